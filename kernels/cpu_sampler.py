"""The sampler's ops on the CPU: equal to their plain twins, with work for the rows and columns that need it only.

A winner is found by its score and only then made a key; noise is drawn for rows that sample, and behind a threshold for
the columns that pass it. A threshold is searched among a few hundred largest logits. Where that does not decide (NaN,
zeros of both signs, a nucleus of more columns), the plain functions do. Values are read on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from funcllm.kernels import radix, reference

_CANDIDATES = 256  # largest logits of a row that a threshold is searched among
_MASK32 = 0xFFFFFFFF
_ID_STEP, _FIRST_MIX, _SECOND_MIX = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


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


def _gumbel(ids: np.ndarray, first_word: np.ndarray, second_word: np.ndarray) -> Tensor:
    """reference.gumbel_noise of ids and the two words of their rows' keys, all uint32 that broadcast."""
    bits = _mix(_mix(ids * _ID_STEP + first_word) ^ second_word)
    u = torch.from_numpy(bits.astype(np.float32)).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(x: np.ndarray) -> np.ndarray:
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
    settings = (temperature_l, top_k_l, top_p_l)
    found = _among_largest(numbers_lv, *settings) if numbers_lv.numel() else None
    if found is None:
        return radix.threshold_alone(numbers_lv, forbidden_ls[:, :0], first_id, num_ids, *settings, min_p_l)
    value_l, largest_l = found
    by_count_l = (top_k_l > 0) & (top_k_l <= num_ids)
    asks_l = (temperature_l > 0) & (by_count_l | (top_p_l < 1) | (min_p_l > 0))
    return value_l, torch.where(asks_l, largest_l, float("-inf"))


def _among_largest(
    numbers_lv: Tensor, temperature_l: Tensor, top_k_l: Tensor, top_p_l: Tensor
) -> tuple[Tensor, Tensor] | None:
    """(threshold, largest logit) of each row by its largest logits in order; None where they do not decide."""
    num_columns = numbers_lv.shape[1]
    width = min(num_columns, _CANDIDATES)
    sorted_lc = numbers_lv.topk(width, dim=-1).values
    largest_l, least_l = sorted_lc[:, 0], sorted_lc[:, -1]
    sampled_l = temperature_l > 0
    by_count_l, by_mass_l = sampled_l & (top_k_l > 0) & (top_k_l <= num_columns), sampled_l & (top_p_l < 1)
    counted_l = sorted_lc.gather(1, (top_k_l.long() - 1).clamp(min=0, max=width - 1)[:, None])[:, 0]
    value_l = torch.where(by_count_l, counted_l, float("-inf"))
    undecided_l = by_count_l & ((top_k_l > width) | (value_l == 0))
    if bool(by_mass_l.any()):
        heat_l1 = torch.where(sampled_l, temperature_l, 1.0)[:, None]
        mass_lc = radix.masses(sorted_lc, largest_l[:, None], heat_l1)
        mass_lc = mass_lc.masked_fill_(sorted_lc < value_l[:, None], 0)
        total_l = mass_lc.sum(-1)
        hidden_x = (by_mass_l & (least_l >= value_l)).nonzero()[:, 0] if width < num_columns else top_k_l[:0]
        if len(hidden_x):
            numbers_xv, floor_x1 = numbers_lv[hidden_x], value_l[hidden_x][:, None]
            mass_xv = radix.masses(numbers_xv, largest_l[hidden_x][:, None], heat_l1[hidden_x])
            total_l[hidden_x] = mass_xv.masked_fill_(numbers_xv < floor_x1, 0).sum(-1)
        target_l = (top_p_l.double() * total_l).ceil().to(torch.int64).clamp(min=1)
        index_l = (mass_lc.cumsum(-1) < target_l[:, None]).sum(-1)
        reached_l = sorted_lc.gather(1, index_l.clamp(max=width - 1)[:, None])[:, 0]
        undecided_l |= by_mass_l & ((index_l == width) | (reached_l == 0))
        value_l = torch.where(by_mass_l, torch.maximum(value_l, reached_l), value_l)
    return None if bool(undecided_l.any()) else (value_l, largest_l)
