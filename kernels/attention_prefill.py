"""Prefill attention over the paged cache: a Triton kernel, and flash-attn-4 where it is present.

A tile holds the query heads of one KV head for a few tokens, so that short chunks fill tensor-core tiles and keys are
read once a group. The grid comes from tensor sizes alone; each program finds its chunk on the device.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcllm.kernels.attention_decode import LOG2_E, SHARED_SM90, capped, device_size

FLASH_HEAD_DIMS = (64, 96, 128)
_TILE_BYTES = 16384  # of keys in a tile
_SCRATCH_BYTES = 8192  # shared memory beside queries and tiles
_TURN_SECONDS = 1e-4  # of Python threads, while one imports flash-attn-4
_EXIT_SECONDS = 5.0  # that an exit waits for a module that is being imported: a thread cut off in C++ code aborts


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How a prefill launch is cut up. rows: (token, query head) pairs a program; tile: keys a loop step."""

    rows: int = 128
    tile: int = 64
    num_warps: int = 8
    num_stages: int = 5


def choose_prefill_config(head_dim: int, element_size: int, shared: int = SHARED_SM90) -> PrefillConfig:
    """The configuration of a prefill launch for a head dim, element size and shared memory of one program."""
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * element_size
    for rows, tile, depth in ((128, 64, 2), (128, 64, 1), (128, 32, 2), (128, 32, 1), (64, 32, 1), (32, 32, 1)):
        small = rows * element_size <= 256 and tile * row_bytes <= _TILE_BYTES  # enough registers for it
        if small and rows * row_bytes + 2 * depth * tile * row_bytes + _SCRATCH_BYTES <= shared:
            return PrefillConfig(rows=rows, tile=tile, num_stages=2 * depth + 1)
    return PrefillConfig(rows=16, tile=16, num_warps=4, num_stages=3)


def prefill_attention(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    block_table_cm: Tensor,
    kv_lens_c: Tensor,
    query_starts_c1: Tensor,
    out_tnh: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Attention of packed chunks over the paged cache, written to out_tnh and returned.

    The contract is reference.attend's for chunk rows; q_tnh holds the chunks' tokens only. Caches are contiguous,
    block_size a power of two >= 16; queries are contiguous within a token.
    """
    num_tokens, num_heads, head_dim = q_tnh.shape
    num_chunks = block_table_cm.shape[0]
    _, block_size, num_kv_heads, _ = k_cache_pskh.shape
    if num_tokens == 0:
        return out_tnh
    if config is None:
        config = choose_prefill_config(head_dim, q_tnh.element_size(), device_size(q_tnh.device)[1])
    constants = prefill_constants(num_heads, num_kv_heads, head_dim, block_size, window, softcap, sinks_n, config)
    _prefill_kernel[(num_kv_heads, num_tokens // constants["TOKENS"] + num_chunks + 1)](
        q_tnh,
        k_cache_pskh,
        v_cache_pskh,
        block_table_cm,
        kv_lens_c,
        query_starts_c1,
        sinks_n if sinks_n is not None else q_tnh,
        out_tnh,
        num_tokens,
        num_chunks,
        q_tnh.stride(0),
        out_tnh.stride(0),
        block_table_cm.stride(0),
        scale if softcap > 0 else scale * LOG2_E,
        softcap,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_tnh


def prefill_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    softcap: float,
    sinks_n: Tensor | None,
    config: PrefillConfig,
) -> dict[str, Any]:
    """The compile-time arguments of the prefill kernel. TOKENS: tokens a program."""
    group = num_heads // num_kv_heads
    rows = max(config.rows, triton.next_power_of_2(group))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "ROWS": rows,
        "TOKENS": rows // group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "TILE": config.tile,
        "WINDOW": window,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": sinks_n is not None,
    }


# --- flash-attn-4 ----------------------------------------------------------------------------------------------------


def flash_prefill(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    block_table_cm: Tensor,
    kv_lens_c: Tensor,
    query_starts_c1: Tensor,
    longest: int,
    out_tnh: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """As prefill_attention, by flash-attn-4. longest: an upper bound of the longest chunk.

    One more duty of the caller: a sequence's unused slots in its last block must be finite (flash-attn multiplies them
    by 0), which a cache filled with zeros at the start keeps.
    """
    options: dict[str, Any] = {
        "cu_seqlens_q": query_starts_c1,
        "seqused_k": kv_lens_c,
        "max_seqlen_q": max(1, min(longest, q_tnh.shape[0])),
        "page_table": block_table_cm,
        "softmax_scale": scale,
        "causal": True,
        "softcap": softcap,
        "learnable_sink": sinks_n,
    }
    forward, writes_out = _flash_forward()
    if writes_out:
        left = {"window_size_left": window - 1, "window_size_right": 0} if window > 0 else {}
        forward(q_tnh, k_cache_pskh, v_cache_pskh, out=out_tnh, **options, **left)
    else:
        both = {"window_size": (window - 1, 0)} if window > 0 else {}
        result = forward(q_tnh, k_cache_pskh, v_cache_pskh, **options, **both)
        out_tnh.copy_(result[0] if isinstance(result, tuple) else result)
    return zero_padding(out_tnh, query_starts_c1)


def zero_padding(out_tnh: Tensor, query_starts_c1: Tensor) -> Tensor:
    """Sets the tokens behind the last chunk to 0, in place."""
    width = out_tnh.shape[1] * out_tnh.shape[2]
    _zero_kernel[(out_tnh.shape[0],)](
        out_tnh,
        query_starts_c1,
        query_starts_c1.shape[0] - 1,
        out_tnh.stride(0),
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
    )
    return out_tnh


def flash_refusal(device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    """Why flash-attn-4 cannot do prefill here; empty if it is worth its import, which takes seconds and is not made."""
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in (9, 10):
        return f"flash-attn-4 is used on sm_90 and sm_100 only, and this GPU is sm_{capability[0]}{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn-4 needs bfloat16 or float16, and the model runs in {dtype}"
    if head_dim not in FLASH_HEAD_DIMS:
        return f"flash-attn-4 is used for head dims {', '.join(map(str, FLASH_HEAD_DIMS))}, and this one is {head_dim}"
    if not _is_installed():
        return "flash-attn-4 is not installed"
    return ""


def import_flash_ahead() -> threading.Thread:
    """A thread that imports flash-attn-4; join it before the first `flash_prefill`, which meets its error again.

    Python threads take turns, by default of 5 ms, for which a step's every launch would wait: they are short meanwhile.
    An interpreter that exits ends the import at its next module.
    """
    _prepare_flash_import()
    exiting = threading.Event()
    thread = threading.Thread(target=_import_flash, args=(exiting,), name="flash-attn-4", daemon=True)

    def stop() -> None:
        exiting.set()
        thread.join(_EXIT_SECONDS)

    atexit.register(stop)
    thread.start()
    return thread


def _import_flash(exiting: threading.Event) -> None:
    importer = threading.current_thread()

    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if exiting.is_set() and threading.current_thread() is importer:
            raise ImportError("the interpreter exits")

    finder: Any = SimpleNamespace(find_spec=find_spec)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    sys.meta_path.insert(0, finder)
    try:
        with contextlib.suppress(Exception):
            _flash_forward()
    finally:
        sys.meta_path.remove(finder)
        sys.setswitchinterval(interval)


@functools.cache
def _flash_forward() -> tuple[Any, bool]:
    """flash-attn-4's forward function, and whether it writes into a given output. Imports it at the first call."""
    _prepare_flash_import()
    from flash_attn.cute import interface

    forward = getattr(interface, "_flash_attn_fwd", None)
    needed = {"cu_seqlens_q", "seqused_k", "page_table", "window_size_left", "learnable_sink", "softcap", "out"}
    if forward is not None and needed <= set(inspect.signature(forward).parameters):
        return forward, True
    return interface.flash_attn_varlen_func, False


