"""The kernels before and after a step against their twins in state.py, in every bit: interpreted, and on a GPU."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm.kernels import reference
from funcllm.state import advance, init_state, inputs_of
from funcllm.types import Extra, SequenceState, StepInputs, StepOutputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
compiled = pytest.mark.skipif(INTERPRETED, reason="runs in the process that does not interpret")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting process of test_interpreted")
on_gpu = pytest.mark.skipif(INTERPRETED or not HAS_GPU, reason="needs a CUDA GPU")

if INTERPRETED or HAS_GPU:
    from funcllm.kernels import triton_step

DEVICES = [
    pytest.param("cpu", id="interpreted", marks=interpreted),
    pytest.param("cuda", id="gpu", marks=[pytest.mark.gpu, on_gpu]),
]

NUM_ROWS = 40
BIAS = Extra(name="bias", shape=(2,), dtype=torch.float32, default=0.5)


def random_state(seed: int, device: str, *, capacity: int = 96, block_size: int = 16, width: int = 9) -> SequenceState:
    """A state of which some rows are dead, some have prompt left, some are early, some stand before their limit."""
    g = torch.Generator().manual_seed(seed)
    state = init_state(NUM_ROWS, capacity, width, (BIAS,))

    def ints(low: Any, high: Any, *tail: int) -> Tensor:
        return (torch.rand(NUM_ROWS, *tail, generator=g) * (high - low) + low).to(torch.int32)

    length_r = ints(1, capacity - 1)
    values = {
        "token_ids_re": ints(0, 8, capacity),
        "length_r": length_r,
        "computed_r": (length_r - 1 - (torch.rand(NUM_ROWS, generator=g) < 0.2).int()).clamp(min=0),
        "prompt_length_r": ints(1, length_r + 1),
        "limit_r": length_r + ints(1, 4),
        "alive_r": torch.rand(NUM_ROWS, generator=g) < 0.8,
        "block_table_rm": ints(1, 1000, width),
    }
    sampling = {
        "temperature_r": torch.rand(NUM_ROWS, generator=g).round(decimals=1),
        "top_k_r": ints(0, 50),
        "top_p_r": torch.rand(NUM_ROWS, generator=g),
        "min_p_r": torch.rand(NUM_ROWS, generator=g),
        "seed_r": torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=g),
        "min_length_r": length_r + ints(-3, 4),
        "stop_ids_rs": ints(-1, 8, 8),
    }
    for target, source in ((state._asdict(), values), (state.sampling._asdict(), sampling)):
        for name, value in source.items():
            target[name][1:] = value[1:]
    state.extras["bias"][1:] = torch.rand(NUM_ROWS - 1, 2, generator=g)
    return pytree.tree_map(lambda x: x.to(device), state)


def random_rows(seed: int, bucket: int, device: str) -> Tensor:
    """Different rows in any order, padded with row 0 to the bucket."""
    g = torch.Generator().manual_seed(seed)
    live = torch.randperm(NUM_ROWS - 1, generator=g)[: max(1, bucket - 3)] + 1
    rows = torch.zeros(bucket, dtype=torch.int32)
    rows[: len(live)] = live[:bucket]
    return rows.to(device)


def both_inputs(
    state: SequenceState, rows_b: Tensor, *, filtered: bool = False, block_size: int = 16
) -> tuple[StepInputs, StepInputs]:
    """By the kernel, by plain PyTorch."""
    options: dict[str, Any] = {"num_tokens": rows_b.shape[0], "block_size": block_size, "filtered": filtered}
    ours = inputs_of(state, rows_b, capturing=filtered, decode_inputs=triton_step.decode_inputs, **options)
    return ours, inputs_of(state, rows_b, capturing=filtered, **options)


def assert_same(ours: Any, theirs: Any) -> None:
    """The same tree, types, shapes and bits."""
    leaves, tree = pytree.tree_flatten(ours)
    others, other_tree = pytree.tree_flatten(theirs)
    assert tree == other_tree
    for mine, other in zip(leaves, others):
        assert mine.dtype == other.dtype
        assert mine.stride() == other.stride()
        assert torch.equal(mine, other)


def new_ring(device: str, rows: int = 48, slots: int = 3) -> tuple[Tensor, Tensor]:
    slots_xb3 = torch.full((slots, rows, 3), -7, dtype=torch.int32, device=device)
    return slots_xb3, torch.zeros(1, dtype=torch.int64, device=device)


def outputs_of(token_ids_l: Tensor, inputs: StepInputs, extras: dict[str, Tensor]) -> StepOutputs:
    return StepOutputs(token_ids_l, inputs.samples_l.to(torch.int32), inputs.samples_l, extras=extras)


def random_tokens(seed: int, count: int, device: str) -> Tensor:
    """Ids that often are stop ids, and the -1 of a row whose logits held NaN."""
    return torch.randint(-1, 8, (count,), generator=torch.Generator().manual_seed(seed)).to(device, torch.int32)


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize(("bucket", "width", "block_size"), [(1, 1, 128), (2, 9, 16), (24, 1500, 1), (40, 7, 16)])
@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_a_decode_step(device: str, bucket: int, width: int, block_size: int, filtered: bool) -> None:
    for seed in range(3):
        state = random_state(seed, device, width=width, block_size=block_size)
        before = pytree.tree_map(torch.clone, state)
        ours, theirs = both_inputs(state, random_rows(seed, bucket, device), filtered=filtered, block_size=block_size)
        sampling = ours.sampling
        assert sampling
        assert_same(sampling.noise_keys_l2, reference.noise_keys(sampling.seed_l, sampling.positions_l))
        decode = ours.decode
        assert decode
        counters_bk = decode.counters_bk
        assert isinstance(counters_bk, Tensor)
        assert (counters_bk.shape, counters_bk.dtype) == ((bucket, 32), torch.int32)
        assert not counters_bk.any()
        plain = ours._replace(sampling=sampling._replace(noise_keys_l2=()), decode=decode._replace(counters_bk=()))
        assert_same(plain, theirs)
        assert ours.rows_t is ours.rows_b
        assert_same(state, before)


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_dead_rows_are_those_of_the_trash_row(device: str) -> None:
    state = random_state(0, device)
    state.alive_r[:] = False
    state.alive_r[5] = True
    state.computed_r[5], state.length_r[5] = 33, 34
    ours, _ = both_inputs(state, torch.tensor([3, 5, 0], dtype=torch.int32, device=device), filtered=True)
    assert ours.rows_b.tolist() == [0, 5, 0]
    assert ours.slots_t.tolist() == [0, int(state.block_table_rm[5, 2]) * 16 + 1, 0]
    assert ours.query_lens_b.tolist() == [0, 1, 0]
    assert ours.samples_l.tolist() == [False, True, False]
    assert ours.decode
    assert ours.decode.kv_lens_b.tolist() == [1, 34, 1]
    assert ours.decode.block_table_bm[0].tolist() == [0] * 9


@pytest.mark.parametrize("device", DEVICES)
def test_noise_keys_are_the_frozen_ones(device: str) -> None:
    state = random_state(0, device)
    state.alive_r[:] = True
    seeds, lengths = [0, 1, 42, 2**40 + 7, -1], [0, 1, 1000, 2**31 - 1, 17]
    state.sampling.seed_r[1:6] = torch.tensor(seeds, device=device)
    state.length_r[1:6] = torch.tensor(lengths, dtype=torch.int32, device=device)
    ours, _ = both_inputs(state, torch.arange(1, 6, dtype=torch.int32, device=device))
    assert ours.sampling
    assert isinstance(ours.sampling.noise_keys_l2, Tensor)
    assert ours.sampling.noise_keys_l2.tolist() == [
        [1713891541, 3781805453],
        [2886210587, 3754282174],
        [3354629496, 2923741036],
        [2416299089, 1942868194],
        [1861354478, 3099962209],
    ]


@pytest.mark.parametrize("bucket", [1, 2, 23, 40])
@pytest.mark.parametrize("device", DEVICES)
def test_advance_and_the_ring(device: str, bucket: int) -> None:
    fates = set()
    for seed in range(4):
        state, rows_b = random_state(seed, device), random_rows(seed, bucket, device)
        twin = pytree.tree_map(torch.clone, state)
        inputs = inputs_of(state, rows_b, num_tokens=bucket, block_size=16)
        tokens = random_tokens(seed, bucket, device)
        outputs = outputs_of(tokens, inputs, {"bias": torch.rand(bucket, 2, device=device)})
        ring = new_ring(device)
        ring[1].fill_(seed + 1)
        kernel = functools.partial(triton_step.advance, ring=ring)
        state, ours = advance(state, inputs, outputs, advance_rows=kernel)
        twin, theirs = advance(twin, inputs, outputs)
        assert_same(ours, theirs)
        assert_same(state, twin)
        slot = (seed + 1) % 3
        packed = torch.stack([tokens, theirs.count_l, theirs.alive_l.to(torch.int32)], dim=1)
        assert torch.equal(ring[0][slot, :bucket], packed)
        ring[0][slot, :bucket] = -7
        assert (ring[0] == -7).all()
        assert ring[1].tolist() == [seed + 2]
        fates |= set(zip(theirs.count_l.tolist(), theirs.alive_l.tolist()))
    if bucket == 40:
        assert fates == {(0, False), (0, True), (1, False), (1, True)}


@pytest.mark.parametrize("device", DEVICES)
def test_advance_of_each_fate(device: str) -> None:
    state = init_state(8, 20, 2, device=device)
    state.length_r[1:] = 10
    state.computed_r[1:] = 9
    state.limit_r[1:] = torch.tensor([20, 11, 20, 20, 20, 12, 20])
    state.alive_r[1:] = True
    state.sampling.min_length_r[1:] = torch.tensor([0, 0, 10, 11, 11, 0, 0])
    state.sampling.stop_ids_rs[1:, 7] = 4
    state.computed_r[7] = 8
    rows_b = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.int32, device=device)
    inputs = inputs_of(state, rows_b, num_tokens=8, block_size=16)
    tokens = torch.tensor([6, 6, 4, 4, -1, 6, 4, 4], dtype=torch.int32, device=device)
    kernel = functools.partial(triton_step.advance, ring=new_ring(device))
    state, outputs = advance(state, inputs, outputs_of(tokens, inputs, {}), advance_rows=kernel)
    # goes on, at its limit, stops, stops too early, NaN, goes on, samples nothing, trash
    assert outputs.count_l.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert outputs.alive_l.tolist() == [True, False, False, True, False, True, True, False]
    assert state.alive_r.tolist() == [False, True, False, False, True, False, True, True]
    assert state.length_r.tolist() == [0, 11, 11, 11, 11, 11, 11, 10]
    assert state.computed_r.tolist() == [0, 10, 10, 10, 10, 10, 10, 9]
    assert state.token_ids_re[:, 10].tolist() == [0, 6, 6, 4, 4, 0, 6, 0]
    assert int(state.token_ids_re[:, :10].sum()) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_advance_of_more_rows_than_one_pass_takes(device: str) -> None:
    count = 1100
    state = init_state(count + 1, 4, 1, device=device)
    state.length_r[1:], state.computed_r[1:], state.limit_r[1:], state.alive_r[1:] = 2, 1, 4, True
    rows_b = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    inputs = inputs_of(state, rows_b, num_tokens=count, block_size=4)
    ring = new_ring(device, rows=count, slots=2)
    kernel = functools.partial(triton_step.advance, ring=ring)
    state, outputs = advance(state, inputs, outputs_of(rows_b * 3, inputs, {}), advance_rows=kernel)
    assert torch.equal(state.token_ids_re[1:, 2], rows_b * 3)
    assert torch.equal(ring[0][0, :, 0], rows_b * 3)
    assert outputs.count_l.sum() == outputs.alive_l.sum() == ring[0][0, :, 1].sum() == count
    assert (ring[0][1] == -7).all()
    assert ring[1].tolist() == [1]


@compiled
def test_mixed_steps_do_not_use_the_decode_kernel() -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a mixed step called it")

    state = init_state(3, 8, 2)
    state.alive_r[1:] = True
    state.length_r[1:] = 5
    rows, lens = torch.tensor([2], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    decode = torch.tensor([1], dtype=torch.int32)
    options: dict[str, Any] = {"num_tokens": 6, "block_size": 4, "span": 4}
    inputs = inputs_of(state, decode, rows, lens, decode_inputs=refuse, **options)
    assert inputs.positions_t.tolist() == [0, 0, 1, 2, 3, 0]
    assert inputs.chunks
    assert inputs.sampling
    assert inputs.sampling.noise_keys_l2 == ()
    with pytest.raises(AssertionError, match="called it"):
        inputs_of(state, decode, num_tokens=1, block_size=4, decode_inputs=refuse)


@compiled
def test_interpreted() -> None:
    """Runs this file's kernel tests in a process where Triton interprets."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted"]
    done = subprocess.run(
        [*command, "--deselect", f"{__file__}::test_interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "100%" in done.stdout or " passed" in done.stdout


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_captured_steps_equal_plain_ones(filtered: bool) -> None:
    """Many replays of one graph, tokens made of the step's own inputs, against uncaptured PyTorch."""
    from funcllm.launch.ring import OutputRing

    state, rows_b = random_state(1, "cuda"), random_rows(1, 32, "cuda")
    state.limit_r[1:] = (state.limit_r[1:] + 20).clamp(max=state.token_ids_re.shape[1])
    twin = pytree.tree_map(torch.clone, state)
    rings = [OutputRing(4, 40, torch.device("cuda")) for _ in range(2)]

    def sampled(inputs: StepInputs) -> Tensor:
        assert inputs.sampling
        keys_l2 = inputs.sampling.noise_keys_l2
        if not isinstance(keys_l2, Tensor):
            keys_l2 = reference.noise_keys(inputs.sampling.seed_l, inputs.sampling.positions_l)
        mixed_l = keys_l2[:, 0] + inputs.slots_t + inputs.token_ids_t + inputs.positions_t
        if inputs.sampling.filters:
            mixed_l = mixed_l + inputs.sampling.filters.forbidden_ls.sum(1)
        return (mixed_l % 50 - 1).to(torch.int32)

    def fast_step() -> None:
        inputs = inputs_of(
            state,
            rows_b,
            num_tokens=32,
            block_size=16,
            filtered=filtered,
            decode_inputs=triton_step.decode_inputs,
        )
        kernel = functools.partial(triton_step.advance, ring=rings[0].rows)
        advance(state, inputs, outputs_of(sampled(inputs), inputs, {}), advance_rows=kernel)

    saved = pytree.tree_map(torch.clone, state)
    fast_step()
    rings[0].skip()
    pytree.tree_map(lambda x, y: x.copy_(y), state, saved)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast_step()
    seen = set()
    for _ in range(15):
        inputs = inputs_of(twin, rows_b, num_tokens=32, block_size=16, filtered=filtered)
        twin, outputs = advance(twin, inputs, outputs_of(sampled(inputs), inputs, {}))
        rings[1].store(outputs)
        graph.replay()
        ours, theirs = rings[0].collect(32).read(), rings[1].collect(32).read()
        assert (ours.token_ids == theirs.token_ids).all()
        assert (ours.counts == theirs.counts).all()
        assert (ours.alive == theirs.alive).all()
        assert_same(state, twin)
        seen |= set(theirs.alive.tolist())
    assert seen == {0, 1}


@pytest.mark.gpu
@compiled
def test_a_decode_step_launches_two_kernels_around_the_model() -> None:
    from torch.profiler import ProfilerActivity, profile

    state, rows_b, ring = random_state(2, "cuda"), random_rows(2, 32, "cuda"), new_ring("cuda")

    def run() -> None:
        inputs = inputs_of(
            state, rows_b, num_tokens=32, block_size=16, filtered=True, decode_inputs=triton_step.decode_inputs
        )
        kernel = functools.partial(triton_step.advance, ring=ring)
        placeholder = StepOutputs(inputs.token_ids_t, inputs.query_lens_b, inputs.samples_l)
        advance(state, inputs, placeholder, advance_rows=kernel)

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    launched = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(launched) == ["_advance_kernel", "_decode_inputs_kernel"]
