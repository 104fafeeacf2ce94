"""Filters of the sampler: top-k, top-p and min-p become one threshold a row, exact and equal at any number of ranks.

A logit is kept iff it is >= the threshold, so values equal to it are all kept. Every sum is of integers and goes
through `reduce_sum`, so neither the order of columns nor their split over ranks changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcllm.kernels import ops_sampler  # noqa: F401  registers the ops
from funcllm.kernels.radix import DIGITS, logit_of

Reduce = Callable[[Tensor], Tensor]


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
) -> Tensor:
    """The smallest logit (fp32, in logit units, inclusive) that each row's filters let through; -inf where none does.

    Columns are this rank's vocabulary ids first_id, first_id + 1, ...; only the first num_ids count. `reduce_sum` and
    `reduce_max` add and maximise a tensor over the ranks (`identity` on one). In this order, at the row's temperature:

    top_k   keeps the k largest logits; <= 0 is off, more than the vocabulary keeps all
    top_p   of what top_k left, renormalised, keeps the smallest set from the top whose mass reaches p, the id that
            crosses p included; >= 1 is off; at least one id stays
    min_p   keeps ids at least min_p times as probable as the most probable one; <= 0 is off

    Greedy rows (temperature <= 0) need no filter: -inf. Masses are 40-bit fixed point relative to the most probable
    id: an id 2^-41 times as probable has mass 0. Reads no value on the host; a NaN logit is left to the pick.
    """
    logits_lv = logits_lv.detach().float()
    sampled_l = temperature_l > 0
    heat_l = torch.where(sampled_l, temperature_l, 1.0)
    largest_l = reduce_max(torch.ops.funcllm.largest_logit.default(logits_lv, num_ids))

    def find(on_l: Tensor, floor_l: Tensor, by_mass: bool, target: Callable[[Tensor], Tensor]) -> Tensor:
        """The largest code at or above which columns (or mass) reach the target; 0 where the row does not ask."""
        prefix_l = torch.where(sampled_l & on_l, 0, -1)
        missing_l = prefix_l
        for index in range(len(DIGITS)):
            histogram_lx = reduce_sum(
                torch.ops.funcllm.radix_histogram.default(
                    logits_lv, num_ids, prefix_l, index, floor_l, largest_l, heat_l, by_mass
                )
            )
            if index == 0:
                missing_l = target(histogram_lx).clamp(min=1)
            prefix_l, missing_l = torch.ops.funcllm.radix_select.default(histogram_lx, missing_l, prefix_l)
        return prefix_l.clamp(min=0)

    zero_l = torch.zeros_like(top_k_l, dtype=torch.int64)
    code_l = find(top_k_l > 0, zero_l, False, lambda counts_lx: top_k_l.long())
    code_p_l = find(
        top_p_l < 1, code_l, True, lambda mass_lx: (top_p_l.double() * mass_lx.sum(-1)).ceil().to(torch.int64)
    )
    code_l = torch.maximum(code_l, code_p_l)
    value_l = torch.where(code_l > 0, logit_of(code_l), float("-inf"))

    least_l = largest_l + heat_l * torch.log(min_p_l.clamp(min=torch.finfo(torch.float32).tiny))
    least_l = torch.where(sampled_l & (min_p_l > 0), torch.minimum(least_l, largest_l), float("-inf"))
    return torch.maximum(value_l, least_l)


def identity(x: Tensor) -> Tensor:
    """The reduction over one rank."""
    return x
