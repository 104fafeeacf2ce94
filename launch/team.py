"""What rank 0 knows of the other ranks, and the monitor that ends all ranks when one dies.

Owns the workers' processes and channels. The monitor is a thread: it reads what the workers send, watches their ends,
and on a death or a failure picks the report that names the cause, ends all workers and frees whoever waits on rank 0.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import IO, Protocol

import torch
import torch.distributed as dist

from funcllm.launch import interrupts, shipping
from funcllm.launch.channel import Channel, ChannelClosed, Kind
from funcllm.launch.errors import EngineError
from funcllm.launch.join import abort, leave, threads_per_rank

CALL_GRACE = 5.0  # seconds that a call may go on after it raised on another rank
_INTERRUPT_GRACE = 3.0  # seconds in which Ctrl-C must get rank 0 out of a step, before the other ranks are ended
_REPORT_GRACE = 0.25  # seconds in which further reports may name the true cause of a death
_EXIT_GRACE = 2.5  # seconds that the caller has to notice a death before the command line ends the process
_KILL_GRACE = 10.0  # seconds that the system has to end a killed process


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(eq=False)
class Worker:
    """A rank other than 0, as rank 0 sees it."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None = None  # None under torchrun
    crash: IO[bytes] | None = None  # where faulthandler writes
    hello: bool = False
    ready: bool = False
    replies: deque[bytearray] = field(default_factory=deque)  # to calls; the first byte is E for an error


