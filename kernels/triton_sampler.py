"""Triton sampler: the winner of every row in one pass over fp32 logits, and the small kernels around it.

The noise of a token is recomputed in the kernel, bit for bit as reference.noise_bits has it. Its logarithms are skipped
where they cannot matter: a standard Gumbel value is at most -log(u), and the float's own bits bound that from above, so
a tile whose best bound lies below the best score so far holds no winner. The result is exact all the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from funcllm.kernels.triton_fused import launch_options

_BLOCK = 1024
_PROGRAMS = 1024  # wanted in all, over rows and splits of the vocabulary
_ROWS = {"BLOCK": 128, "num_warps": 4, "enable_fp_fusion": False}  # of the kernels with one number a row

_LOWEST = tl.constexpr(-(1 << 63))
_GOLDEN = tl.constexpr(0x9E3779B9)
_MIX_FIRST = tl.constexpr(0x85EBCA6B)
_MIX_SECOND = tl.constexpr(0xC2B2AE35)
_FIRST_MULTIPLIER = tl.constexpr(0xD2511F53)
_SECOND_MULTIPLIER = tl.constexpr(0xCD9E8D57)
_FIRST_WEYL = tl.constexpr(0x9E3779B9)
_SECOND_WEYL = tl.constexpr(0xBB67AE85)
_TINY = tl.constexpr(2.0**-126)
_LOG_2 = tl.constexpr(0.6931471805599453)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)


def pick(
    logits_lv: Tensor,
    temperature_l: Tensor,
    keys_l2: Tensor,
    threshold_l: Tensor | None,
    first_id: int,
    num_ids: int,
    forbidden_ls: Tensor | None = None,
    *,
    pdl: bool = False,
    interpreted: bool = False,
) -> Tensor:
    """The reference's pick; the smallest int64 for a shard without ids. interpreted: do without libdevice."""
    rows = logits_lv.shape[0]
    key_l = torch.empty(rows, dtype=torch.int64, device=logits_lv.device)
    if rows == 0:
        return key_l
    splits, span = split_vocabulary(rows, num_ids)
    key_ls = torch.empty((rows, splits), dtype=torch.int64, device=logits_lv.device) if splits > 1 else key_l
    _pick_kernel[(rows, splits)](
        logits_lv,
        temperature_l.contiguous(),
        keys_l2.contiguous(),
        temperature_l if threshold_l is None else threshold_l.contiguous(),
        keys_l2 if forbidden_ls is None else forbidden_ls.contiguous(),
        key_ls,
        logits_lv.stride(0),
        first_id,
        num_ids,
        span,
        NUM_FORBIDDEN=0 if forbidden_ls is None else forbidden_ls.shape[1],
        HAS_THRESHOLD=threshold_l is not None,
        LIBDEVICE=not interpreted,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )
    if splits > 1:
        _largest_kernel[(rows,)](
            key_ls, key_l, splits, BLOCK=triton.next_power_of_2(splits), num_warps=1, **launch_options(pdl)
        )
    return key_l


def noise_keys(seed_l: Tensor, position_l: Tensor) -> Tensor:
    """reference.noise_keys."""
    keys_l2 = torch.empty((seed_l.shape[0], 2), dtype=torch.int64, device=seed_l.device)
    _each_row(_noise_keys_kernel, seed_l, position_l, keys_l2)
    return keys_l2


def token_of(key_l: Tensor) -> Tensor:
    """reference.token_of."""
    token_l = torch.empty(key_l.shape, dtype=torch.int32, device=key_l.device)
    _each_row(_token_kernel, key_l, token_l)
    return token_l


def with_min_p(threshold_l: Tensor, largest_l: Tensor, temperature_l: Tensor, min_p_l: Tensor) -> Tensor:
    """reference.with_min_p, by libdevice's logarithm."""
    raised_l = torch.empty(threshold_l.shape, dtype=torch.float32, device=threshold_l.device)
    _each_row(_min_p_kernel, threshold_l, largest_l, temperature_l, min_p_l, raised_l)
    return raised_l


