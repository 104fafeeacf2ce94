"""The CPU's ops against their plain twins: few rows as columns, whole blocks of keys, thresholds among the largest."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_kernels_step import assert_same, outputs_of, random_rows, random_state, random_tokens
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm.kernels import cpu, cpu_sampler, cpu_step, radix, reference
from funcllm.kernels.bundle import FAST, SMALL_BLOCKS, fast_kernels
from funcllm.state import advance, inputs_of

INF = float("inf")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- embedding, angles, keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [3], [12, 0, 7, 7], [12, 13, -1, 4]], ids=str)
@pytest.mark.parametrize("first_id", [0, 3])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_rows_of_the_embedding_are_gathered(ids: list[int], first_id: int, kind: torch.dtype) -> None:
    token_ids = torch.tensor(ids, dtype=kind)
    before = token_ids.clone()
    for ours, theirs in zip(
        cpu.embed_rows(token_ids, values(10, 6), first_id), reference.embed_rows(token_ids, values(10, 6), first_id)
    ):
        assert ours.shape == (len(ids), 6)
        assert torch.equal(ours, theirs)
    assert torch.equal(token_ids, before)


def test_angles_are_the_plain_ones_bit_for_bit() -> None:
    positions, frequencies = torch.arange(0, 2**20, 9973, dtype=torch.int32), values(65).abs()
    for ours, theirs in zip(cpu.rope_angles(positions, frequencies), reference.rope_angles(positions, frequencies)):
        assert torch.equal(ours, theirs)


def test_min_p_touches_only_rows_that_ask() -> None:
    limit, largest = values(4), values(4, seed=1)
    heat, min_p = torch.tensor([1.0, 0.0, 2.0, -1.0]), torch.tensor([0.0, 0.5, 0.1, 0.5])
    for asked in (torch.tensor([1, 1, 0, 1]), torch.ones(4)):
        ours = cpu_sampler.with_min_p(limit, largest, heat * asked, min_p)
        assert torch.equal(ours, reference.with_min_p(limit, largest, heat * asked, min_p))
        assert ours.data_ptr() != limit.data_ptr()
    assert torch.equal(ours[[0, 1, 3]], limit[[0, 1, 3]])


# --- dense layers, norms, rotary embedding ---------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 64, 65])
def test_linear_of_few_and_many_rows(rows: int, bias: bool) -> None:
    x, weight = values(rows, 64), values(100, 64, seed=1)
    bias_o = values(100, seed=2) if bias else None
    before = None if bias_o is None else bias_o.clone()
    y = cpu.linear(x, weight, bias_o)
    expected = F.linear(x.double(), weight.double(), None if bias_o is None else bias_o.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()
    if bias_o is not None:
        assert torch.equal(bias_o, before)


def test_linear_in_bfloat16_rounds_as_torch_does() -> None:
    x, weight = values(2, 64).bfloat16(), values(100, 64, seed=1).bfloat16()
    assert torch.equal(cpu.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_side_by_side_or_apart_mean_the_same(packed: bool, normed: bool) -> None:
    heads = values(5, 9, 16)
    first = 4 if packed else 5
    q, k, v = heads[:, :4], heads[:, first : first + 2], heads[:, 7:9]
    weights: Any = (values(16, seed=1), values(16, seed=2)) if normed else ((), ())
    angles = values(5, 8, seed=3)
    slots = torch.tensor([7, 3, 30, 4, 0])
    caches = [values(4, 8, 2, 16, seed=4), values(4, 8, 2, 16, seed=5)]
    expected = reference.qk_norm_rope_write(q, k, v, *weights, 1e-6, angles.cos(), angles.sin(), *caches, slots)
    before = heads.clone()
    optional = [w if isinstance(w, Tensor) else None for w in weights]
    ours = cpu.qk_norm_rope_write(q, k, v, *optional, 1e-6, angles.cos(), angles.sin(), *caches, slots)
    for value, theirs in zip((ours, *caches), expected):
        torch.testing.assert_close(value, theirs, rtol=2e-6, atol=2e-6)
    assert torch.equal(heads, before)


def test_small_blocks_serve_fp32_only() -> None:
    fp32 = fast_kernels(torch.device("cpu"), 64, torch.float32, 16)
    bf16 = fast_kernels(torch.device("cpu"), 64, torch.bfloat16, 16)
    assert fp32.fused == FAST.fused | SMALL_BLOCKS
    assert bf16.fused == FAST.fused
    assert (fp32.small_rows, bf16.small_rows) == (8, 0)


# --- attention -------------------------------------------------------------------------------------------------------


def decode(k_cache: Tensor, v_cache: Tensor, lens: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """(ours, the reference's) of rows with 4 query heads whose blocks lie scattered in the caches."""
    q, count = values(len(lens), 4, 8), len(lens)
    table = (torch.randperm(count * 4, generator=torch.Generator().manual_seed(1)) + 1).view(count, 4).to(torch.int32)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    cpu.attend_decode(q, k_cache, v_cache, table, kv_lens, out, scale=0.3, **options)
    if options.get("sinks_n") is None:
        options.pop("sinks_n", None)
    return out, reference.attend(q, k_cache, v_cache, (table, kv_lens), (), scale=0.3, **options)


@pytest.mark.parametrize("spoiler", [float("nan"), INF])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 3}, {"sinks_n": values(4)}], ids=str)
def test_what_lies_behind_a_row_never_counts(spoiler: float, options: dict[str, Any]) -> None:
    k_cache, v_cache = values(14, 4, 2, 8, seed=2), values(14, 4, 2, 8, seed=3)
    lens = [5, 16, 1]
    clean, expected = decode(k_cache, v_cache, lens, **dict(options))
    torch.testing.assert_close(clean, expected, rtol=1e-5, atol=1e-6)
    table = (torch.randperm(12, generator=torch.Generator().manual_seed(1)) + 1).view(3, 4)
    for cache in (k_cache, v_cache):
        cache[0] = spoiler
        for row, length in zip(table, lens):
            cache[row] = cache[row].flatten(0, 1).index_fill(0, torch.arange(length, 16), spoiler).unflatten(0, (4, 4))
    spoiled, _ = decode(k_cache, v_cache, lens, **dict(options))
    torch.testing.assert_close(spoiled, clean, rtol=1e-5, atol=1e-6)


