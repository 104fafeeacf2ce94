"""The sampler's threshold on one GPU: the few logits that can matter are gathered first, then searched in registers.

Equal to radix.threshold_alone bit for bit. Five kernels, none of which copies the logits or asks the host:

maxima    the columns fall into 4096 groups by their number modulo 4096: the largest code of each group, in one read
bound     one program a row: the n-th largest group maximum, rounded down, so at least n logits reach it. n is the
          row's top-k; for a row with top-p alone it is a number that most nuclei stay below. Behind a small top-k it
          appends the logits at or above the bound to the row's buffer at once, from the few groups that have any
gather    does so for the other rows, in one read; behind a large top-k only of groups whose maximum reaches the bound,
          for top-p alone of all, where the row's whole mass is summed on the way
choose    one program a row: exact search among the gathered. A row is left over where they are not enough: the buffer
          was too small (many ties, a huge k), or the nucleus reaches below the bound
leftover  one program a row: radix passes over the whole row; returns at once where `choose` has answered

Codes here are int32: a logit's bits in an order-preserving form. A row that asks for nothing costs five empty programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcllm.kernels.triton_radix import mass_of, octave_of
from funcllm.kernels.triton_sampler import any_forbidden, without_forbidden

GROUPS = 4096
CAPACITY = 4096  # gathered logits a row
NUCLEUS = 2048  # logits looked at for top-p without top-k
FEW = 64  # groups that the bound's program reads itself
PAIRS = 128  # up to so many gathered logits are compared in pairs

_TILE = 2048
_PROGRAMS = 1024  # wanted in all, over rows and splits of the vocabulary
_STREAM = {"num_warps": 4, "enable_fp_fusion": False}
_SEARCH = {"num_warps": 8, "enable_fp_fusion": False}
_LEFTOVER_BLOCK = 4096

_GROUPS = tl.constexpr(GROUPS)
_CAPACITY = tl.constexpr(CAPACITY)
_NUCLEUS = tl.constexpr(NUCLEUS)
_FEW = tl.constexpr(FEW)
_FEW_DEPTH = tl.constexpr(64)
_PAIRS = tl.constexpr(PAIRS)
_LOWEST = tl.constexpr(-(1 << 31))
_MINUS_INF = tl.constexpr(-2139095041)  # the code of -inf
_BOUND_STEP = tl.constexpr(1 << 10)  # codes that a bound may lie too low: 2^-13 of the logit
_BINS = tl.constexpr(2048)


def threshold(
    logits_lv: Tensor,
    forbidden_ls: Tensor,
    first_id: int,
    num_ids: int,
    temperature_l: Tensor,
    top_k_l: Tensor,
    top_p_l: Tensor,
    min_p_l: Tensor,
) -> tuple[Tensor, Tensor]:
    """radix.threshold_alone."""
    rows, device = logits_lv.shape[0], logits_lv.device

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=device)

    value_l, largest_l = empty(torch.float32), empty(torch.float32)
    if rows == 0:
        return value_l, largest_l
    maxima_lg, bound_l = empty(torch.int32, GROUPS), empty(torch.int32)
    gathered_lc, count_l, mass_l = empty(torch.float32, CAPACITY), empty(torch.int32), empty(torch.int64)
    few_lg, is_gathered_l = empty(torch.int32, FEW), empty(torch.int32)
    is_left_l, bins_lx = empty(torch.int32), empty(torch.int64, _BINS.value)
    columns = (logits_lv, forbidden_ls.contiguous())
    settings = (temperature_l.contiguous(), top_k_l.contiguous(), top_p_l.contiguous(), min_p_l.contiguous())
    sizes = (logits_lv.stride(0), first_id, num_ids)
    constants = {"NUM_FORBIDDEN": forbidden_ls.shape[1]}
    splits = split_groups(rows)
    tile = {"WIDTH": GROUPS // splits, "DEPTH": _TILE * splits // GROUPS}

    _maxima_kernel[(rows, splits)](*columns, *settings, maxima_lg, *sizes, **constants, **tile, **_STREAM)
    _bound_kernel[(rows,)](
        *columns,
        *settings,
        maxima_lg,
        largest_l,
        bound_l,
        few_lg,
        gathered_lc,
        count_l,
        mass_l,
        is_gathered_l,
        *sizes,
        **constants,
        **_SEARCH,
    )
    _gather_kernel[(rows, splits)](
        *columns,
        *settings,
        maxima_lg,
        largest_l,
        bound_l,
        gathered_lc,
        count_l,
        mass_l,
        is_gathered_l,
        *sizes,
        **constants,
        **tile,
        **_STREAM,
    )
    _choose_kernel[(rows,)](
        gathered_lc, *settings, largest_l, bound_l, count_l, mass_l, value_l, is_left_l, num_ids, **_SEARCH
    )
    _leftover_kernel[(rows,)](
        *columns,
        *settings,
        largest_l,
        is_left_l,
        bins_lx,
        value_l,
        *sizes,
        **constants,
        BLOCK=_LEFTOVER_BLOCK,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return value_l, largest_l


def split_groups(rows: int) -> int:
    """How many programs share the groups of a row: a power of two that leaves each 32 to 2048 of them."""
    return min(128, max(2, triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows))))


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _asks(row, temperature_ptr, top_k_ptr, top_p_ptr, num_ids):
    """(k or 0, p or 1, whether the row is sampled): what a row asks; more than the vocabulary is off."""
    is_sampled = tl.load(temperature_ptr + row) > 0
    k = tl.load(top_k_ptr + row).to(tl.int32)
    k = tl.where(is_sampled & (k > 0) & (k <= num_ids), k, 0)
    p = tl.load(top_p_ptr + row)
    p = tl.where(is_sampled & (p < 1.0), p, 1.0)
    return k, p, is_sampled


@triton.jit
def _code(x_v):
    """Ordered bits of a logit; those of -inf for NaN."""
    x_v = tl.where(x_v == x_v, x_v, float("-inf"))
    bits_v = x_v.to(tl.int32, bitcast=True)
    return bits_v ^ ((bits_v >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(code):
    """The inverse of _code; -inf for what lies below."""
    code = tl.maximum(code, _MINUS_INF)
    return (code ^ ((code >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _maxima_kernel(
    logits_ptr,
    forbidden_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    stride,
    first_id,
    num_ids,
    NUM_FORBIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0)
    k, p, is_sampled = _asks(row, temperature_ptr, top_k_ptr, top_p_ptr, num_ids)
    if is_sampled & ((k > 0) | (p < 1.0) | (tl.load(min_p_ptr + row) > 0)):
        logits_ptr += row.to(tl.int64) * stride
        forbidden_ptr += row * NUM_FORBIDDEN
        narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
        group_w = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        at_dw = tl.arange(0, DEPTH)[:, None] * _GROUPS + group_w[None, :]
        best_dw = tl.full((DEPTH, WIDTH), _MINUS_INF, tl.int32)
        for start in range(0, num_ids, DEPTH * _GROUPS):
            x_dw = tl.load(logits_ptr + start + at_dw, mask=start + at_dw < num_ids, other=float("-inf"))
            if narrowed:
                x_dw = without_forbidden(x_dw, first_id + start + at_dw, forbidden_ptr, NUM_FORBIDDEN)
            best_dw = tl.maximum(best_dw, _code(x_dw))
        tl.store(maxima_ptr + row * _GROUPS + group_w, tl.max(best_dw, axis=0))


@triton.jit
def _append(x_v, kept_v, gathered_ptr, count_ptr):
    """Appends the kept logits to a row's buffer, in any order, and counts them; what does not fit is only counted."""
    place_v = tl.atomic_add(count_ptr + tl.zeros_like(kept_v.to(tl.int32)), 1, mask=kept_v, sem="relaxed")
    tl.store(gathered_ptr + place_v, x_v, mask=kept_v & (place_v < _CAPACITY))