class Team:
    """What the ranks' owner, its monitor thread and the finalizer share."""

    def __init__(self, *, exit_on_death: bool) -> None:
        self.workers: list[Worker] = []
        self.process_group: dist.ProcessGroup | None = None
        self.failure: str | None = None
        self.call: int | None = None  # which call of all ranks rank 0 is in
        self.guarding: int | None = None  # the guard that rank 0 is in
        self._interrupted: tuple[float, int] | None = None  # until when to wait, for which guard to end
        self._call_deadline: tuple[float, int] | None = None  # until when to wait, for which call to end
        self._exit_on_death = exit_on_death
        self._changed = threading.Condition()
        self._noticed = threading.Event()
        self._closing = False
        self._freed = False
        self._owner = os.getpid()
        self._monitor: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._threads: int | None = None
        self.store: dist.Store | None = None

    def limit_threads(self, tp: int) -> None:
        """Shares the cores with the other ranks of this host, unless the user set a number."""
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(threads_per_rank(tp))

    def watch(self) -> None:
        """Starts the monitor over the present workers."""
        self._monitor = threading.Thread(target=self._run_monitor, name="rank monitor", daemon=True)
        self._monitor.start()
        interrupts.listen(self._interrupt)

    def _interrupt(self) -> None:
        """Ctrl-C: while rank 0 waits in a collective, Python cannot act on it."""
        guarding, interrupted = self.guarding, self._interrupted  # the monitor changes them
        if guarding is not None and (interrupted is None or interrupted[1] != guarding):
            self._interrupted = (time.monotonic() + _INTERRUPT_GRACE, guarding)
            self._wake()

    def told(self) -> str:
        """The reason of the end, for an EngineError that reaches the caller."""
        self._noticed.set()
        return self.failure or "the engine has ended"

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(self.told())

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until done() or the timeout; whether done. Raises EngineError when a rank dies meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: done() or self.failure is not None, timeout)
        self.check()
        return done()

    def failed_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None, seconds)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self, reason: str, *, quietly: bool = False) -> None:
        """Records why the engine ends (the first reason stays), ends the workers and frees whoever waits."""
        with self._changed:
            if self.failure is not None or self._closing:
                return
            self.failure = reason
        if quietly:
            self._noticed.set()
        for worker in self.workers:
            _kill(worker)
        self.notify()
        self._wake()
        if self.process_group is not None:
            _start(threading.Thread(target=abort, args=(self.process_group,), name="abort", daemon=True))

    def shut(self, runtime: Closable | None, grace: float) -> None:
        """Ends the workers, in order while all is well, and frees what this process holds."""
        if os.getpid() != self._owner:  # a process that the owner forked ends, the ranks go on
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
        try:
            self._close(runtime, grace)
        finally:  # Ctrl-C may have ended the waiting
            self._release()

    def _close(self, runtime: Closable | None, grace: float) -> None:
        """Has every rank close, and waits for the workers' ends, up to `grace` seconds while all is well."""
        self._noticed.set()
        self._wake()
        if self._monitor not in (None, threading.current_thread()):
            self._monitor.join(2.0)
        well = self.failure is None
        deadline = time.monotonic() + (grace if well else 0.0)
        watchdog = threading.Timer(grace, self._free)
        watchdog.name, watchdog.daemon = "close watchdog", True
        if self.workers:
            _start(watchdog)
        try:
            for worker in self.workers:
                with contextlib.suppress(ChannelClosed):
                    worker.channel.send(Kind.CLOSE)
            if runtime is not None:
                runtime.close()
        except RuntimeError:  # of a collective whose partner was ended
            if not self._freed:
                raise
        finally:
            if well:
                leave(self.process_group)
            for worker in self.workers:
                _reap(worker, deadline)
            watchdog.cancel()

    def _free(self) -> None:
        """Ends the workers, and frees rank 0 from a collective that it waits in while it closes."""
        self._freed = True
        for worker in self.workers:
            _kill(worker)
        group = self.process_group
        if group is not None:
            abort(group)

    def _release(self) -> None:
        """Ends what is left, and gives back what this process holds."""
        for worker in self.workers:
            _reap(worker, 0.0)
            worker.channel.close()
            if worker.crash is not None:
                worker.crash.close()
        if self.failure is not None and self.process_group is not None:
            abort(self.process_group)
        self.process_group = None
        self.store = None
        interrupts.forget(self._interrupt)
        self._wake_read.close()
        self._wake_write.close()
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _run_monitor(self) -> None:
        """Reads the workers' messages and watches their ends, until a death or the close; ends all where it cannot."""
        try:
            self._monitor_workers()
        except Exception:
            self.end(f"the monitor of the ranks failed:\n{traceback.format_exc()}")
        self._exit_unless_noticed()

    def _monitor_workers(self) -> None:
        death_fds = {worker.rank: _death_fd(worker) for worker in self.workers}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_read, selectors.EVENT_READ, None)
                for worker in self.workers:
                    selector.register(worker.channel, selectors.EVENT_READ, (worker, "message"))
                    fd = death_fds[worker.rank]
                    if fd is not None:
                        selector.register(fd, selectors.EVENT_READ, (worker, "death"))
                self._watch_until_end(selector)
        finally:
            for fd in death_fds.values():
                if fd is not None:
                    os.close(fd)

    def _watch_until_end(self, selector: selectors.BaseSelector) -> None:
        reports: list[tuple[int, str]] = []  # (precedence, text)
        decide_at: float | None = None
        while not self._closing and self.failure is None:
            interrupt_at = self._interrupted[0] if self._interrupted else None
            call_at = self._call_deadline[0] if self._call_deadline else None
            deadlines = [at for at in (decide_at, call_at, interrupt_at) if at is not None]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in selector.select(timeout):
                if key.data is None:
                    self._wake_read.recv(4096)
                    continue
                report = self._take(*key.data)
                if report is not None:
                    reports.append(report)
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if reports and decide_at is None:
                decide_at = now + _REPORT_GRACE
            if self._call_deadline is not None and now >= self._call_deadline[0]:
                if self.call == self._call_deadline[1]:
                    reports.append((0, self._call_error()))
                    decide_at = now
                self._call_deadline = None
            if self._interrupted is not None and now >= self._interrupted[0]:
                if self.guarding == self._interrupted[1]:
                    reports.append((0, "interrupted while rank 0 waited for another rank"))
                    decide_at = now
                self._interrupted = None
            if decide_at is not None and now >= decide_at and not self._closing:
                self.end(min(reports, key=itemgetter(0))[1])  # the first of equals: the others may be its consequences
                return

    def _take(self, worker: Worker, what: str) -> tuple[int, str] | None:
        """Handles what a worker's channel or process says; a report when it is its end."""
        if what == "death":
            return _describe_death(worker)
        try:
            kind, body = worker.channel.receive()
        except ChannelClosed:
            return (3, f"rank {worker.rank} closed its channel") if worker.process is None else _describe_exit(worker)
        if kind is Kind.FAILED:
            return (1, f"rank {worker.rank} failed:\n{body.decode(errors='replace')}")
        if kind is Kind.HELLO:
            worker.hello = True
        elif kind is Kind.READY:
            worker.ready = True
        elif kind is Kind.REPLY:
            if body[:1] == b"E" and self.call is not None:
                self._call_deadline = (time.monotonic() + CALL_GRACE, self.call)
            worker.replies.append(body)
        self.notify()
        return None

    def _call_error(self) -> str:
        """The first error among the replies to the call that rank 0 still hangs in."""
        for worker in self.workers:
            for reply in worker.replies:
                if reply[:1] == b"E":
                    return f"rank {worker.rank} raised in a call that rank 0 waits in:\n{shipping.loads(reply[1:])}"
        return "a rank raised in a call that rank 0 waits in"

    def _exit_unless_noticed(self) -> None:
        """The last resort of the command line: rank 0 may be stuck where no exception reaches it."""
        if self._exit_on_death and self.failure is not None and not self._noticed.wait(_EXIT_GRACE):
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)