def _each_row(kernel: Any, *tensors: Tensor) -> None:
    """Launches a kernel over rows; the last tensor is its result."""
    num_rows = tensors[-1].shape[0]
    if num_rows:
        kernel[(triton.cdiv(num_rows, _ROWS["BLOCK"]),)](*(x.contiguous() for x in tensors), num_rows, **_ROWS)


def noise_bits(keys_l2: Tensor, first_id: int, num_ids: int) -> Tensor:
    """The pick kernel's own noise bits, int64 [l, num_ids], to be compared with reference.noise_bits."""
    bits_lv = torch.empty((keys_l2.shape[0], num_ids), dtype=torch.int64, device=keys_l2.device)
    grid = (keys_l2.shape[0], triton.cdiv(num_ids, _BLOCK))
    _bits_kernel[grid](keys_l2.contiguous(), bits_lv, first_id, num_ids, BLOCK=_BLOCK)
    return bits_lv


def split_vocabulary(rows: int, num_ids: int) -> tuple[int, int]:
    """(programs a row, ids that each of them reads), from sizes alone."""
    tiles = max(1, triton.cdiv(num_ids, _BLOCK))
    splits = max(1, min(tiles, triton.cdiv(_PROGRAMS, rows), 256))
    span = triton.cdiv(tiles, splits) * _BLOCK
    return max(1, triton.cdiv(num_ids, span)), span


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def philox_words(seed, position):
    """reference.noise_keys of rows, in uint32 arithmetic, which wraps as the masks there do; seed is int64."""
    c0 = position.to(tl.uint32)
    c1 = c0 & 0
    c2 = c1
    c3 = c1
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * _FIRST_MULTIPLIER
        second = c2.to(tl.uint64) * _SECOND_MULTIPLIER
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        k0 = k0 + _FIRST_WEYL
        k1 = k1 + _SECOND_WEYL
    return c0.to(tl.int64), c1.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def _noise_keys_kernel(seed_ptr, position_ptr, keys_ptr, num_rows, BLOCK: tl.constexpr):
    row_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live_l = row_l < num_rows
    seed_l = tl.load(seed_ptr + row_l, mask=live_l, other=0).to(tl.int64)
    first_l, second_l = philox_words(seed_l, tl.load(position_ptr + row_l, mask=live_l, other=0))
    tl.store(keys_ptr + row_l * 2, first_l, mask=live_l)
    tl.store(keys_ptr + row_l * 2 + 1, second_l, mask=live_l)


@triton.jit(do_not_specialize=["num_rows"])
def _token_kernel(key_ptr, token_ptr, num_rows, BLOCK: tl.constexpr):
    row_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live_l = row_l < num_rows
    key_l = tl.load(key_ptr + row_l, mask=live_l, other=0)
    token_l = (0xFFFFFFFF - (key_l & 0xFFFFFFFF)).to(tl.int32)
    tl.store(token_ptr + row_l, tl.where((key_l >> 32) == 0x7FFFFFFF, -1, token_l), mask=live_l)


