"""Which shapes of step get a graph, and when; and that a replay reads its rows from the static plan buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from funcllm.config import qwen3_config
from funcllm.launch import engine as engine_module
from funcllm.launch import graphs, runner
from funcllm.launch.graphs import StepGraphs, StepKey, host_bound_tokens, key_of
from funcllm.launch.plan import Plan, pack, unpack
from funcllm.launch.request import SamplingParams
from funcllm.launch.ring import Handle, Outputs, outputs_now
from funcllm.layers import swiglu
from funcllm.record import Layers
from funcllm.state import init_state
from tests import test_runner as plans
from tests.test_engine import by_hand, prompt, start

DECODE = StepKey(8, token_bucket=8)
MIXED = StepKey(8, 2, 64, 64)


class Recorded:
    """A graph that counts its replays."""

    def __init__(self, key: StepKey) -> None:
        self.key, self.replays = key, 0

    def replay(self) -> None:
        self.replays += 1


def make(captured_tokens: int = 128, **functions: Any) -> tuple[StepGraphs, list[Recorded]]:
    made: list[Recorded] = []

    def capture(key: StepKey) -> Recorded:
        made.append(Recorded(key))
        return made[-1]

    functions = {"capture": capture, "agree": lambda ok: ok} | functions
    return StepGraphs(**functions, captured_tokens=captured_tokens), made


def test_a_decode_shape_is_captured_behind_its_first_step() -> None:
    table, made = make()
    assert not table.replay(DECODE)
    table.ran(DECODE, alone=False)
    assert [graph.key for graph in made] == [DECODE]
    assert table.replay(DECODE)
    assert not table.replay(DECODE._replace(filtered=True))
    assert made[0].replays == 1


def test_a_mixed_shape_is_captured_when_it_comes_again_or_is_one_prompt_alone() -> None:
    table, made = make()
    table.ran(MIXED, alone=False)
    assert not table.replay(MIXED)
    table.ran(MIXED, alone=False)
    assert table.replay(MIXED)
    table.ran(MIXED._replace(decode_bucket=2), alone=True)
    assert table.replay(MIXED._replace(decode_bucket=2))
    assert len(table) == len(made) == 2


def test_a_large_mixed_step_is_never_captured() -> None:
    table, made = make(captured_tokens=MIXED.chunk_tokens - 1)
    for _ in range(3):
        table.ran(MIXED, alone=True)
    assert (len(table), made) == (0, [])
    assert not table.wants(MIXED)
    assert table.wants(MIXED._replace(token_bucket=48))


def test_the_mixed_graph_unused_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_MIXED", 2)
    table, _ = make()
    keys = [MIXED._replace(span=span) for span in (16, 32, 64)]
    for key in keys[:2]:
        table.add(key)
    assert table.replay(keys[0])
    table.add(keys[2])
    assert [table.replay(key) for key in keys] == [True, False, True]


def test_a_failed_capture_of_a_decode_step_ends_all_graphs_with_the_reason() -> None:
    def fail(key: StepKey) -> Recorded:
        raise MemoryError("no room")

    table, _ = make(capture=fail)
    table.ran(DECODE, alone=False)
    assert table.notes == ["no CUDA graphs, steps run uncaptured: bucket 8 failed to capture (MemoryError: no room)"]
    assert not table.wants(DECODE)
    table.clear()
    assert table.wants(DECODE), "new functions may be captured again"


def test_a_failed_capture_of_a_mixed_step_leaves_the_graphs_of_decode_steps() -> None:
    table, _ = make(agree=lambda ok: False)
    table._decode[DECODE] = Recorded(DECODE)
    table.ran(MIXED, alone=True)
    assert table.notes == ["no CUDA graphs of steps with prompts: 64 tokens failed to capture (another rank failed)"]
    assert not table.wants(MIXED)
    assert table.replay(DECODE)


def test_the_key_holds_every_number_of_the_step() -> None:
    plan = Plan(
        step=7,
        decode_rows=np.array([3], np.int32),
        chunk_rows=np.array([1, 2], np.int32),
        chunk_lens=np.array([9, 5], np.int32),
        decode_bucket=4,
        chunk_bucket=2,
        token_bucket=32,
        span=16,
        filtered=True,
    )
    assert key_of(unpack(pack(plan))) == StepKey(4, 2, 32, 16, True)


def test_steps_of_a_small_model_are_bound_by_the_host_for_longer() -> None:
    limits = {size: host_bound_tokens(qwen3_config(size), 1) for size in ("0.6b", "8b", "32b")}
    assert limits == {"0.6b": 22252, "8b": 1814, "32b": 717}
    assert host_bound_tokens(qwen3_config("8b"), 2) == 3628


class Rerun:
    """Stands for a CUDA graph where there is none: calls again what was captured, with the arguments of then."""

    replays = mixed_replays = 0

    def __init__(self, run: Any, pool: Any, stream: Any) -> None:
        self.run = run

    def replay(self) -> None:
        Rerun.replays += 1
        Rerun.mixed_replays += self.run.args[0].is_mixed
        self.run()


class Ring:
    """The output ring without a device: what the last step stored."""

    def store(self, outputs: Any) -> None:
        self.last: Outputs = outputs_now(outputs).read()

    def collect(self, num_rows: int) -> Handle:
        token_ids, counts, alive, captured = self.last
        assert len(token_ids) == num_rows
        return Handle(lambda: True, lambda: Outputs(token_ids.copy(), counts.copy(), alive.copy(), captured))


class Plans:
    def copy_to(self, target: Any, words: Any, step: int) -> None:
        target[: len(words)] = torch.from_numpy(words)


def captured_runner(monkeypatch: pytest.MonkeyPatch) -> runner.Runner:
    monkeypatch.setattr(runner, "Graph", Rerun)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    made = plans.make_runner(graphs=True, buckets=replace(plans.BUCKETS, captured_tokens=48))
    made.on_gpu, made.kernels = True, replace(made.kernels, advance=None)
    made._device_words = torch.zeros(1 << 12, dtype=torch.int32)
    made._plans, made._ring, made._pool, made._capture_stream = Plans(), Ring(), None, None  # type: ignore[assignment]
    return made


def test_replayed_steps_give_what_uncaptured_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, plain = captured_runner(monkeypatch), plans.make_runner()
    prompts = [[7, 201, 33, 90, 14, 61], [3, 8, 250, 11, 5], [9, 4, 2, 77, 1, 30, 12]]

    def admitted(row: int, decode: list[int]) -> Plan:
        ids = prompts[row - 1]
        blocks = [3 * row - 2, 3 * row - 1, 3 * row]
        fields = {"admissions": (plans.admission(row, ids),), "appends": plans.appended(row, blocks)}
        return plans.chunk_plan(row, len(ids), decode=decode, **fields)

    steps = [admitted(1, []), admitted(2, [1]), admitted(3, [1, 2]), *[plans.decode_plan([1, 2, 3])] * 2]
    replays = []
    for plan in steps:
        before = Rerun.replays
        assert plans.execute(captured, plan) == plans.execute(plain, plan)
        replays.append(Rerun.replays - before)
    assert replays == [0, 1, 1, 0, 1]
    assert captured.num_graphs == 2


# --- a whole engine whose device is simulated ------------------------------------------------------------------------


class SimulatedRunner(runner.Runner):
    """Takes every path of the GPU's runtime, on the CPU: graphs run again what they captured, copies are at once."""

    on_gpu = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]

    def _choose_kernels(self) -> Any:
        return replace(super()._choose_kernels(), advance=None)

    def _allocate(self) -> None:
        options = self.options
        extras = self.model.layers.extras
        self.state = init_state(options.max_num_seqs + 1, options.max_model_len, options.table_width, extras)
        self._device_words = torch.full((1 << 15,), -1, dtype=torch.int32)
        self._plans, self._pool, self._capture_stream = Plans(), None, None  # type: ignore[assignment]
        self._new_ring()

    def _new_ring(self) -> None:
        self._ring = DelayedRing(self.options.depth + 3)  # type: ignore[assignment]


