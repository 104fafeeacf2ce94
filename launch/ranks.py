"""One process per rank: rank 0 is the caller's process, the others are its children.

Owns the life of the ranks. `start_ranks` starts `python -m funcllm.launch.ranks` once for every further rank, sends it
the factory and its payload, joins all ranks in a process group and builds every rank's runtime. Rank 0 then sends plans
and calls; a worker executes them in order and decides nothing. When a rank dies or fails, at any time, all ranks end
within seconds and rank 0 gets an `EngineError` with that rank's traceback. Nothing is left behind when rank 0 ends,
however it ends. Under torchrun nothing is started: the processes are there, and those of rank 1 and up serve rank 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from funcllm.group import SINGLE, Group, _ProcessHandle
from funcllm.launch import shipping
from funcllm.launch.channel import Channel, ChannelClosed, Kind, channel_pair, watch_peer
from funcllm.launch.errors import CallError, EngineError

Result = TypeVar("Result")
Words = npt.NDArray[np.int32]

_REPORT_GRACE = 0.25  # seconds in which further reports may name the true cause of a death
_CALL_GRACE = 5.0  # seconds a call may go on after it raised on another rank
_INTERRUPT_GRACE = 3.0  # seconds in which Ctrl-C must get rank 0 out of a step, before the other ranks are ended
_VERDICT_GRACE = 3.0  # seconds that a failing collective waits for the monitor to name the dead rank
_EXIT_GRACE = 2.5  # seconds that the caller has to notice a death before the command line ends the process
_CLOSE_GRACE = 20.0  # seconds that a worker has to end by itself when closed
_ORPHAN_GRACE = 2.0  # seconds that a worker has to end by itself when rank 0 is gone
_JOIN_TIMEOUT = 120.0  # seconds in which all ranks, once alive, must meet in the process group

_engines = itertools.count()
_guards = itertools.count()


class Runtime(Protocol):
    """What a rank does with what rank 0 sends. Built on every rank by factory(group, device, payload)."""

    def execute(self, words: Words) -> Any:
        """Applies one packed plan. What it returns is seen on rank 0 only."""
        ...

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs fn on this rank, between steps."""
        ...

    def close(self) -> None: ...


Factory = Callable[[Group, torch.device, Any], Runtime]


def start_ranks(
    tp: int,
    factory: Factory,
    payload: Any = None,
    *,
    device: str | torch.device = "cpu",
    collective_timeout: float = 1800.0,
    exit_on_death: bool = False,
) -> Ranks:
    """All ranks with their runtimes built, rank 0 being this process.

    device: "cpu", or "cuda" for GPU r on rank r ("cuda:2": GPU 2 + r). exit_on_death: for a command line; when another
    rank died and this process does not notice within seconds, it prints why and exits with 1. Raises what the factory
    raises on rank 0, and EngineError with the traceback where another rank failed. Under torchrun it returns on rank 0
    only: the other ranks serve it, then exit.
    """
    if tp < 1:
        raise ValueError(f"tp={tp} must be at least 1")
    launched = _torchrun_rank(tp)
    devices = [_device_of(device, rank, tp) for rank in range(tp)]
    if launched is not None and launched > 0:
        _serve_torchrun(launched, tp, factory, payload, devices[launched], collective_timeout)
    team = _Team(exit_on_death=exit_on_death)
    ranks = Ranks(team, tp, devices[0])
    try:
        if tp > 1:
            _set_device(devices[0])
            team.limit_threads(tp)
            store, name = _gather(
                team, tp, factory, payload, devices, collective_timeout, torchrun=launched is not None
            )
            with ranks.guard():
                team.process_group = _interruptible(
                    lambda: _join(store, 0, tp, devices[0], name, collective_timeout), team
                )
                ranks.group = _group_of(team.process_group)
        with ranks.guard():
            ranks.runtime = factory(ranks.group, devices[0], payload)
        team.wait(lambda: all(worker.ready for worker in team.workers))
    except BaseException as error:
        if not isinstance(error, EngineError):
            team.end("rank 0 failed to start", quietly=True)
        ranks.close()
        raise
    return ranks


