"""One process per rank: rank 0 is the caller's process, the others are its children.

Owns the life of the ranks. `start_ranks` starts `worker_main` in a process for every further rank, sends it
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
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from funcllm.group import SINGLE, Group
from funcllm.launch import join, shipping, team
from funcllm.launch.channel import Channel, ChannelClosed, Kind, channel_pair, watch_peer
from funcllm.launch.errors import CallError, EngineError
from funcllm.launch.join import Place
from funcllm.launch.team import Team, Worker

Result = TypeVar("Result")
Words = npt.NDArray[np.int32]

_VERDICT_GRACE = 3.0  # seconds that a failing collective waits for the monitor to name the dead rank
_CLOSE_GRACE = 20.0  # seconds that a worker has to end by itself when closed
_ORPHAN_GRACE = 2.0  # seconds that a worker has to end by itself when rank 0 is gone or leaves with an error

_engines = itertools.count()
_guards = itertools.count()
_calls = itertools.count()


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
    launched = join.torchrun_rank(tp)
    name = f"funcllm-{next(_engines)}" if tp > 1 else ""
    places = [
        Place(rank=rank, size=tp, device=join.device_of(device, rank, tp), name=name, timeout=collective_timeout)
        for rank in range(tp)
    ]
    if launched is not None and launched > 0:
        _serve_torchrun(places[launched], factory, payload)
    members = Team(exit_on_death=exit_on_death)
    ranks = Ranks(members, places[0])
    try:
        if tp > 1:
            store = _gather(members, places, factory, payload, by_launcher=launched is not None)
            with ranks.guard(), join.alone(store):
                members.process_group = _interruptible(lambda: join.make_group(store, places[0]), members)
                ranks.group = join.group_of(members.process_group)
        with ranks.guard():
            ranks.runtime = factory(ranks.group, ranks.device, payload)
        members.wait(lambda: all(worker.ready for worker in members.workers))
    except BaseException as error:
        if not isinstance(error, EngineError):
            members.end("rank 0 failed to start", quietly=True)
        ranks.close()
        raise
    return ranks


class Ranks:
    """Rank 0's hold on all ranks. Not safe for use by two threads at once.

    runtime: rank 0's own; group: all ranks; device: rank 0's. Also a context manager, and closed at the latest when it
    is collected or the interpreter exits.
    """

    runtime: Runtime

    def __init__(self, members: Team, place: Place) -> None:
        self.tp = place.size
        self.device = place.device
        self.group: Group = SINGLE
        self._team = members
        self._closed = False
        self._finalizer = weakref.finalize(self, members.shut, None, _ORPHAN_GRACE)

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
        try:
            with self.guard():
                self.send_plan(words)
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
        members = self._team
        shipped = shipping.dumps((fn, args)) if members.workers else b""
        members.call = next(_calls)  # before the workers can answer: the monitor must know whom their errors concern
        try:
            with self.guard():
                self._send(Kind.CALL, shipped)
                own, error = self._call_here(fn, args)
                is_answered = self._await_replies(error)
                replies = [worker.replies.popleft() for worker in members.workers] if is_answered else []
        finally:
            members.call = None
        if error is None:
            return [own, *_values(members.workers, replies)]
        if not is_answered:
            members.end(f"rank 0 raised in a call that another rank waits in: {error!r}", quietly=True)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: together they would outlive the call, and what fn used, too

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

    def _call_here(self, fn: Callable[..., Result], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        """What fn returns on rank 0, or the exception that it raises there."""
        try:
            return self.runtime.call(fn, args), None
        except Exception as error:
            return None, error

    def _await_replies(self, error: Exception | None) -> bool:
        """Waits for the other ranks' replies to a call, not for long where it raised here; whether all replied."""
        members = self._team
        timeout = None
        if error is not None:  # it goes before the errors of other ranks, after which the monitor would end the call
            timeout, members.call = team.CALL_GRACE, None
        try:
            return members.wait(lambda: all(worker.replies for worker in members.workers), timeout)
        except EngineError as end:
            raise end from error


def _values(workers: list[Worker], replies: list[bytearray]) -> list[Any]:
    """What a call returned on each worker. Raises CallError where it raised."""
    for worker, reply in zip(workers, replies):
        if reply[:1] == b"E":
            raise CallError(f"rank {worker.rank} raised in a call:\n{shipping.loads(reply[1:])}")
    values = []
    for worker, reply in zip(workers, replies):
        try:
            values.append(shipping.loads(reply[1:]))
        except Exception as error:
            raise CallError(f"what rank {worker.rank} returned from a call cannot be read here: {error!r}") from error
    return values


