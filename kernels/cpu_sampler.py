"""The sampler's ops on the CPU: equal to their plain twins, with work for the rows and columns that need it only.

A winner is found by its score and only then made a key; noise is drawn for rows that sample, and behind a threshold for
the columns that pass it. A threshold is found by sorting the columns that can matter. Where a NaN or the sign of a zero
decides, the plain functions do. Values are read on the host.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcllm.kernels import cpu_step, radix, reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_MASK32 = 0xFFFFFFFF
_ID_STEP, _FIRST_MIX, _SECOND_MIX = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


# --- keys ------------------------------------------------------------------------------------------------------------


def noise_keys(seed_l: Tensor, position_l: Tensor) -> Tensor:
    """reference.noise_keys."""
    return torch.from_numpy(cpu_step.noise_keys(seed_l.long().numpy(), position_l.to(torch.int32).numpy()))


def token_of(key_l: Tensor) -> Tensor:
    """reference.token_of: the id is the low word, inverted."""
    key = key_l.numpy()
    return torch.from_numpy(np.where((key >> 32) == 0x7FFFFFFF, -1, ~key).astype(np.int32))


# --- pick ------------------------------------------------------------------------------------------------------------


def pick(
    logits_lv: Tensor,
    temperature_l: Tensor,
    keys_l2: Tensor,
    threshold_l: Tensor | None,
    first_id: int,
    num_ids: int,
    forbidden_ls: Tensor | None,
) -> Tensor:
    """reference.pick."""
    limit: Tensor | tuple[()] = () if threshold_l is None else threshold_l
    forbidden: Tensor | tuple[()] = ()
    if forbidden_ls is not None and bool((forbidden_ls >= 0).any()):
        forbidden = forbidden_ls
    score_lv = logits_lv[:, :num_ids]
    if score_lv.numel():
        if isinstance(forbidden, Tensor):
            score_lv = reference.forbid(score_lv, forbidden, first_id)
        if threshold_l is not None:
            score_lv = score_lv.masked_fill(score_lv < threshold_l[:, None], float("-inf"))
        score_lv = _with_noise(score_lv, temperature_l, keys_l2, first_id, is_sparse=threshold_l is not None)
        best_l, index_l = score_lv.max(dim=-1)
        if bool((best_l.abs() > 0).all()):
            return (reference.ordered_bits(best_l).long() << 32) | (_MASK32 - first_id - index_l)
    return reference.pick(logits_lv, temperature_l, keys_l2, limit, first_id, num_ids, forbidden_ls=forbidden)


def _with_noise(score_lv: Tensor, temperature_l: Tensor, keys_l2: Tensor, first_id: int, *, is_sparse: bool) -> Tensor:
    """The scores, in the rows that sample divided by their temperature and with noise; -inf stays."""
    hot_x = (~(temperature_l <= 0)).nonzero()[:, 0]
    if not len(hot_x):
        return score_lv
    add_noise = _noisy_few if is_sparse else _noisy
    if len(hot_x) == score_lv.shape[0]:
        return add_noise(score_lv, temperature_l, keys_l2, first_id)
    noisy_xv = add_noise(score_lv[hot_x], temperature_l[hot_x], keys_l2[hot_x], first_id)
    return score_lv.index_copy(0, hot_x, noisy_xv)


def _noisy(score_xv: Tensor, temperature_x: Tensor, keys_x2: Tensor, first_id: int) -> Tensor:
    """Score / temperature + noise of every column."""
    words_x2 = keys_x2.numpy().astype(np.uint32)
    ids_v = np.arange(first_id, first_id + score_xv.shape[1]).astype(np.uint32)
    noise_xv = _gumbel(ids_v[None, :], words_x2[:, :1], words_x2[:, 1:])
    return noise_xv.add_(score_xv / temperature_x[:, None])


def _noisy_few(score_xv: Tensor, temperature_x: Tensor, keys_x2: Tensor, first_id: int) -> Tensor:
    """`_noisy`, computed where the score is not -inf."""
    row_i, column_i = (score_xv != float("-inf")).nonzero(as_tuple=True)
    words_x2, row = keys_x2.numpy().astype(np.uint32), row_i.numpy()
    noise_i = _gumbel((column_i.numpy() + first_id).astype(np.uint32), words_x2[row, 0], words_x2[row, 1])
    where = (row_i, column_i)
    return score_xv.index_put(where, noise_i.add_(score_xv[where] / temperature_x[row_i]))


def _gumbel(ids: Array, first_word: Array, second_word: Array) -> Tensor:
    """reference.gumbel_noise of ids and the two words of their rows' keys, all uint32 that broadcast."""
    bits = _mix(_mix(ids * _ID_STEP + first_word) ^ second_word)
    u = torch.from_numpy(bits.astype(np.float32)).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Array) -> Array:
    """reference._mix32 in arithmetic modulo 2^32; x is overwritten."""
    x ^= x >> 16
    x *= _FIRST_MIX
    x ^= x >> 13
    x *= _SECOND_MIX
    x ^= x >> 16
    return x