@triton.jit(do_not_specialize=["num_rows"])
def _min_p_kernel(threshold_ptr, largest_ptr, temperature_ptr, min_p_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    row_l = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live_l = row_l < num_rows
    threshold_l = tl.load(threshold_ptr + row_l, mask=live_l, other=0.0)
    largest_l = tl.load(largest_ptr + row_l, mask=live_l, other=0.0)
    heat_l = tl.load(temperature_ptr + row_l, mask=live_l, other=0.0)
    min_p_l = tl.load(min_p_ptr + row_l, mask=live_l, other=0.0)
    asks_l = (heat_l > 0) & (min_p_l > 0)
    least_l = largest_l + heat_l * tl.log(tl.maximum(min_p_l, _TINY))
    least_l = tl.minimum(least_l, largest_l, propagate_nan=tl.PropagateNan.ALL)
    least_l = tl.where(asks_l, least_l, float("-inf"))
    tl.store(out_ptr + row_l, tl.maximum(threshold_l, least_l, propagate_nan=tl.PropagateNan.ALL), mask=live_l)


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * _MIX_FIRST
    x = x ^ (x >> 13)
    x = x * _MIX_SECOND
    return x ^ (x >> 16)


@triton.jit
def _noise_bits(id_v, low_key, high_key):
    """reference.noise_bits in uint32 arithmetic, which wraps as the masks there do."""
    x = _mix32(id_v.to(tl.uint32) * _GOLDEN + low_key)
    return _mix32(x ^ high_key)


@triton.jit
def _gumbel(u, LIBDEVICE: tl.constexpr):
    """-log(-log1p(-u)); without libdevice log1p(-u) is log(w) * u / (1 - w), w = 1 - u, exact where w rounds."""
    u = tl.minimum(u, _LARGEST_UNIFORM)
    if LIBDEVICE:
        exponential = -libdevice.log1p(-u)
        noise = -libdevice.log(exponential)
    else:
        w = 1.0 - u
        lost = 1.0 - w
        exponential = tl.where(lost == 0.0, u, -tl.log(w) * (u / tl.where(lost == 0.0, 1.0, lost)))
        noise = -tl.log(exponential)
    return noise


@triton.jit
def _ordered(score):
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(score, x, id_v):
    high = tl.where(x != x, 0x7FFFFFFF, _ordered(score)).to(tl.int64)
    return (high << 32) | (0xFFFFFFFF - id_v.to(tl.int64))


@triton.jit
def any_forbidden(forbidden_ptr, NUM: tl.constexpr):
    """Whether a row, whose NUM forbidden ids start at the pointer, has one that is not -1."""
    last = tl.full((), -1, tl.int32)
    for index in tl.static_range(NUM):
        last = tl.maximum(last, tl.load(forbidden_ptr + index))
    return last >= 0


@triton.jit
def without_forbidden(x_v, id_v, forbidden_ptr, NUM: tl.constexpr):
    """The logits with -inf at a row's forbidden ids."""
    for index in tl.static_range(NUM):
        x_v = tl.where(id_v == tl.load(forbidden_ptr + index), float("-inf"), x_v)
    return x_v


@triton.jit
def _pick_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    threshold_ptr,
    forbidden_ptr,
    out_ptr,
    stride,
    first_id,
    num_ids,
    span,
    NUM_FORBIDDEN: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits_ptr += row.to(tl.int64) * stride
    heat = tl.load(temperature_ptr + row)
    threshold = tl.load(threshold_ptr + row) if HAS_THRESHOLD else 0.0
    forbidden_ptr += row * NUM_FORBIDDEN
    narrowed = any_forbidden(forbidden_ptr, NUM_FORBIDDEN)
    begin = part * span
    end = tl.minimum(begin + span, num_ids)
    at_v = tl.arange(0, BLOCK)
    best = tl.full((), _LOWEST, tl.int64)
    if heat > 0:
        low_key = tl.load(keys_ptr + row * 2).to(tl.uint32)
        high_key = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32)
        inverse = 1.0 / heat
        best_score = float("-inf")
        for start in range(begin, end, BLOCK):
            column_v = start + at_v
            live_v = column_v < end
            x = tl.load(logits_ptr + column_v, mask=live_v, other=float("-inf"))
            id_v = first_id + column_v
            if narrowed:
                x = without_forbidden(x, id_v, forbidden_ptr, NUM_FORBIDDEN)
            useless = live_v == 0
            if HAS_THRESHOLD:
                useless = useless | (x < threshold)
            if (best == _LOWEST) | (tl.min(useless.to(tl.int32), axis=0) == 0):
                u = (_noise_bits(id_v, low_key, high_key).to(tl.float32) + 0.5) * 2.3283064365386963e-10
                octaves = 127.0 - u.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07
                heated = x * inverse
                heated = tl.maximum(heated * 1.000001, heated * 0.999999)
                bound = heated + (octaves * _LOG_2 + 1e-4)
                hopeless = useless | (bound < best_score)
                if (best == _LOWEST) | (tl.min(hopeless.to(tl.int32), axis=0) == 0):
                    score = tl.div_rn(x, heat) + _gumbel(u, LIBDEVICE)
                    if HAS_THRESHOLD:
                        score = tl.where(x < threshold, float("-inf"), score)
                    key_v = tl.where(live_v, _keys(score, x, id_v), _LOWEST)
                    best = tl.maximum(best, tl.max(key_v, axis=0))
                    number_v = tl.where(score == score, score, float("-inf"))
                    best_score = tl.maximum(best_score, tl.max(number_v, axis=0))
    else:
        best_v = tl.full((BLOCK,), _LOWEST, tl.int64)
        for start in range(begin, end, BLOCK):
            column_v = start + at_v
            live_v = column_v < end
            x = tl.load(logits_ptr + column_v, mask=live_v, other=float("-inf"))
            if narrowed:
                x = without_forbidden(x, first_id + column_v, forbidden_ptr, NUM_FORBIDDEN)
            score = x
            if HAS_THRESHOLD:
                score = tl.where(x < threshold, float("-inf"), score)
            key_v = tl.where(live_v, _keys(score, x, first_id + column_v), _LOWEST)
            best_v = tl.maximum(best_v, key_v)
        best = tl.max(best_v, axis=0)
    tl.store(out_ptr + row * tl.num_programs(1) + part, best)