def test_rows_without_keys_beside_others_come_out_as_zero() -> None:
    ours, expected = decode(values(14, 4, 2, 8, seed=2), values(14, 4, 2, 8, seed=3), [0, 7, 0])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert (ours[[0, 2]] == 0).all()
    assert (ours[1] != 0).all()


def test_lengths_and_blocks_written_in_place_count_at_once() -> None:
    q, caches = values(2, 4, 8), [values(14, 4, 2, 8, seed=2), values(14, 4, 2, 8, seed=3)]
    table, lens = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([7, 8], dtype=torch.int32)
    for edit in (lambda: None, lambda: lens.copy_(torch.tensor([8, 5])), lambda: table[0].fill_(9)):
        for inference in (False, True):
            with torch.inference_mode(inference):
                edit()
                out = torch.empty_like(q)
                cpu.attend_decode(q, *caches, table, lens, out, scale=0.3)
                expected = reference.attend(q, *caches, (table, lens), (), scale=0.3)
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


# --- before and after a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize(("bucket", "width", "block_size"), [(1, 1, 128), (2, 9, 16), (24, 1500, 1), (40, 7, 16)])
def test_inputs_of_a_decode_step(bucket: int, width: int, block_size: int, filtered: bool) -> None:
    options: dict[str, Any] = {"num_tokens": bucket, "block_size": block_size, "filtered": filtered}
    for seed in range(4):
        state = random_state(seed, "cpu", width=width, block_size=block_size)
        before, rows = pytree.tree_map(torch.clone, state), random_rows(seed, bucket, "cpu")
        ours = inputs_of(state, rows, capturing=filtered, decode_inputs=cpu_step.decode_inputs, **options)
        theirs = inputs_of(state, rows, capturing=filtered, **options)
        sampling = ours.sampling
        assert sampling
        assert_same(sampling.noise_keys_l2, reference.noise_keys(sampling.seed_l, sampling.positions_l))
        assert_same(ours._replace(sampling=sampling._replace(noise_keys_l2=())), theirs)
        assert_same(state, before)


def test_noise_keys_are_the_frozen_ones() -> None:
    seeds, positions = torch.tensor([0, 1, 42, 2**40 + 7, -1]), torch.tensor([0, 1, 1000, 2**31 - 1, 17])
    assert cpu_step.noise_keys(seeds.numpy(), positions.to(torch.int32).numpy()).tolist() == [
        [1713891541, 3781805453],
        [2886210587, 3754282174],
        [3354629496, 2923741036],
        [2416299089, 1942868194],
        [1861354478, 3099962209],
    ]


@pytest.mark.parametrize("bucket", [1, 2, 23, 40])
def test_advance(bucket: int) -> None:
    fates = set()
    for seed in range(4):
        state, rows = random_state(seed, "cpu"), random_rows(seed, bucket, "cpu")
        twin = pytree.tree_map(torch.clone, state)
        inputs = inputs_of(state, rows, num_tokens=bucket, block_size=16)
        outputs = outputs_of(random_tokens(seed, bucket, "cpu"), inputs, {"bias": torch.rand(bucket, 2)})
        state, ours = advance(state, inputs, outputs, advance_rows=cpu_step.advance)
        twin, theirs = advance(twin, inputs, outputs)
        assert_same(ours, theirs)
        assert_same(state, twin)
        fates |= set(zip(theirs.count_l.tolist(), theirs.alive_l.tolist()))
    if bucket == 40:
        assert fates == {(0, False), (0, True), (1, False), (1, True)}


