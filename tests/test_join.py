from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from funcllm.launch import join
from funcllm.launch.channel import Channel, Kind
from funcllm.launch.join import (
    Place,
    accept_workers,
    device_of,
    own_store,
    reach_rank_0,
    threads_per_rank,
    torchrun_rank,
    torchrun_store,
)

LAUNCHER = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_stores_bind_ports_of_their_own_and_share_what_is_set() -> None:
    one, two = own_store(2), own_store(2)
    assert one.port != two.port
    other = own_store(2, one.port)
    one.set("key", "one")
    two.set("key", "two")
    assert other.get("key") == b"one"
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", one.port), reuse_port=False)


def test_a_launchers_processes_are_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert torchrun_rank(4) is None
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert torchrun_rank(4) == 2
    assert torchrun_rank(1) is None
    with pytest.raises(ValueError, match="WORLD_SIZE=4 is set by a launcher but tp=2; start 2 processes or unset RANK"):
        torchrun_rank(2)


def test_a_launchers_store_keeps_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    server = own_store(1)
    place = {"rank": 0, "size": 1, "device": torch.device("cpu"), "timeout": 10.0}
    for name, value in {**LAUNCHER, "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    one, two = (torchrun_store(Place(name=name, **place)) for name in ("one", "two"))  # type: ignore[arg-type]
    one.set("key", "1")
    two.set("key", "2")
    assert (one.get("key"), two.get("key")) == (b"1", b"2")


def test_gpus_are_counted_from_the_first_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device_of("cpu", rank, 2) for rank in range(2)] == [torch.device("cpu")] * 2
    assert [device_of("cuda", rank, 2).index for rank in range(2)] == [0, 1]
    assert [device_of("cuda:2", rank, 2).index for rank in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="rank 1 of tp=2 needs GPU 4, 4 are visible; use a smaller tp"):
        device_of("cuda:3", 1, 2)
    for name, value in {**LAUNCHER, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert [device_of("cuda", rank, 4).index for rank in range(4)] == [0, 1, 0, 1]


def test_cores_are_divided_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [threads_per_rank(tp) for tp in (1, 2, 4, 8)] == [6, 3, 1, 1]


def test_workers_are_taken_by_rank_and_strangers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    server = own_store(1)
    accepted: list[Channel] = []
    waiting = threading.Thread(target=lambda: accepted.extend(accept_workers(server, 3)), daemon=True)
    waiting.start()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
    with socket.create_connection(("127.0.0.1", int(client.get("port")))) as stranger:
        stranger.sendall(bytes(16) + (1).to_bytes(2, "little"))
        assert stranger.recv(1) == b""
    channels = {rank: reach_rank_0(client, rank) for rank in (2, 1)}
    waiting.join(30)
    for rank, channel in channels.items():
        channel.send(Kind.HELLO, bytes([rank]))
    assert [channel.receive() for channel in accepted] == [(Kind.HELLO, b"\x01"), (Kind.HELLO, b"\x02")]
    for channel in [*accepted, *channels.values()]:
        channel.close()


def test_a_stranger_that_says_nothing_does_not_keep_the_workers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(join, "_GREETING_TIMEOUT", 0.2)
    server = own_store(1)
    accepted: list[Channel] = []
    waiting = threading.Thread(target=lambda: accepted.extend(accept_workers(server, 2)), daemon=True)
    waiting.start()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
    with socket.create_connection(("127.0.0.1", int(client.get("port")))) as stranger:
        channel = reach_rank_0(client, 1)
        waiting.join(30)
        assert stranger.recv(1) == b""
    channel.send(Kind.HELLO, b"1")
    assert [one.receive() for one in accepted] == [(Kind.HELLO, b"1")]
    for end in [*accepted, channel]:
        end.close()


def test_a_process_group_stands_beside_the_default_one() -> None:
    default = dist.distributed_c10d.GroupMember.WORLD
    store = own_store(1)
    place = Place(rank=0, size=1, device=torch.device("cpu"), name="funcllm-alone", timeout=10.0)
    handle = join.join(store, place)
    assert (handle.rank(), handle.size(), handle.group_name) == (0, 1, "funcllm-alone")
    assert dist.distributed_c10d.GroupMember.WORLD is default
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    join.leave(handle)