@triton.jit
def _bound_kernel(
    logits_ptr,
    forbidden_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    largest_ptr,
    bound_ptr,
    few_ptr,
    gathered_ptr,
    count_ptr,
    mass_ptr,
    is_gathered_ptr,
    stride,
    first_id,
    num_ids,
    NUM_FORBIDDEN: tl.constexpr,
):
    row = tl.program_id(0)
    k, p, is_sampled = _asks(row, temperature_ptr, top_k_ptr, top_p_ptr, num_ids)
    largest = tl.full((), _MINUS_INF, tl.int32)
    bound = tl.full((), _MINUS_INF, tl.int32).to(tl.int64)
    is_gathered = 0
    tl.store(count_ptr + row, 0)
    if is_sampled & ((k > 0) | (p < 1.0) | (tl.load(min_p_ptr + row) > 0)):
        best_g = tl.load(maxima_ptr + row * _GROUPS + tl.arange(0, _GROUPS))
        largest = tl.max(best_g, axis=0)
        wanted = tl.where(k > 0, k, tl.where(p < 1.0, _NUCLEUS, _GROUPS + 1))
        if wanted <= _GROUPS:
            bound = tl.min(best_g, axis=0).to(tl.int64)
            span = largest.to(tl.int64) - bound
            step = tl.full((), 1 << 32, tl.int64)
            while step > span:
                step = step // 2
            while step >= _BOUND_STEP:
                reach = tl.sum((best_g >= (bound + step).to(tl.int32)).to(tl.int32), axis=0)
                bound += tl.where((bound + step <= largest) & (reach >= wanted), step, 0)
                step = step // 2
        wanted_g = best_g >= tl.maximum(bound, _MINUS_INF + 1).to(tl.int32)
        num_groups = tl.sum(wanted_g.to(tl.int32), axis=0)
        if (k > 0) & (num_groups <= _FEW):
            is_gathered = 1
            few_ptr += row * _FEW
            place_g = tl.cumsum(wanted_g.to(tl.int32), axis=0) - 1
            tl.store(few_ptr + place_g, tl.arange(0, _GROUPS), mask=wanted_g)
            tl.debug_barrier()
            logits_ptr += row.to(tl.int64) * stride
            forbidden_ptr += row * NUM_FORBIDDEN
            narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
            at_f = tl.arange(0, _FEW)
            group_f = tl.load(few_ptr + at_f, mask=at_f < num_groups, other=0)
            at_fd = group_f[:, None] + tl.arange(0, _FEW_DEPTH)[None, :] * _GROUPS
            for start in range(0, num_ids, _FEW_DEPTH * _GROUPS):
                live_fd = (start + at_fd < num_ids) & (at_f < num_groups)[:, None]
                x_fd = tl.load(logits_ptr + start + at_fd, mask=live_fd, other=float("-inf"))
                if narrowed:
                    x_fd = without_forbidden(x_fd, first_id + start + at_fd, forbidden_ptr, NUM_FORBIDDEN)
                code_fd = _code(x_fd)
                kept_fd = (code_fd >= bound.to(tl.int32)) & (code_fd > _MINUS_INF)
                _append(x_fd, kept_fd, gathered_ptr + row * _CAPACITY, count_ptr + row)
    tl.store(largest_ptr + row, _logit(largest))
    tl.store(bound_ptr + row, bound.to(tl.int32))
    tl.store(is_gathered_ptr + row, is_gathered)
    tl.store(mass_ptr + row, tl.zeros((), tl.int64))