class Ranks:
    """Rank 0's hold on all ranks. Not safe for use by two threads at once.

    runtime: rank 0's own; group: all ranks; device: rank 0's. Also a context manager, and closed at the latest when it
    is collected or the interpreter exits.
    """

    runtime: Runtime

    def __init__(self, team: _Team, tp: int, device: torch.device) -> None:
        self.tp = tp
        self.device = device
        self.group: Group = SINGLE
        self._team = team
        self._closed = False
        self._finalizer = weakref.finalize(self, team.shut, None, _ORPHAN_GRACE)

    @property
    def failure(self) -> str | None:
        """Why the engine ended, or None while it is well. Cheap: a wait may poll it."""
        return self._team.failure

    def check(self) -> None:
        """Raises EngineError when a rank died or the ranks are closed."""
        self._team.check()
        if self._closed:
            raise EngineError("the engine is closed; open a new one")

    def send_plan(self, words: Words) -> None:
        """Sends a packed plan to every worker; each executes it after all that was sent before."""
        self._send(Kind.PLAN, np.ascontiguousarray(words, np.int32).data.cast("B"))

    def execute(self, words: Words) -> Any:
        """Sends a packed plan to every worker, then executes it here; what rank 0's runtime returns.

        An exception on any rank ends the engine: the ranks are no longer in step.
        """
        self.check()
        self.send_plan(words)
        try:
            with self.guard():
                return self.runtime.execute(words)
        except EngineError:
            raise
        except Exception as error:
            if self.tp > 1:
                self._team.end(f"rank 0 failed in a step: {error!r}", quietly=True)
            raise

    def call(self, fn: Callable[..., Result], *args: Any) -> list[Result]:
        """Runs `runtime.call(fn, args)` on every rank and returns the results by rank.

        Tensors travel through the CPU. When fn raises on rank 0, that exception is raised; when it raises on another
        rank only, CallError with its traceback. The engine goes on unless a rank hangs in the call for that reason.
        """
        self.check()
        team = self._team
        if team.workers:
            self._send(Kind.CALL, shipping.dumps((fn, shipping.to_cpu(args))))
        team.in_call = True
        try:
            with self.guard():
                own = self.runtime.call(fn, args)
        except EngineError:
            raise
        except Exception as error:
            self._await_after_error(error)
            raise
        finally:
            team.in_call = False
        team.wait(lambda: all(worker.replies for worker in team.workers))
        replies = [shipping.loads(worker.replies.popleft()) for worker in team.workers]
        for worker, (ok, value) in zip(team.workers, replies):
            if not ok:
                raise CallError(f"rank {worker.rank} raised in a call:\n{value}")
        return [own, *(value for _, value in replies)]

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turns the errors of collectives whose partner died into EngineError; for all that rank 0 does with its group.

        An interrupt (Ctrl-C) in here ends the ranks, as they are no longer in step; close or leave the engine then.
        """
        self.check()
        outer, self._team.guarding = self._team.guarding, next(_guards)
        try:
            yield
        except EngineError:
            raise
        except RuntimeError as error:
            if self.tp > 1 and self._team.failed_within(_VERDICT_GRACE):
                raise EngineError(self._team.told()) from error
            raise
        except Exception:
            raise
        except BaseException:
            if self.tp > 1:
                self._team.end("interrupted in the middle of a step", quietly=True)
            raise
        finally:
            self._team.guarding = outer
        self._team.check()

    def close(self, grace: float = _CLOSE_GRACE) -> None:
        """Ends all ranks and waits for them; kills those that do not end within `grace` seconds.

        May be called at any time and more than once.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        self._team.shut(getattr(self, "runtime", None), grace)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(grace=_CLOSE_GRACE if kind is None else _ORPHAN_GRACE)

    def _send(self, kind: Kind, body: bytes | memoryview) -> None:
        try:
            for worker in self._team.workers:
                worker.channel.send(kind, body)
        except ChannelClosed as error:
            self._team.failed_within(_VERDICT_GRACE)
            self._team.end(f"rank {worker.rank} closed its channel", quietly=True)
            raise EngineError(self._team.told()) from error

    def _await_after_error(self, error: Exception) -> None:
        """Takes the other ranks' replies to a call that raised here; ends the engine where one does not answer."""
        team = self._team
        if team.wait(lambda: all(worker.replies for worker in team.workers), timeout=_CALL_GRACE):
            for worker in team.workers:
                worker.replies.popleft()
        else:
            team.end(f"rank 0 raised in a call that another rank waits in: {error!r}", quietly=True)


# --- rank 0's side ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    """A rank other than 0, as rank 0 sees it."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None = None  # None under torchrun
    crash: IO[bytes] | None = None  # where faulthandler writes
    hello: bool = False
    ready: bool = False
    replies: deque[bytearray] = field(default_factory=deque)


