"""Filters of the sampler: top-k, top-p and min-p become one threshold a row, exact and equal at any number of ranks.

A logit is kept iff it is >= the threshold, so values equal to it are all kept. Every sum is of integers and goes
through `reduce_sum`, so neither the order of columns nor their split over ranks changes a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcllm.kernels import (
    ops_sampler,  # noqa: F401  registers the ops
    radix,
)
from funcllm.kernels.radix import Reduce


def threshold(
    logits_lv: Tensor,
    temperature_l: Tensor,
    top_k_l: Tensor,
    top_p_l: Tensor,
    min_p_l: Tensor,
    first_id: int,
    num_ids: int,
    reduce_sum: Reduce,
    reduce_max: Reduce,
    forbidden_ls: Tensor | tuple[()] = (),
) -> Tensor:
    """The smallest logit (fp32, in logit units, inclusive) that each row's filters let through; -inf where none does.

    Columns are this rank's vocabulary ids first_id, first_id + 1, ...; only the first num_ids count; NaN logits and
    those of forbidden_ls (int32 ids; -1 is none) count as -inf. `reduce_sum` and `reduce_max` add and maximise a tensor
    over the ranks; pass `identity` as both on one rank, which is faster. In this order, at the row's temperature:

    top_k   keeps the k largest logits; <= 0 is off, more than the vocabulary keeps all
    top_p   of what top_k left, renormalised, keeps the smallest set from the top whose mass reaches p, the id that
            crosses p included; >= 1 is off; at least one id stays
    min_p   keeps ids at least min_p times as probable as the most probable one; <= 0 is off

    Greedy rows (temperature <= 0) need no filter: -inf. Masses are 40-bit fixed point relative to the most probable
    id: an id 2^-41 times as probable has mass 0. Reads no value on the host; a NaN logit is reported by the pick.
    """
    logits_lv = logits_lv.detach().float()
    if not isinstance(forbidden_ls, Tensor):
        forbidden_ls = torch.empty((logits_lv.shape[0], 0), dtype=torch.int32, device=logits_lv.device)
    columns = (logits_lv, forbidden_ls, first_id, num_ids)
    settings = (temperature_l, top_k_l, top_p_l)
    if reduce_sum is identity and reduce_max is identity:
        value_l, largest_l = torch.ops.funcllm.filter_threshold.default(*columns, *settings, min_p_l)
    else:
        passes = (
            torch.ops.funcllm.largest_logit.default,
            torch.ops.funcllm.radix_histogram.default,
            torch.ops.funcllm.radix_select.default,
        )
        value_l, largest_l = radix.threshold(*columns, *settings, passes, reduce_sum, reduce_max)
    return torch.ops.funcllm.with_min_p.default(value_l, largest_l, temperature_l, min_p_l)


def identity(x: Tensor) -> Tensor:
    """The reduction over one rank."""
    return x


__all__ = ["Reduce", "identity", "threshold"]