@triton.jit
def _gather_kernel(
    logits_ptr,
    forbidden_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    largest_ptr,
    bound_ptr,
    gathered_ptr,
    count_ptr,
    mass_ptr,
    is_gathered_ptr,
    stride,
    first_id,
    num_ids,
    NUM_FORBIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0)
    k, p, _ = _asks(row, temperature_ptr, top_k_ptr, top_p_ptr, num_ids)
    if ((k > 0) | (p < 1.0)) & (tl.load(is_gathered_ptr + row) == 0):
        group_w = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        bound = tl.load(bound_ptr + row)
        best_w = tl.load(maxima_ptr + row * _GROUPS + group_w)
        by_mass = k == 0
        wanted_w = best_w >= tl.where(by_mass, _LOWEST, tl.maximum(bound, _MINUS_INF + 1))
        if tl.max(wanted_w.to(tl.int32), axis=0) > 0:
            logits_ptr += row.to(tl.int64) * stride
            gathered_ptr += row * _CAPACITY
            forbidden_ptr += row * NUM_FORBIDDEN
            narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
            largest = tl.load(largest_ptr + row)
            octave = octave_of(tl.load(temperature_ptr + row))
            at_dw = tl.arange(0, DEPTH)[:, None] * _GROUPS + group_w[None, :]
            mass_dw = tl.zeros((DEPTH, WIDTH), tl.int64)
            for start in range(0, num_ids, DEPTH * _GROUPS):
                live_dw = (start + at_dw < num_ids) & wanted_w[None, :]
                x_dw = tl.load(logits_ptr + start + at_dw, mask=live_dw, other=float("-inf"))
                if narrowed:
                    x_dw = without_forbidden(x_dw, first_id + start + at_dw, forbidden_ptr, NUM_FORBIDDEN)
                code_dw = _code(x_dw)
                kept_dw = (code_dw >= bound) & (code_dw > _MINUS_INF)
                _append(x_dw, kept_dw, gathered_ptr, count_ptr + row)
                if by_mass:
                    mass_dw += tl.where(code_dw > _MINUS_INF, mass_of(x_dw, largest, octave), 0)
            if by_mass:
                mass = tl.sum(tl.sum(mass_dw, axis=0), axis=0)
                if mass > 0:
                    tl.atomic_add(mass_ptr + row, mass, sem="relaxed")


