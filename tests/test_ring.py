"""The rings: their slots by a stand-in for the GPU's streams, and on a GPU with copies that are late on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from funcllm.launch import ring as ring_module
from funcllm.launch.ring import OutputRing, PlanRing, outputs_now
from funcllm.types import StepOutputs


def step_outputs(step: int, rows: int, device: Any = "cpu", **captured: Tensor) -> StepOutputs:
    """Outputs that tell their step and row."""
    index = torch.arange(rows, dtype=torch.int32, device=device)
    return StepOutputs(
        token_ids_l=100 * step + index,
        count_l=(index + step) % 2,
        alive_l=(index + step) % 3 > 0,
        captured=captured,
    )


def assert_outputs(outputs: Any, step: int, rows: int) -> None:
    index = np.arange(rows)
    assert outputs.token_ids.tolist() == (100 * step + index).tolist()
    assert outputs.counts.tolist() == ((index + step) % 2).tolist()
    assert outputs.alive.tolist() == ((index + step) % 3 > 0).astype(int).tolist()


def test_outputs_now_are_the_steps_own() -> None:
    values = torch.randn(3, 2)
    handle = outputs_now(step_outputs(4, 3, final=values))
    assert handle.ready()
    outputs = handle.read()
    assert_outputs(outputs, 4, 3)
    assert torch.equal(outputs.captured["final"], values)


# --- without a GPU ---------------------------------------------------------------------------------------------------


class Stub:
    """Stands for a stream and for an event; remembers the events on which the host waited."""

    waits: list[Stub]

    def __init__(self, *_: Any) -> None:
        self.recorded = 0

    def wait_stream(self, other: Any) -> None: ...

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Stub.waits.append(self)


class StubCuda:
    Stream = Event = Stub

    @staticmethod
    def current_stream() -> Stub:
        return Stub()

    @staticmethod
    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield


class StubTorch:
    """torch whose GPU streams do nothing and whose memory is not pinned."""

    cuda = StubCuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **kwargs)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    Stub.waits = []
    monkeypatch.setattr(ring_module, "torch", StubTorch())


@pytest.mark.usefixtures("stub")
def test_each_step_is_read_from_its_own_slot_while_others_are_under_way() -> None:
    ring = OutputRing(4, 5, torch.device("cpu"))
    pending = []
    for step in range(11):
        rows = 1 + step % 5
        ring.store(step_outputs(step, rows, final=torch.full((rows, 2), float(step))))
        pending.append((step, rows, ring.collect(rows)))
        if len(pending) == 3:  # as at depth 2
            done, count, handle = pending.pop(0)
            outputs = handle.read()
            assert_outputs(outputs, done, count)
            assert torch.equal(outputs.captured["final"], torch.full((count, 2), float(done)))
    assert len(Stub.waits) == 9


@pytest.mark.usefixtures("stub")
def test_a_slot_that_nobody_reads_is_passed_over() -> None:
    ring = OutputRing(3, 2, torch.device("cpu"))
    ring.store(step_outputs(0, 2))
    ring.skip()
    ring.store(step_outputs(1, 2))
    assert_outputs(ring.collect(2).read(), 1, 2)


@pytest.mark.usefixtures("stub")
def test_what_is_read_does_not_change_when_the_slot_is_used_again() -> None:
    ring = OutputRing(2, 2, torch.device("cpu"))
    ring.store(step_outputs(0, 2, final=torch.zeros(2, 1)))
    first = ring.collect(2).read()
    for step in (1, 2, 3):
        ring.store(step_outputs(step, 2, final=torch.ones(2, 1)))
        ring.collect(2)
    assert_outputs(first, 0, 2)
    assert torch.equal(first.captured["final"], torch.zeros(2, 1))


@pytest.mark.usefixtures("stub")
def test_a_kernel_may_store_the_rows_by_itself() -> None:
    ring = OutputRing(3, 4, torch.device("cpu"))
    for step in range(5):
        rows_sr3, written = ring.rows
        assert rows_sr3.shape == (3, 4, 3)
        ring.store_captured({"final": torch.full((2, 1), float(step))})
        outputs = step_outputs(step, 2)
        rows_sr3[written.item() % 3, :2] = torch.stack([outputs.token_ids_l, outputs.count_l, outputs.alive_l.int()], 1)
        written += 1
        read = ring.collect(2).read()
        assert_outputs(read, step, 2)
        assert read.captured["final"].tolist() == [[step], [step]]


@pytest.mark.usefixtures("stub")
def test_a_plan_waits_for_the_copy_that_used_its_buffer() -> None:
    ring, target = PlanRing(3, 8), torch.zeros(8, dtype=torch.int32)
    for step in range(7):
        words = np.arange(step, step + 4, dtype=np.int32)
        ring.copy_to(target, words, step)
        assert target[:4].tolist() == words.tolist()
        words[:] = -1  # the caller's array is free again
        assert target[0] == step
    events = Stub.waits
    assert [event.recorded for event in ring._sent] == [3, 2, 2]
    assert [ring._sent.index(event) for event in events] == [0, 1, 2, 0, 1, 2, 0]


# --- on a GPU --------------------------------------------------------------------------------------------------------

_LATE = 20_000_000  # cycles, about 10 ms


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["steps", "copies"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_late_steps_and_late_copies_mix_nothing_up(late: str, depth: int) -> None:
    device = torch.device("cuda")
    plans, outputs = PlanRing(depth + 3, 64), OutputRing(depth + 3, 8, device)
    words = torch.zeros(64, dtype=torch.int32, device=device)
    pending: list[Any] = []
    for step in range(20):
        plans.copy_to(words, np.full(64, step, np.int32), step)
        if late == "steps":
            torch.cuda._sleep(_LATE)
        seen = words[:8].clone()
        values = step_outputs(step, 8, device)
        outputs.store(values._replace(token_ids_l=100 * seen + torch.arange(8, dtype=torch.int32, device=device)))
        if late == "copies":
            with torch.cuda.stream(outputs._side):
                torch.cuda._sleep(_LATE)
        pending.append((step, outputs.collect(8)))
        if len(pending) > depth:
            done, handle = pending.pop(0)
            assert_outputs(handle.read(), done, 8)
    for done, handle in pending:
        assert_outputs(handle.read(), done, 8)
