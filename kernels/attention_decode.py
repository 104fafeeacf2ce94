"""Paged decode attention in Triton: one query a row, split over the keys, all query heads of a KV head in one tile.

Decoding is bound by memory, so a program reads each key and value once for the whole group of query heads (padded to 16
rows, the smallest tensor-core tile). The number of splits comes from shapes alone, so that a launch can live in a CUDA
graph: each row divides its own length on the device, and a split without keys returns at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

LOG2_E = 1.4426950408889634
SHARED_SM90 = 232448  # bytes of shared memory that one program may take on sm_90
SHARED_LEAST = 101376  # on any GPU from sm_80
_MAX_SPLITS = 128
_PROGRAMS_PER_SM = 2
_TILE_BYTES = 8192  # of keys in a tile
_TILES_IN_FLIGHT = 2
_MIN_KEYS = 1024  # of a split, where there are many rows: shorter ones are not worth their partial results
_SCRATCH_BYTES = 12288  # shared memory beside the tiles


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a decode launch is cut up.

    tile: keys a loop step. num_stages: Triton's pipeline depth; a block id is loaded ahead of what it points at, so
    2 n + 1 stages keep n tiles of keys and values in flight. splits: programs a (row, KV head). min_tiles: tiles that a
    split takes at least, so that short rows use fewer splits. pdl: the combine kernel starts by programmatic dependent
    launch (sm_90 and later).
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 7
    splits: int = 1
    min_tiles: int = 1
    pdl: bool = False


def choose_splits(batch: int, num_kv_heads: int, max_len: int, tile: int, num_sms: int) -> int:
    """Splits of each row, from shapes only: the fewest that fill the GPU, in whole waves where there are few.

    max_len is what a block table can hold. Many rows take no splits beyond what evens out ragged lengths.
    """
    places = num_sms * _PROGRAMS_PER_SM
    rows = max(batch * num_kv_heads, 1)
    limit = max(1, min(_MAX_SPLITS, -(-max_len // tile)))
    if rows >= 4 * places:
        return 1
    if rows >= 2 * places:
        return min(2, limit)
    best, best_use = 1, 0.0
    for splits in range(1, limit + 1):
        waves = rows * splits / places
        use = waves / -(-rows * splits // places)
        if use > best_use + 0.02:
            best, best_use = splits, use
        if waves >= 4:
            break
    return best


def choose_config(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_len: int,
    element_size: int,
    num_sms: int,
    shared: int = SHARED_SM90,
) -> DecodeConfig:
    """The configuration of a decode launch, from shapes and the GPU's size only.

    shared: bytes of shared memory that one program may take; two programs are to fit.
    """
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * element_size
    tile = max(16, min(128, _TILE_BYTES // row_bytes))
    in_flight = max(1, min(_TILES_IN_FLIGHT, (shared // _PROGRAMS_PER_SM - _SCRATCH_BYTES) // (2 * tile * row_bytes)))
    splits = choose_splits(batch, num_kv_heads, max_len, tile, num_sms)
    many_rows = batch * num_kv_heads >= 2 * num_sms * _PROGRAMS_PER_SM
    return DecodeConfig(
        tile=tile,
        num_warps=2,
        num_stages=2 * in_flight + 1,
        splits=splits,
        min_tiles=_MIN_KEYS // tile if many_rows else 1,
    )


def decode_attention(
    q_bnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    block_table_bm: Tensor,
    kv_lens_b: Tensor,
    out_bnh: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attention of one query a row over its own kv_len keys, written to out_bnh and returned.

    The contract is reference.attend's for decode rows. Caches are contiguous, block_size a power of two >= 16; queries
    are contiguous within a row. config: instead of the one that choose_config picks.
    """
    batch, num_heads, head_dim = q_bnh.shape
    _, block_size, num_kv_heads, _ = k_cache_pskh.shape
    if batch == 0:
        return out_bnh
    if config is None:
        max_len = block_table_bm.shape[1] * block_size
        config = choose_config(batch, num_kv_heads, head_dim, max_len, q_bnh.element_size(), *device_size(q_bnh.device))
        config = replace(config, pdl=q_bnh.is_cuda and torch.cuda.get_device_capability(q_bnh.device) >= (9, 0))
    splits = config.splits
    if splits > 1:
        partials = torch.empty((batch, num_heads, splits, head_dim), dtype=torch.float32, device=q_bnh.device)
        lses = torch.empty((batch, num_heads, splits), dtype=torch.float32, device=q_bnh.device)
    else:
        partials = lses = out_bnh
    shape = decode_constants(num_heads, num_kv_heads, head_dim, block_size, window, softcap, sinks_n, config)
    sinks = sinks_n if sinks_n is not None else q_bnh
    _decode_kernel[(num_kv_heads * splits, batch)](
        q_bnh,
        k_cache_pskh,
        v_cache_pskh,
        block_table_bm,
        kv_lens_b,
        sinks,
        out_bnh,
        partials,
        lses,
        q_bnh.stride(0),
        out_bnh.stride(0),
        block_table_bm.stride(0),
        splits,
        config.min_tiles,
        scale if softcap > 0 else scale * LOG2_E,
        softcap,
        **shape,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        launch: dict[str, Any] = {"launch_pdl": True} if config.pdl else {}
        _combine_kernel[(num_heads, batch)](
            partials,
            lses,
            kv_lens_b,
            sinks,
            out_bnh,
            out_bnh.stride(0),
            splits,
            config.min_tiles,
            **combine_constants(head_dim, window, sinks_n, config),
            num_warps=4,
            **launch,
        )
    return out_bnh


def decode_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    softcap: float,
    sinks_n: Tensor | None,
    config: DecodeConfig,
) -> dict[str, Any]:
    """The compile-time arguments of the split kernel."""
    group = num_heads // num_kv_heads
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_ROWS": max(16, triton.next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "TILE": config.tile,
        "IS_SPLIT": config.splits > 1,
        "WINDOW": window,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks_n is not None,
    }


