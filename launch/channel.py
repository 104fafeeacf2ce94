"""An ordered, queued connection between rank 0 and one worker.

Messages are a kind and bytes of any size. `send` never waits for the reader: what the socket does not take at once is
copied and handed to a writer thread, and later messages queue behind it. The sender may therefore reuse its buffer as
soon as `send` returns, and a slow worker never blocks rank 0. The end of the peer's process is seen as EOFError.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

_HEADER = struct.Struct("<BQ")
_MAX_MESSAGE = 1 << 48


class Kind(enum.IntEnum):
    """From rank 0: SETUP, PLAN, CALL, CLOSE. From a worker: HELLO, READY, REPLY, FAILED."""

    SETUP = 1
    PLAN = 2
    CALL = 3
    CLOSE = 4
    HELLO = 5
    READY = 6
    REPLY = 7
    FAILED = 8


_KINDS = frozenset(Kind)


class ChannelClosed(EOFError):
    """The other end is gone."""


class Channel:
    """One end of a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.RLock()  # where garbage is collected in here, an engine may be closed, which sends
        self._written = threading.Condition(self._lock)
        self._backlog: deque[memoryview] = deque()
        self._writing = False
        self._broken = False
        self._closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, body: bytes | bytearray | memoryview = b"") -> None:
        """Queues one message; never waits for the reader. Raises ChannelClosed when the other end is gone."""
        view = memoryview(body).cast("B")
        header = _HEADER.pack(kind, len(view))
        with self._lock:
            if self._closed or self._broken:
                raise ChannelClosed("the other end of the channel is gone")
            sent = 0 if self._backlog or self._writing else self._send_now(header, view)
            if sent == len(header) + len(view):
                return
            self._backlog.append(memoryview(header + bytes(view))[sent:])
            if not self._writing:
                self._start_writing()

    def flush(self, timeout: float) -> bool:
        """Waits until the system has taken all that was sent; whether it has. For a process that is about to end."""
        with self._written:
            return self._written.wait_for(lambda: not self._writing, timeout) and not self._broken

    def receive(self) -> tuple[Kind, bytearray]:
        """The next message; waits for it. Raises ChannelClosed when the other end is gone and all was read."""
        kind, size = _HEADER.unpack(self._read(_HEADER.size))
        if size > _MAX_MESSAGE or kind not in _KINDS:
            raise ChannelClosed(f"a message of kind {kind} and {size} bytes was announced: the stream is out of step")
        return Kind(kind), self._read(size)

    def wait_for_end(self, timeout: float) -> bool:
        """Waits until the other end is gone; whether it is. Messages may wait unread."""
        return self._closed or _wait_for_end(self._socket.fileno(), timeout)

    def close(self) -> None:
        """Ends the connection for both sides, also where a forked process holds a copy of the socket."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_now(self, header: bytes, view: memoryview) -> int:
        """How many bytes the socket took without waiting."""
        try:
            return self._socket.sendmsg([header, view], [], socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(f"the other end of the channel is gone ({error})") from error

    def _start_writing(self) -> None:
        self._writing = True
        try:
            threading.Thread(target=self._write_backlog, name="channel writer", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had, as at the interpreter's end
            self._writing, self._broken = False, True
            raise ChannelClosed(f"the rest of a message cannot be written ({error})") from error

    def _write_backlog(self) -> None:
        """Writes what is queued, in order, then ends; a broken connection is reported by the next read or send."""
        while True:
            with self._lock:
                if not self._backlog or self._closed or self._broken:
                    self._backlog.clear()
                    self._writing = False
                    self._written.notify_all()
                    return
                data = self._backlog.popleft()
            try:
                self._socket.sendall(data)
            except OSError:
                with self._lock:
                    self._broken = True

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, start = memoryview(data), 0
        while start < size:
            try:
                count = self._socket.recv_into(view[start:], size - start, socket.MSG_WAITALL)
            except OSError as error:
                raise ChannelClosed(f"the channel broke ({error})") from error
            if count == 0:
                raise ChannelClosed("the other end of the channel is gone")
            start += count
        return data


def channel_pair() -> tuple[Channel, socket.socket]:
    """This process's end, and the socket whose file descriptor a child process inherits."""
    own, other = socket.socketpair()
    return Channel(own), other


def watch_peer(channel: Channel, on_gone: Callable[[], None]) -> threading.Thread:
    """Calls on_gone once, in a thread of its own, as soon as the other end is gone, even while messages wait unread."""
    thread = threading.Thread(target=_watch, args=(os.dup(channel.fileno()), on_gone), name="peer watch", daemon=True)
    thread.start()
    return thread


def _watch(fd: int, on_gone: Callable[[], None]) -> None:
    _wait_for_end(fd, None)
    os.close(fd)
    on_gone()


def _wait_for_end(fd: int, timeout: float | None) -> bool:
    """Waits until the other end of a socket is gone; whether it is."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(None if timeout is None else 1000 * timeout))
