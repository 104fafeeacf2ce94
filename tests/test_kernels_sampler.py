"""The sampler: its noise is frozen, its pick is exact in every kernel, its filters equal a sort in fp64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from funcllm.kernels import fused, radix, reference, sampler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting process of test_interpreted")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs in the process that does not interpret")

INF = float("inf")

SEEDS = (0, 1, 42, 2**40 + 7, -1)
POSITIONS = (0, 1, 1000, 2**31 - 1, 17)
FROZEN_KEYS = [
    [1713891541, 3781805453],
    [2886210587, 3754282174],
    [3354629496, 2923741036],
    [2416299089, 1942868194],
    [1861354478, 3099962209],
]
FROZEN_BITS = [
    [2821947389, 3426969576, 3342288088, 614834920, 1614619363],
    [3681640029, 2509395533, 4179477432, 1086830569, 4215950647],
    [2403127388, 3300182453, 1888190203, 3834160642, 3070598424],
    [2395866997, 2129473361, 810444899, 2849136305, 4287877319],
    [2661874262, 2273933448, 2928981469, 1590137039, 3088627159],
]
FROZEN_NOISE = [
    [-0.0677795, -0.4693848, -0.4094047],
    [-0.6659303, 0.1304445, -1.2853732],
    [0.1985802, -0.3802655, 0.5461845],
    [0.2032629, 0.378635, 1.5648807],
    [0.0335898, 0.282582, -0.1359002],
]


# --- noise -----------------------------------------------------------------------------------------------------------


def philox_words(seed: int, position: int) -> tuple[int, int]:
    """Philox4x32-10 in plain Python integers, written from the paper: the first two words of one counter."""
    mask = 2**32 - 1
    c0, c1, c2, c3 = position & mask, 0, 0, 0
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1


def bits_of(words: tuple[int, int], token_id: int) -> int:
    """32 noise bits of a vocabulary id in plain Python integers."""
    mask = 2**32 - 1

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & mask
        x ^= x >> 13
        x = x * 0xC2B2AE35 & mask
        return x ^ x >> 16

    return mix(mix((token_id * 0x9E3779B9 + words[0]) & mask) ^ words[1])


def rows_of_keys() -> Tensor:
    return reference.noise_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS, dtype=torch.int32))


@compiled
def test_noise_keys_are_philox_and_frozen() -> None:
    keys = rows_of_keys().tolist()
    assert keys == [list(philox_words(seed, position)) for seed, position in zip(SEEDS, POSITIONS)]
    assert keys == FROZEN_KEYS


def function(name: str) -> Callable[..., Tensor]:
    """An op, or in the interpreting process its kernel."""
    if not INTERPRETED:
        return getattr(fused, name)
    from funcllm.kernels import triton_sampler

    return getattr(triton_sampler, name)


def test_noise_keys_of_every_implementation_are_the_frozen_ones() -> None:
    noise_keys = function("noise_keys")
    positions = torch.tensor(POSITIONS)
    for kind in (torch.int32, torch.int64):
        assert noise_keys(torch.tensor(SEEDS), positions.to(kind)).tolist() == FROZEN_KEYS
    small = torch.tensor([0, 1, 42, 7, -1], dtype=torch.int32)
    assert torch.equal(noise_keys(small, positions), reference.noise_keys(small, positions))
    assert torch.equal(noise_keys(small.long(), positions - 1), reference.noise_keys(small, positions - 1))


@pytest.mark.parametrize("rows", [0, 1, 2, 127, 129, 300])
def test_noise_keys_and_tokens_of_any_number_of_rows(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows, 2), generator=generator)[:, 0]
    positions = torch.randint(0, 2**31 - 1, (rows,), generator=generator, dtype=torch.int32)
    keys = function("noise_keys")(seeds, positions)
    assert keys.dtype == torch.int64
    assert keys.shape == (rows, 2)
    assert keys.is_contiguous()
    assert torch.equal(keys, reference.noise_keys(seeds, positions))
    seeds[::3] |= 0x7FFFFFFF << 32
    seeds[::3] &= 2**63 - 1
    tokens = function("token_of")(seeds)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens, reference.token_of(seeds))
    assert (tokens == -1).sum() == -(-rows // 3)


def test_tokens_are_the_inverted_low_words_and_minus_one_for_nan() -> None:
    ids = [0, 1, 151_935, 2**31 - 1, 2**32 - 1]
    scores = [0, 5, -1, -(2**31), 0x7FFFFFFE]
    keys = [(score << 32) | (2**32 - 1 - token) for score, token in zip(scores, ids)]
    keys += [0x7FFFFFFF << 32, (0x7FFFFFFF << 32) | 77, -(2**63)]
    tokens = function("token_of")(torch.tensor(keys))
    assert tokens.tolist() == [0, 1, 151_935, 2**31 - 1, -1, -1, -1, -1]
    assert torch.equal(tokens, reference.token_of(torch.tensor(keys)))


@compiled
def test_philox_agrees_with_the_published_known_answer() -> None:
    assert philox_words(0, 0) == (0x6627E8D5, 0xE169C58D)


@compiled
def test_noise_bits_are_frozen() -> None:
    ids = torch.tensor([0, 1, 2, 151935, 2**31 - 1])
    bits = reference.noise_bits(rows_of_keys(), ids)
    assert bits.tolist() == [
        [bits_of(philox_words(seed, position), i) for i in ids.tolist()] for seed, position in zip(SEEDS, POSITIONS)
    ]
    assert bits.tolist() == FROZEN_BITS


@compiled
def test_gumbel_noise_is_frozen_and_right() -> None:
    noise = reference.gumbel_noise(rows_of_keys(), torch.arange(3))
    torch.testing.assert_close(noise, torch.tensor(FROZEN_NOISE), rtol=1e-6, atol=1e-6)
    u = (reference.noise_bits(rows_of_keys(), torch.arange(3)).double() + 0.5) / 2**32
    torch.testing.assert_close(noise.double(), -torch.log(-torch.log1p(-u)), rtol=1e-5, atol=1e-5)


@compiled
def test_gumbel_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 1, 2**32 - 1]])
    monkeypatch.setattr(reference, "noise_bits", lambda keys, ids: ends)
    noise = reference.gumbel_noise(torch.zeros(1, 2, dtype=torch.int64), torch.arange(3))[0]
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert noise[2].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    assert torch.isfinite(noise).all()


@compiled
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_follow_the_distribution(vary: str) -> None:
    draws = 200_000
    probabilities = torch.tensor([0.3, 0.2, 0.15, 0.12, 0.1, 0.07, 0.05, 0.01])
    varying, fixed = torch.arange(draws), torch.full((draws,), 5)
    seed, position = (fixed, varying) if vary == "position" else (varying, fixed)
    tokens = draw(probabilities.log().expand(draws, -1), seed, position)
    counts = torch.bincount(tokens, minlength=8).double()
    expected = probabilities.double() * draws
    assert chi_square(counts, expected) < 24.3  # 7 degrees of freedom, p = 0.001


@compiled
@pytest.mark.parametrize("step", [(0, 1), (1, 0)], ids=["next position", "next seed"])
def test_neighbouring_draws_are_independent(step: tuple[int, int]) -> None:
    draws = 100_000
    logits = torch.zeros(draws, 4)
    seed, position = torch.arange(draws) // 300, torch.arange(draws) % 300
    first, second = draw(logits, seed, position), draw(logits, seed + 1000 * step[0], position + 1000 * step[1])
    near = draw(logits, seed + step[0], position + step[1])
    for other in (second, near):
        pairs = torch.bincount(first * 4 + other, minlength=16).double()
        assert chi_square(pairs, torch.full((16,), draws / 16, dtype=torch.float64)) < 37.7  # 15 degrees, p = 0.001


@compiled
def test_neighbouring_ids_are_uncorrelated() -> None:
    keys = reference.noise_keys(torch.arange(2000), torch.zeros(2000, dtype=torch.int32))
    u = reference.noise_bits(keys, torch.arange(64)).double() / 2**32
    correlation = torch.corrcoef(u.T) - torch.eye(64)
    assert correlation.abs().max() < 5 / math.sqrt(2000)


def draw(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    keys = reference.noise_keys(seed, position)
    winner = reference.pick(logits, torch.ones(len(logits)), keys, (), 0, logits.shape[1])
    return reference.token_of(winner).long()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()


# --- pick ------------------------------------------------------------------------------------------------------------


def pick_inputs(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    logits = torch.randn(rows, columns, generator=generator) * 4
    temperature = torch.tensor([0.0, 0.6, 1.0, 7.0])[torch.arange(rows) % 4]
    return logits, temperature, reference.noise_keys(torch.arange(rows) * 77, torch.arange(rows) + 3)


def triton_pick(*args: object) -> Tensor:
    from funcllm.kernels import triton_sampler

    return triton_sampler.pick(*args, interpreted=True)  # type: ignore[arg-type]


def op_pick(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    threshold: Tensor | None,
    first_id: int,
    num_ids: int,
    forbidden: Tensor | tuple[()] = (),
) -> Tensor:
    limit = () if threshold is None else threshold
    return fused.pick(logits, temperature, keys, limit, first_id, num_ids, forbidden_ls=forbidden)


Pick = Callable[..., Tensor]
PICKS = [
    pytest.param(op_pick, id="op", marks=compiled),
    pytest.param(triton_pick, id="triton", marks=interpreted),
]


def assert_same_keys(ours: Tensor, theirs: Tensor) -> None:
    """The same ids, and scores within a few units in the last place."""
    assert (ours & 0xFFFFFFFF).tolist() == (theirs & 0xFFFFFFFF).tolist()
    assert ((ours >> 32) - (theirs >> 32)).abs().max() <= 16


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize(
    ("rows", "columns", "first_id", "num_ids"),
    [(1, 5, 0, 5), (3, 1024, 1024, 1000), (4, 2500, 100_000, 2500), (2, 4099, 7, 4097), (5, 33, 151_900, 1)],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_pick_equals_the_reference(
    pick: Pick, rows: int, columns: int, first_id: int, num_ids: int, filtered: bool
) -> None:
    logits, temperature, keys = pick_inputs(rows, columns)
    threshold = logits[:, :num_ids].quantile(0.9, dim=1) if filtered else None
    expected = reference.pick(logits, temperature, keys, () if threshold is None else threshold, first_id, num_ids)
    winner = pick(logits, temperature, keys, threshold, first_id, num_ids)
    assert_same_keys(winner, expected)
    if threshold is not None:
        chosen = logits.gather(1, (reference.token_of(winner).long() - first_id)[:, None])[:, 0]
        assert (chosen >= threshold).all()


@pytest.mark.parametrize("pick", PICKS)
def test_pick_never_skips_a_winner(pick: Pick) -> None:
    """Over many tiles with nearly equal logits the noise decides, so every skipped tile is a chance to be wrong."""
    logits, _, keys = pick_inputs(2, 30_000)
    logits = logits * 1e-3
    temperature = torch.tensor([1.0, 0.3])
    assert_same_keys(
        pick(logits, temperature, keys, None, 0, 30_000), reference.pick(logits, temperature, keys, (), 0, 30_000)
    )


@pytest.mark.parametrize("pick", PICKS)
def test_pick_takes_the_lowest_id_of_a_tie(pick: Pick) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [2999, 1700, 1024]] = 5.0
    logits[1, [2, 1]] = 5.0
    keys = torch.zeros(2, 2, dtype=torch.int64)
    assert reference.token_of(pick(logits, torch.zeros(2), keys, None, 10, 3000)).tolist() == [1034, 11]


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pick_marks_nan_and_bears_infinities(pick: Pick, temperature: float) -> None:
    logits, _, keys = pick_inputs(6, 2100)
    logits[0, 2050] = float("nan")
    logits[1, :] = -INF
    logits[2, :-1] = -INF
    logits[3, 1999] = INF
    logits[4, :3] = -float("nan")
    logits[5, 2000:] = float("nan")
    heat = torch.full((6,), temperature)
    winner = pick(logits, heat, keys, None, 0, 2000)
    ids = reference.token_of(winner).tolist()
    assert_same_keys(winner, reference.pick(logits, heat, keys, (), 0, 2000))
    assert ids[1] == 0
    assert ids[3] == 1999
    assert ids[4] == -1
    assert ids[5] >= 0
    assert reference.token_of(pick(logits, heat, keys, None, 0, 2100)).tolist()[0] == -1


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("filtered", [False, True])
def test_pick_passes_over_forbidden_ids(pick: Pick, filtered: bool) -> None:
    logits, temperature, keys = pick_inputs(8, 2500)
    logits[7, 3] = float("nan")
    threshold = logits.nan_to_num(0.0).quantile(0.9, dim=1) if filtered else None
    plain = reference.pick(logits, temperature, keys, () if threshold is None else threshold, 50, 2500)
    forbidden = torch.full((8, 3), -1, dtype=torch.int32)
    forbidden[:6, 1] = reference.token_of(plain)[:6]
    forbidden[6], forbidden[7, 2] = torch.tensor([2, 2550, 49]), 53
    limit = () if threshold is None else threshold
    expected = reference.pick(logits, temperature, keys, limit, 50, 2500, forbidden_ls=forbidden)
    winner = pick(logits, temperature, keys, threshold, 50, 2500, forbidden)
    assert_same_keys(winner, expected)
    assert (reference.token_of(winner) != reference.token_of(plain)).tolist() == [True] * 6 + [False, True]


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pick_takes_the_first_id_where_nothing_passes_the_threshold(pick: Pick, temperature: float) -> None:
    logits, _, keys = pick_inputs(2, 5000)
    winner = pick(logits, torch.full((2,), temperature), keys, torch.tensor([INF, 1e9]), 10, 5000)
    assert reference.token_of(winner).tolist() == [10, 10]


@pytest.mark.parametrize("pick", PICKS)
def test_shards_agree_with_the_whole(pick: Pick) -> None:
    """C6, C8, C14: the largest key over shards is the whole's, padding columns never win, and a shard may be empty."""
    logits, temperature, keys = pick_inputs(4, 199)
    whole = pick(logits, temperature, keys, None, 0, 199)
    shard = torch.full((4, 100), 100.0)
    shard[:, :99] = logits[:, 100:]
    empty = torch.full((4, 100), 100.0)
    parts = [
        pick(logits[:, :100].contiguous(), temperature, keys, None, 0, 100),
        pick(shard, temperature, keys, None, 100, 99),
        pick(empty, temperature, keys, None, 199, 0),
    ]
    assert torch.stack(parts).amax(0).tolist() == whole.tolist()
    assert parts[2].tolist() == [-(2**63)] * 4