def _gather(members: Team, places: list[Place], factory: Factory, payload: Any, *, by_launcher: bool) -> dist.Store:
    """All workers alive and in reach; the store through which the ranks are to meet."""
    tp = len(places)
    join.set_device(places[0].device)
    members.limit_threads(tp)
    if by_launcher:
        store = join.torchrun_store(places[0])
        members.workers = [Worker(rank, channel) for rank, channel in enumerate(join.accept_workers(store, tp), 1)]
        members.watch()
    else:
        store = join.own_store(tp)
        shipped = shipping.dumps((factory, payload))
        for place in places[1:]:
            members.workers.append(_spawn(place))
        members.watch()
        for worker, place in zip(members.workers, places[1:]):
            setup = {"sys_path": sys.path, "port": store.port, **asdict(place), "device": str(place.device)}
            with contextlib.suppress(ChannelClosed):
                worker.channel.send(Kind.SETUP, json.dumps(setup).encode())
                worker.channel.send(Kind.SETUP, shipped)
    members.store = store
    members.wait(lambda: all(worker.hello for worker in members.workers))
    return store


def _spawn(place: Place) -> Worker:
    """Starts a worker in a session of its own: the terminal's signals reach rank 0 only."""
    own, other = channel_pair()
    crash = tempfile.TemporaryFile()  # noqa: SIM115
    package_folder = str(Path(sys.modules["funcllm"].__path__[0]).parent)
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": str(join.threads_per_rank(place.size)), **os.environ, "PYTHONPATH": path}
    # The parent-death signal follows the thread that started the child: elsewhere the channel's end must do.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    command += ["-m", "funcllm.launch.early", "funcllm.launch.ranks:worker_main", str(place.device)]
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
    return Worker(place.rank, own, process, crash)


def _interruptible(work: Callable[[], Result], members: Team) -> Result:
    """work() in a thread, waited for here: a rank's death or Ctrl-C ends the wait, which C++ code would not."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))
        members.notify()

    threading.Thread(target=run, name="join", daemon=True).start()
    members.wait(lambda: bool(outcome))
    ok, value = outcome[0]
    if not ok:
        raise value
    return value


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
        return b"R" + shipping.dumps(runtime.call(fn, args))
    except Exception:
        return b"E" + shipping.dumps(traceback.format_exc())


def worker_main(arguments: list[str]) -> None:
    """The life of a started worker. arguments: file descriptors of its channel and crash report, and its parent."""
    channel_fd, crash_fd, parent = (int(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent:
        _die_with(parent)
    faulthandler.enable(os.fdopen(crash_fd, "w"))
    channel = Channel(socket.socket(fileno=channel_fd))

    def live() -> None:
        setup = json.loads(bytes(channel.receive()[1]))
        sys.path[:] = setup.pop("sys_path")
        store = join.own_store(setup["size"], setup.pop("port"))
        factory, payload = shipping.loads(channel.receive()[1])
        place = Place(**{**setup, "device": torch.device(setup["device"])})
        _live(channel, store, place, factory, payload)

    _report_failure(channel, live)


def _live(channel: Channel, store: dist.Store, place: Place, factory: Factory, payload: Any) -> None:
    """Joins the group, builds the runtime and serves until closed."""
    join.set_device(place.device)
    channel.send(Kind.HELLO)
    handle = join.join(store, place)
    runtime = factory(join.group_of(handle), place.device, payload)
    channel.send(Kind.READY)
    serve(runtime, channel)
    runtime.close()
    join.leave(handle)


def _report_failure(channel: Channel, live: Callable[[], None]) -> None:
    """Runs live(); where it raises, tells rank 0 and ends this process at once, whatever its threads hang in.

    When rank 0 is gone, the process ends too, in a collective for instance, which the main thread could not leave.
    """
    done = threading.Event()
    watch_peer(channel, lambda: _end_orphan(done))
    try:
        live()
    except ChannelClosed:
        os._exit(1)
    except BaseException:
        text = traceback.format_exc()
        try:
            channel.send(Kind.FAILED, text.encode(errors="replace"))
            channel.flush(_ORPHAN_GRACE)
        except ChannelClosed:
            print(text, file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    done.set()
    channel.close()


def _die_with(parent: int) -> None:
    """Lets the kernel kill this process with its parent (Linux), and ends it if that came too late."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_orphan(done: threading.Event) -> None:
    """Ends this process unless its main thread does so in time."""
    if not done.wait(_ORPHAN_GRACE):
        os._exit(1)


def _serve_torchrun(place: Place, factory: Factory, payload: Any) -> NoReturn:
    """The life of a launcher's rank 1 and up: serves rank 0, then exits."""
    store = join.torchrun_store(place)
    channel = join.reach_rank_0(store, place.rank)
    _report_failure(channel, lambda: _live(channel, store, place, factory, payload))
    raise SystemExit(0)
