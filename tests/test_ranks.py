from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from funcllm.group import SINGLE, Group, all_gather, all_reduce
from funcllm.launch import join, team
from funcllm.launch.channel import Kind
from funcllm.launch.errors import CallError, EngineError
from funcllm.launch.ranks import Ranks, start_ranks
from tests.patience import MOST, patient

SOON = 10.0  # seconds within which all ranks must have ended; about 5 are needed

PLAN = np.array([1, 2, 3], np.int32)


class Toy:
    """A runtime whose step is one all_reduce."""

    def __init__(self, group: Group, device: torch.device, payload: Any) -> None:
        self.group, self.device, self.payload = group, device, payload
        self.plans: list[list[int]] = []
        self.closed = False
        if callable(payload):
            payload(group)

    def execute(self, words: npt.NDArray[np.int32]) -> torch.Tensor:
        self.plans.append(words.tolist())
        if words[0] == -1 and self.group.rank == 1:
            raise ArithmeticError("rank 1 cannot follow this plan")
        if words[0] == -2 and self.group.rank == 2:
            raise ArithmeticError("rank 2 cannot follow this plan")
        return all_reduce(torch.tensor(words.tolist()), self.group)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return fn(self, *args)

    def close(self) -> None:
        self.closed = True


def pid(_: Toy) -> int:
    return os.getpid()


def reduce_after_rank_1(toy: Toy, seconds: float) -> float:
    """Rank 0 is in the collective while rank 1 sleeps."""
    if toy.group.rank == 1:
        time.sleep(seconds)
    return all_reduce(torch.ones(1), toy.group).item()


def gone(process_id: int) -> bool:
    """Whether a process has ended; one that its parent has not waited for counts as ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_all_gone(process_ids: list[int]) -> None:
    deadline = time.monotonic() + patient(SOON)
    while time.monotonic() < deadline and not all(map(gone, process_ids)):
        time.sleep(0.02)
    left = [process_id for process_id in process_ids if not gone(process_id)]
    assert left == []


@contextlib.contextmanager
def ends_soon() -> Iterator[None]:
    start, limit = time.monotonic(), patient(SOON)
    yield
    seconds = time.monotonic() - start
    assert seconds < SOON or seconds < max(limit, patient(SOON))


def children() -> list[int]:
    """Processes that this process started and that have not ended."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(child) for child in listing.split() if not gone(int(child)) and is_rank(int(child))]


