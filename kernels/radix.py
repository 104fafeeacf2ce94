"""Order statistics of logits by radix passes over their bits, in plain PyTorch: the twin of the ops in ops_sampler.py.

A code is a logit's 32 bits as an unsigned number of the same order. Three passes of 11, 11 and 10 bits find a code:
each adds up, for every value of the next digit, the columns whose higher digits are the row's prefix; a prefix of -1
marks a row that does not ask. All sums are of integers, so neither the order of columns nor their split over ranks
matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcllm.kernels.reference import ordered_bits

DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the passes
MASS_BITS = 40  # the most probable id has mass 2^40: 2^22 columns fit into int64
LOG2_E = 1.4426950408889634
EXP2_COEFFICIENTS = (  # 2^f on [0, 1), relative error 2e-9 before rounding; fitted by weighted least squares
    2.1702255e-4,
    1.2439688e-3,
    9.6788406e-3,
    5.5483341e-2,
    2.4022983e-1,
    6.9314700e-1,
    1.0,
)


def largest(logits_lv: Tensor, num_ids: int) -> Tensor:
    """The largest logit of each row among the first num_ids that is not NaN; -inf where there is none."""
    logits_lv = logits_lv[:, :num_ids]
    floor_l1 = logits_lv.new_full((logits_lv.shape[0], 1), float("-inf"))
    numbers_lv = torch.where(torch.isnan(logits_lv), float("-inf"), logits_lv)
    return torch.cat([numbers_lv, floor_l1], dim=-1).amax(dim=-1)


def histogram(
    logits_lv: Tensor,
    num_ids: int,
    prefix_l: Tensor,
    index: int,
    floor_l: Tensor,
    largest_l: Tensor,
    heat_l: Tensor,
    by_mass: bool,
) -> Tensor:
    """What each value of digit `index` holds, int64 [l, 2^bits]: how many columns, or their mass at or above the floor.

    Only columns whose higher digits equal the prefix take part: a range of codes. After the first pass these are few,
    so they are gathered. (Their number is read on the host: this runs inside an op, on CPU.)
    """
    shift, bits = DIGITS[index]
    logits_lv = logits_lv[:, :num_ids]
    low_l = torch.where(prefix_l < 0, 1, prefix_l << (shift + bits))
    high_l = torch.where(prefix_l < 0, 0, low_l + (1 << (shift + bits)) - 1)
    if by_mass:
        low_l = torch.maximum(low_l, floor_l)
    low_l, high_l = ((x - (1 << 31)).to(torch.int32) for x in (low_l, high_l))
    ordered_lv = ordered_bits(logits_lv)
    part_lv = (ordered_lv >= low_l[:, None]) & (ordered_lv <= high_l[:, None])
    row_i, column_i = part_lv.nonzero(as_tuple=True)
    logit_i = logits_lv[row_i, column_i]
    digit_i = (code_of(logit_i) >> shift) & ((1 << bits) - 1)
    amount_i = torch.ones_like(digit_i)
    if by_mass:
        amount_i = masses(logit_i, largest_l[row_i], heat_l[row_i])
    histogram_x = digit_i.new_zeros(logits_lv.shape[0] << bits)
    return histogram_x.index_add(0, (row_i << bits) + digit_i, amount_i).unflatten(0, (logits_lv.shape[0], 1 << bits))


def select(histogram_lx: Tensor, missing_l: Tensor, prefix_l: Tensor) -> tuple[Tensor, Tensor]:
    """(the prefix with one digit more, what is missing behind it): the largest digit that reaches what is missing.

    Where all digits together do not reach it, the digit is 0. A prefix of -1 stays.
    """
    above_lx = histogram_lx.flip(-1).cumsum(-1).flip(-1)
    digit_l = ((above_lx >= missing_l[:, None]).sum(-1) - 1).clamp(min=0)
    passed_l = torch.gather(above_lx - histogram_lx, 1, digit_l[:, None])[:, 0]
    return torch.where(prefix_l < 0, prefix_l, prefix_l * histogram_lx.shape[1] + digit_l), missing_l - passed_l


def code_of(logits: Tensor) -> Tensor:
    """fp32 -> int64 in [0, 2^32) in the same order."""
    return ordered_bits(logits).long() + (1 << 31)


def logit_of(code: Tensor) -> Tensor:
    """The inverse of code_of."""
    ordered = (code - (1 << 31)).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def masses(logits: Tensor, largest: Tensor, heat: Tensor) -> Tensor:
    """exp((logit - largest) / heat) as int64 multiples of 2^-40, elementwise.

    Made of additions, products and shifts only, whose results are the same in every position of a tensor; library
    exponentials may differ by a bit between the body of a vector loop and its end.
    """
    octaves = torch.where(logits == largest, 0.0, (logits - largest) * (LOG2_E / heat))
    octaves = torch.nan_to_num(octaves, nan=-64.0).clamp(min=-64.0, max=0.0)
    whole = octaves.floor()
    fraction = octaves - whole
    power = torch.full_like(fraction, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = power * fraction + coefficient
    mantissa = (power * float(1 << MASS_BITS)).long()
    return mantissa >> (-whole).long().clamp(max=63)
