"""Triton sampler: the winner of every row in one pass over fp32 logits, and the small kernels around it.

A row's winner is found by bounds. One kernel reads all logits and leaves, for every group of some hundred ids, a key
that no key of the group exceeds; it takes neither a division nor the noise's logarithms for that. The other kernel
opens the group of the largest bound, computes its keys exactly, and stops when no bound is above the best key, mostly
after one group. So the result is the reference's, ties, NaN and infinities included. kernels/NOTES.md has the proof.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from funcllm.kernels.triton_fused import launch_options

_BLOCK = 1024  # ids of a tile
_PROGRAMS = 1024  # wanted in all, over rows and splits of the vocabulary
_LANES = 256  # ids that are opened at a time
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
_MINUS_LOG_2 = tl.constexpr(-0.6931471805599453)
_LARGEST_BOUND = tl.constexpr(22.180709777918249)  # 32 log 2
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
_INVERSE_OVERFLOWS = tl.constexpr(2.0**-126)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_INVERSE_MARGIN = tl.constexpr(1.0 - 2.0**-21)
_BOUND_MARGIN = tl.constexpr(2.0**-19)
_BOUND_SLACK = tl.constexpr(2.0**-10)


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
    """The reference's pick; the smallest int64 for a shard without ids. interpreted: do without the GPU's functions."""
    rows = logits_lv.shape[0]
    key_l = torch.empty(rows, dtype=torch.int64, device=logits_lv.device)
    if rows == 0:
        return key_l
    launch = _launch(
        logits_lv, temperature_l, keys_l2, threshold_l, first_id, num_ids, pdl=pdl, interpreted=interpreted
    )
    _pick_kernel[(rows,)](
        *launch.inputs,
        keys_l2 if forbidden_ls is None else forbidden_ls.contiguous(),
        _bounds(launch),
        key_l,
        *launch.sizes,
        NUM_FORBIDDEN=0 if forbidden_ls is None else forbidden_ls.shape[1],
        LANES=_LANES,
        GROUPS=_BLOCK,
        **launch.options,
    )
    return key_l


def group_bounds(
    logits_lv: Tensor,
    temperature_l: Tensor,
    keys_l2: Tensor,
    threshold_l: Tensor | None,
    first_id: int,
    num_ids: int,
    *,
    pdl: bool = False,
    interpreted: bool = False,
) -> Tensor:
    """int64 [l, groups]: for each group of split_vocabulary a key that the keys of its ids do not exceed."""
    return _bounds(
        _launch(logits_lv, temperature_l, keys_l2, threshold_l, first_id, num_ids, pdl=pdl, interpreted=interpreted)
    )


class _PickLaunch(NamedTuple):
    """What both kernels of a pick take. sizes: stride of the logits, first id, ids, tiles, splits."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    sizes: tuple[int, int, int, int, int]
    options: dict[str, Any]


def _launch(
    logits_lv: Tensor,
    temperature_l: Tensor,
    keys_l2: Tensor,
    threshold_l: Tensor | None,
    first_id: int,
    num_ids: int,
    *,
    pdl: bool,
    interpreted: bool,
) -> _PickLaunch:
    tiles, splits, width = split_vocabulary(logits_lv.shape[0], num_ids)
    limit_l = temperature_l if threshold_l is None else threshold_l
    options = {"HAS_THRESHOLD": threshold_l is not None, "ON_GPU": not interpreted, "BLOCK": _BLOCK, "num_warps": 4}
    return _PickLaunch(
        inputs=(logits_lv, temperature_l.contiguous(), keys_l2.contiguous(), limit_l.contiguous()),
        sizes=(logits_lv.stride(0), first_id, num_ids, tiles, splits),
        options=options | {"WIDTH": width} | launch_options(pdl),
    )