def is_rank(process_id: int) -> bool:
    try:
        return b"funcllm.launch.ranks" in Path(f"/proc/{process_id}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    before = children()
    yield
    assert_all_gone([child for child in children() if child not in before])


@contextlib.contextmanager
def toys(tp: int, payload: Any = None) -> Iterator[tuple[Ranks, list[int]]]:
    """The ranks and the process ids of the workers, which must all be gone at the end."""
    with start_ranks(tp, Toy, payload, collective_timeout=60.0) as ranks:
        workers = ranks.call(pid)[1:]
        yield ranks, workers
    assert_all_gone(workers)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks for the tests that leave them well."""
    with toys(2, {"scale": 3}) as (ranks, _):
        yield ranks


def test_a_single_rank_starts_no_process() -> None:
    with start_ranks(1, Toy, "payload") as ranks:
        assert ranks.group is SINGLE
        assert ranks.execute(PLAN).tolist() == [1, 2, 3]
        assert ranks.call(pid) == [os.getpid()]
        assert ranks.runtime.payload == "payload"
    assert ranks.runtime.closed
    with pytest.raises(EngineError, match="closed; open a new one"):
        ranks.execute(PLAN)


def test_plans_and_calls_reach_every_rank_in_order() -> None:
    tp = 4
    with toys(tp, {"scale": 3}) as (ranks, workers):
        assert len({os.getpid(), *workers}) == tp
        plans = [np.arange(1, size, dtype=np.int32) for size in (2, 40_000, 3)]
        for plan in plans:
            assert ranks.execute(plan).tolist() == (plan * tp).tolist()
        assert ranks.call(lambda toy: toy.plans) == [[plan.tolist() for plan in plans]] * tp
        assert ranks.call(lambda toy, x: x * toy.group.rank * toy.payload["scale"], 2) == [6 * r for r in range(tp)]
        gathered = ranks.call(lambda toy: all_gather(torch.tensor([toy.group.rank]), toy.group).tolist())
        assert gathered == [list(range(tp))] * tp
        assert ranks.failure is None


def test_a_slow_worker_gets_two_plans_sent_back_to_back_from_one_buffer(pair: Ranks) -> None:
    def forget(toy: Toy) -> None:
        toy.plans.clear()
        toy.execute = lambda words: (time.sleep(0.3), toy.plans.append(words.tolist()))  # type: ignore[method-assign]

    def remember(toy: Toy) -> list[list[int]]:
        del toy.execute
        return toy.plans

    pair.call(forget)
    buffer = np.full(200_000, 1, np.int32)
    pair.send_plan(buffer)
    buffer[:] = 2
    pair.send_plan(buffer[:5])
    buffer[:] = 3
    assert pair.call(remember)[1] == [[1] * 200_000, [2] * 5]


def test_two_engines_run_beside_each_other_in_one_process() -> None:
    with toys(2) as (one, _), toys(2) as (two, _):
        for _ in range(3):
            assert one.execute(PLAN).tolist() == two.execute(PLAN).tolist() == [2, 4, 6]
        assert len(set(one.call(pid) + two.call(pid))) == 3
    with toys(2) as (three, _):
        assert three.execute(PLAN).tolist() == [2, 4, 6]


def test_tensors_come_back_from_every_rank(pair: Ranks) -> None:
    results = pair.call(lambda toy, x: {"x": x + toy.group.rank}, torch.zeros(2))
    assert [result["x"].tolist() for result in results] == [[0, 0], [1, 1]]


# --- failures --------------------------------------------------------------------------------------------------------


def raise_on_rank_1(group: Group) -> None:
    if group.rank == 1:
        raise KeyError("no such weight")
    all_reduce(torch.ones(1), group)


def test_a_rank_that_fails_in_load_ends_all_with_its_traceback() -> None:
    with (
        leaves_nothing(),
        ends_soon(),
        pytest.raises(EngineError, match=r"(?s)rank 1 failed:.*raise_on_rank_1.*no such weight"),
    ):
        start_ranks(2, Toy, raise_on_rank_1)


def raise_on_rank_0(group: Group) -> None:
    if group.rank == 0:
        raise ValueError("bad folder")
    all_reduce(torch.ones(1), group)


def test_an_error_of_rank_0_in_load_is_raised_as_it_is() -> None:
    with leaves_nothing(), ends_soon(), pytest.raises(ValueError, match="bad folder"):
        start_ranks(2, Toy, raise_on_rank_0)


def test_a_worker_that_cannot_read_its_payload_is_named() -> None:
    with leaves_nothing(), ends_soon(), pytest.raises(EngineError, match=r"(?s)rank 1 failed:.*not a number"):
        start_ranks(2, Toy, Unreadable())


def test_a_rank_killed_during_a_collective_ends_all() -> None:
    with toys(4) as (ranks, workers):
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {workers[0]}"])
        with ends_soon(), pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
            ranks.call(reduce_after_rank_1, 60.0)
        killer.wait()
        assert_all_gone(workers)
        for use in (lambda: ranks.execute(PLAN), lambda: ranks.call(pid), ranks.check):
            with pytest.raises(EngineError, match="rank 1 was killed"):
                use()


def test_a_rank_killed_while_idle_is_noticed() -> None:
    with toys(2) as (ranks, workers):
        os.kill(workers[0], signal.SIGKILL)
        deadline = time.monotonic() + patient(SOON)
        while ranks.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ranks.failure is not None
        assert ranks.failure.startswith("rank 1 was killed by SIGKILL")
        with pytest.raises(EngineError):
            ranks.execute(PLAN)


def test_a_crash_names_the_signal_and_the_python_line() -> None:
    def crash(toy: Toy) -> None:
        if toy.group.rank == 1:
            ctypes.string_at(0)
        all_reduce(torch.ones(1), toy.group)

    with toys(2) as (ranks, _), ends_soon(), pytest.raises(EngineError, match=r"(?s)rank 1 .* SIGSEGV.*in crash"):
        ranks.call(crash)


def test_a_rank_that_leaves_without_a_word_is_named() -> None:
    def leave(toy: Toy) -> None:
        if toy.group.rank == 1:
            os._exit(3)
        all_reduce(torch.ones(1), toy.group)

    with toys(2) as (ranks, _), ends_soon(), pytest.raises(EngineError, match="rank 1 exited with code 3"):
        ranks.call(leave)


def test_a_worker_that_cannot_follow_a_plan_ends_all_with_its_traceback() -> None:
    with toys(2) as (ranks, _):
        with ends_soon(), pytest.raises(EngineError, match=r"(?s)rank 1 failed:.*cannot follow this plan"):
            ranks.execute(np.array([-1], np.int32))
        with pytest.raises(EngineError, match="rank 1 failed"):
            ranks.execute(PLAN)


def test_the_rank_that_failed_first_is_named_and_not_those_that_waited_for_it() -> None:
    with toys(4) as (ranks, _), ends_soon(), pytest.raises(EngineError, match=r"(?s)rank 2 failed:.*rank 2 cannot"):
        ranks.execute(np.array([-2], np.int32))


def test_a_long_report_of_a_failure_arrives_whole() -> None:
    def fail(toy: Toy) -> None:
        if toy.group.rank == 1:
            raise SystemExit("x" * 20_000_000 + " is the end")

    with toys(2) as (ranks, _), pytest.raises(EngineError, match=r"rank 1 failed:") as raised:
        ranks.call(fail)
    assert str(raised.value).endswith("is the end\n")


def test_what_a_dead_rank_had_started_is_ended(tmp_path: Path) -> None:
    def start(toy: Toy) -> int:
        return subprocess.Popen(["sleep", "100"]).pid if toy.group.rank == 1 else 0

    with toys(2) as (ranks, workers):
        _, child = ranks.call(start)
        os.kill(workers[0], signal.SIGKILL)
        assert_all_gone([child])


def test_a_death_while_the_ranks_join_ends_all_and_the_next_start_works(monkeypatch: pytest.MonkeyPatch) -> None:
    make_group = join.make_group
    before = children()

    def make_after_a_death(store: Any, place: join.Place) -> Any:
        os.kill(max(set(children()) - set(before)), signal.SIGKILL)
        return make_group(store, place)

    monkeypatch.setattr(join, "make_group", make_after_a_death)
    with leaves_nothing(), pytest.raises(EngineError, match=r"rank \d was killed by SIGKILL"):
        start_ranks(4, Toy)
    monkeypatch.undo()
    with toys(2) as (ranks, _):
        assert ranks.execute(PLAN).tolist() == [2, 4, 6]


def test_an_error_of_the_monitor_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("in the monitor")

    with toys(2) as (ranks, _), ends_soon():
        monkeypatch.setattr(ranks._team, "_take", fail)
        with pytest.raises(EngineError, match=r"(?s)the monitor of the ranks failed:.*in the monitor"):
            ranks.call(reduce_after_rank_1, 0.2)
        with pytest.raises(EngineError, match="the monitor of the ranks failed"):
            ranks.execute(PLAN)


def test_a_step_that_fails_on_rank_0_ends_the_engine() -> None:
    with toys(2) as (ranks, _):
        ranks.runtime.execute = lambda words: 1 / 0
        with pytest.raises(ZeroDivisionError):
            ranks.execute(PLAN)
        with pytest.raises(EngineError, match="rank 0 failed in a step: ZeroDivisionError"):
            ranks.execute(PLAN)


# --- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_that_raises_everywhere_raises_and_the_engine_goes_on(pair: Ranks) -> None:
    with pytest.raises(ZeroDivisionError):
        pair.call(lambda toy: 1 / 0)
    assert pair.execute(PLAN).tolist() == [2, 4, 6]
    assert pair.call(lambda toy: toy.group.rank) == [0, 1]


def test_a_call_that_raises_on_another_rank_raises_its_traceback_and_the_engine_goes_on(pair: Ranks) -> None:
    with pytest.raises(CallError, match=r"(?s)rank 1 raised in a call:.*ZeroDivisionError"):
        pair.call(lambda toy: 1 / (1 - toy.group.rank))
    assert pair.call(lambda toy: toy.group.rank) == [0, 1]
    assert pair.execute(PLAN).tolist() == [2, 4, 6]


@pytest.mark.parametrize("raising", [0, 1])
def test_a_call_that_raises_on_one_rank_while_the_other_waits_ends_the_engine(
    raising: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "CALL_GRACE", 0.3)

    def raise_beside_a_collective(toy: Toy, raising: int) -> None:
        if toy.group.rank == raising:
            raise ZeroDivisionError("on one rank")
        all_reduce(torch.ones(1), toy.group)

    error = ZeroDivisionError if raising == 0 else EngineError
    with toys(2) as (ranks, _):
        with ends_soon(), pytest.raises(error, match="on one rank"):
            ranks.call(raise_beside_a_collective, raising)
        with pytest.raises(EngineError, match="on one rank"):
            ranks.execute(PLAN)


def test_a_call_that_raises_before_rank_0_has_begun_it_ends_the_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's error is read before rank 0 enters the call, in whose collective it would wait for ever."""
    monkeypatch.setattr(team, "CALL_GRACE", 0.3)

    def raise_on_rank_1(toy: Toy) -> None:
        if toy.group.rank == 1:
            raise ZeroDivisionError("on one rank")
        all_reduce(torch.ones(1), toy.group)

    with toys(2) as (ranks, _):
        send = ranks._send

        def send_and_wait(kind: Kind, body: Any) -> None:
            send(kind, body)
            deadline = time.monotonic() + patient(SOON)
            while not ranks._team.workers[0].replies and time.monotonic() < deadline:
                time.sleep(0.01)

        monkeypatch.setattr(ranks, "_send", send_and_wait)
        with ends_soon(), pytest.raises(EngineError, match="on one rank"):
            ranks.call(raise_on_rank_1)


def test_a_call_in_which_one_worker_raises_and_another_waits_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has nothing to do in it and only waits for the answers."""
    monkeypatch.setattr(team, "CALL_GRACE", 0.3)

    def leave_rank_2_waiting(toy: Toy) -> None:
        if toy.group.rank == 1:
            raise ZeroDivisionError("on one rank")
        if toy.group.rank == 2:
            all_reduce(torch.ones(1), toy.group)

    with toys(3) as (ranks, _), ends_soon(), pytest.raises(EngineError, match="on one rank"):
        ranks.call(leave_rank_2_waiting)


def test_the_error_of_rank_0_goes_before_that_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "CALL_GRACE", 1.0)

    def raise_late_on_rank_0(toy: Toy) -> None:
        if toy.group.rank == 0:
            time.sleep(0.5)
        if toy.group.rank == 2:
            all_reduce(torch.ones(1), toy.group)
        raise ZeroDivisionError(f"on rank {toy.group.rank}")

    with toys(3) as (ranks, _):
        with ends_soon(), pytest.raises(ZeroDivisionError, match="on rank 0"):
            ranks.call(raise_late_on_rank_0)
        with pytest.raises(EngineError, match="on rank 0"):
            ranks.execute(PLAN)


def test_the_grace_of_one_call_does_not_end_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "CALL_GRACE", 0.3)
    with toys(2) as (ranks, _):
        with pytest.raises(CallError, match="rank 1 raised in a call"):
            ranks.call(lambda toy: 1 / 0 if toy.group.rank == 1 else time.sleep(0.2))
        assert ranks.call(lambda toy: time.sleep(0.6) or toy.group.rank) == [0, 1]


def test_an_unpicklable_result_is_an_error_of_that_call(pair: Ranks) -> None:
    with pytest.raises(CallError, match="rank 1 raised in a call"):
        pair.call(lambda toy: (x for x in ()))
    assert pair.call(lambda toy: 1) == [1, 1]


class Unreadable:
    """Can be packed, but not unpacked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


def test_a_result_that_cannot_be_read_is_an_error_of_that_call_alone() -> None:
    with toys(3) as (ranks, _):
        with pytest.raises(CallError, match=r"what rank 1 returned from a call cannot be read here: .*not a number"):
            ranks.call(lambda toy: Unreadable() if toy.group.rank == 1 else "old")
        assert ranks.call(lambda toy: toy.group.rank) == [0, 1, 2]


def test_an_error_of_rank_0_in_a_call_is_raised_at_once_as_it_is(pair: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def misfit(toy: Toy) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(pair._team, "failed_within", lambda seconds: pytest.fail("it waits for the verdict on a death"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        pair.call(misfit)
    assert pair.execute(PLAN).tolist() == [2, 4, 6]


@contextlib.contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """A KeyboardInterrupt in the main thread; what a test runner does with the signal does not matter."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, previous)


def test_an_interrupt_while_rank_0_waits_for_replies_ends_the_engine() -> None:
    """Else the next call would take the replies of this one."""
    with toys(2) as (ranks, _):
        with ctrl_c_after(0.5), pytest.raises(KeyboardInterrupt):
            ranks.call(lambda toy: time.sleep(2) if toy.group.rank else "old")
        with pytest.raises(EngineError, match="interrupted in the middle of a step"):
            ranks.call(lambda toy: "new")


def test_an_interrupt_between_two_sends_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with toys(3) as (ranks, _):
        monkeypatch.setattr(ranks._team.workers[1].channel, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.execute(PLAN)
        monkeypatch.undo()
        with pytest.raises(EngineError, match="interrupted in the middle of a step"):
            ranks.execute(PLAN)


def test_every_engine_of_a_process_hears_of_an_interrupt() -> None:
    with toys(2) as (one, _), toys(2) as (two, _):
        with ctrl_c_after(0.5), ends_soon(), pytest.raises((KeyboardInterrupt, EngineError)):
            two.call(reduce_after_rank_1, 60.0)
        assert one.execute(PLAN).tolist() == [2, 4, 6]


def test_a_worker_ignores_ctrl_c(pair: Ranks) -> None:
    os.kill(pair.call(pid)[1], signal.SIGINT)
    assert pair.call(lambda toy: toy.group.rank) == [0, 1]


def test_a_forked_process_that_closes_leaves_the_ranks_alone(pair: Ranks) -> None:
    child = os.fork()
    if child == 0:
        pair.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pair.execute(PLAN).tolist() == [2, 4, 6]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_ranks_that_nobody_closes_end_when_they_are_collected() -> None:
    ranks = start_ranks(2, Toy)
    workers = ranks.call(pid)[1:]
    del ranks
    gc.collect()
    assert_all_gone(workers)


def test_closing_ends_in_time_though_rank_0_waits_for_a_rank_that_hangs() -> None:
    class Stuck(Toy):
        def close(self) -> None:
            if self.group.rank == 0:
                all_reduce(torch.ones(1), self.group)
            time.sleep(60)

    ranks = start_ranks(2, Stuck, collective_timeout=60.0)
    workers = ranks.call(pid)[1:]
    with ends_soon():
        ranks.close(grace=1.0)
    assert_all_gone(workers)


@pytest.mark.parametrize("moment", ["while it waits", "before it has told the ranks"])
def test_an_interrupted_close_leaves_no_process(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    class Slow(Toy):
        def close(self) -> None:
            if self.group.rank == 1:
                time.sleep(60)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ranks = start_ranks(2, Slow)
    workers = ranks.call(pid)[1:]
    if moment != "while it waits":
        monkeypatch.setattr(ranks._team.workers[0].channel, "send", interrupt)
    with ctrl_c_after(0.5), ends_soon(), pytest.raises(KeyboardInterrupt):
        ranks.close(grace=5.0)
    assert_all_gone(workers)


def test_threads_are_shared_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    before = torch.get_num_threads()
    with toys(2) as (ranks, _):
        assert ranks.call(lambda toy: torch.get_num_threads()) == [2, 2]
    assert torch.get_num_threads() == before


HEAD = """
import os, signal, sys, time
import numpy as np, torch
from funcllm.group import all_reduce
from funcllm.launch.ranks import start_ranks

class Toy:
    def __init__(self, group, device, payload):
        self.group, self.payload = group, payload
        if group.rank == 1:
            print("worker", os.getpid(), file=sys.stderr, flush=True)
        if payload == "load" and group.rank == 1:
            time.sleep(60)
    def execute(self, words):
        return all_reduce(torch.tensor(words.tolist()), self.group)
    def call(self, fn, args):
        return fn(self, *args)
    def close(self):
        if self.payload == "slow to close" and self.group.rank == 1:
            time.sleep(3)
"""


StartScript = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[StartScript]:
    """Starts a script, in a session of its own, that is ended with the test."""
    scripts = []

    def start(body: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(body))
        command = [sys.executable, str(path)]
        scripts.append(subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True))
        return scripts[-1]

    yield start
    for script in scripts:
        script.kill()
        script.wait()


def test_a_script_without_a_main_guard_ships_its_functions_and_their_globals(start_script: StartScript) -> None:
    body = """
    SCALE = 3.0
    SHIFT = torch.ones(2)
    def inner(x): return x * SCALE + SHIFT
    def mlp(x): return inner(x)
    def use(toy, x):
        return torch.compile(toy.payload["mlp"], backend="eager", fullgraph=True)(x).tolist(), (lambda: SCALE)()
    with start_ranks(2, lambda *args: Toy(*args), {"mlp": mlp}) as ranks:
        print(ranks.call(use, torch.ones(2)))
        print(ranks.execute(np.array([5], np.int32)).tolist())
    """
    script = start_script(body)
    output, errors = script.communicate(timeout=200)
    assert output == f"{[([4.0, 4.0], 3.0)] * 2}\n[10]\n", errors
    assert script.returncode == 0


def test_code_without_a_file_that_never_closes_its_engine_works_and_ends(tmp_path: Path) -> None:
    body = "ranks = start_ranks(2, Toy)\nprint(ranks.call(lambda toy: toy.group.rank and os.getpid()))"
    run = subprocess.run([sys.executable], input=HEAD + body, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    zero, worker = run.stdout.strip("[]\n").split(",")
    assert zero == "0"
    assert_all_gone([int(worker)])


BODIES = {
    "load": "start_ranks(2, Toy, 'load')",
    "collective": """
        with start_ranks(2, Toy) as ranks:
            ranks.call(lambda toy: toy.group.rank and time.sleep(60) or all_reduce(torch.ones(1), toy.group))
        """,
    "idle": "ranks = start_ranks(2, Toy)\ntime.sleep(60)",
}


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("load", "SIGINT"),
        ("load", "SIGKILL"),
        ("collective", "SIGINT"),
        ("collective", "SIGTERM"),
        ("collective", "SIGKILL"),
        ("idle", "SIGINT"),
        ("idle", "SIGHUP"),
        ("idle", "SIGKILL"),
    ],
)
def test_no_process_is_left_however_rank_0_ends(start_script: StartScript, phase: str, name: str) -> None:
    script = start_script(BODIES[phase])
    assert script.stderr is not None
    word, worker = script.stderr.readline().split()
    assert word == "worker"
    time.sleep(0.5)
    assert not gone(int(worker))
    with ends_soon():
        os.killpg(script.pid, getattr(signal, name))
        script.communicate(timeout=MOST)
        assert_all_gone([int(worker)])
    assert script.returncode != 0


def test_the_command_line_ends_by_itself_when_rank_0_does_not_notice_a_death(start_script: StartScript) -> None:
    body = """
    ranks = start_ranks(2, Toy, exit_on_death=True)
    os.kill(ranks.call(lambda toy: os.getpid())[1], signal.SIGKILL)
    time.sleep(60)
    """
    script = start_script(body)
    _, errors = script.communicate(timeout=200)
    assert "error: rank 1 was killed by SIGKILL" in errors
    assert script.returncode == 1


def test_torchruns_processes_serve_rank_0_and_end_in_their_own_time(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    body = """
    with start_ranks(2, Toy, "slow to close") as ranks:
        print(ranks.call(lambda toy: toy.group.rank + 10), ranks.execute(np.array([4], np.int32)).tolist())
    print("rank", os.environ["RANK"], "is done")
    """
    path.write_text(HEAD + textwrap.dedent(body))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (run.stdout, run.returncode) == ("[10, 11] [8]\nrank 0 is done\n", 0), run.stderr


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="tp=0 must be at least 1"):
        start_ranks(0, Toy)