def _kill(worker: Worker) -> None:
    """Ends a worker and the processes that it started."""
    if worker.process is None:
        worker.channel.close()
    elif worker.process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(worker.process.pid, signal.SIGKILL)


def _reap(worker: Worker, deadline: float) -> None:
    """Waits for a worker's end, and makes it end after the deadline."""
    left = max(0.0, deadline - time.monotonic())
    if worker.process is None:
        worker.channel.wait_for_end(left)
        return
    try:
        worker.process.wait(left)
    except subprocess.TimeoutExpired:
        _kill(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_KILL_GRACE)


def _start(thread: threading.Thread) -> None:
    """Starts a thread that only speeds an end up; at the interpreter's end there is none to be had."""
    with contextlib.suppress(RuntimeError):
        thread.start()


def _death_fd(worker: Worker) -> int | None:
    """A file descriptor that becomes readable when the worker's process ends, where the system has such."""
    if worker.process is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(worker.process.pid)
    except OSError:
        return None


def _describe_exit(worker: Worker) -> tuple[int, str]:
    """What became of a worker whose channel ended."""
    assert worker.process is not None
    if not _ends_within(worker.process, 1.0):
        return 3, f"rank {worker.rank} closed its channel"
    return _describe_death(worker)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for a process's end, but leaves it to be reaped; whether it has ended."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
    return True


def _describe_death(worker: Worker) -> tuple[int, str]:
    """Precedence and text: a signal comes first, it is a cause; an exit late, as its report may be on its way."""
    assert worker.process is not None
    _kill(worker)  # what it started; while it is not reaped, no other process can have its number
    code = worker.process.wait()
    if code >= 0:
        return 2, f"rank {worker.rank} exited with code {code} before the engine was closed" + _crash_text(worker)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
    return 0, f"rank {worker.rank} was killed by {name}{hint}" + _crash_text(worker)


def _crash_text(worker: Worker) -> str:
    if worker.crash is None or worker.crash.closed:
        return ""
    worker.crash.seek(0)
    text = worker.crash.read(1 << 16).decode(errors="replace").strip()
    return f":\n{text}" if text else ""