# --- threshold -------------------------------------------------------------------------------------------------------


def filter_threshold(
    logits_lv: Tensor,
    forbidden_ls: Tensor,
    first_id: int,
    num_ids: int,
    temperature_l: Tensor,
    top_k_l: Tensor,
    top_p_l: Tensor,
    min_p_l: Tensor,
) -> tuple[Tensor, Tensor]:
    """radix.threshold_alone, equal to it in every bit."""
    numbers_lv = radix.numbers(logits_lv, forbidden_ls, first_id, num_ids)
    sampled_l = temperature_l > 0
    by_count_l, by_mass_l = sampled_l & (top_k_l > 0) & (top_k_l <= num_ids), sampled_l & (top_p_l < 1)
    rows_x = (by_count_l | by_mass_l | (sampled_l & (min_p_l > 0))).nonzero()[:, 0]
    value_l = numbers_lv.new_full((len(sampled_l),), float("-inf"))
    largest_l = value_l.clone()
    if not len(rows_x) or not num_ids:
        return value_l, largest_l
    logits_xv = numbers_lv.numpy()[rows_x.numpy()]
    largest_x = logits_xv.max(axis=1)
    largest_l[rows_x] = torch.from_numpy(largest_x)
    per_octave_x = (radix.LOG2_E / temperature_l[rows_x]).numpy()
    counts, shares = (
        torch.where(by_count_l, top_k_l, 0)[rows_x].tolist(),
        torch.where(by_mass_l, top_p_l, 1.0)[rows_x].tolist(),
    )
    masses_xv = _masses(logits_xv, largest_x, per_octave_x) if any(share < 1 for share in shares) else logits_xv
    limits = [_limit(*row) for row in zip(logits_xv, masses_xv, counts, shares)]
    if any(limit == 0 for limit in limits):
        settings = (temperature_l, top_k_l, top_p_l, min_p_l)
        return radix.threshold_alone(numbers_lv, forbidden_ls[:, :0], first_id, num_ids, *settings)
    value_l[rows_x] = torch.tensor(limits)
    return value_l, largest_l


def with_min_p(threshold_l: Tensor, largest_l: Tensor, temperature_l: Tensor, min_p_l: Tensor) -> Tensor:
    """reference.with_min_p, in a tensor of its own."""
    if not ((temperature_l.numpy() > 0) & (min_p_l.numpy() > 0)).any():
        return threshold_l.clone()
    return reference.with_min_p(threshold_l, largest_l, temperature_l, min_p_l)


def _limit(logits_v: Floats, mass_v: Array, count: int, share: float) -> float:
    """The smallest logit among the `count` largest (0: all) and, of those, among the most probable `share`."""
    limit = float(np.partition(logits_v, -count)[-count]) if count else -math.inf
    if share >= 1:
        return limit
    if count:
        mass_v = np.where(logits_v < limit, 0, mass_v)
    total = int(mass_v.sum())
    target = max(1, math.ceil(share * total))
    few = np.flatnonzero(mass_v > max(0, total - target) // len(mass_v))  # the others together are not missed
    descending = few[np.argsort(logits_v[few])[::-1]]
    last = np.searchsorted(mass_v[descending].cumsum(), target)
    return float(logits_v[descending[last]])


def _masses(logits_xv: Floats, largest_x: Floats, per_octave_x: Floats) -> Array:
    """radix.masses, of rows; per_octave: log2(e) / temperature."""
    with np.errstate(invalid="ignore", over="ignore"):
        octaves = (logits_xv - largest_x[:, None]) * per_octave_x[:, None]
    octaves[logits_xv == largest_x[:, None]] = 0
    np.minimum(np.fmax(octaves, -64, out=octaves), 0, out=octaves)
    whole = np.floor(octaves)
    octaves -= whole
    power = np.full_like(octaves, radix.EXP2_COEFFICIENTS[0])
    for coefficient in radix.EXP2_COEFFICIENTS[1:]:
        power *= octaves
        power += np.float32(coefficient)
    power *= np.float32(1 << radix.MASS_BITS)
    return power.astype(np.int64) >> np.minimum(-whole, 63).astype(np.int64)
