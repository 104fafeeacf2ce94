"""Triton kernels of the sampler's threshold; each equals its twin in radix.py bit for bit.

Programs of rows that do not ask return at once. Counts are gathered in shared memory; masses are added in global memory
and only where they are not zero: behind top-k that is a handful of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcllm.kernels import radix
from funcllm.kernels.triton_sampler import any_forbidden, without_forbidden

_BLOCK = 4096
_PROGRAMS = 1024  # wanted in all, over rows and splits of the vocabulary
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

_LOG2_E = tl.constexpr(radix.LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in radix.EXP2_COEFFICIENTS)
_MASS_ONE = tl.constexpr(float(1 << radix.MASS_BITS))


def largest(logits_lv: Tensor, forbidden_ls: Tensor, first_id: int, num_ids: int) -> Tensor:
    """radix.largest."""
    rows = logits_lv.shape[0]
    splits, span = _split(rows, num_ids)
    part_ls = torch.empty((rows, splits), dtype=torch.float32, device=logits_lv.device)
    if rows:
        _largest_kernel[(rows, splits)](
            logits_lv,
            forbidden_ls.contiguous(),
            part_ls,
            logits_lv.stride(0),
            first_id,
            num_ids,
            span,
            NUM_FORBIDDEN=forbidden_ls.shape[1],
            BLOCK=_BLOCK,
            **_OPTIONS,
        )
    return part_ls.amax(-1)


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
    """radix.histogram."""
    rows = logits_lv.shape[0]
    shift, bits = radix.DIGITS[index]
    histogram_lx = torch.zeros((rows, 1 << bits), dtype=torch.int64, device=logits_lv.device)
    if rows:
        splits, span = _split(rows, num_ids)
        _histogram_kernel[(rows, splits)](
            logits_lv,
            forbidden_ls.contiguous(),
            prefix_l,
            floor_l,
            largest_l,
            heat_l,
            histogram_lx,
            logits_lv.stride(0),
            first_id,
            num_ids,
            span,
            NUM_FORBIDDEN=forbidden_ls.shape[1],
            SHIFT=shift,
            BITS=bits,
            BY_MASS=by_mass,
            BLOCK=_BLOCK,
            **_OPTIONS,
        )
    return histogram_lx


def select(histogram_lx: Tensor, missing_l: Tensor, prefix_l: Tensor) -> tuple[Tensor, Tensor]:
    """radix.select."""
    rows, bins = histogram_lx.shape
    next_l, left_l = torch.empty_like(prefix_l), torch.empty_like(prefix_l)
    if rows:
        _select_kernel[(rows,)](
            histogram_lx.contiguous(), missing_l.contiguous(), prefix_l, next_l, left_l, BINS=bins, num_warps=4
        )
    return next_l, left_l


def _split(rows: int, num_ids: int) -> tuple[int, int]:
    tiles = max(1, triton.cdiv(num_ids, _BLOCK))
    splits = max(1, min(tiles, triton.cdiv(_PROGRAMS, max(rows, 1))))
    span = triton.cdiv(tiles, splits) * _BLOCK
    return max(1, triton.cdiv(num_ids, span)), span


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _largest_kernel(
    logits_ptr,
    forbidden_ptr,
    out_ptr,
    stride,
    first_id,
    num_ids,
    span,
    NUM_FORBIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits_ptr += row.to(tl.int64) * stride
    forbidden_ptr += row * NUM_FORBIDDEN
    narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
    begin = part * span
    end = tl.minimum(begin + span, num_ids)
    best_v = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK):
        at_v = start + tl.arange(0, BLOCK)
        x_v = tl.load(logits_ptr + at_v, mask=at_v < end, other=float("-inf"))
        if narrowed:
            x_v = without_forbidden(x_v, first_id + at_v, forbidden_ptr, NUM_FORBIDDEN)
        best_v = tl.maximum(best_v, tl.where(x_v == x_v, x_v, float("-inf")))
    tl.store(out_ptr + row * tl.num_programs(1) + part, tl.max(best_v, axis=0))


@triton.jit
def octave_of(heat):
    """How many octaves of probability one unit of a logit is worth, as [1]."""
    one = tl.full((1,), 1.0, tl.float32)
    return tl.div_rn(one * _LOG2_E, one * heat)


@triton.jit
def mass_of(x_v, largest, octave):
    """radix.masses, operation by operation."""
    octaves_v = (x_v - largest) * octave
    octaves_v = tl.where(x_v == largest, 0.0, octaves_v)
    octaves_v = tl.where(octaves_v == octaves_v, octaves_v, -64.0)
    octaves_v = tl.minimum(tl.maximum(octaves_v, -64.0), 0.0)
    whole_v = tl.floor(octaves_v)
    fraction_v = octaves_v - whole_v
    power_v = fraction_v * _C0 + _C1
    power_v = power_v * fraction_v + _C2
    power_v = power_v * fraction_v + _C3
    power_v = power_v * fraction_v + _C4
    power_v = power_v * fraction_v + _C5
    power_v = power_v * fraction_v + _C6
    mantissa_v = (power_v * _MASS_ONE).to(tl.int64)
    return mantissa_v >> tl.minimum((-whole_v).to(tl.int64), 63)


@triton.jit
def _histogram_kernel(
    logits_ptr,
    forbidden_ptr,
    prefix_ptr,
    floor_ptr,
    largest_ptr,
    heat_ptr,
    out_ptr,
    stride,
    first_id,
    num_ids,
    span,
    NUM_FORBIDDEN: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    prefix = tl.load(prefix_ptr + row)
    if prefix >= 0:
        begin = tl.program_id(1) * span
        end = tl.minimum(begin + span, num_ids)
        logits_ptr += row.to(tl.int64) * stride
        out_ptr += row.to(tl.int64) * (1 << BITS)
        forbidden_ptr += row * NUM_FORBIDDEN
        narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
        floor = tl.load(floor_ptr + row)
        largest = tl.load(largest_ptr + row)
        octave = octave_of(tl.load(heat_ptr + row))
        counts_x = tl.zeros((1 << BITS,), tl.int32)
        for start in range(begin, end, BLOCK):
            at_v = start + tl.arange(0, BLOCK)
            live_v = at_v < end
            x_v = tl.load(logits_ptr + at_v, mask=live_v, other=0.0)
            if narrowed:
                x_v = without_forbidden(x_v, first_id + at_v, forbidden_ptr, NUM_FORBIDDEN)
            x_v = tl.where(x_v == x_v, x_v, float("-inf"))
            bits_v = x_v.to(tl.int32, bitcast=True)
            code_v = (bits_v ^ ((bits_v >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
            part_v = live_v & ((code_v >> (SHIFT + BITS)) == prefix)
            if BY_MASS:
                part_v = part_v & (code_v >= floor)
            if tl.max(part_v.to(tl.int32), axis=0) > 0:
                digit_v = ((code_v >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
                if BY_MASS:
                    mass_v = mass_of(x_v, largest, octave)
                    tl.atomic_add(out_ptr + digit_v, mass_v, mask=part_v & (mass_v > 0), sem="relaxed")
                else:
                    counts_x += tl.histogram(digit_v, 1 << BITS, mask=part_v)
        if not BY_MASS:
            at_x = tl.arange(0, 1 << BITS)
            tl.atomic_add(out_ptr + at_x, counts_x.to(tl.int64), mask=counts_x > 0, sem="relaxed")


@triton.jit
def _select_kernel(histogram_ptr, missing_ptr, prefix_ptr, next_ptr, left_ptr, BINS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at_x = tl.arange(0, BINS)
    amount_x = tl.load(histogram_ptr + row * BINS + at_x)
    missing = tl.load(missing_ptr + row)
    prefix = tl.load(prefix_ptr + row)
    higher_x = tl.sum(amount_x, axis=0) - tl.cumsum(amount_x, axis=0)
    digit = tl.maximum(tl.sum((higher_x + amount_x >= missing).to(tl.int64), axis=0) - 1, 0)
    passed = tl.sum(tl.where(at_x == digit, higher_x, 0), axis=0)
    tl.store(next_ptr + row, tl.where(prefix < 0, prefix, prefix * BINS + digit))
    tl.store(left_ptr + row, missing - passed)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    signature = {
        "logits_ptr": "*fp32",
        "forbidden_ptr": "*i32",
        "first_id": "i32",
        "prefix_ptr": "*i64",
        "floor_ptr": "*i64",
        "largest_ptr": "*fp32",
    }
    signature |= {"heat_ptr": "*fp32", "out_ptr": "*i64", "stride": "i32", "num_ids": "i32", "span": "i32"}
    histograms = [
        (
            f"histogram-{'mass' if by_mass else 'count'}-{index}",
            _histogram_kernel,
            signature,
            dict(zip(("SHIFT", "BITS"), radix.DIGITS[index]), NUM_FORBIDDEN=8, BY_MASS=by_mass, BLOCK=_BLOCK),
            {"num_warps": 8},
        )
        for by_mass, index in ((False, 0), (False, 2), (True, 0))
    ]
    pointers = ("histogram_ptr", "missing_ptr", "prefix_ptr", "next_ptr", "left_ptr")
    select_variant = ("select", _select_kernel, dict.fromkeys(pointers, "*i64"), {"BINS": 2048}, {"num_warps": 4})
    signature = {"logits_ptr": "*fp32", "forbidden_ptr": "*i32", "out_ptr": "*fp32"}
    signature |= dict.fromkeys(("stride", "first_id", "num_ids", "span"), "i32")
    constants = {"NUM_FORBIDDEN": 8, "BLOCK": _BLOCK}
    largest_variant = ("largest-logit", _largest_kernel, signature, constants, {"num_warps": 8})
    return [*histograms, select_variant, largest_variant]