@interpreted
@pytest.mark.parametrize("first_id", [0, 151_900, 2**31 - 1100])
def test_noise_bits_in_the_kernel_are_the_references(first_id: int) -> None:
    from funcllm.kernels import triton_sampler

    bits = triton_sampler.noise_bits(rows_of_keys(), first_id, 1100)
    assert torch.equal(bits, reference.noise_bits(rows_of_keys(), first_id + torch.arange(1100)))


@compiled
def test_splits_cover_the_vocabulary() -> None:
    from funcllm.kernels.triton_sampler import split_vocabulary

    for rows in (1, 2, 7, 64, 256, 1024, 5000):
        for num_ids in (0, 1, 1023, 1024, 1025, 2048, 75_968, 151_936, 1_000_000):
            tiles, splits, width = split_vocabulary(rows, num_ids)
            assert 1 <= splits <= min(tiles, 256)
            assert (tiles - 1) * 1024 < max(num_ids, 1) <= tiles * 1024
            assert splits <= width <= 256
            assert splits * (1024 // width) <= 1024
    assert [split_vocabulary(rows, 151_936)[1:] for rows in (2, 16, 64, 256)] == [
        (149, 256),
        (64, 64),
        (16, 16),
        (4, 4),
    ]


# --- bounds of groups ------------------------------------------------------------------------------------------------


def keys_of_ids(
    logits: Tensor, temperature: Tensor, keys: Tensor, threshold: Tensor | None, first_id: int, num_ids: int
) -> Tensor:
    """The reference's key of every id, int64 [l, num_ids]."""
    ids = first_id + torch.arange(num_ids)
    logits = logits[:, :num_ids]
    heat = torch.where(temperature <= 0, 1.0, temperature)[:, None]
    noise = reference.gumbel_noise(keys, ids)
    score = torch.where((temperature <= 0)[:, None], logits, logits / heat + noise)
    if threshold is not None:
        score = torch.where(logits < threshold[:, None], -INF, score)
    high = torch.where(logits.isnan(), 2**31 - 1, reference.ordered_bits(score)).long()
    return (high << 32) | (2**32 - 1 - ids)


def members(rows: int, num_ids: int) -> Tensor:
    """The group of every column, int64 [num_ids], written from split_vocabulary's contract."""
    from funcllm.kernels import triton_sampler

    tiles, splits, width = triton_sampler.split_vocabulary(rows, num_ids)
    columns = torch.arange(num_ids)
    ends = torch.tensor([(part + 1) * tiles // splits for part in range(splits)])
    part = torch.searchsorted(ends, columns // 1024, right=True)
    return part * (1024 // width) + columns % 1024 // width


def group_bounds(*inputs: Any) -> Tensor:
    from funcllm.kernels import triton_sampler

    return triton_sampler.group_bounds(*inputs, interpreted=True)


def assert_bounds_hold(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    threshold: Tensor | None = None,
    first_id: int = 0,
    num_ids: int | None = None,
) -> Tensor:
    """That no key exceeds its group's bound, and that the pick is the reference's. How many bounds reach the winner."""
    num_ids = logits.shape[1] if num_ids is None else num_ids
    inputs = (logits, temperature, keys, threshold, first_id, num_ids)
    key_lv, bound_lg = keys_of_ids(*inputs), group_bounds(*inputs)
    assert (key_lv <= bound_lg[:, members(len(logits), num_ids)]).all()
    winner = triton_pick(*inputs)
    assert_same_keys(winner, key_lv.amax(1))
    return (bound_lg >= winner[:, None]).sum(1)


KINDS = {
    "equal": lambda x: torch.zeros_like(x),
    "negative zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "close": lambda x: x * 1e-3,
    "wide": lambda x: x * 1e4,
    "far below": lambda x: x * 3 - 1e6,
    "far above": lambda x: x * 3 + 1e6,
    "denormal": lambda x: x * 1e-41,
    "largest floats": lambda x: torch.where(x > 0, 3.4e38, -3.4e38) * (1 - x.abs() / 100),
    "two levels": lambda x: torch.where(x > 9, 5.0, -INF),
    "infinite": lambda x: torch.where(x.abs() > 8, x * INF, x),
    "nothing": lambda x: torch.full_like(x, -INF),
    "NaN": lambda x: torch.where(x > 10, float("nan"), x),
}


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filtered", [False, True])
def test_no_key_exceeds_its_bound(kind: str, filtered: bool) -> None:
    heats = [0.0, 1e-30, 1e-6, 0.05, 0.6, 1.0, 7.0, 1e6, 1e30]
    logits = KINDS[kind](pick_inputs(len(heats), 3000)[0])
    keys = reference.noise_keys(torch.arange(9), torch.arange(9))
    threshold = logits.nan_to_num(0.0).sort(dim=1).values[:, 2900] if filtered else None
    assert_bounds_hold(logits, torch.tensor(heats), keys, threshold, first_id=77, num_ids=2990)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("heat", [1e-45, 1e-42, 2.0**-128, 2.0**-127, 2.0**-126, 2.0**127, 3.4e38])
def test_bounds_hold_at_both_ends_of_the_temperatures(heat: float) -> None:
    logits = pick_inputs(5, 100)[0] * torch.tensor([1e-44, 1e-40, 1.0, 1e20, 1e38 / 16])[:, None]
    logits[:, 7] = -INF
    keys = reference.noise_keys(torch.arange(5), torch.arange(5))
    assert_bounds_hold(logits, torch.full((5,), heat), keys)


@interpreted
@pytest.mark.parametrize("programs", [1, 12, 300])
def test_any_split_of_the_vocabulary_gives_the_same_keys(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from funcllm.kernels import triton_sampler

    inputs = (*pick_inputs(4, 9000), None, 5, 8765)
    expected = triton_pick(*inputs)
    monkeypatch.setattr(triton_sampler, "_PROGRAMS", programs)
    splits = triton_sampler.split_vocabulary(4, 8765)[1]
    assert splits == min(9, -(-programs // 4))
    assert torch.equal(triton_pick(*inputs), expected)
    assert_bounds_hold(*inputs)


@interpreted
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_lowest_id_of_a_tie_wins_over_a_group_that_begins_earlier(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids 1024 and 2048 are of the first group, 5 and 6 of the second; infinities tie whatever the noise is."""
    from funcllm.kernels import triton_sampler

    monkeypatch.setattr(triton_sampler, "_PROGRAMS", 2)
    logits = torch.zeros(2, 3000)
    logits[0, [2048, 1024, 5, 6]] = logits[1, [1024, 9]] = INF
    assert triton_sampler.split_vocabulary(2, 3000) == (3, 1, 4)
    keys = reference.noise_keys(torch.arange(2), torch.arange(2))
    winner = triton_pick(logits, torch.full((2,), temperature), keys, None, 0, 3000)
    assert reference.token_of(winner).tolist() == [5, 9]


@interpreted
def test_few_groups_are_opened() -> None:
    rows, columns = 6, 9000
    logits, _, keys = pick_inputs(rows, columns)
    logits[2:4] = 0.0
    logits[4:] -= 30.0 * (torch.arange(columns) % 3000 > 0)
    opened = assert_bounds_hold(logits, torch.tensor([0.6, 1.0] * 3), keys)
    assert opened.max() <= 3
    assert opened.sum() <= 9
    assert assert_bounds_hold(logits, torch.zeros(rows), keys).tolist() == [1] * rows


@interpreted
def test_rows_without_a_winner_open_few_groups() -> None:
    logits = torch.full((4, 5000), -INF)
    logits[2:, 1111::3] = float("nan")
    heat = torch.tensor([0.0, 1.0] * 2)
    opened = assert_bounds_hold(logits, heat, reference.noise_keys(torch.arange(4), torch.arange(4)))
    assert opened[:2].tolist() == [1, 1]
    assert opened.max() <= 2


def words_of(bits: np.ndarray, folded_key: int) -> np.ndarray:
    """The word id * golden + low key whose noise bits these are: every step of the mixes undone, uint32."""
    first, second = (np.uint32(pow(multiplier, -1, 2**32)) for multiplier in (0x85EBCA6B, 0xC2B2AE35))
    x = bits ^ (bits >> np.uint32(16))
    for key in (np.uint32(folded_key), np.uint32(0)):
        x = x * second
        x = x ^ (x >> np.uint32(13)) ^ (x >> np.uint32(26))
        x = x * first ^ key
    return x ^ (x >> np.uint32(16))


if INTERPRETED:
    import triton
    import triton.language as tl

    from funcllm.kernels.triton_sampler import _bound, _unfinished_bits

    @triton.jit
    def bounds_of_words(word_ptr: Any, bits_ptr: Any, bound_ptr: Any, folded_key: Any, BLOCK: tl.constexpr) -> None:
        at_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        word_v = tl.load(word_ptr + at_v).to(tl.uint32)
        key = folded_key.to(tl.uint32)
        x_v = _unfinished_bits(word_v, key)
        tl.store(bits_ptr + at_v, (x_v ^ (x_v >> 16)).to(tl.int64))
        tl.store(bound_ptr + at_v, _bound(tl.zeros((BLOCK,), tl.float32), word_v, key, 1.0, False))


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
def test_bound_exceeds_the_noise_for_all_bits() -> None:
    """At a step of 8009 and near every power of 2, against fp64: with three quarters of the slack to spare."""
    from funcllm.kernels import triton_sampler

    powers = 2 ** np.arange(33, dtype=np.int64)[:, None] + np.arange(-40, 41)
    bits = np.unique(np.concatenate([powers.ravel(), np.arange(0, 2**32, 8009)]).clip(0, 2**32 - 1))
    bits = np.concatenate([bits, np.zeros(-len(bits) % 16384, np.int64)])
    folded_key = 0x12345678
    words = torch.from_numpy(words_of(bits.astype(np.uint32), folded_key).astype(np.int64))
    found, bound = torch.empty(len(bits), dtype=torch.int64), torch.empty(len(bits))
    bounds_of_words[(len(bits) // 16384,)](words, found, bound, folded_key, BLOCK=16384)
    assert np.array_equal(found.numpy(), bits)
    uniform = ((torch.from_numpy(bits).float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    noise = -torch.log(-torch.log1p(-uniform.double()))
    hardware = 32 * 2.0**-22  # the error of the GPU's logarithm
    room = bound.double() - hardware - noise
    assert room.min() > -0.25 * triton_sampler._BOUND_SLACK.value
    small = (bits > 2**12) & (bits < 2**20)
    assert room[torch.from_numpy(small)].max() < 1e-3


# --- threshold -------------------------------------------------------------------------------------------------------


def threshold(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    ranks: int = 1,
    forbidden: Tensor | tuple[()] = (),
) -> list[Tensor]:
    """The threshold as each of `ranks` threads finds it over its shard of the columns."""
    import threading

    columns = -(-logits.shape[1] // ranks)
    meet = threading.Barrier(ranks)
    given: list[Tensor] = [torch.empty(0)] * ranks
    results: list[Tensor] = [torch.empty(0)] * ranks

    def run(rank: int) -> None:
        def reduce(combine: Callable[[Tensor], Tensor]) -> sampler.Reduce:
            def apply(x: Tensor) -> Tensor:
                given[rank] = x
                meet.wait()
                total = combine(torch.stack(given))
                meet.wait()
                return total

            return apply

        first = min(rank * columns, logits.shape[1])
        num_ids = min(columns, logits.shape[1] - first)
        shard = torch.full((logits.shape[0], columns), 100.0)
        shard[:, :num_ids] = logits[:, first : first + num_ids]
        results[rank] = sampler.threshold(
            shard,
            temperature,
            top_k,
            top_p,
            min_p,
            first,
            num_ids,
            reduce(lambda x: x.sum(0)),
            reduce(lambda x: x.amax(0)),
            forbidden,
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def kept_by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that the filters let through, the plain way: sort, exponentiate and accumulate in fp64."""
    if temperature <= 0:
        return set(range(len(logits)))
    scaled = logits.double().numpy() / np.float64(np.float32(temperature))
    order = np.argsort(-scaled, kind="stable")
    kept = order if top_k <= 0 or top_k >= len(order) else order[scaled[order] >= scaled[order[top_k - 1]]]
    mass = np.exp(scaled[kept] - scaled[kept[0]])
    if top_p < 1:
        share = np.cumsum(mass) / mass.sum()
        last = min(int(np.searchsorted(share, np.float64(np.float32(top_p)), side="left")), len(kept) - 1)
        kept = kept[scaled[kept] >= scaled[kept[last]]]
    if min_p > 0:
        kept = kept[np.exp(scaled[kept] - scaled[order[0]]) >= min(np.float64(np.float32(min_p)), 1.0)]
    return set(kept.tolist())


def column(values: list[float] | list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@compiled
@pytest.mark.parametrize("columns", [7, 257, 3001])
@pytest.mark.parametrize("spread", [0.5, 3.0, 30.0])
def test_threshold_keeps_what_sorting_keeps(columns: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(columns)
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.3, 1.0, 4.0)
        for top_k in (-1, 0, 1, 5, 50, 10**6)
        for top_p in (0.013, 0.517, 0.951, 1.0)
        for min_p in (0.0, 0.0517, 0.517)
    ]
    logits = torch.randn(len(settings), columns, generator=generator) * spread
    logits[::5, ::3] = logits[::5, :1]
    logits[::7, 1::2] = -INF
    temperature, top_k, top_p, min_p = (list(x) for x in zip(*settings))
    [limit] = threshold(logits, column(temperature), column(top_k, torch.int32), column(top_p), column(min_p))
    for row, setting in enumerate(settings):
        kept = set(torch.nonzero(logits[row] >= limit[row])[:, 0].tolist())
        assert kept == kept_by_sorting(logits[row], *setting), (row, setting)


@compiled
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_threshold_is_the_same_bit_for_bit_at_any_number_of_ranks(ranks: int) -> None:
    rows = 24
    logits = torch.randn(rows, 199, generator=torch.Generator().manual_seed(3)) * 5
    logits[3] = -INF
    settings = (
        column([0.0, 0.7, 1.0, 2.5] * 6),
        column([0, 3, 20, 1000, 50, -1] * 4, torch.int32),
        column([1.0, 0.9, 0.5, 0.95] * 6),
        column([0.0, 0.0, 0.02] * 8),
    )
    [whole] = threshold(logits, *settings)
    for part in threshold(logits, *settings, ranks=ranks):
        assert torch.equal(part, whole)
    assert torch.isfinite(whole).sum() > rows / 2


@compiled
@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.6, {2, 3}),
        ([0.1, 0.2, 0.3, 0.4], 0.35, {3}),
        ([0.1, 0.2, 0.3, 0.4], 0.95, {0, 1, 2, 3}),
        ([0.1, 0.2, 0.3, 0.4], 0.0, {3}),
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_id_that_crosses_p(probabilities: list[float], top_p: float, kept: set[int]) -> None:
    logits = column(probabilities).log()[None]
    [limit] = threshold(logits, column([1.0]), column([0], torch.int32), column([top_p]), column([0.0]))
    assert set(torch.nonzero(logits[0] >= limit[0])[:, 0].tolist()) == kept


@compiled
def test_top_k_is_clamped_and_per_row_beside_greedy_rows() -> None:
    top_k = [-1, 0, 1, 255, 256, 10**6, 5, 5]
    logits = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    off = torch.ones(8)
    heat = column([1.0] * 7 + [0.0])
    [limit] = threshold(logits, heat, column(top_k, torch.int32), off, torch.zeros(8))
    assert (logits >= limit[:, None]).sum(-1).tolist() == [256, 256, 1, 255, 256, 256, 5, 256]
    keys = reference.noise_keys(torch.arange(8), torch.arange(8))
    tokens = reference.token_of(fused.pick(logits, heat, keys, limit, 0, 256)).tolist()
    assert tokens[2] == logits[2].argmax()
    assert tokens[7] == logits[7].argmax()
    assert tokens[6] in logits[6].topk(5).indices.tolist()


@compiled
def test_top_p_counts_only_what_top_k_left() -> None:
    logits = column([0.4, 0.3, 0.2, 0.1]).log()[None]
    [limit] = threshold(logits, column([1.0]), column([2], torch.int32), column([0.5]), column([0.0]))
    assert (logits >= limit).tolist() == [[True, False, False, False]]  # 0.4 / 0.7 reaches 0.5


@compiled
def test_threshold_counts_the_long_tail() -> None:
    """150 000 ids with 2^-33 of the largest mass each: far below fp32's resolution of the sum, yet counted."""
    logits = torch.full((1, 150_001), -33 * math.log(2.0))
    logits[0, 77] = 0.0
    tail = 150_000 * 2.0**-33
    for top_p, kept in ((1 - 2 * tail, 1), (1 - tail / 2, 150_001)):
        [limit] = threshold(logits, column([1.0]), column([0], torch.int32), column([top_p]), column([0.0]))
        assert (logits >= limit).sum().item() == kept


@compiled
def test_threshold_bears_strange_rows() -> None:
    logits = torch.zeros(4, 9)
    logits[0] = -INF
    logits[1, 4] = INF
    logits[2, 2] = float("nan")
    logits[3] = -0.0
    settings = (torch.ones(4), column([3] * 4, torch.int32), column([0.5] * 4), column([0.1] * 4))
    [limit] = threshold(logits, *settings)
    kept = logits >= limit[:, None]
    assert kept[0].all()
    assert kept[1].tolist() == [i == 4 for i in range(9)]
    assert kept[3].all()
    winner = fused.pick(logits, torch.ones(4), torch.zeros(4, 2, dtype=torch.int64), limit, 0, 9)
    assert reference.token_of(winner)[2].item() == -1


@compiled
def test_threshold_compiles_whole_and_stays_equal() -> None:
    def run(logits: Tensor, *settings: Tensor) -> Tensor:
        return sampler.threshold(logits, *settings, 0, logits.shape[1], sampler.identity, sampler.identity)

    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5)) * 3
    settings = (
        column([0.0, 0.7, 1.0] * 2),
        column([0, 3, 20] * 2, torch.int32),
        column([1.0, 0.9] * 3),
        column([0.0, 0.02] * 3),
    )
    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(logits, *settings), run(logits, *settings))


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 129])
def test_min_p_raises_a_threshold_by_one_definition(rows: int, asked: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    largest = torch.randn(rows, generator=generator) * 9
    below = torch.rand(rows, generator=generator) * 30
    below[::4] = INF
    heat = torch.rand(rows, generator=generator) * 2 - 0.4
    min_p = (torch.rand(rows, generator=generator) * 1.5 - 0.3) if asked else torch.zeros(rows)
    min_p[::7] *= 1e-40
    given = (largest - below, largest, heat, min_p)
    before = [x.clone() for x in given]
    if INTERPRETED:
        from funcllm.kernels import triton_sampler

        limit = triton_sampler.with_min_p(*given)
    else:
        limit = torch.ops.funcllm.with_min_p.default(*given)
    expected = reference.with_min_p(*given)
    if INTERPRETED:
        torch.testing.assert_close(limit, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(limit, expected)
    least = largest.double() + heat.double() * min_p.clamp(min=2.0**-126).double().log()
    asks = (heat > 0) & (min_p > 0)
    wanted = torch.where(asks, torch.minimum(least, largest.double()), -INF).maximum(given[0].double())
    torch.testing.assert_close(limit.double(), wanted, rtol=1e-6, atol=1e-5)
    assert limit.data_ptr() != given[0].data_ptr() or rows == 0
    assert all(torch.equal(x, y) for x, y in zip(given, before))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity times 0
def test_min_p_bears_strange_rows() -> None:
    given = (
        torch.tensor([-INF, -INF, -INF, 1.0, -INF]),
        torch.tensor([-INF, INF, 2.0, 2.0, 2.0]),
        torch.tensor([1.0, 1.0, INF, 1.0, 0.0]),
        torch.tensor([0.5, 0.5, 1.0, float("nan"), 0.5]),
    )
    if INTERPRETED:
        from funcllm.kernels import triton_sampler

        limit = triton_sampler.with_min_p(*given)
    else:
        limit = torch.ops.funcllm.with_min_p.default(*given)
    assert torch.equal(limit.nan_to_num(nan=9.0), reference.with_min_p(*given).nan_to_num(nan=9.0))
    assert limit[[0, 1, 3, 4]].tolist() == [-INF, INF, 1.0, -INF]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity - infinity
@pytest.mark.parametrize("by_mass", [False, True], ids=["count", "mass"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_radix_kernels_are_their_twins_bit_for_bit(by_mass: bool, index: int) -> None:
    from funcllm.kernels import triton_radix

    rows, columns, num_ids = 6, 4500, 4400
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(index)) * 5
    logits[0, :7], logits[1, :3000], logits[2, 9], logits[3, 4] = 2.5, -INF, INF, float("nan")
    forbidden = torch.full((rows, 3), -1, dtype=torch.int32)
    forbidden[5] = torch.tensor([107, 4321 + 100, 99])
    columns = (forbidden, 100, num_ids)
    logits[5, 7] = 50.0
    largest = triton_radix.largest(logits, *columns)
    assert torch.equal(largest, radix.largest(logits, *columns))
    assert largest[5] < 50.0
    shift, bits = radix.DIGITS[index]
    prefix = radix.code_of(logits[:, 4321]) >> (shift + bits)
    prefix[4] = -1
    floor = radix.code_of(logits.quantile(0.01, dim=-1).nan_to_num())
    heat = torch.tensor([0.01, 0.6, 1.0, 2.0, 1.0, 1.5])
    arguments = (*columns, prefix, index, floor, largest, heat, by_mass)
    ours, theirs = triton_radix.histogram(logits, *arguments), radix.histogram(logits, *arguments)
    assert torch.equal(ours, theirs)
    assert (ours.sum(-1) > 0).any()
    assert ours[4].sum() == 0
    missing = (theirs.sum(-1) * 2 // 3).clamp(min=1)
    missing[0] = 2**50
    for mine, expected in zip(triton_radix.select(ours, missing, prefix), radix.select(theirs, missing, prefix)):
        assert torch.equal(mine, expected)


@interpreted
def test_radix_kernels_find_the_largest_of_a_shard_without_ids() -> None:
    from funcllm.kernels import triton_radix

    none = torch.empty((2, 0), dtype=torch.int32)
    assert triton_radix.largest(torch.ones(2, 8), none, 0, 0).tolist() == [-INF, -INF]


Settings = tuple[Tensor, Tensor, Tensor, Tensor]


def settings_of(rows: int, temperature: object, top_k: object, top_p: object, min_p: object) -> Settings:
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    values = (temperature, top_k, top_p, min_p)
    columns = [torch.as_tensor(value, dtype=kind).expand(rows).contiguous() for value, kind in zip(values, kinds)]
    return columns[0], columns[1], columns[2], columns[3]


def assert_gathering_finds_the_same(
    logits: Tensor,
    settings: Settings,
    *,
    forbidden: Tensor | None = None,
    first_id: int = 0,
    num_ids: int | None = None,
    leftover: list[int] | None = None,
) -> Tensor:
    """The threshold by gathering, equal to the plain one; `leftover`: the rows that need passes over all columns."""
    from funcllm.kernels import triton_candidates

    none = torch.empty((len(logits), 0), dtype=torch.int32)
    count = logits.shape[1] if num_ids is None else num_ids
    arguments = (logits, none if forbidden is None else forbidden, first_id, count, *settings)
    seen: list[Tensor] = []
    kernel = triton_candidates._leftover_kernel

    class Watched:
        """The last kernel, seen from outside: which rows it is asked to work on."""

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*args: Tensor, **options: object) -> None:
                seen.append(args[7].clone())
                kernel[grid](*args, **options)

            return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_candidates, "_PROGRAMS", 4 * len(logits))
        patch.setattr(triton_candidates, "_leftover_kernel", Watched())
        ours = triton_candidates.threshold(*arguments)
    theirs = radix.threshold_alone(*arguments)
    for mine, expected in zip(ours, theirs):
        assert torch.equal(mine, expected)
    if leftover is not None:
        assert torch.nonzero(seen[0])[:, 0].tolist() == leftover
    return ours[0]


noisy = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity - infinity


def spread_logits(rows: int, columns: int, spread: float = 4.0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * spread


@interpreted
@noisy
@pytest.mark.parametrize("columns", [7, 257, 5001])
@pytest.mark.parametrize("spread", [0.5, 3.0, 30.0])
def test_gathering_finds_the_threshold_at_any_setting(columns: int, spread: float) -> None:
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.3, 4.0)
        for top_k in (-1, 1, 5, 50, 10**6)
        for top_p in (0.013, 0.951, 1.0)
        for min_p in (0.0, 0.0517)
    ]
    logits = spread_logits(len(settings), columns, spread)
    logits[::5, ::3] = logits[::5, :1]
    logits[::7, 1::2] = -INF
    values = list(zip(*settings))
    limit = assert_gathering_finds_the_same(logits, settings_of(len(settings), *map(list, values)))
    assert torch.isfinite(limit).sum() > len(settings) / 3


@interpreted
@noisy
def test_gathering_bears_strange_rows() -> None:
    logits = spread_logits(8, 6000)
    logits[0] = 1.5
    logits[1] = -INF
    logits[2, ::2] = -INF
    logits[3, 7] = INF
    logits[4, 5] = float("nan")
    logits[5] = float("nan")
    logits[6] = -0.0
    logits[6, ::3] = 0.0
    logits[7, :5990] = -INF
    for top_k, top_p, leftover in ((20, 0.95, [0, 6]), (0, 0.5, [0, 6]), (3, 1.0, [0, 6]), (0, 1.0, [])):
        settings = settings_of(8, 1.0, top_k, top_p, 0.1)
        assert_gathering_finds_the_same(logits, settings, leftover=leftover)


@interpreted
@noisy
def test_gathering_bears_every_top_k() -> None:
    top_k = [1, 128, 129, 3000, 4096, 4097, 7999, 8000, 8001, 2**31 - 1]
    logits = spread_logits(10, 8000)
    for top_p in (1.0, 0.9):
        settings = settings_of(10, 1.0, top_k, top_p, 0.0)
        limit = assert_gathering_finds_the_same(logits, settings, leftover=[4, 5, 6, 7])
        kept = (logits >= limit[:, None]).sum(-1).tolist()
        if top_p == 1.0:
            assert kept == [1, 128, 129, 3000, 4096, 4097, 7999, 8000, 8000, 8000]


@interpreted
@noisy
def test_gathering_leaves_a_flat_or_tied_nucleus_to_the_passes() -> None:
    logits = spread_logits(5, 20_000)
    logits[1] *= 0.1
    logits[2] = logits[2].round()
    logits[3, :6000] = logits[3].max() + 1
    logits[4, :4000] = logits[4].max() + 1
    settings = settings_of(5, [1.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 0, 20, 20], [0.9, 0.9, 0.9, 0.9, 0.9], 0.0)
    limit = assert_gathering_finds_the_same(logits, settings, leftover=[1, 3])
    kept = (logits >= limit[:, None]).sum(-1).tolist()
    assert kept[1] > 10_000
    assert kept[3:] == [6000, 4000]


@interpreted
@noisy
@pytest.mark.parametrize("temperature", [1e-5, 1e-2, 100.0])
def test_gathering_at_extreme_temperatures(temperature: float) -> None:
    logits = spread_logits(4, 5000)
    settings = settings_of(4, temperature, [0, 20, 600, 0], [0.95, 0.95, 0.95, 0.999], [0.0, 0.0, 0.0, 0.5])
    assert_gathering_finds_the_same(logits, settings)


@interpreted
@noisy
def test_gathering_passes_over_forbidden_ids_and_padding_columns() -> None:
    logits = spread_logits(6, 9000)
    logits[:, 8801:] = 100.0
    best = logits[:, :8801].topk(3).indices.int() + 1000
    forbidden = torch.full((6, 8), -1, dtype=torch.int32)
    forbidden[:3, 2:5] = best[:3]
    forbidden[3, 0], forbidden[4, 7] = 5, 9900
    settings = settings_of(6, 1.0, [1, 5, 0, 700, 1, 3], [1.0, 0.9, 0.5, 1.0, 0.9, 1.0], 0.3)
    limit = assert_gathering_finds_the_same(logits, settings, forbidden=forbidden, first_id=1000, num_ids=8801)
    assert limit[0] == logits[0, :8801].topk(4).values[3]
    assert (limit < 100.0).all()


@interpreted
def test_gathering_takes_shards_without_ids_and_batches_without_rows() -> None:
    assert_gathering_finds_the_same(torch.ones(2, 8), settings_of(2, 1.0, 3, 0.5, 0.1), num_ids=0)
    assert_gathering_finds_the_same(torch.ones(0, 8), settings_of(0, 1.0, 3, 0.5, 0.1))


@compiled
def test_groups_are_shared_evenly() -> None:
    from funcllm.kernels.triton_candidates import GROUPS, split_groups

    for rows in (1, 2, 3, 7, 64, 100, 256, 1024, 5000):
        splits = split_groups(rows)
        assert GROUPS % splits == 0
        assert 32 <= GROUPS // splits <= 2048
    assert [split_groups(rows) for rows in (2, 64, 256)] == [128, 16, 4]


@compiled
@pytest.mark.parametrize("ranks", [1, 2])
def test_forbidden_and_nan_logits_count_as_minus_infinity(ranks: int) -> None:
    logits = spread_logits(4, 60)
    logits[1, 9] = float("nan")
    best = logits.nan_to_num(-50.0).topk(2).indices.int()
    forbidden = torch.cat([best, torch.full((4, 2), -1, dtype=torch.int32)], dim=1)
    settings = settings_of(4, 1.0, [3, 3, 0, 0], [1.0, 1.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.5])
    cleared = logits.scatter(1, best.long(), -INF).nan_to_num(-INF, neginf=-INF)
    [expected] = threshold(cleared, *settings)
    for limit in threshold(logits, *settings, ranks=ranks, forbidden=forbidden):
        assert torch.equal(limit, expected)
    alone = sampler.threshold(logits, *settings, 0, 60, sampler.identity, sampler.identity, forbidden)
    assert torch.equal(alone, expected)
    assert (cleared >= expected[:, None]).sum(-1).tolist()[:2] == [3, 3]


@compiled
def test_masses_are_exponentials() -> None:
    logits = torch.linspace(-30.0, 3.0, 2000)[None]
    mass = radix.masses(logits[0], torch.tensor(3.0), torch.tensor(0.8)).double() / 2**radix.MASS_BITS
    expected = torch.exp((logits[0].double() - 3.0) / np.float64(np.float32(0.8)))
    torch.testing.assert_close(mass, expected, rtol=1e-5, atol=2.0**-40)
    assert mass[-1] == 1


@compiled
def test_codes_keep_the_order_and_invert() -> None:
    logits = torch.tensor([-INF, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, INF])
    code = radix.code_of(logits)
    assert (code.diff() > 0).all()
    assert code.min() >= 0
    assert code.max() < 2**32
    assert torch.equal(radix.logit_of(code).view(torch.int32), logits.view(torch.int32))


@compiled
@pytest.mark.slow
def test_gathering_compiles_for_sm_90_without_spills() -> None:
    from tests.test_kernels_sm90 import compile_module

    variants = compile_module("triton_candidates")
    assert {"maxima-2", "gather-256", "bound", "choose", "leftover"} <= set(variants)
    for name, use in variants.items():
        assert use["stack"] == use["local"] == 0, name
        assert use["shared"] <= 48 * 1024, name
        num_threads = 512 if name == "leftover" else 256 if name in ("bound", "choose") else 128
        assert 0 < num_threads * use["registers"] <= 65536, name


# --- Triton on a CPU -------------------------------------------------------------------------------------------------


@compiled
def test_interpreted() -> None:
    """Runs this file's kernel tests in a process where Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
