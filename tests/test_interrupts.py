from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from funcllm.launch import interrupts


@pytest.fixture(autouse=True)
def quiet_ctrl_c() -> Iterator[None]:
    """Python's own handler of the signal does nothing, and no file descriptor is set, before and after a test."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    before = signal.set_wakeup_fd(-1)
    yield
    assert signal.set_wakeup_fd(before) == -1
    signal.signal(signal.SIGINT, previous)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_every_listener_is_told_until_it_is_forgotten() -> None:
    first, second = threading.Event(), threading.Event()
    interrupts.listen(first.set)
    interrupts.listen(second.set)
    press()
    assert first.wait(10)
    assert second.wait(10)
    first.clear()
    second.clear()
    interrupts.forget(first.set)
    press()
    assert second.wait(10)
    assert not first.is_set()
    interrupts.forget(second.set)
    interrupts.forget(second.set)


def test_other_signals_are_not_told() -> None:
    told = threading.Semaphore(0)
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    interrupts.listen(told.release)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not told.acquire(timeout=0.2)
    press()
    assert told.acquire(timeout=10)
    interrupts.forget(told.release)
    signal.signal(signal.SIGUSR1, previous)


def test_a_listener_in_another_thread_is_kept_for_the_main_thread() -> None:
    told = threading.Event()
    thread = threading.Thread(target=interrupts.listen, args=(told.set,))
    thread.start()
    thread.join()
    assert signal.set_wakeup_fd(-1) == -1
    interrupts.listen(print)
    press()
    assert told.wait(10)
    interrupts.forget(told.set)
    interrupts.forget(print)


def test_another_librarys_file_descriptor_stays() -> None:
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno())
    told = threading.Event()
    interrupts.listen(told.set)
    press()
    assert read.recv(10) == bytes([signal.SIGINT])
    interrupts.forget(told.set)
    assert signal.set_wakeup_fd(-1) == write.fileno()
    assert not told.is_set()
    read.close()
    write.close()


def test_a_forked_process_tells_its_parent_nothing() -> None:
    told = threading.Event()
    interrupts.listen(told.set)
    child = os.fork()
    if child == 0:
        press()
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 and not interrupts._listeners else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not told.wait(0.2)
    press()
    assert told.wait(10)
    interrupts.forget(told.set)
