"""Paged decode attention in Triton: one query a row, split over the keys, all query heads of a KV head in one tile.

Decoding is bound by memory, so a program reads each key and value once for the whole group of query heads (padded to 16
rows, the smallest tensor-core tile). The number of splits comes from shapes alone, so that a launch can live in a CUDA
graph: each row divides its own length on the device, and a split without keys returns at once.

The splits of a (row, KV head) leave partial results, which are put together in split order: by a second kernel, or,
with one_launch, by whichever of its programs comes last. Both run `combined`, all elementwise: the same bits.

One launch: each program with keys stores its partial result, passes a barrier of its threads and adds 1 to the counter
of its (row, KV head) by an atomic with acquire and release semantics at the GPU's scope; the one that finds all others
counted sets the counter back to 0 and reads all partial results. On sm_90 that is `bar.sync`, then
`atom.global.gpu.acq_rel.add` by one thread (in machine code a MEMBAR at the GPU's scope before it and an invalidation
of the L1 cache behind it), then a `bar.sync` that hands its result to the other threads. By the first barrier the
release covers the stores of all threads of the program; the additions to a counter are a chain of releases and
acquires, so the last program sees every partial result; it reads them past the L1 cache besides (`.cg`). Only programs
with keys count, once each, so a counter is 0 between launches; a launch that never ran has counted nothing.

What kernels that start early (programmatic dependent launch) may read before they wait stands in `DecodeConfig`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = 1.4426950408889634
SHARED_SM90 = 232448  # bytes of shared memory that one program may take on sm_90
SHARED_LEAST = 101376  # on any GPU from sm_80
_MAX_SPLITS = 128
_PROGRAMS_PER_SM = 2
_TILE_BYTES = 8192  # of keys in a tile
_TILES_IN_FLIGHT = 2
_MIN_KEYS = 256  # of a split, where rows are not few: shorter ones are not worth their partial results
_SCRATCH_BYTES = 12288  # shared memory beside the tiles
_COMBINE_WARPS = 4
_VALUES_IN_FLIGHT = 56  # of partial results, a thread; with 64 a variant spills
_AHEAD_ROWS = 2
_FEW_ROWS = 8
_RESIDENT = 4  # programs on a multiprocessor


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a decode launch is cut up, and how it starts.

    tile: keys a loop step. num_stages: Triton's pipeline depth; a block id is loaded ahead of what it points at, so
    2 n + 1 stages keep n tiles of keys and values in flight. splits: programs a (row, KV head). min_tiles: tiles that a
    split takes at least, so that short rows use fewer splits. one_launch: the last program of a (row, KV head) combines
    its splits, where counters are given.

    Programmatic dependent launch (sm_90 and later), which starts a kernel before its predecessor in the stream ends:
    pdl: the combine kernel starts so. early: the split kernel starts so too, and both let their successor do it. All
    that they read or write, they do behind the wait for the predecessor, so any kernel may stand before them.

    prefetch: an early split kernel reads lengths, block ids and the first tile of each split, but not a row's newest
    key, before the wait. This is right if a kernel stands before it in the stream that started in full (not early) and
    behind whatever wrote those: a model's embedding, since the step's first kernel makes tables and lengths and all
    keys but the newest are of earlier steps. Proof: a kernel starts no sooner than its predecessor has started, early
    or not; so when a program of this one runs, that kernel has started, and it did so when all before it was complete
    and visible (every early kernel waits, in one program at least, so that its own end implies its predecessors').
    These reads go past the L1 cache, whose lines may be older. It is not enough that the predecessor waits before it
    writes: kernels let their successors start before they wait, so the predecessor, and its own predecessor, may still
    be waiting while this one reads.
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 7
    splits: int = 1
    min_tiles: int = 1
    pdl: bool = False
    one_launch: bool = False
    early: bool = False
    prefetch: bool = False


def choose_splits(batch: int, num_kv_heads: int, max_len: int, tile: int, num_sms: int) -> int:
    """Splits of each row, from shapes only. max_len is what a block table can hold.

    Few rows take the fewest splits that fill the GPU in whole waves. More take so many that their programs are resident
    at once, and then two, which evens out ragged lengths. Where there are more programs than that, short rows fill the
    gaps behind long ones, if these come first.
    """
    places = num_sms * _PROGRAMS_PER_SM
    rows = max(batch * num_kv_heads, 1)
    limit = max(1, min(_MAX_SPLITS, -(-max_len // tile)))
    if rows >= 3 * places:
        return 1
    if rows >= places:
        return min(2, limit)
    if batch > _FEW_ROWS:
        return max(1, min(limit, num_sms * _RESIDENT // rows))
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

    The ways to start and to combine are those that were fastest in a chain of layers (NOTES.md). A row or two ask for
    keys before the wait, and combine their splits in a second launch: the counters would cost more. Many rows start
    early, some rows, which may be long, do not.

    shared: bytes of shared memory that one program may take; two programs are to fit.
    """
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * element_size
    tile = max(16, min(128, _TILE_BYTES // row_bytes))
    in_flight = max(1, min(_TILES_IN_FLIGHT, (shared // _PROGRAMS_PER_SM - _SCRATCH_BYTES) // (2 * tile * row_bytes)))
    splits = choose_splits(batch, num_kv_heads, max_len, tile, num_sms)
    is_ahead = batch <= _AHEAD_ROWS
    return DecodeConfig(
        tile=tile,
        num_warps=2,
        num_stages=2 * in_flight + 1,
        splits=splits,
        min_tiles=_MIN_KEYS // tile if batch > _FEW_ROWS else 1,
        one_launch=splits > 1 and not is_ahead,
        early=is_ahead or batch * num_kv_heads >= num_sms * _PROGRAMS_PER_SM,
        prefetch=is_ahead,
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
    counters_bk: Tensor | None = None,
    early: bool = False,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attention of one query a row over its own kv_len keys, written to out_bnh and returned.

    The contract is reference.attend's for decode rows. Caches are contiguous, block_size a power of two >= 16; queries
    are contiguous within a row. config: instead of the one that choose_config picks.

    counters_bk: int32 zeros, at least one a row and KV head, for a launch that combines its splits itself, which leaves
    zeros behind. Launches that may run at the same time need counters of their own; those behind each other in a stream
    share them; too few are not used. early: an early start with prefetch, by the rule of DecodeConfig.prefetch, which
    the caller answers for.
    """
    batch, num_heads, head_dim = q_bnh.shape
    _, block_size, num_kv_heads, _ = k_cache_pskh.shape
    if batch == 0:
        return out_bnh
    if config is None:
        max_len = block_table_bm.shape[1] * block_size
        config = choose_config(batch, num_kv_heads, head_dim, max_len, q_bnh.element_size(), *device_size(q_bnh.device))
        pdl = q_bnh.is_cuda and torch.cuda.get_device_capability(q_bnh.device) >= (9, 0)
        early = pdl and early and config.early
        config = replace(config, pdl=pdl, early=early, prefetch=early and config.prefetch)
    is_counted = counters_bk is not None and counters_bk.shape[1] >= num_kv_heads
    config = replace(config, one_launch=config.one_launch and config.splits > 1 and is_counted)
    splits = config.splits
    if splits > 1:
        partials = torch.empty((batch, num_heads, splits, head_dim), dtype=torch.float32, device=q_bnh.device)
        lses = torch.empty((batch, num_heads, splits), dtype=torch.float32, device=q_bnh.device)
    else:
        partials = lses = out_bnh
    shape = decode_constants(num_heads, num_kv_heads, head_dim, block_size, window, softcap, sinks_n, config)
    sinks = sinks_n if sinks_n is not None else q_bnh
    counters = kv_lens_b if counters_bk is None else counters_bk
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
        counters,
        q_bnh.stride(0),
        out_bnh.stride(0),
        block_table_bm.stride(0),
        counters.stride(0),
        splits,
        config.min_tiles,
        scale if softcap > 0 else scale * LOG2_E,
        softcap,
        **shape,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_launch_options(config.early),
    )
    if splits > 1 and not config.one_launch:
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
            num_warps=_COMBINE_WARPS,
            **_launch_options(config.pdl),
        )
    return out_bnh


def _launch_options(pdl: bool) -> dict[str, Any]:
    return {"enable_fp_fusion": True} | ({"launch_pdl": True} if pdl else {})


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
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_group = triton.next_power_of_2(group)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_ROWS": max(16, triton.next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "TILE": config.tile,
        "IS_SPLIT": config.splits > 1,
        "WINDOW": window,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks_n is not None,
        "ONE_LAUNCH": config.one_launch,
        "PADDED_GROUP": padded_group,
        "CHUNK": splits_in_flight(padded_group * padded_dim, config.num_warps, config.splits),
        "EARLY": config.early,
        "PREFETCH": config.early and config.prefetch,
    }


def combine_constants(head_dim: int, window: int, sinks_n: Tensor | None, config: DecodeConfig) -> dict[str, Any]:
    """The compile-time arguments of the combine kernel."""
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "TILE": config.tile,
        "CHUNK": splits_in_flight(padded_dim, _COMBINE_WARPS, config.splits),
        "WINDOW": window,
        "HAS_SINKS": sinks_n is not None,
        "PDL": config.pdl,
        "EARLY": config.early,
        "PREFETCH": config.early and config.prefetch,
    }


def splits_in_flight(size: int, num_warps: int, splits: int) -> int:
    """Splits whose partial results, `size` values each, a program asks for at a time."""
    return min(triton.next_power_of_2(splits), 32, max(1, _VALUES_IN_FLIGHT * 32 * num_warps // size))


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


@triton.jit
def tile_slots(tile, kv_len, table_ptr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """(slot that a tile's slots are counted from, slots of its keys behind that one); AHEAD: read past the L1 cache."""
    start = tile * TILE
    keys_in_tile = tl.arange(0, TILE)
    if BLOCK_SIZE >= TILE:
        if AHEAD:
            block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < kv_len, other=0, cache_modifier=".cg")
        else:
            block = tl.load(table_ptr + start // BLOCK_SIZE)
        first = block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
        behind = keys_in_tile
    else:
        key = start + keys_in_tile
        cache: tl.constexpr = ".cg" if AHEAD else ""
        blocks = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < kv_len, other=0, cache_modifier=cache)
        first = 0
        behind = blocks.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    return first, behind


@triton.jit
def older_keys(
    tile,
    kv_len,
    k_ptr,
    v_ptr,
    table_ptr,
    inside,
    live_dims,
    SLOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """(keys, values, their addresses, which of them the query sees, which one is the newest) of a tile.

    The row's newest key and value, which the predecessor writes, are not read: they are 0.
    """
    first, behind = tile_slots(tile, kv_len, table_ptr, BLOCK_SIZE, TILE, True)
    key = tile * TILE + tl.arange(0, TILE)
    seen = key < kv_len
    if WINDOW > 0:
        seen = seen & (key >= kv_len - WINDOW)
    older = (seen & (key < kv_len - 1))[:, None] & live_dims
    newest = (key == kv_len - 1)[:, None] & live_dims
    offsets = behind[:, None] * SLOT + inside
    k_at = k_ptr + first * SLOT + offsets
    v_at = v_ptr + first * SLOT + offsets
    k = tl.load(k_at, mask=older, other=0.0, cache_modifier=".cg")
    v = tl.load(v_at, mask=older, other=0.0, cache_modifier=".cg")
    return k, v, k_at, v_at, seen, newest


@triton.jit
def weighed(q, k, seen, top, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """(weights of a tile's keys against the new top score, factor of what was summed before, new top score)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = capped(scores, softcap) * 1.4426950408889634
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    return tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top), new_top


@triton.jit
def combined(
    partials_ptr,
    lses_ptr,
    sinks_ptr,
    first,
    head,
    live,
    used,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Outputs [heads, PADDED_DIM] from `used` partial results of each head, added up in split order.

    first, head, live: [heads, 1]; first is the index of a head's first partial result. Products and sums are spelled
    out and elementwise, so that the bits depend neither on CHUNK, the splits asked for at a time, nor on how the heads
    are spread over programs and threads.
    """
    dims = tl.arange(0, PADDED_DIM)[None, :]
    top = tl.full(head.shape, -1e30, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros([head.shape[0], PADDED_DIM], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    for start in tl.range(0, used, CHUNK, num_stages=1):
        lses, parts = (), ()
        for ahead in tl.static_range(CHUNK):
            at = first + start + ahead
            there = live & (at < first + used)
            part_there = there & (dims < HEAD_DIM)
            lse = tl.load(lses_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(partials_ptr + at * HEAD_DIM + dims, mask=part_there, other=0.0, cache_modifier=".cg")
            lses += (lse,)  # type: ignore[assignment]
            parts += (part,)  # type: ignore[assignment]
        for ahead in tl.static_range(CHUNK):
            new_top = tl.maximum(top, lses[ahead])
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(lses[ahead] - new_top)
            total = tl.fma(total, shrink, weight)
            acc = tl.fma(weight, parts[ahead], acc * shrink)
            top = new_top
    return acc / tl.where(total > 0, total, 1.0)


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
    counters_ptr,
    q_stride,
    out_stride,
    table_stride,
    counter_stride,
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
    ONE_LAUNCH: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS
    row = tl.program_id(1).to(tl.int64)
    if EARLY and not PREFETCH:
        gdc_launch_dependents()
        gdc_wait()
    kv_len = tl.load(lens_ptr + row, cache_modifier=".cg" if PREFETCH else "")
    begin, end, used = split_range(kv_len, split, splits, min_tiles, TILE, WINDOW)
    # The first split stays even without keys: it writes an empty row and, in an early start, waits for the predecessor.
    if IS_SPLIT and (begin >= end) & (split > 0):
        return

    SLOT: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    dims = tl.arange(0, PADDED_DIM)
    inside = kv_head * HEAD_DIM + dims[None, :]
    live_dims = (dims < HEAD_DIM)[None, :]
    table_ptr += row * table_stride
    if PREFETCH:
        first_k, first_v, first_k_at, first_v_at, first_seen, newest = older_keys(
            begin, kv_len, k_ptr, v_ptr, table_ptr, inside, live_dims, SLOT, BLOCK_SIZE, TILE, WINDOW
        )
        gdc_launch_dependents()
        gdc_wait()
        first_k = tl.load(first_k_at, mask=newest, other=first_k, cache_modifier=".cg")
        first_v = tl.load(first_v_at, mask=newest, other=first_v, cache_modifier=".cg")

    heads = tl.arange(0, GROUP_ROWS)
    own = (heads < GROUP)[:, None] & live_dims
    head = kv_head * GROUP + heads
    at = head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + row * q_stride + at, mask=own, other=0.0)

    top = tl.full([GROUP_ROWS], -1e30, tl.float32)
    sums = tl.zeros([GROUP_ROWS, TILE], tl.float32)
    acc = tl.zeros([GROUP_ROWS, PADDED_DIM], tl.float32)
    if PREFETCH:
        weights, shrink, top = weighed(q, first_k, first_seen, top, scale, softcap, HAS_SOFTCAP)
        sums = sums * shrink[:, None] + weights
        acc = tl.dot(weights.to(first_v.dtype), first_v, acc * shrink[:, None], input_precision="ieee")
        begin += 1
    for tile in tl.range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        seen = key < kv_len
        if WINDOW > 0:
            seen = seen & (key >= kv_len - WINDOW)
        first, behind = tile_slots(tile, kv_len, table_ptr, BLOCK_SIZE, TILE, False)
        offsets = behind[:, None] * SLOT + inside
        if HEAD_DIM == PADDED_DIM:
            live = seen[:, None]
        else:
            live = seen[:, None] & live_dims
        k = tl.load(k_ptr + first * SLOT + offsets, mask=live, other=0.0)
        weights, shrink, top = weighed(q, k, seen, top, scale, softcap, HAS_SOFTCAP)
        sums = sums * shrink[:, None] + weights
        v = tl.load(v_ptr + first * SLOT + offsets, mask=live, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    # Summed here once, since a sum over the keys of a tile goes through all warps.
    total = tl.sum(sums, 1)
    whole = True
    if IS_SPLIT:
        whole = used <= 1
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
        if ONE_LAUNCH:
            counter_ptr = counters_ptr + row * counter_stride + kv_head
            tl.debug_barrier()  # the release covers the stores of all threads
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(counter_ptr, 0)
                group = tl.arange(0, PADDED_GROUP)[:, None]
                head_g = kv_head * GROUP + group
                first_g = (row * NUM_KV_HEADS * GROUP + head_g) * splits
                out_g = combined(
                    partials_ptr,
                    lses_ptr,
                    sinks_ptr,
                    first_g,
                    head_g,
                    group < GROUP,
                    used,
                    HEAD_DIM,
                    PADDED_DIM,
                    CHUNK,
                    HAS_SINKS,
                )
                at_g = row * out_stride + head_g * HEAD_DIM + dims[None, :]
                tl.store(out_ptr + at_g, out_g.to(out_ptr.dtype.element_ty), mask=(group < GROUP) & live_dims)


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
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
        if PDL and not PREFETCH:
            gdc_wait()
    kv_len = tl.load(lens_ptr + row, cache_modifier=".cg" if PREFETCH else "")
    _, _, used = split_range(kv_len, 0, splits, min_tiles, TILE, WINDOW)
    if PDL:
        gdc_wait()
    if used <= 1:
        return

    one = tl.arange(0, 1)[:, None]
    head = tl.program_id(0) + one
    first = (row * tl.num_programs(0) + head) * splits
    out = combined(
        partials_ptr, lses_ptr, sinks_ptr, first, head, one == 0, used, HEAD_DIM, PADDED_DIM, CHUNK, HAS_SINKS
    )
    dims = tl.arange(0, PADDED_DIM)[None, :]
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
    signature |= {"counters_ptr": "*i32", "counter_stride": "i32"}
    signature |= dict.fromkeys(("q_stride", "out_stride", "table_stride", "splits", "min_tiles"), "i32")
    variants = []
    plain_start = {"one_launch": False, "early": False, "prefetch": False}
    for head_dim in (64, 80, 96, 128, 256):
        for block_size, batch in ((128, 256), (16, 1)):
            config = replace(choose_config(batch, 8, head_dim, 40960, 2, 132, shared), **plain_start)
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            plain = decode_constants(32, 8, head_dim, block_size, 0, 0.0, None, config)
            variants.append((f"decode-{head_dim}-{block_size}", _decode_kernel, signature, plain, options))
        every = {**plain, "WINDOW": 4096, "HAS_SOFTCAP": True, "HAS_SINKS": True}
        variants.append((f"decode-{head_dim}-options", _decode_kernel, signature, every, options))
    for name, heads, batch, choice in (
        ("joined-0.6b", 16, 1, {"one_launch": True}),
        ("joined-8b", 32, 1, {"one_launch": True}),
        ("joined-early", 16, 1, {"one_launch": True, "early": True}),
        ("joined-prefetch", 16, 1, {"one_launch": True, "early": True, "prefetch": True}),
        ("joined-prefetch-8b", 32, 64, {"one_launch": True, "early": True, "prefetch": True}),
        ("prefetch-0.6b", 16, 1, {"early": True, "prefetch": True}),
    ):
        config = replace(choose_config(batch, 8, 128, 40960, 2, 132, shared), **plain_start | choice)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        for block_size in (128, 16):
            constants = decode_constants(heads, 8, 128, block_size, 0, 0.0, None, config)
            variants.append((f"{name}-{block_size}", _decode_kernel, signature, constants, options))
    for head_dim in (64, 80, 256):
        config = choose_config(1, 8, head_dim, 40960, 2, 132, shared)
        config = replace(config, one_launch=True, early=True, prefetch=True)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        constants = decode_constants(32, 8, head_dim, 16, 4096, 2.0, None, config) | {"HAS_SINKS": True}
        variants.append((f"joined-options-{head_dim}", _decode_kernel, signature, constants, options))
    combined = {"partials_ptr": "*fp32", "lses_ptr": "*fp32", "lens_ptr": "*i32", "sinks_ptr": "*fp32"}
    combined |= {"out_ptr": "*bf16", "out_stride": "i32", "splits": "i32", "min_tiles": "i32"}
    for head_dim, splits, pdl in ((64, 2, False), (80, 5, True), (128, 33, True), (128, 128, False), (256, 16, False)):
        config = DecodeConfig(splits=splits, pdl=pdl, early=splits == 5, prefetch=splits == 5)
        constants = combine_constants(head_dim, 0, None, config)
        variants.append((f"combine-{head_dim}-{splits}", _combine_kernel, combined, constants, {"num_warps": 4}))
    return variants
