"""The lagged loop over the null model: the same tokens at every depth, and failures that end everything cleanly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from funcllm.launch.loop import Loop, LoopFailed
from funcllm.launch.null import HostTimes, NullExecutor, measure_host
from funcllm.launch.plan import Ints, Plan, unpack
from funcllm.launch.request import Request, ResolvedSampling
from funcllm.launch.scheduler import Event, Scheduler

VOCAB = 50


class Recorder(NullExecutor):
    """Keeps the order in which steps are launched and read, and raises where it is told to."""

    def __init__(
        self, num_rows: int, *, fail_launch: int = -1, fail_read: int = -1, error: BaseException | None = None
    ):
        super().__init__(num_rows, vocab_size=VOCAB)
        self.calls: list[tuple[str, int]] = []
        self._fail = {"launch": fail_launch, "read": fail_read}
        self._error = error or RuntimeError("the device is gone")

    def launch(self, words: Ints, plan: Plan, /) -> Any:
        self._note("launch", unpack(words).step)
        return plan.step, super().launch(words, plan)

    def read(self, handle: Any, /) -> Any:
        self._note("read", handle[0])
        return handle[1]

    def _note(self, name: str, step: int) -> None:
        if self._fail[name] == step:
            raise self._error
        self.calls.append((name, step))


def _scheduler(**changed: Any) -> Scheduler:
    values = {
        "num_blocks": 20,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 40,
        "unit": 2,
        "check": True,
    }
    return Scheduler(**{**values, **changed})  # type: ignore[arg-type]


def _request(i: int, *, length: int = 7, stream: bool = False, **sampling: Any) -> Request:
    resolved = ResolvedSampling(**{"seed": i, "max_tokens": 6, **sampling})
    return Request(id=i, prompt_ids=np.arange(length) + i, sampling=resolved, stream=stream)


def _tokens(events: list[Event]) -> dict[Any, list[int]]:
    tokens: dict[Any, list[int]] = {}
    for event in events:
        tokens.setdefault(event.request_id, []).extend(event.token_ids.tolist())
    return tokens


def _expected(i: int, length: int = 7, count: int = 6) -> list[int]:
    return [NullExecutor(1, vocab_size=VOCAB).token(i, position) for position in range(length, length + count)]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("num_blocks", [5, 20])
def test_the_same_tokens_come_out_at_every_depth(depth: int, num_blocks: int) -> None:
    loop = Loop(_scheduler(num_blocks=num_blocks), NullExecutor(5, vocab_size=VOCAB), depth=depth)
    for i in range(6):
        loop.submit(_request(i))
    assert _tokens(list(loop.run())) == {i: _expected(i) for i in range(6)}
    assert not loop.has_work
    assert loop.scheduler.stats().used_blocks == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_is_read_depth_steps_after_its_launch(depth: int) -> None:
    executor = Recorder(5)
    loop = Loop(_scheduler(), executor, depth=depth)
    loop.submit(_request(0))
    list(loop.run())
    for number, call in enumerate(executor.calls):
        if call[0] == "read":
            launches = [step for name, step in executor.calls[:number] if name == "launch"]
            assert launches[-1] == min(call[1] + depth, 5), executor.calls
    assert [step for name, step in executor.calls if name == "read"] == list(range(6))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_id_ends_a_request_whatever_is_under_way(depth: int) -> None:
    loop = Loop(_scheduler(), NullExecutor(5, vocab_size=VOCAB), depth=depth)
    tokens = _expected(3, count=6)
    loop.submit(_request(3, max_tokens=20, stop_ids=(tokens[2],), min_tokens=0))
    loop.submit(_request(4, max_tokens=20))
    events = list(loop.run())
    assert {e.request_id: e.finish_reason for e in events} == {3: "stop", 4: "length"}
    assert _tokens(events) == {3: tokens[:3], 4: _expected(4, count=20)}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_min_tokens_hold_back_every_stop_id(depth: int) -> None:
    """The third token would be a stop id; it is another one, and the sixth ends the request."""
    tokens = _expected(3)
    loop = Loop(_scheduler(), NullExecutor(5, vocab_size=VOCAB), depth=depth)
    stop_ids = (tokens[2], tokens[5])
    loop.submit(_request(3, max_tokens=20, stop_ids=stop_ids, min_tokens=5))
    (event,) = list(loop.run())
    assert event.finish_reason == "stop"
    assert event.token_ids.tolist() == [*tokens[:2], (tokens[2] + 1) % VOCAB, *tokens[3:]]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_streams_get_each_token_alone_and_others_all_at_the_end(depth: int) -> None:
    loop = Loop(_scheduler(), NullExecutor(5, vocab_size=VOCAB), depth=depth)
    loop.submit(_request(0, stream=True))
    loop.submit(_request(1))
    events = list(loop.run())
    assert [len(e.token_ids) for e in events if e.request_id == 0] == [1] * 6
    assert [len(e.token_ids) for e in events if e.request_id == 1] == [6]
    assert _tokens(events) == {0: _expected(0), 1: _expected(1)}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("fault", ["launch", "read"])
@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_failed_step_ends_every_request_with_the_error(fault: str, step: int, depth: int) -> None:
    executor = Recorder(5, **{f"fail_{fault}": step})
    loop = Loop(_scheduler(max_num_seqs=2), executor, depth=depth)
    for i in range(4):
        loop.submit(_request(i, stream=i == 0))
    events = list(loop.run())
    ended = [e for e in events if e.finish_reason is not None]
    assert [(e.request_id, e.finish_reason) for e in ended] == [(i, "error") for i in range(4)]
    assert {e.error for e in ended} == {"RuntimeError: the device is gone"}
    assert _tokens(events)[0] == _expected(0)[: len(_tokens(events)[0])]
    assert str(loop.failure) == "the device is gone"


def test_a_failed_loop_takes_nothing_more_and_leaks_nothing() -> None:
    loop = Loop(_scheduler(), Recorder(5, fail_launch=2))
    loop.submit(_request(0))
    list(loop.run())
    stats = loop.scheduler.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.running, stats.waiting) == (0, 0, 0, 0)
    with pytest.raises(LoopFailed, match="the device is gone"):
        loop.submit(_request(1))
    with pytest.raises(LoopFailed, match="the device is gone"):
        loop.step()


def test_an_interrupt_fails_the_loop_and_is_raised() -> None:
    loop = Loop(_scheduler(), Recorder(5, fail_launch=1, error=KeyboardInterrupt()))
    loop.submit(_request(0))
    with pytest.raises(KeyboardInterrupt):
        list(loop.run())
    assert isinstance(loop.failure, KeyboardInterrupt)
    assert loop.scheduler.stats().used_blocks == 0


def test_the_scheduler_works_again_under_a_new_loop() -> None:
    scheduler = _scheduler()
    loop = Loop(scheduler, Recorder(5, fail_launch=2))
    loop.submit(_request(0))
    list(loop.run())
    again = Loop(scheduler, NullExecutor(5, vocab_size=VOCAB))
    again.submit(_request(0))
    assert _tokens(list(again.run())) == {0: _expected(0)}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_aborting_gives_what_is_not_delivered_yet(depth: int) -> None:
    loop = Loop(_scheduler(), NullExecutor(5, vocab_size=VOCAB), depth=depth)
    loop.submit(_request(0, max_tokens=20))
    loop.submit(_request(1, max_tokens=20, stream=True))
    streamed = [event for _ in range(6) for event in loop.step()]
    events = [loop.abort(0), loop.abort(1)]
    done = len(streamed)
    assert [e.finish_reason for e in events if e] == ["abort", "abort"]
    assert [e.token_ids.tolist() for e in events if e] == [_expected(0, count=6 - depth), []]
    assert _tokens(streamed) == {1: _expected(1, count=done)}
    assert (loop.abort(0), loop.abort(1), loop.abort(99)) == (None, None, None)
    assert loop.scheduler.stats().used_blocks == 0
    assert list(loop.run()) == []


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_draining_reads_what_is_under_way_and_launches_nothing(depth: int) -> None:
    executor = Recorder(5)
    loop = Loop(_scheduler(), executor, depth=depth)
    loop.submit(_request(0, stream=True))
    events = [event for _ in range(3) for event in loop.step()] + loop.drain()
    assert [call for call in executor.calls if call[0] == "launch"] == [("launch", step) for step in range(3)]
    assert _tokens(events) == {0: _expected(0, count=3)}
    assert loop.scheduler.num_in_flight == 0
    assert _tokens([*events, *loop.run()]) == {0: _expected(0)}


def test_a_failure_while_draining_ends_every_request() -> None:
    loop = Loop(_scheduler(), Recorder(5, fail_read=1), depth=2)
    loop.submit(_request(0))
    loop.step()
    loop.step()
    assert [(e.finish_reason, e.token_ids.tolist()) for e in loop.drain()] == [("error", _expected(0, count=1))]


def test_a_loop_that_is_idle_has_nothing_to_do() -> None:
    loop = Loop(_scheduler(), NullExecutor(5))
    assert not loop.has_work
    assert loop.step() == []


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=-1"):
        Loop(_scheduler(), NullExecutor(5), depth=-1)


def test_the_null_model_measures_the_host() -> None:
    times = measure_host(3, 5)
    assert isinstance(times, HostTimes)
    assert times.total == pytest.approx(times.plan + times.pack + times.commit)
    assert min(times) > 0
    assert times.total < 50


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_the_host_is_measured_at_any_depth(depth: int, streams: bool) -> None:
    assert measure_host(2, 3, depth=depth, streams=streams).total > 0