@triton.jit
def _largest_kernel(keys_ptr, out_ptr, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    key_s = tl.load(keys_ptr + row * splits + at, mask=at < splits, other=_LOWEST)
    tl.store(out_ptr + row, tl.max(key_s, axis=0))


@triton.jit
def _bits_kernel(keys_ptr, out_ptr, first_id, num_ids, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low_key = tl.load(keys_ptr + row * 2).to(tl.uint32)
    high_key = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32)
    at_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits_v = _noise_bits(first_id + at_v, low_key, high_key)
    tl.store(out_ptr + row * num_ids + at_v, bits_v.to(tl.int64), mask=at_v < num_ids)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    signature = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "keys_ptr": "*i64", "threshold_ptr": "*fp32"}
    signature |= {"forbidden_ptr": "*i32", "out_ptr": "*i64"} | dict.fromkeys(
        ("stride", "first_id", "num_ids", "span"), "i32"
    )
    picks = [
        (
            f"pick-{'threshold' if has_threshold else 'plain'}",
            _pick_kernel,
            signature,
            {
                "NUM_FORBIDDEN": 8 * has_threshold,
                "HAS_THRESHOLD": has_threshold,
                "LIBDEVICE": True,
                "BLOCK": _BLOCK,
                "PDL": has_threshold,
            },
            {"num_warps": 4},
        )
        for has_threshold in (False, True)
    ]
    by_row = [
        (name, kernel, {**dict.fromkeys(kernel.arg_names[:-2], "*fp32"), **types, "num_rows": "i32"})
        for name, kernel, types in (
            ("noise-keys", _noise_keys_kernel, {"seed_ptr": "*i64", "position_ptr": "*i32", "keys_ptr": "*i64"}),
            ("token", _token_kernel, {"key_ptr": "*i64", "token_ptr": "*i32"}),
            ("min-p", _min_p_kernel, {}),
        )
    ]
    rows = [(*variant, {"BLOCK": _ROWS["BLOCK"]}, {"num_warps": 4}) for variant in by_row]
    signature = {"keys_ptr": "*i64", "out_ptr": "*i64", "splits": "i32"}
    return [*picks, *rows, ("largest", _largest_kernel, signature, {"BLOCK": 256, "PDL": False}, {"num_warps": 1})]