@functools.cache
def _prepare_flash_import() -> None:
    """Hides the warnings of flash-attn-4's packages, and lets it keep what it compiles, seconds a kernel, on the disk.

    It reads these settings when it is imported. Warnings are hidden by module, not around the import: that would hide
    and forget those of other threads, too.
    """
    warnings.filterwarnings("ignore", message="(?s).*aux_data")
    warnings.filterwarnings("ignore", module=r"(flash_attn|cutlass|quack|tvm_ffi|torch_c_dlpack_ext)(\.|$)")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(base, "funcllm", "flash-attn-4")
    with contextlib.suppress(OSError):  # a home that cannot be written: compiled anew at every start
        os.makedirs(folder, exist_ok=True)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", folder)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _is_installed() -> bool:
    """Whether flash-attn-4's files are there; asking for a submodule by name would import its packages."""
    try:
        spec = importlib.util.find_spec("flash_attn")
    except ValueError:  # a module without a spec
        return False
    places = spec.submodule_search_locations if spec is not None else None
    return any(os.path.exists(os.path.join(place, "cute", "interface.py")) for place in places or ())


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _find_chunk(starts_ptr, num_chunks, place, TOKENS: tl.constexpr):
    """The chunk of a place in the grid. Chunk i owns the places from starts[i] // TOKENS + i on; chunk num_chunks is
    the padding behind the last."""
    low = 0
    high = num_chunks + 1
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle) // TOKENS + middle
        if first <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _prefill_tile(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_head,
    start,
    position,
    kv_len,
    scale,
    softcap,
    top,
    total,
    acc,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the softmax over TILE keys. Unmasked: every row sees every key of the tile."""
    SLOT: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    keys_in_tile = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    inside = kv_head * HEAD_DIM + dims[None, :]
    key = start + keys_in_tile
    known = key < kv_len
    if BLOCK_SIZE >= TILE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        offsets = keys_in_tile[:, None] * SLOT + inside
        first = (block * BLOCK_SIZE + start % BLOCK_SIZE) * SLOT
        k_at = k_ptr + first + offsets
        v_at = v_ptr + first + offsets
    else:
        if MASKED:
            blocks = tl.load(table_ptr + key // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        else:
            blocks = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        offsets = ((blocks * BLOCK_SIZE + key % BLOCK_SIZE) * SLOT)[:, None] + inside
        k_at = k_ptr + offsets
        v_at = v_ptr + offsets
    live = (dims < HEAD_DIM)[None, :]
    if MASKED:
        live = live & known[:, None]
    if MASKED or HEAD_DIM != PADDED_DIM:
        k = tl.load(k_at, mask=live, other=0.0)
        v = tl.load(v_at, mask=live, other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = capped(scores, softcap) * 1.4426950408889634
    if MASKED:
        seen = known[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    starts_ptr,
    sinks_ptr,
    out_ptr,
    num_tokens,
    num_chunks,
    q_stride,
    out_stride,
    table_stride,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # The last tokens of a chunk see most keys: their programs start first.
    place = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    chunk = _find_chunk(starts_ptr, num_chunks, place, TOKENS)
    chunk_start = tl.load(starts_ptr + chunk)
    chunk_end = num_tokens
    kv_len = 0
    if chunk < num_chunks:
        chunk_end = tl.load(starts_ptr + chunk + 1)
        kv_len = tl.load(lens_ptr + chunk)
    first_token = chunk_start + (place - (chunk_start // TOKENS + chunk)) * TOKENS
    if first_token >= chunk_end:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    token = first_token + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    own_row = (rows < TOKENS * GROUP) & (token < chunk_end)
    own = own_row[:, None] & (dims < HEAD_DIM)[None, :]
    at = (head * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptr + token.to(tl.int64)[:, None] * q_stride + at, mask=own, other=0.0)

    position = token - chunk_end + kv_len
    first_position = first_token - chunk_end + kv_len
    last_position = tl.minimum(first_token + TOKENS, chunk_end) - 1 - chunk_end + kv_len
    end = tl.minimum(last_position + 1, kv_len)
    table_ptr += chunk.to(tl.int64) * table_stride
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    else:
        whole_end = tl.maximum(tl.minimum(first_position + 1, kv_len), 0) // TILE * TILE
        for start in tl.range(0, whole_end, TILE):
            top, total, acc = _prefill_tile(
                q,
                k_ptr,
                v_ptr,
                table_ptr,
                kv_head,
                start,
                position,
                kv_len,
                scale,
                softcap,
                top,
                total,
                acc,
                NUM_KV_HEADS,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                TILE,
                WINDOW,
                HAS_SOFTCAP,
                False,
            )
        begin = whole_end
    for start in tl.range(begin, end, TILE):
        top, total, acc = _prefill_tile(
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            kv_head,
            start,
            position,
            kv_len,
            scale,
            softcap,
            top,
            total,
            acc,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            HAS_SOFTCAP,
            True,
        )

    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc = acc * shrink[:, None]
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + token.to(tl.int64)[:, None] * out_stride + at, out.to(out_ptr.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["num_chunks"])
def _zero_kernel(out_ptr, starts_ptr, num_chunks, out_stride, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    token = tl.program_id(0)
    if token < tl.load(starts_ptr + num_chunks):
        return
    at = tl.arange(0, PADDED_WIDTH)
    zeros = tl.zeros([PADDED_WIDTH], tl.float32).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * out_stride + at, zeros, mask=at < WIDTH)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants(
    shared: int = SHARED_SM90,
) -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of production launches, to be compiled in tests."""
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    signature |= {"table_ptr": "*i32", "lens_ptr": "*i32", "starts_ptr": "*i32", "sinks_ptr": "*fp32"}
    signature |= {"num_tokens": "i32", "num_chunks": "i32", "scale": "fp32", "softcap": "fp32"}
    signature |= dict.fromkeys(("q_stride", "out_stride", "table_stride"), "i32")
    variants = []
    for head_dim in (64, 80, 96, 128, 256):
        config = choose_prefill_config(head_dim, 2, shared)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        for block_size in (128, 16):
            plain = prefill_constants(32, 8, head_dim, block_size, 0, 0.0, None, config)
            variants.append((f"prefill-{head_dim}-{block_size}", _prefill_kernel, signature, plain, options))
        every = {**plain, "WINDOW": 4096, "HAS_SOFTCAP": True, "HAS_SINKS": True}
        variants.append((f"prefill-{head_dim}-options", _prefill_kernel, signature, every, options))
    zeros = {"out_ptr": "*bf16", "starts_ptr": "*i32", "num_chunks": "i32", "out_stride": "i32"}
    constants = {"WIDTH": 4096, "PADDED_WIDTH": 4096}
    return [*variants, ("zero-padding", _zero_kernel, zeros, constants, {"num_warps": 4})]