class _Team:
    """What the ranks' owner, its monitor thread and the finalizer share."""

    def __init__(self, *, exit_on_death: bool) -> None:
        self.workers: list[_Worker] = []
        self.process_group: dist.ProcessGroup | None = None
        self.failure: str | None = None
        self.in_call = False
        self.guarding: int | None = None  # the guard that rank 0 is in
        self._interrupted: tuple[float, int] | None = None  # until when to wait, for which guard to end
        self._call_deadline: float | None = None
        self._exit_on_death = exit_on_death
        self._changed = threading.Condition()
        self._noticed = threading.Event()
        self._closing = False
        self._monitor: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._hears_signals = False
        self._threads: int | None = None
        self.store: Any = None

    def limit_threads(self, tp: int) -> None:
        """Shares the cores with the other ranks of this host, unless the user set a number."""
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(_threads_per_rank(tp))

    def watch(self) -> None:
        """Starts the monitor over the present workers."""
        self._monitor = threading.Thread(target=self._run_monitor, name="rank monitor", daemon=True)
        self._monitor.start()
        self._hear_signals()

    def _hear_signals(self) -> None:
        """Lets the monitor know of Ctrl-C: while rank 0 waits in a collective, Python cannot act on it."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._wake_write.setblocking(False)
        previous = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
        else:
            self._hears_signals = True

    def _forget_signals(self) -> None:
        if self._hears_signals and threading.current_thread() is threading.main_thread():
            previous = signal.set_wakeup_fd(-1)
            if previous != self._wake_write.fileno():
                signal.set_wakeup_fd(previous)

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
            threading.Thread(target=_abort, args=(self.process_group,), name="abort", daemon=True).start()

    def shut(self, runtime: Runtime | None, grace: float) -> None:
        """Ends the workers, in order while all is well, and frees what this process holds."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._noticed.set()
        self._wake()
        if self._monitor is not None:
            self._monitor.join(2.0)
        well = self.failure is None
        for worker in self.workers:
            with contextlib.suppress(ChannelClosed):
                worker.channel.send(Kind.CLOSE)
        try:
            if runtime is not None:
                runtime.close()
        finally:
            if well:
                _leave(self.process_group)
            deadline = time.monotonic() + (grace if well else 0.0)
            for worker in self.workers:
                _reap(worker, deadline)
            if not well and self.process_group is not None:
                _abort(self.process_group)
            self.process_group = None
            self.store = None
            self._forget_signals()
            self._wake_read.close()
            self._wake_write.close()
            if self._threads is not None:
                torch.set_num_threads(self._threads)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _run_monitor(self) -> None:
        """Reads the workers' messages and watches their ends, until a death or the close."""
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
            deadlines = [at for at in (decide_at, self._call_deadline, interrupt_at) if at is not None]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in selector.select(timeout):
                if key.data is None:
                    woken = self._wake_read.recv(4096)
                    if signal.SIGINT in woken and self.guarding is not None:
                        self._interrupted = (time.monotonic() + _INTERRUPT_GRACE, self.guarding)
                    continue
                report = self._take(*key.data)
                if report is not None:
                    reports.append(report)
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if reports and decide_at is None:
                decide_at = now + _REPORT_GRACE
            if self._call_deadline is not None and now >= self._call_deadline:
                self._call_deadline = None
                if self.in_call:
                    reports.append((0, self._call_error()))
                    decide_at = now
            if self._interrupted is not None and now >= self._interrupted[0]:
                if self.guarding == self._interrupted[1]:
                    reports.append((0, "interrupted while rank 0 waited for another rank"))
                    decide_at = now
                self._interrupted = None
            if decide_at is not None and now >= decide_at and not self._closing:
                self.end(min(reports)[1])
                self._exit_unless_noticed()
                return

    def _take(self, worker: _Worker, what: str) -> tuple[int, str] | None:
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
            if body[:1] == b"E" and self.in_call:
                self._call_deadline = time.monotonic() + _CALL_GRACE
            worker.replies.append(body[1:])
        self.notify()
        return None

    def _call_error(self) -> str:
        """The first error among the replies to the call that rank 0 still hangs in."""
        for worker in self.workers:
            for reply in worker.replies:
                ok, value = shipping.loads(reply)
                if not ok:
                    return f"rank {worker.rank} raised in a call that rank 0 waits in:\n{value}"
        return "a rank raised in a call that rank 0 waits in"

    def _exit_unless_noticed(self) -> None:
        """The last resort of the command line: rank 0 may be stuck where no exception reaches it."""
        if self._exit_on_death and not self._noticed.wait(_EXIT_GRACE):
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)