def _bounds(launch: _PickLaunch) -> Tensor:
    logits_lv, splits = launch.inputs[0], launch.sizes[-1]
    rows = logits_lv.shape[0]
    groups = splits * (_BLOCK // launch.options["WIDTH"])
    bound_lg = torch.empty((rows, groups), dtype=torch.int64, device=logits_lv.device)
    _bounds_kernel[(rows, splits)](*launch.inputs, bound_lg, *launch.sizes, **launch.options)
    return bound_lg


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


def split_vocabulary(rows: int, num_ids: int) -> tuple[int, int, int]:
    """(tiles of a row, programs a row, ids side by side in a group), from sizes alone.

    Program i reads the tiles from i * tiles // splits up to (i + 1) * tiles // splits. A tile has BLOCK / width groups,
    and group g of all tiles of a program is one. The width is a power of 4, so that few variants are compiled, and at
    least the number of splits, so that a row has no more than BLOCK groups.
    """
    tiles = max(1, triton.cdiv(num_ids, _BLOCK))
    splits = max(1, min(tiles, triton.cdiv(_PROGRAMS, rows), 256))
    width = next(width for width in (4, 16, 64, 256) if width >= splits)
    return tiles, splits, width


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
def _unfinished_bits(x, folded_key):
    """reference.noise_bits without its last step, from id * golden + low key, in uint32 arithmetic, which wraps.

    There the first mix ends, around the exclusive or with the high key, with the step that the second begins with. That
    step undoes itself and is linear, so what is left of the three is one exclusive or with the folded key.
    """
    x = x ^ (x >> 16)
    x = x * _MIX_FIRST
    x = x ^ (x >> 13)
    x = x * _MIX_SECOND
    x = x ^ folded_key
    x = x * _MIX_FIRST
    x = x ^ (x >> 13)
    return x * _MIX_SECOND


@triton.jit
def _noise_bits(id_v, low_key, folded_key):
    """reference.noise_bits."""
    x = _unfinished_bits(id_v.to(tl.uint32) * _GOLDEN + low_key, folded_key)
    return x ^ (x >> 16)


@triton.jit
def _row_keys(keys_ptr, row):
    """A row's low key, and its high key folded for _unfinished_bits."""
    low_key = tl.load(keys_ptr + row * 2).to(tl.uint32)
    high_key = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32)
    return low_key, high_key ^ (high_key >> 16)


@triton.jit
def _log2(x, ON_GPU: tl.constexpr):
    """The hardware's logarithm, one instruction, right to 2^-22 beyond [0.5, 2]; 0 gives -inf."""
    if ON_GPU:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _bound(x, word_v, folded_key, inverse, ON_GPU: tl.constexpr):
    """About x / temperature - log(u), which is above the score up to what _safe adds."""
    logarithm = _log2(_unfinished_bits(word_v, folded_key).to(tl.float32), ON_GPU)
    return tl.fma(x, inverse, tl.fma(logarithm, _MINUS_LOG_2, _LARGEST_BOUND))


@triton.jit
def _safe(bound, heat):
    """The largest _bound of some ids, raised above their scores."""
    raised = tl.maximum(bound * (1.0 + _BOUND_MARGIN), bound * (1.0 - _BOUND_MARGIN), propagate_nan=tl.PropagateNan.ALL)
    raised += _BOUND_SLACK
    if heat < _INVERSE_OVERFLOWS:
        raised = tl.where(bound > float("-inf"), float("inf"), raised)
    return raised