def combine_constants(head_dim: int, window: int, sinks_n: Tensor | None, config: DecodeConfig) -> dict[str, Any]:
    """The compile-time arguments of the combine kernel."""
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_splits = triton.next_power_of_2(config.splits)
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "TILE": config.tile,
        "PADDED_SPLITS": padded_splits,
        "CHUNK": min(padded_splits, max(1, 4096 // padded_dim)),
        "WINDOW": window,
        "HAS_SINKS": sinks_n is not None,
        "PDL": config.pdl,
    }


@functools.cache
def device_size(device: torch.device) -> tuple[int, int]:
    """Streaming multiprocessors and shared memory a program may take; a small GPU for the interpreter's CPU tensors."""
    if device.type != "cuda":
        return 8, SHARED_SM90
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", SHARED_LEAST)


@triton.jit
def split_range(kv_len, split, splits, min_tiles, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """(first tile, end tile, used splits) of one split of a row with kv_len keys, of which a window sees the last."""
    end_tile = tl.cdiv(kv_len, TILE)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(kv_len - WINDOW, 0) // TILE
    tiles = end_tile - first_tile
    share = tl.maximum(tl.cdiv(tiles, splits), min_tiles)
    begin = first_tile + split * share
    return begin, tl.minimum(begin + share, end_tile), tl.cdiv(tiles, share)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap))))