def _gather(
    team: _Team,
    tp: int,
    factory: Factory,
    payload: Any,
    devices: list[torch.device],
    timeout: float,
    *,
    torchrun: bool,
) -> tuple[Any, str]:
    """All workers alive and in reach; the store and the name of the process group that they are to join."""
    name = f"funcllm-{next(_engines)}"
    if torchrun:
        store = _torchrun_store(0, tp, name)
        team.workers = _accept(store, tp)
        team.watch()
    else:
        store = dist.TCPStore("127.0.0.1", 0, tp, True, timedelta(seconds=_JOIN_TIMEOUT), wait_for_workers=False)
        shipped = shipping.dumps((factory, payload))
        for rank in range(1, tp):
            team.workers.append(_spawn(rank, tp))
        team.watch()
        for worker in team.workers:
            setup = {
                "sys_path": sys.path,
                "rank": worker.rank,
                "size": tp,
                "device": str(devices[worker.rank]),
                "port": store.port,
                "name": name,
                "timeout": timeout,
            }
            with contextlib.suppress(ChannelClosed):
                worker.channel.send(Kind.SETUP, json.dumps(setup).encode())
                worker.channel.send(Kind.SETUP, shipped)
    team.store = store
    team.wait(lambda: all(worker.hello for worker in team.workers))
    return store, name