@triton.jit
def _gumbel(u, ON_GPU: tl.constexpr):
    """-log(-log1p(-u)); without libdevice log1p(-u) is log(w) * u / (1 - w), w = 1 - u, exact where w rounds."""
    u = tl.minimum(u, _LARGEST_UNIFORM)
    if ON_GPU:
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
def _part_end(part, tiles, splits, num_ids, BLOCK: tl.constexpr):
    return tl.minimum((part + 1) * tiles // splits * BLOCK, num_ids)


@triton.jit
def _passing(x, threshold, HAS_THRESHOLD: tl.constexpr):
    """The logits with -inf below the threshold."""
    if HAS_THRESHOLD:
        x = tl.where(x < threshold, float("-inf"), x)
    return x


@triton.jit(do_not_specialize=["first_id", "num_ids", "tiles", "splits"])
def _bounds_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    threshold_ptr,
    bound_ptr,
    stride,
    first_id,
    num_ids,
    tiles,
    splits,
    HAS_THRESHOLD: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """For every group of a part of a row a key that is at least that of each of its ids.

    The high word bounds the scores and is 2^31 - 1 where one may be NaN; the low word is the first id's. Forbidden ids
    count here like others, which only raises the bound.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    heat = tl.load(temperature_ptr + row)
    threshold = tl.load(threshold_ptr + row) if HAS_THRESHOLD else 0.0
    at_v = tl.arange(0, BLOCK)
    logit_ptrs = logits_ptr + row.to(tl.int64) * stride + at_v
    begin = part * tiles // splits * BLOCK
    end = _part_end(part, tiles, splits, num_ids, BLOCK)
    whole = begin + (end - begin) // BLOCK * BLOCK
    bound_v = tl.full((BLOCK,), float("-inf"), tl.float32)
    following = tl.load(logit_ptrs + begin, mask=at_v < whole - begin)
    if heat > 0:
        low_key, folded_key = _row_keys(keys_ptr, row)
        inverse = tl.minimum(tl.div_rn(1.0, heat), _LARGEST_FLOAT) * _INVERSE_MARGIN
        word_v = (first_id + at_v).to(tl.uint32) * _GOLDEN + low_key
        offset = begin.to(tl.uint32) * _GOLDEN
        for start in range(begin, whole, BLOCK):
            x = _passing(following, threshold, HAS_THRESHOLD)
            following = tl.load(logit_ptrs + start + BLOCK, mask=at_v < whole - start - BLOCK)
            score_v = _bound(x, word_v + offset, folded_key, inverse, ON_GPU)
            bound_v = tl.maximum(bound_v, score_v, propagate_nan=tl.PropagateNan.ALL)
            offset += (BLOCK * 0x9E3779B9) & 0xFFFFFFFF
        if whole < end:
            x = tl.load(logit_ptrs + whole, mask=whole + at_v < end, other=float("-inf"))
            x = _passing(x, threshold, HAS_THRESHOLD)
            score_v = _bound(x, word_v + offset, folded_key, inverse, ON_GPU)
            bound_v = tl.maximum(bound_v, score_v, propagate_nan=tl.PropagateNan.ALL)
        bound_v = _safe(bound_v, heat)
    else:
        for start in range(begin, whole, BLOCK):
            x = _passing(following, threshold, HAS_THRESHOLD)
            following = tl.load(logit_ptrs + start + BLOCK, mask=at_v < whole - start - BLOCK)
            bound_v = tl.maximum(bound_v, x, propagate_nan=tl.PropagateNan.ALL)
        if whole < end:
            x = tl.load(logit_ptrs + whole, mask=whole + at_v < end, other=float("-inf"))
            x = _passing(x, threshold, HAS_THRESHOLD)
            bound_v = tl.maximum(bound_v, x, propagate_nan=tl.PropagateNan.ALL)
        bound_v = tl.where(bound_v == 0.0, 0.0, bound_v)
    high_v = tl.where(bound_v != bound_v, 0x7FFFFFFF, _ordered(bound_v))
    NUM: tl.constexpr = BLOCK // WIDTH
    high_g = tl.max(tl.reshape(high_v, (NUM, WIDTH)), axis=1)
    group_g = tl.arange(0, NUM)
    column_g = begin + group_g * WIDTH
    key_g = (high_g.to(tl.int64) << 32) | (0xFFFFFFFF - (first_id + column_g).to(tl.int64))
    key_g = tl.where(column_g < end, key_g, _LOWEST)
    tl.store(bound_ptr + (row * splits + part) * NUM + group_g, key_g)


@triton.jit(do_not_specialize=["first_id", "num_ids", "tiles", "splits"])
def _pick_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    threshold_ptr,
    forbidden_ptr,
    bound_ptr,
    out_ptr,
    stride,
    first_id,
    num_ids,
    tiles,
    splits,
    NUM_FORBIDDEN: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest key of a row: opens the group with the largest bound until no bound is above the best key.

    A bound equal to the best key is that key itself, since both name an id. So equal scores, and rows of nothing but
    -inf, open no more groups than begin below the winner.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    heat = tl.load(temperature_ptr + row)
    threshold = tl.load(threshold_ptr + row) if HAS_THRESHOLD else 0.0
    low_key, folded_key = _row_keys(keys_ptr, row)
    forbidden_ptr += row * NUM_FORBIDDEN
    num_groups = splits * (BLOCK // WIDTH)
    at_g = tl.arange(0, GROUPS)
    bound_g = tl.load(bound_ptr + row * num_groups + at_g, mask=at_g < num_groups, other=_LOWEST)
    at_v = tl.arange(0, LANES)
    best = tl.full((), _LOWEST, tl.int64)
    top = tl.max(bound_g, axis=0)
    while top > best:
        column = (0xFFFFFFFF - (top & 0xFFFFFFFF)).to(tl.int32) - first_id
        part = ((column // BLOCK + 1) * splits - 1) // tiles
        end = _part_end(part, tiles, splits, num_ids, BLOCK)
        for start in range(column, end, LANES // WIDTH * BLOCK):
            column_v = start + at_v // WIDTH * BLOCK + at_v % WIDTH
            live_v = column_v < end
            id_v = first_id + column_v
            x = tl.load(logits_ptr + column_v, mask=live_v, other=float("-inf"))
            x = without_forbidden(x, id_v, forbidden_ptr, NUM_FORBIDDEN)
            score = x
            if heat > 0:
                u = (_noise_bits(id_v, low_key, folded_key).to(tl.float32) + 0.5) * 2.3283064365386963e-10
                score = tl.div_rn(x, heat) + _gumbel(u, ON_GPU)
            score = tl.where(x < threshold, float("-inf"), score) if HAS_THRESHOLD else score
            key_v = tl.where(live_v, _keys(score, x, id_v), _LOWEST)
            best = tl.maximum(best, tl.max(key_v, axis=0))
        bound_g = tl.where(bound_g == top, _LOWEST, bound_g)
        top = tl.max(bound_g, axis=0)
    tl.store(out_ptr + row, best)


@triton.jit
def _bits_kernel(keys_ptr, out_ptr, first_id, num_ids, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low_key, folded_key = _row_keys(keys_ptr, row)
    at_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits_v = _noise_bits(first_id + at_v, low_key, folded_key)
    tl.store(out_ptr + row * num_ids + at_v, bits_v.to(tl.int64), mask=at_v < num_ids)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    inputs = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "keys_ptr": "*i64", "threshold_ptr": "*fp32"}
    sizes = dict.fromkeys(("stride", "first_id", "num_ids", "tiles", "splits"), "i32")
    bounds = inputs | {"bound_ptr": "*i64"} | sizes
    winner = inputs | {"forbidden_ptr": "*i32", "bound_ptr": "*i64", "out_ptr": "*i64"} | sizes
    picks = []
    for name, has_threshold, width in (("plain", False, 4), ("threshold", True, 16), ("few-rows", False, 256)):
        constants = {"HAS_THRESHOLD": has_threshold, "ON_GPU": True, "BLOCK": _BLOCK, "WIDTH": width}
        constants |= {"PDL": has_threshold}
        opening = {"NUM_FORBIDDEN": 8 * has_threshold, "LANES": _LANES, "GROUPS": _BLOCK}
        picks.append((f"bounds-{name}", _bounds_kernel, bounds, constants, {"num_warps": 4}))
        picks.append((f"pick-{name}", _pick_kernel, winner, constants | opening, {"num_warps": 4}))
    by_row = [
        (name, kernel, {**dict.fromkeys(kernel.arg_names[:-2], "*fp32"), **types, "num_rows": "i32"})
        for name, kernel, types in (
            ("noise-keys", _noise_keys_kernel, {"seed_ptr": "*i64", "position_ptr": "*i32", "keys_ptr": "*i64"}),
            ("token", _token_kernel, {"key_ptr": "*i64", "token_ptr": "*i32"}),
            ("min-p", _min_p_kernel, {}),
        )
    ]
    rows = [(*variant, {"BLOCK": _ROWS["BLOCK"]}, {"num_warps": 4}) for variant in by_row]
    return [*picks, *rows]