class DelayedRing:
    """Slots that are overwritten as on a device: outputs that are read too late are those of another step."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.written = self.step = 0

    def store(self, outputs: Any) -> None:
        self.slots[self.written % len(self.slots)] = outputs_now(outputs).read()
        self.written += 1

    def skip(self) -> None:
        self.step += 1

    def collect(self, num_rows: int) -> Handle:
        assert self.written == self.step + 1, "host and device count the same steps"
        slot = self.step % len(self.slots)
        self.step += 1

        def read() -> Outputs:
            token_ids, counts, alive, captured = self.slots[slot]
            assert len(token_ids) == num_rows
            return Outputs(token_ids, counts, alive, captured)

        return Handle(lambda: True, read)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process run as on a GPU with graphs."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(runner, "Graph", Rerun)
    monkeypatch.setattr(
        engine_module, "build_runtime", lambda group, device, options: SimulatedRunner(group, device, options)
    )

    def options(**values: Any) -> runner.RunOptions:
        buckets = replace(values["buckets"], captured_tokens=48)
        return runner.RunOptions(**values | {"graphs": True, "buckets": buckets})

    monkeypatch.setattr(engine_module, "RunOptions", options)


ROUNDS = [[1, 9, 30, 4], [2, 11, 29, 3, 17, 40], [5], [5], [7, 7, 7], [5], [5], [8, 30, 5, 1]]


def served(**options: Any) -> list[Any]:
    outputs = []
    with start(**options) as engine:
        for shift, lengths in enumerate(ROUNDS):
            batch = [prompt(length, seed=shift) for length in lengths]
            outputs += engine.generate(batch, [GREEDY, TOP_P, SAMPLED][shift % 3])
        described = engine.describe()
        assert not [note for note in described["notes"] if "CUDA graphs" in note]
    return [*outputs, described]


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=9, seed=5, ignore_eos=True)
TOP_P = SamplingParams(temperature=0.8, top_p=0.7, max_tokens=6, seed=6, ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_engine_with_graphs_gives_what_one_without_gives(depth: int, request: pytest.FixtureRequest) -> None:
    layers = Layers().capture("layers.1.residual_mid")
    *plain, described = served(depth=depth, layers=layers)
    assert described["graphs"] == 0
    request.getfixturevalue("simulated")
    Rerun.replays = Rerun.mixed_replays = 0
    *captured, described = served(depth=depth, layers=layers)
    assert described["graphs"] > 6
    assert Rerun.replays - Rerun.mixed_replays > 30
    assert Rerun.mixed_replays >= 2
    for first, second in zip(captured, plain):
        assert (first.token_ids, first.finish_reason) == (second.token_ids, second.finish_reason)
        for name, value in second.captured.items():
            torch.testing.assert_close(first.captured[name], value, rtol=1e-4, atol=1e-4)


def doubled(x_td: Any, params: Any, context: Any) -> Any:
    return swiglu(x_td, params, context) * 2


def test_new_functions_drop_the_graphs_of_the_old_ones(simulated: None) -> None:
    ids = prompt(9)
    with start() as engine:
        usual = engine.generate([ids, ids[:5]], GREEDY)
        engine.update_layers(Layers(mlp=doubled))
        changed = engine.generate([ids, ids[:5]], GREEDY)
        assert [o.token_ids for o in changed] == [by_hand(x, 12, Layers(mlp=doubled)) for x in (ids, ids[:5])]
        engine.update_layers(Layers())
        assert [o.token_ids for o in engine.generate([ids, ids[:5]], GREEDY)] == [o.token_ids for o in usual]