def _spawn(rank: int, tp: int) -> _Worker:
    """Starts a worker in a session of its own: the terminal's signals reach rank 0 only."""
    own, other = channel_pair()
    crash = tempfile.TemporaryFile()  # noqa: SIM115
    package_folder = str(Path(sys.modules["funcllm"].__path__[0]).parent)
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": str(_threads_per_rank(tp)), **os.environ, "PYTHONPATH": path}
    # The parent-death signal follows the thread that started the child: elsewhere the channel's end must do.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    command += ["-W", "ignore::RuntimeWarning:runpy", "-m", "funcllm.launch.ranks"]
    try:
        process = subprocess.Popen(
            [*command, str(other.fileno()), str(crash.fileno()), str(parent)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(other.fileno(), crash.fileno()),
            env=environment,
            start_new_session=True,
        )
    finally:
        other.close()
    return _Worker(rank, own, process, crash)


def _kill(worker: _Worker) -> None:
    """Ends a worker and the processes that it started."""
    if worker.process is None:
        worker.channel.close()
    elif worker.process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(worker.process.pid, signal.SIGKILL)


def _reap(worker: _Worker, deadline: float) -> None:
    """Waits for a worker's end, and makes it end after the deadline."""
    if worker.process is not None:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(worker)
            worker.process.wait()
    worker.channel.close()
    if worker.crash is not None:
        worker.crash.close()


def _death_fd(worker: _Worker) -> int | None:
    """A file descriptor that becomes readable when the worker's process ends, where the system has such."""
    if worker.process is None or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(worker.process.pid)
    except OSError:
        return None


def _describe_exit(worker: _Worker) -> tuple[int, str]:
    """What became of a worker whose channel ended."""
    assert worker.process is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(1.0)
    if worker.process.returncode is None:
        return 3, f"rank {worker.rank} closed its channel"
    return _describe_death(worker)


def _describe_death(worker: _Worker) -> tuple[int, str]:
    """Precedence and text: a signal comes first, it is a cause; an exit late, as its report may be on its way."""
    assert worker.process is not None
    code = worker.process.wait()
    if code >= 0:
        return 2, f"rank {worker.rank} exited with code {code} before the engine was closed" + _crash_text(worker)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
    return 0, f"rank {worker.rank} was killed by {name}{hint}" + _crash_text(worker)


def _crash_text(worker: _Worker) -> str:
    if worker.crash is None or worker.crash.closed:
        return ""
    worker.crash.seek(0)
    text = worker.crash.read(1 << 16).decode(errors="replace").strip()
    return f":\n{text}" if text else ""


# --- the worker's side -----------------------------------------------------------------------------------------------


def serve(runtime: Runtime, channel: Channel) -> None:
    """Executes what rank 0 sends, in order, until it closes. Only calls are answered; any other error is raised."""
    while True:
        kind, body = channel.receive()
        if kind is Kind.PLAN:
            runtime.execute(np.frombuffer(body, np.int32))
        elif kind is Kind.CALL:
            channel.send(Kind.REPLY, _answer(runtime, body))
        elif kind is Kind.CLOSE:
            return
        else:
            raise ValueError(f"a worker cannot follow a message of kind {kind.name}")


def _answer(runtime: Runtime, body: bytearray) -> bytes:
    try:
        fn, args = shipping.loads(body)
        return b"R" + shipping.dumps((True, shipping.to_cpu(runtime.call(fn, args))))
    except Exception:
        return b"E" + shipping.dumps((False, traceback.format_exc()))


def worker_main(arguments: list[str]) -> None:
    """The life of a started worker. arguments: file descriptors of its channel and crash report, and its parent."""
    channel_fd, crash_fd, parent = (int(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent:
        _die_with(parent)
    faulthandler.enable(os.fdopen(crash_fd, "w"))
    channel = Channel(socket.socket(fileno=channel_fd))
    done = threading.Event()
    watch_peer(channel, lambda: _end_orphan(done))

    def prepare() -> tuple[Any, Factory, Any, dict[str, Any]]:
        setup = json.loads(bytes(channel.receive()[1]))
        sys.path[:] = setup["sys_path"]
        factory, payload = shipping.loads(channel.receive()[1])
        store = dist.TCPStore("127.0.0.1", setup["port"], setup["size"], False, timedelta(seconds=_JOIN_TIMEOUT))
        return store, factory, payload, setup

    def live() -> None:
        store, factory, payload, setup = prepare()
        device = torch.device(setup["device"])
        _live(channel, store, factory, payload, setup["rank"], setup["size"], device, setup["name"], setup["timeout"])

    _report_failure(channel, live)
    done.set()


def _live(
    channel: Channel,
    store: Any,
    factory: Factory,
    payload: Any,
    rank: int,
    size: int,
    device: torch.device,
    name: str,
    timeout: float,
) -> None:
    """Joins the group, builds the runtime and serves until closed."""
    _set_device(device)
    channel.send(Kind.HELLO)
    handle = _join(store, rank, size, device, name, timeout)
    runtime = factory(_group_of(handle), device, payload)
    channel.send(Kind.READY)
    serve(runtime, channel)
    runtime.close()
    _leave(handle)


def _report_failure(channel: Channel, live: Callable[[], None]) -> None:
    """Runs live(); where it raises, tells rank 0 and ends this process at once, whatever its threads hang in."""
    try:
        live()
    except ChannelClosed:
        os._exit(1)
    except BaseException:
        text = traceback.format_exc()
        try:
            channel.send(Kind.FAILED, text.encode())
        except ChannelClosed:
            print(text, file=sys.stderr)
        sys.stderr.flush()
        time.sleep(0.05)
        os._exit(1)


def _die_with(parent: int) -> None:
    """Lets the kernel kill this process with its parent (Linux), and ends it if that came too late."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_orphan(done: threading.Event) -> None:
    """Ends this process when rank 0 is gone and the main thread does not see it, in a collective for instance."""
    if not done.wait(_ORPHAN_GRACE):
        os._exit(1)


# --- torchrun --------------------------------------------------------------------------------------------------------


def _torchrun_rank(tp: int) -> int | None:
    """This process's rank where a launcher like torchrun started one process per rank, else None."""
    if tp == 1 or not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    size = int(os.environ["WORLD_SIZE"])
    if size != tp:
        raise ValueError(f"WORLD_SIZE={size} is set by a launcher but tp={tp}; start {tp} processes or unset RANK")
    return int(os.environ["RANK"])


def _torchrun_store(rank: int, size: int, name: str) -> Any:
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=_JOIN_TIMEOUT)))
    return dist.PrefixStore(name, store)


def _accept(store: Any, tp: int) -> list[_Worker]:
    """The workers of a launcher: they connect to a port that rank 0 announces and prove that they read the store."""
    token = secrets.token_bytes(16)
    with socket.create_server(("", 0)) as server:
        server.settimeout(_JOIN_TIMEOUT)
        store.set("token", token.hex())
        store.set("port", str(server.getsockname()[1]))
        workers: dict[int, _Worker] = {}
        while len(workers) < tp - 1:
            connection, _ = server.accept()
            connection.settimeout(_JOIN_TIMEOUT)
            greeting = connection.recv(18, socket.MSG_WAITALL)
            rank = int.from_bytes(greeting[16:], "little")
            if not secrets.compare_digest(greeting[:16], token) or len(greeting) < 18 or rank in workers:
                connection.close()
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            workers[rank] = _Worker(rank, Channel(connection))
    return [workers[rank] for rank in sorted(workers)]


