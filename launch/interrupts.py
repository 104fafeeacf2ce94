"""Tells of Ctrl-C at once, in a thread: Python acts on it only when the main thread has come back from C++ code.

Owns the file descriptor to which the interpreter writes signals, unless another library has set one already: then
nothing is told. A process that the owner forks starts without listeners.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

_listeners: tuple[Callable[[], None], ...] = ()
_ear: tuple[int, int] | None = None  # a pipe: what a thread reads, what the interpreter writes to


def listen(listener: Callable[[], None]) -> None:
    """Has the listener called, in a thread, on every Ctrl-C. Takes effect when called in the main thread."""
    global _listeners
    _listeners = (*_listeners, listener)
    with contextlib.suppress(ValueError):  # the main thread only may do this
        previous = signal.set_wakeup_fd(_open_ear(), warn_on_full_buffer=False)
        if previous not in (-1, _open_ear()):
            signal.set_wakeup_fd(previous)


def forget(listener: Callable[[], None]) -> None:
    """Ends what `listen` began; a listener that is unknown is ignored."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other != listener)
    if not _listeners:
        _give_back()


def _open_ear() -> int:
    global _ear
    if _ear is None:
        _ear = os.pipe()
        os.set_blocking(_ear[1], False)
        threading.Thread(target=_tell, args=(_ear[0],), name="interrupts", daemon=True).start()
    return _ear[1]


def _tell(read: int) -> None:
    while signals := os.read(read, 4096):
        if signal.SIGINT in signals:
            for listener in _listeners:
                listener()


def _give_back() -> None:
    """Lets the interpreter write signals nowhere, as before; in another thread than the main one it goes on."""
    with contextlib.suppress(ValueError):
        previous = signal.set_wakeup_fd(-1)
        if previous != -1 and (_ear is None or previous != _ear[1]):
            signal.set_wakeup_fd(previous)


def _start_anew() -> None:
    """In a forked process: its signals are not its parent's."""
    global _listeners, _ear
    _listeners = ()
    if _ear is not None:
        _give_back()
        for fd in _ear:
            os.close(fd)
        _ear = None


os.register_at_fork(after_in_child=_start_anew)
