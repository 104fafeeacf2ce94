"""Order statistics of logits by radix passes over their bits, in plain PyTorch: the twin of the ops in ops_sampler.py.

A code is a logit's 32 bits as an unsigned number of the same order. Three passes of 11, 11 and 10 bits find a code:
each adds up, for every value of the next digit, the columns whose higher digits are the row's prefix; a prefix of -1
marks a row that does not ask. All sums are of integers, so neither the order of columns nor their split over ranks
matters. A NaN logit and one of a forbidden id count as -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcllm.kernels.reference import forbid, ordered_bits

Reduce = Callable[[Tensor], Tensor]

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


def threshold(
    logits_lv: Tensor,
    forbidden_ls: Tensor,
    first_id: int,
    num_ids: int,
    temperature_l: Tensor,
    top_k_l: Tensor,
    top_p_l: Tensor,
    passes: tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]],
    reduce_sum: Reduce,
    reduce_max: Reduce,
) -> tuple[Tensor, Tensor]:
    """(what top-k and top-p let through at the least, -inf where a row does not ask; the largest logit) of each row.

    passes: the functions `largest`, `histogram` and `select`, or ops of the same contract.
    """
    largest, histogram, select = passes
    sampled_l = temperature_l > 0
    heat_l = torch.where(sampled_l, temperature_l, 1.0)
    largest_l = reduce_max(largest(logits_lv, forbidden_ls, first_id, num_ids))

    def find(on_l: Tensor, floor_l: Tensor, by_mass: bool, target: Callable[[Tensor], Tensor]) -> Tensor:
        """The largest code at or above which columns (or mass) reach the target; 0 where the row does not ask."""
        prefix_l = torch.where(sampled_l & on_l, 0, -1)
        missing_l = prefix_l
        for index in range(len(DIGITS)):
            histogram_lx = reduce_sum(
                histogram(
                    logits_lv, forbidden_ls, first_id, num_ids, prefix_l, index, floor_l, largest_l, heat_l, by_mass
                )
            )
            if index == 0:
                missing_l = target(histogram_lx).clamp(min=1)
            prefix_l, missing_l = select(histogram_lx, missing_l, prefix_l)
        return prefix_l.clamp(min=0)

    zero_l = torch.zeros_like(top_k_l, dtype=torch.int64)
    code_l = find(top_k_l > 0, zero_l, False, lambda counts_lx: top_k_l.long())
    code_p_l = find(
        top_p_l < 1, code_l, True, lambda mass_lx: (top_p_l.double() * mass_lx.sum(-1)).ceil().to(torch.int64)
    )
    code_l = torch.maximum(code_l, code_p_l)
    return torch.where(code_l > 0, logit_of(code_l), float("-inf")), largest_l


def threshold_alone(
    logits_lv: Tensor,
    forbidden_ls: Tensor,
    first_id: int,
    num_ids: int,
    temperature_l: Tensor,
    top_k_l: Tensor,
    top_p_l: Tensor,
    min_p_l: Tensor,
) -> tuple[Tensor, Tensor]:
    """`threshold` where one rank has all columns. The largest logit is given where a row asks for a filter, else -inf.

    A top-k above the number of columns asks for nothing. What no filter may see is replaced once, ahead of the passes.
    """
    numbers_lv = numbers(logits_lv, forbidden_ls, first_id, num_ids)
    none_ls = forbidden_ls[:, :0]
    value_l, largest_l = threshold(
        numbers_lv,
        none_ls,
        first_id,
        num_ids,
        temperature_l,
        top_k_l,
        top_p_l,
        (largest, histogram, select),
        lambda x: x,
        lambda x: x,
    )
    by_count_l = (top_k_l > 0) & (top_k_l <= num_ids)
    asks_l = (temperature_l > 0) & (by_count_l | (top_p_l < 1) | (min_p_l > 0))
    return value_l, torch.where(asks_l, largest_l, float("-inf"))


def largest(logits_lv: Tensor, forbidden_ls: Tensor, first_id: int, num_ids: int) -> Tensor:
    """The largest logit of each row among the first num_ids; -inf where there is none."""
    numbers_lv = numbers(logits_lv, forbidden_ls, first_id, num_ids)
    floor_l1 = numbers_lv.new_full((numbers_lv.shape[0], 1), float("-inf"))
    return torch.cat([numbers_lv, floor_l1], dim=-1).amax(dim=-1)


def histogram(
    logits_lv: Tensor,
    forbidden_ls: Tensor,
    first_id: int,
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
    logits_lv = numbers(logits_lv, forbidden_ls, first_id, num_ids)
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


def numbers(logits_lv: Tensor, forbidden_ls: Tensor, first_id: int, num_ids: int) -> Tensor:
    """The first num_ids columns, -inf where a logit is NaN or its id forbidden; copied only where there is such a one.

    Its questions are answered on the host: this runs inside an op, on CPU.
    """
    numbers_lv = logits_lv[:, :num_ids]
    if bool((forbidden_ls >= 0).any()):
        numbers_lv = forbid(numbers_lv, forbidden_ls, first_id)
    if numbers_lv.numel() and bool(torch.isnan(numbers_lv.sum())):
        numbers_lv = torch.where(torch.isnan(numbers_lv), float("-inf"), numbers_lv)
    return numbers_lv