def _serve_torchrun(rank: int, tp: int, factory: Factory, payload: Any, device: torch.device, timeout: float) -> None:
    """The life of a launcher's rank 1 and up: serves rank 0, then exits."""
    name = f"funcllm-{next(_engines)}"
    store = _torchrun_store(rank, tp, name)
    address = (os.environ["MASTER_ADDR"], int(store.get("port")))
    connection = socket.create_connection(address, _JOIN_TIMEOUT)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes.fromhex(store.get("token").decode()) + rank.to_bytes(2, "little"))
    channel = Channel(connection)
    done = threading.Event()
    watch_peer(channel, lambda: _end_orphan(done))
    _report_failure(channel, lambda: _live(channel, store, factory, payload, rank, tp, device, name, timeout))
    done.set()
    raise SystemExit(0)


# --- both sides ------------------------------------------------------------------------------------------------------


def _device_of(device: str | torch.device, rank: int, tp: int) -> torch.device:
    """The device of a rank; a GPU's index counts from that of `device`, or is LOCAL_RANK under torchrun."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    first, visible = device.index or 0, torch.cuda.device_count()
    local = rank % int(os.environ.get("LOCAL_WORLD_SIZE", tp)) if _torchrun_rank(tp) is not None else rank
    if first + local >= visible:
        raise ValueError(f"rank {rank} of tp={tp} needs GPU {first + local}, {visible} are visible; use a smaller tp")
    return torch.device("cuda", first + local)


def _set_device(device: torch.device) -> None:
    """Before anything else touches CUDA: a rank must open no context on another rank's GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _threads_per_rank(tp: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // tp)


def _interruptible(work: Callable[[], Result], team: _Team) -> Result:
    """work() in a thread, waited for here: a rank's death or Ctrl-C ends the wait, which C++ code would not."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))
        team.notify()

    threading.Thread(target=run, name="join", daemon=True).start()
    team.wait(lambda: bool(outcome))
    ok, value = outcome[0]
    if not ok:
        raise value
    return value


_joining = threading.Lock()


def _join(store: Any, rank: int, size: int, device: torch.device, name: str, timeout: float) -> dist.ProcessGroup:
    """A process group of its own, beside whatever default group the process may have.

    On GPUs, CUDA tensors go through NCCL and CPU tensors through gloo. The name counts the engines of a process, and is
    the same in every run: it is part of compiled code, which a random name would compile anew at every start.
    """
    c10d = dist.distributed_c10d
    _set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    changes = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # the monitor sees to deaths; NCCL's own would kill the caller
    if isinstance(store, dist.TCPStore) and sys.platform == "linux":
        changes["GLOO_SOCKET_IFNAME"] = "lo"
    with _joining, _environment(changes):
        previous = dist.GroupMember.WORLD
        c10d._update_default_pg(None)
        try:
            handle, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],
                dist.Backend(backend) if ":" not in backend else backend,
                store,
                group_name=name,  # type: ignore[arg-type]
                timeout=timedelta(seconds=timeout),
                device_id=device if device.type == "cuda" else None,
                group_desc="funcllm",
            )
        finally:
            c10d._update_default_pg(previous)
        c10d._world.pg_group_ranks[handle] = {r: r for r in range(size)}
    return handle


def _group_of(handle: dist.ProcessGroup) -> Group:
    return Group(handle.rank(), handle.size(), _ProcessHandle(handle.group_name, handle.size()))


def _leave(handle: dist.ProcessGroup | None) -> None:
    if handle is not None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group(handle)


def _abort(handle: dist.ProcessGroup) -> None:
    """Frees whoever is stuck in a collective of this group, and forgets the group."""
    with contextlib.suppress(Exception):
        dist.distributed_c10d._abort_process_group(handle)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Environment variables for the time of a call; what the user set stays."""
    added = [name for name in changes if name not in os.environ]
    os.environ.update({name: changes[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


if __name__ == "__main__":
    # Not this module under the name __main__, but the one that the rest of the package imports.
    from funcllm.launch.ranks import worker_main as main

    main(sys.argv[1:])