@triton.jit
def _target(p, mass):
    """The mass that top-p wants."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _choose_pairs(code_n, mass_n, k, p, mass):
    """(the code that top-k asks for, that of top-p) among a few codes; _LOWEST where they do not reach or none asks.

    mass: that of the whole row, for a row without top-k. Codes of -inf are padding.
    """
    above_nn = code_n[None, :] >= code_n[:, None]
    live_n = code_n > _MINUS_INF
    code_k = tl.full((), _LOWEST, tl.int32)
    if k > 0:
        rank_n = tl.sum(above_nn.to(tl.int32), axis=1)
        code_k = tl.max(tl.where(live_n & (rank_n >= k), code_n, _LOWEST), axis=0)
        mass_n = tl.where(code_n >= code_k, mass_n, 0)
        mass = tl.sum(mass_n, axis=0)
    code_p = tl.full((), _LOWEST, tl.int32)
    if p < 1.0:
        reach_n = tl.sum(tl.where(above_nn, mass_n[None, :], 0), axis=1)
        code_p = tl.max(tl.where(live_n & (reach_n >= _target(p, mass)), code_n, _LOWEST), axis=0)
    return code_k, code_p


@triton.jit
def _choose_steps(code_n, mass_n, bound, largest, k, p, mass):
    """The same for many codes, all of them between bound and largest: a search bit by bit."""
    span = largest.to(tl.int64) - bound.to(tl.int64)
    first = tl.full((), 1 << 32, tl.int64)
    while first > span:
        first = first // 2
    code_k = tl.full((), _LOWEST, tl.int32)
    if k > 0:
        if tl.sum((code_n > _MINUS_INF).to(tl.int32), axis=0) >= k:
            low = bound.to(tl.int64)
            step = first
            while step > 0:
                reach = tl.sum((code_n >= (low + step).to(tl.int32)).to(tl.int32), axis=0)
                low += tl.where((low + step <= largest) & (reach >= k), step, 0)
                step = step // 2
            code_k = low.to(tl.int32)
        mass_n = tl.where(code_n >= code_k, mass_n, 0)
        mass = tl.sum(mass_n, axis=0)
    code_p = tl.full((), _LOWEST, tl.int32)
    if p < 1.0:
        target = _target(p, mass)
        if tl.sum(mass_n, axis=0) >= target:
            low = bound.to(tl.int64)
            step = first
            while step > 0:
                reach = tl.sum(tl.where(code_n >= (low + step).to(tl.int32), mass_n, 0), axis=0)
                low += tl.where((low + step <= largest) & (reach >= target), step, 0)
                step = step // 2
            code_p = low.to(tl.int32)
    return code_k, code_p


@triton.jit
def _gathered(gathered_ptr, count, largest, octave, SIZE: tl.constexpr):
    """(codes, masses) of what was gathered; -inf and 0 behind it."""
    at_n = tl.arange(0, SIZE)
    x_n = tl.load(gathered_ptr + at_n, mask=at_n < count, other=float("-inf"))
    return _code(x_n), tl.where(at_n < count, mass_of(x_n, largest, octave), 0)


@triton.jit
def _choose_kernel(
    gathered_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    bound_ptr,
    count_ptr,
    mass_ptr,
    value_ptr,
    is_left_ptr,
    num_ids,
):
    row = tl.program_id(0)
    k, p, _ = _asks(row, temperature_ptr, top_k_ptr, top_p_ptr, num_ids)
    count = tl.load(count_ptr + row)
    code_k = tl.full((), _LOWEST, tl.int32)
    code_p = tl.full((), _LOWEST, tl.int32)
    is_left = count > _CAPACITY
    if ((k > 0) | (p < 1.0)) & (count > 0) & (count <= _CAPACITY):
        gathered_ptr += row * _CAPACITY
        bound = tl.load(bound_ptr + row)
        largest = tl.load(largest_ptr + row)
        mass = tl.load(mass_ptr + row)
        octave = octave_of(tl.load(temperature_ptr + row))
        if count <= _PAIRS:
            code_n, mass_n = _gathered(gathered_ptr, count, largest, octave, _PAIRS)
            code_k, code_p = _choose_pairs(code_n, mass_n, k, p, mass)
        else:
            code_c, mass_c = _gathered(gathered_ptr, count, largest, octave, _CAPACITY)
            code_k, code_p = _choose_steps(code_c, mass_c, bound, _code(largest), k, p, mass)
        is_short = ((k > 0) & (code_k == _LOWEST) & (bound > _MINUS_INF)) | ((p < 1.0) & (code_p == _LOWEST))
        is_left = is_left | is_short
    tl.store(value_ptr + row, _logit(tl.maximum(code_k, code_p)))
    tl.store(is_left_ptr + row, is_left.to(tl.int32))


@triton.jit
def _add_up(
    bins_ptr,
    logits_ptr,
    forbidden_ptr,
    first_id,
    num_ids,
    prefix,
    floor,
    largest,
    octave,
    narrowed,
    by_mass,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    NUM_FORBIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """radix.histogram of one row, by one program; the bins in global memory are 0 before and after."""
    for start in range(0, num_ids, BLOCK):
        at_v = start + tl.arange(0, BLOCK)
        x_v = tl.load(logits_ptr + at_v, mask=at_v < num_ids, other=float("-inf"))
        if narrowed:
            x_v = without_forbidden(x_v, first_id + at_v, forbidden_ptr, NUM_FORBIDDEN)
        code_v = _code(x_v).to(tl.int64) + 2147483648
        part_v = (at_v < num_ids) & ((code_v >> (SHIFT + BITS)) == prefix) & (code_v >= floor)
        amount_v = tl.full((BLOCK,), 1, tl.int64)
        if by_mass:
            amount_v = mass_of(_logit(_code(x_v)), largest, octave)
        digit_v = ((code_v >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        tl.atomic_add(bins_ptr + digit_v, amount_v, mask=part_v & (amount_v > 0), sem="relaxed")
    tl.debug_barrier()
    amount_x = tl.atomic_xchg(bins_ptr + tl.arange(0, _BINS), tl.zeros((_BINS,), tl.int64), sem="relaxed")
    tl.debug_barrier()
    return amount_x


@triton.jit
def _leftover_kernel(
    logits_ptr,
    forbidden_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    is_left_ptr,
    bins_ptr,
    value_ptr,
    stride,
    first_id,
    num_ids,
    NUM_FORBIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(is_left_ptr + row) != 0:
        k, p, _ = _asks(row, temperature_ptr, top_k_ptr, top_p_ptr, num_ids)
        logits_ptr += row.to(tl.int64) * stride
        forbidden_ptr += row * NUM_FORBIDDEN
        narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
        bins_ptr += row * _BINS
        at_x = tl.arange(0, _BINS)
        tl.store(bins_ptr + at_x, tl.zeros((_BINS,), tl.int64))
        tl.debug_barrier()
        largest = tl.load(largest_ptr + row)
        octave = octave_of(tl.load(temperature_ptr + row))
        code = tl.zeros((), tl.int64)
        for turn in range(2):
            by_mass = turn == 1
            if (by_mass & (p < 1.0)) | ((turn == 0) & (k > 0)):
                floor = tl.where(by_mass, code, 0)
                prefix = tl.zeros((), tl.int64)
                missing = k.to(tl.int64)
                for index in tl.static_range(3):
                    amount_x = _add_up(
                        bins_ptr,
                        logits_ptr,
                        forbidden_ptr,
                        first_id,
                        num_ids,
                        prefix,
                        floor,
                        largest,
                        octave,
                        narrowed,
                        by_mass,
                        21 - 11 * index + index // 2,
                        11 - index // 2,
                        NUM_FORBIDDEN,
                        BLOCK,
                    )
                    total = tl.sum(amount_x, axis=0)
                    if index == 0:
                        missing = tl.where(by_mass, _target(p, total), missing)
                    higher_x = total - tl.cumsum(amount_x, axis=0)
                    digit = tl.maximum(tl.sum((higher_x + amount_x >= missing).to(tl.int64), axis=0) - 1, 0)
                    missing -= tl.sum(tl.where(at_x == digit, higher_x, 0), axis=0)
                    prefix = (prefix << (11 - index // 2)) + digit
                code = tl.maximum(code, prefix)
        tl.store(value_ptr + row, _logit((code - 2147483648).to(tl.int32)))


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    kinds = {"logits_ptr": "*fp32", "gathered_ptr": "*fp32", "largest_ptr": "*fp32", "value_ptr": "*fp32"}
    kinds |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp32")
    kinds |= dict.fromkeys(("forbidden_ptr", "top_k_ptr", "maxima_ptr", "bound_ptr", "few_ptr"), "*i32")
    kinds |= dict.fromkeys(("count_ptr", "is_left_ptr", "is_gathered_ptr"), "*i32") | dict.fromkeys(
        ("mass_ptr", "bins_ptr"), "*i64"
    )
    kinds |= dict.fromkeys(("stride", "first_id", "num_ids"), "i32")

    def variant(name: str, kernel: Any, num_warps: int, **constants: int) -> Any:
        signature = {argument: kinds[argument] for argument in kernel.arg_names if argument in kinds}
        return name, kernel, signature, constants, {"num_warps": num_warps}

    streams = []
    for rows in (2, 64, 256):
        width = GROUPS // split_groups(rows)
        tile = {"NUM_FORBIDDEN": 8, "WIDTH": width, "DEPTH": _TILE // width}
        streams += [
            variant(f"maxima-{rows}", _maxima_kernel, 4, **tile),
            variant(f"gather-{rows}", _gather_kernel, 4, **tile),
        ]
    return [
        *streams,
        variant("bound", _bound_kernel, 8, NUM_FORBIDDEN=8),
        variant("choose", _choose_kernel, 8),
        variant("leftover", _leftover_kernel, 16, NUM_FORBIDDEN=8, BLOCK=_LEFTOVER_BLOCK),
    ]
