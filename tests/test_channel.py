from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcllm.launch.channel import Channel, ChannelClosed, Kind, channel_pair, watch_peer

LARGE = 5_000_000  # many times a socket's buffer


def pair() -> tuple[Channel, Channel]:
    own, other = channel_pair()
    return own, Channel(other)


def send_repeatedly(channel: Channel, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        channel.send(Kind.PLAN, b"x")
        time.sleep(0.01)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=300)), max_size=20))
def test_messages_arrive_whole_and_in_order(messages: list[tuple[Kind, bytes]]) -> None:
    sender, receiver = pair()
    for kind, body in messages:
        sender.send(kind, body)
    assert [receiver.receive() for _ in messages] == messages
    sender.close()
    with pytest.raises(ChannelClosed):
        receiver.receive()
    receiver.close()


def test_two_commands_back_to_back_reach_a_slow_reader_though_the_sender_reuses_its_buffer() -> None:
    sender, receiver = pair()
    words = np.arange(LARGE // 4, dtype=np.int32)
    first = words.copy()
    sender.send(Kind.PLAN, words.data)
    words[:] = -1
    sender.send(Kind.CALL, b"call")
    sender.send(Kind.PLAN, words.data)
    words[:] = 7
    time.sleep(0.1)
    received = [receiver.receive() for _ in range(3)]
    assert [kind for kind, _ in received] == [Kind.PLAN, Kind.CALL, Kind.PLAN]
    assert np.array_equal(np.frombuffer(received[0][1], np.int32), first)
    assert received[1][1] == b"call"
    assert np.all(np.frombuffer(received[2][1], np.int32) == -1)
    sender.close()
    receiver.close()


def test_sending_never_waits_for_the_reader() -> None:
    sender, receiver = pair()
    sent = threading.Event()

    def send() -> None:
        for number in range(8):
            sender.send(Kind.PLAN, bytes([number]) * LARGE)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert sent.wait(20)
    for number in range(8):
        kind, body = receiver.receive()
        assert (kind, len(body), body[0], body[-1]) == (Kind.PLAN, LARGE, number, number)
    sender.send(Kind.CLOSE)
    assert receiver.receive() == (Kind.CLOSE, b"")
    sender.close()
    receiver.close()


def test_a_flush_waits_until_all_is_written_and_no_longer_than_it_may() -> None:
    sender, receiver = pair()
    assert sender.flush(0)
    sender.send(Kind.PLAN, bytes(LARGE))
    assert not sender.flush(0.1)
    threading.Timer(0.2, receiver.receive).start()
    assert sender.flush(20)
    sender.send(Kind.PLAN, bytes(LARGE))
    receiver.close()
    assert not sender.flush(20)
    sender.close()


def test_a_stream_out_of_step_is_a_closed_channel() -> None:
    own, other = channel_pair()
    other.sendall(struct.pack("<BQ", 99, 0))
    with pytest.raises(ChannelClosed, match="kind 99 and 0 bytes was announced: the stream is out of step"):
        own.receive()
    other.close()
    own.close()


def test_a_message_that_no_thread_can_write_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sender, receiver = pair()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ChannelClosed, match=r"cannot be written .can't start new thread"):
        sender.send(Kind.PLAN, bytes(LARGE))
    with pytest.raises(ChannelClosed):
        sender.send(Kind.CLOSE)
    sender.close()
    receiver.close()


def test_an_end_is_waited_for() -> None:
    sender, receiver = pair()
    sender.send(Kind.PLAN, b"unread")
    assert not receiver.wait_for_end(0.05)
    threading.Timer(0.1, sender.close).start()
    assert receiver.wait_for_end(20)
    assert sender.wait_for_end(0)
    receiver.close()


def test_received_bodies_are_writable_arrays_of_their_own() -> None:
    sender, receiver = pair()
    for _ in range(2):
        sender.send(Kind.PLAN, np.arange(3, dtype=np.int32).data)
    first, second = (np.frombuffer(receiver.receive()[1], np.int32) for _ in range(2))
    first[:] = 9
    assert second.tolist() == [0, 1, 2]
    sender.close()
    receiver.close()


def test_sending_to_a_closed_end_raises() -> None:
    sender, receiver = pair()
    receiver.close()
    with pytest.raises(ChannelClosed):
        sender.send(Kind.PLAN, b"x")
    sender.close()
    sender.close()
    with pytest.raises(ChannelClosed):
        sender.send(Kind.PLAN, b"x")


def test_a_reader_that_dies_under_a_backlog_is_noticed() -> None:
    sender, receiver = pair()
    sender.send(Kind.PLAN, bytes(LARGE))
    receiver.close()
    with pytest.raises(ChannelClosed):
        send_repeatedly(sender, seconds=20)
    sender.close()


def test_the_death_of_the_other_process_ends_the_channel_after_what_it_sent() -> None:
    own, other = channel_pair()
    code = (
        "import socket, sys, time; from funcllm.launch.channel import *\n"
        "channel = Channel(socket.socket(fileno=int(sys.argv[1]))); channel.send(Kind.READY, b'last'); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(other.fileno())], pass_fds=(other.fileno(),))
    other.close()
    gone = threading.Event()
    assert own.receive() == (Kind.READY, b"last")
    watch_peer(own, gone.set)
    assert not gone.wait(0.1)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        own.receive()
    assert gone.wait(10)
    assert child.wait(10) == -signal.SIGKILL
    own.close()


def test_the_watch_sees_the_end_while_messages_wait_unread() -> None:
    sender, receiver = pair()
    gone = threading.Event()
    watch_peer(receiver, gone.set)
    sender.send(Kind.PLAN, b"unread")
    assert not gone.wait(0.1)
    sender.close()
    assert gone.wait(10)
    assert receiver.receive() == (Kind.PLAN, b"unread")
    receiver.close()
