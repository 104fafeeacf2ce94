"""Filters of the sampler: top-k, top-p and min-p become one threshold a row, exact and equal at any number of ranks.

A logit is kept iff it is >= the threshold, so values equal to it are all kept. Every sum is of integers and goes
through `reduce_sum`, so neither the order of columns nor their split over ranks changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcllm.kernels.reference import ordered_bits

Reduce = Callable[[Tensor], Tensor]

_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the three radix passes over 32 bits
_MASS_BITS = 40  # the most probable id has mass 2^40: 2^22 columns fit into int64
_MANTISSA_BITS = 23
_LOG2_E = 1.4426950408889634
_EXP2_COEFFICIENTS = (  # 2^f on [0, 1), relative error 2e-9 before rounding; fitted by weighted least squares
    2.1702255e-4,
    1.2439688e-3,
    9.6788406e-3,
    5.5483341e-2,
    2.4022983e-1,
    6.9314700e-1,
    1.0,
)


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
    id: an id 2^-41 times as probable has mass 0. Uses no value on the host; NaN logits neither pass nor raise here.
    """
    logits_lv = logits_lv[:, :num_ids].float()
    sampled_l = temperature_l > 0
    heat_l = torch.where(sampled_l, temperature_l, 1.0)
    largest_l = reduce_max(_largest(logits_lv))
    code_lv = _unsigned(logits_lv)

    k_on_l = sampled_l & (top_k_l > 0)
    code_k_l = _select(code_lv, torch.ones_like(code_lv), lambda total_l: top_k_l.long().minimum(total_l), reduce_sum)
    code_k_l = torch.where(k_on_l, code_k_l, 0)

    mass_lv = torch.where(code_lv >= code_k_l[:, None], _masses(logits_lv, largest_l, heat_l), 0)
    p_on_l = sampled_l & (top_p_l < 1)
    code_p_l = _select(code_lv, mass_lv, lambda total_l: (top_p_l.double() * total_l).ceil().long(), reduce_sum)
    code_p_l = torch.where(p_on_l, code_p_l, 0)

    least_l = largest_l + heat_l * torch.log(min_p_l.clamp(min=torch.finfo(torch.float32).tiny))
    m_on_l = sampled_l & (min_p_l > 0)
    least_l = torch.where(m_on_l, torch.minimum(least_l, largest_l), float("-inf"))

    code_l = torch.maximum(code_k_l, code_p_l)
    value_l = torch.where(code_l > 0, _from_unsigned(code_l), float("-inf"))
    return torch.maximum(value_l, least_l)


def identity(x: Tensor) -> Tensor:
    """The reduction over one rank."""
    return x


def _largest(logits_lv: Tensor) -> Tensor:
    """The largest logit of each row that is not NaN; -inf without columns."""
    floor_l1 = logits_lv.new_full((logits_lv.shape[0], 1), float("-inf"))
    numbers_lv = torch.where(torch.isnan(logits_lv), float("-inf"), logits_lv)
    return torch.cat([numbers_lv, floor_l1], dim=-1).amax(dim=-1)


def _unsigned(logits_lv: Tensor) -> Tensor:
    """fp32 -> int64 in [0, 2^32) in the same order."""
    return ordered_bits(logits_lv).long() + (1 << 31)


def _from_unsigned(code_l: Tensor) -> Tensor:
    ordered_l = (code_l - (1 << 31)).to(torch.int32)
    return (ordered_l ^ ((ordered_l >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _masses(logits_lv: Tensor, largest_l: Tensor, heat_l: Tensor) -> Tensor:
    """exp((logit - largest) / temperature) as int64 multiples of 2^-40.

    Made of additions, products and shifts only, whose results are the same in every position of a tensor; library
    exponentials may differ by a bit between the body of a vector loop and its end.
    """
    octaves_lv = (logits_lv - largest_l[:, None]) * (_LOG2_E / heat_l)[:, None]
    octaves_lv = torch.where(logits_lv == largest_l[:, None], 0.0, octaves_lv)
    octaves_lv = torch.nan_to_num(octaves_lv, nan=-64.0).clamp(min=-64.0, max=0.0)
    whole_lv = octaves_lv.floor()
    fraction_lv = octaves_lv - whole_lv
    power_lv = torch.full_like(fraction_lv, _EXP2_COEFFICIENTS[0])
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        power_lv = power_lv * fraction_lv + coefficient
    mantissa_lv = (power_lv * float(1 << _MANTISSA_BITS)).round().long()
    return (mantissa_lv << (_MASS_BITS - _MANTISSA_BITS)) >> (-whole_lv).long().clamp(max=63)


def _select(code_lv: Tensor, mass_lv: Tensor, target: Callable[[Tensor], Tensor], reduce_sum: Reduce) -> Tensor:
    """The largest code such that the mass at or above it reaches target(total mass) (at least 1); 0 if none does."""
    prefix_l = code_lv.new_zeros(code_lv.shape[0])
    missing_l = prefix_l
    for index, (shift, bits) in enumerate(_DIGITS):
        inside_lv = (code_lv >> (shift + bits)) == prefix_l[:, None]
        digit_lv = (code_lv >> shift) & ((1 << bits) - 1)
        histogram_lx = code_lv.new_zeros((code_lv.shape[0], 1 << bits))
        histogram_lx = reduce_sum(histogram_lx.scatter_add(1, digit_lv, torch.where(inside_lv, mass_lv, 0)))
        above_lx = histogram_lx.flip(-1).cumsum(-1).flip(-1)
        if index == 0:
            missing_l = target(above_lx[:, 0]).clamp(min=1)
        digit_l = (above_lx >= missing_l[:, None]).sum(-1) - 1
        digit_l = digit_l.clamp(min=0)
        passed_l = torch.gather(above_lx - histogram_lx, 1, digit_l[:, None])[:, 0]
        missing_l = missing_l - passed_l
        prefix_l = (prefix_l << bits) | digit_l
    return prefix_l