# --- sampler ---------------------------------------------------------------------------------------------------------


def settings(rows: int, columns: int, seed: int) -> list[Tensor]:
    """temperature, top_k, top_p, min_p of rows, each often off."""
    generator = torch.Generator().manual_seed(seed)

    def choice(options: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        index = torch.randint(len(options), (rows,), generator=generator)
        return torch.tensor(options)[index].to(dtype)

    top_k = choice([0, 0, 1, 3, 50, 256, 257, columns - 1, columns, columns + 1], torch.int32)
    top_p = choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999])
    return [choice([0.0, 0.5, 1.0, 3.0]), top_k, top_p, choice([0.0, 0.0, 0.1])]


@pytest.mark.parametrize("columns", [1, 7, 256, 257, 1500])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 6.0])
def test_threshold_equals_the_plain_one_bit_for_bit(
    columns: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = []
    plain = radix.threshold_alone
    monkeypatch.setattr(radix, "threshold_alone", lambda *args: given_up.append(1) or plain(*args))
    for seed in range(12):
        logits = (values(1 + seed % 3, columns + 2, seed=seed) * spread).round(decimals=1 if seed % 2 else 4)
        heat, top_k, top_p, min_p = settings(len(logits), columns, seed)
        forbidden = torch.full((len(logits), 2), -1, dtype=torch.int32)
        if seed % 4 == 0:
            forbidden[0, 1] = 10 + int(logits[0, :columns].argmax())
            logits[-1, 0] = float("nan")
        arguments = (logits, forbidden, 10, columns, heat, top_k, top_p, min_p)
        for ours, theirs in zip(cpu_sampler.filter_threshold(*arguments), plain(*arguments)):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), seed
    assert len(given_up) < 12
    if (columns, spread) == (1500, 0.1):
        assert given_up


def test_threshold_with_ties_across_the_candidates() -> None:
    logits = torch.cat([torch.full((2, 3), 5.0), torch.full((2, 600), 4.0), torch.zeros(2, 50) - 20], dim=1)
    for top_k, top_p in [(4, 0.5), (4, 1.0), (4, 0.999), (0, 0.5), (300, 0.9)]:
        arguments = (
            logits,
            torch.empty((2, 0), dtype=torch.int32),
            0,
            653,
            torch.tensor([1.0, 0.2]),
            torch.full((2,), top_k, dtype=torch.int32),
            torch.full((2,), top_p),
            torch.zeros(2),
        )
        for ours, theirs in zip(cpu_sampler.filter_threshold(*arguments), radix.threshold_alone(*arguments)):
            assert torch.equal(ours, theirs), (top_k, top_p)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_pick_where_the_best_score_is_zero(zero: float) -> None:
    logits = torch.full((1, 6), -1.0)
    logits[0, 2:5] = torch.tensor([-0.0, zero, -0.0])
    keys = torch.zeros(1, 2, dtype=torch.int64)
    arguments = (logits, torch.zeros(1), keys)
    ours = cpu_sampler.pick(*arguments, None, 0, 6, None)
    assert ours.tolist() == reference.pick(*arguments, (), 0, 6).tolist()
    assert reference.token_of(ours).tolist() == [2 if str(zero) == "-0.0" else 3]


def test_noise_is_drawn_for_few_columns_as_for_all() -> None:
    logits, heat = values(4, 3000) * 3, torch.tensor([0.0, 0.7, 1.0, 2.0])
    keys = reference.noise_keys(torch.arange(4) * 1234567, torch.arange(4))
    lowest = torch.full((4,), -1e9)
    for threshold in (None, lowest, logits.quantile(0.99, dim=1)):
        ours = cpu_sampler.pick(logits, heat, keys, threshold, 2**31, 3000, None)
        theirs = reference.pick(logits, heat, keys, () if threshold is None else threshold, 2**31, 3000)
        assert reference.token_of(ours).tolist() == reference.token_of(theirs).tolist()
        assert ((ours >> 32) - (theirs >> 32)).abs().max() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_of_zeros_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    x = cpu.zeros((64, 1 << 20, 4), dtype, "cpu")
    assert (x.shape, x.dtype, x.data_ptr() % 64, x.is_contiguous()) == ((64, 1 << 20, 4), dtype, 0, True)
    assert resident() - before < x.nbytes // 4
    assert not x[::7, ::4096].any()
    x[5, 3] = 2.0
    assert x[5, 2:5].sum(1).tolist() == [0.0, 8.0, 0.0]
    assert torch.equal(cpu.zeros((3, 2), dtype, "cpu"), torch.zeros(3, 2, dtype=dtype))
    assert cpu.zeros((3, 2), dtype, "meta").device.type == "meta"