@triton.jit(do_not_specialize=["splits", "min_tiles"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    partials_ptr,
    lses_ptr,
    q_stride,
    out_stride,
    table_stride,
    splits,
    min_tiles,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS
    row = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(lens_ptr + row)
    begin, end, used = split_range(kv_len, split, splits, min_tiles, TILE, WINDOW)
    if IS_SPLIT and begin >= end:
        return

    heads = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    own = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP + heads
    at = head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + row * q_stride + at, mask=own, other=0.0)

    SLOT: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    keys_in_tile = tl.arange(0, TILE)
    inside = kv_head * HEAD_DIM + dims[None, :]
    table_ptr += row * table_stride
    top = tl.full([GROUP_ROWS], -1e30, tl.float32)
    sums = tl.zeros([GROUP_ROWS, TILE], tl.float32)
    acc = tl.zeros([GROUP_ROWS, PADDED_DIM], tl.float32)
    for tile in tl.range(begin, end):
        start = tile * TILE
        key = start + keys_in_tile
        seen = key < kv_len
        if WINDOW > 0:
            seen = seen & (key >= kv_len - WINDOW)
        if BLOCK_SIZE >= TILE:
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
            first = (block * BLOCK_SIZE + start % BLOCK_SIZE) * SLOT
            offsets = keys_in_tile[:, None] * SLOT + inside
            k_at = k_ptr + first + offsets
            v_at = v_ptr + first + offsets
        else:
            blocks = tl.load(table_ptr + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            offsets = ((blocks * BLOCK_SIZE + key % BLOCK_SIZE) * SLOT)[:, None] + inside
            k_at = k_ptr + offsets
            v_at = v_ptr + offsets
        if HEAD_DIM == PADDED_DIM:
            live = seen[:, None]
        else:
            live = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_at, mask=live, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = capped(scores, softcap) * 1.4426950408889634
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        sums = sums * shrink[:, None] + weights
        v = tl.load(v_at, mask=live, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    # Summed here once, since a sum over the keys of a tile goes through all warps.
    total = tl.sum(sums, 1)
    whole = True
    if IS_SPLIT:
        whole = used == 1
    if whole:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=heads < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.exp2(sink - new_top)
            acc = acc * shrink[:, None]
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + row * out_stride + at, out.to(out_ptr.dtype.element_ty), mask=own)
    else:
        part = (row * NUM_KV_HEADS * GROUP + head) * splits + split
        tl.store(partials_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=own)
        tl.store(lses_ptr + part, top + tl.log2(total), mask=heads < GROUP)


@triton.jit(do_not_specialize=["splits", "min_tiles"])
def _combine_kernel(
    partials_ptr,
    lses_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    out_stride,
    splits,
    min_tiles,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(lens_ptr + row)
    _, _, used = split_range(kv_len, 0, splits, min_tiles, TILE, WINDOW)
    if PDL:
        gdc_wait()
    if used == 1:
        return

    first = (row * tl.num_programs(0) + head) * splits
    every = tl.arange(0, PADDED_SPLITS)
    lse = tl.load(lses_ptr + first + every, mask=every < used, other=float("-inf"))
    top = tl.maximum(tl.max(lse, 0), -1e30)
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    total += tl.sum(tl.exp2(lse - top), 0)

    dims = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in tl.range(0, used, CHUNK):
        part = start + tl.arange(0, CHUNK)
        live = part < used
        weight = tl.exp2(tl.load(lses_ptr + first + part, mask=live, other=float("-inf")) - top)
        at = (first + part)[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(partials_ptr + at, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * values, 0)
    out = acc / tl.where(total > 0, total, 1.0)
    at = row * out_stride + head * HEAD_DIM + dims
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants(
    shared: int = SHARED_SM90,
) -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of production launches, to be compiled in tests."""
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    signature |= {"table_ptr": "*i32", "lens_ptr": "*i32", "sinks_ptr": "*fp32"}
    signature |= {"partials_ptr": "*fp32", "lses_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    signature |= dict.fromkeys(("q_stride", "out_stride", "table_stride", "splits", "min_tiles"), "i32")
    variants = []
    for head_dim in (64, 80, 96, 128, 256):
        for block_size, batch in ((128, 256), (16, 1)):
            config = choose_config(batch, 8, head_dim, 40960, 2, 132, shared)
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            plain = decode_constants(32, 8, head_dim, block_size, 0, 0.0, None, config)
            variants.append((f"decode-{head_dim}-{block_size}", _decode_kernel, signature, plain, options))
        every = {**plain, "WINDOW": 4096, "HAS_SOFTCAP": True, "HAS_SINKS": True}
        variants.append((f"decode-{head_dim}-options", _decode_kernel, signature, every, options))
    combined = {"partials_ptr": "*fp32", "lses_ptr": "*fp32", "lens_ptr": "*i32", "sinks_ptr": "*fp32"}
    combined |= {"out_ptr": "*bf16", "out_stride": "i32", "splits": "i32", "min_tiles": "i32"}
    for head_dim, splits, pdl in ((64, 2, False), (80, 5, True), (128, 33, True), (128, 128, False), (256, 16, False)):
        constants = combine_constants(head_dim, 0, None, DecodeConfig(splits=splits, pdl=pdl))
        variants.append((f"combine-{head_dim}-{splits}", _combine_kernel, combined, constants, {"num_warps": 4}))
    return variants
