"""Triton kernels that write and copy paged keys and values.

A slot is block * block_size + offset. A layer's cache passes 2^31 elements, so slots are int64 before they are
multiplied.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


def write_kv(k_tkh: Tensor, v_tkh: Tensor, k_cache_pskh: Tensor, v_cache_pskh: Tensor, slots_t: Tensor) -> None:
    """Writes k and v into the caches at the given slots, in place. Caches are contiguous; k and v within a token."""
    num_tokens, num_kv_heads, head_dim = k_tkh.shape
    if num_tokens == 0:
        return
    width = num_kv_heads * head_dim
    _write_kernel[(num_tokens,)](
        k_tkh,
        v_tkh,
        k_cache_pskh,
        v_cache_pskh,
        slots_t,
        k_tkh.stride(0),
        v_tkh.stride(0),
        **write_constants(width),
        num_warps=warps_for(width),
    )


def copy_slots(k_cache_pskh: Tensor, v_cache_pskh: Tensor, copies_n3: Tensor) -> None:
    """Copies the first slots of blocks, in place: rows are (source block, destination block, number of slots), int32.

    No block is both a source and a destination, or a destination twice: the copies run at the same time.
    """
    num_copies = copies_n3.shape[0]
    if num_copies == 0:
        return
    _, block_size, num_kv_heads, head_dim = k_cache_pskh.shape
    width = num_kv_heads * head_dim
    _copy_kernel[(block_size, num_copies)](
        k_cache_pskh,
        v_cache_pskh,
        copies_n3,
        copies_n3.stride(0),
        copies_n3.stride(1),
        BLOCK_SIZE=block_size,
        **write_constants(width),
        num_warps=warps_for(width),
    )


def write_constants(width: int) -> dict[str, int]:
    """The compile-time arguments of a kernel that moves one slot, `width` elements."""
    return {"WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}


def warps_for(width: int) -> int:
    """Warps that move `width` elements, eight a thread."""
    return max(1, min(8, triton.next_power_of_2(width) // 256))


@triton.jit
def _write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = tl.arange(0, PADDED_WIDTH)
    live = at < WIDTH
    k = tl.load(k_ptr + token * k_stride + at, mask=live)
    v = tl.load(v_ptr + token * v_stride + at, mask=live)
    tl.store(k_cache_ptr + slot * WIDTH + at, k, mask=live)
    tl.store(v_cache_ptr + slot * WIDTH + at, v, mask=live)


@triton.jit
def _copy_kernel(
    k_cache_ptr,
    v_cache_ptr,
    copies_ptr,
    copy_stride,
    column_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    offset = tl.program_id(0)
    copies_ptr += tl.program_id(1) * copy_stride
    if offset >= tl.load(copies_ptr + 2 * column_stride):
        return
    source = tl.load(copies_ptr).to(tl.int64) * BLOCK_SIZE + offset
    destination = tl.load(copies_ptr + column_stride).to(tl.int64) * BLOCK_SIZE + offset
    at = tl.arange(0, PADDED_WIDTH)
    live = at < WIDTH
    k = tl.load(k_cache_ptr + source * WIDTH + at, mask=live)
    v = tl.load(v_cache_ptr + source * WIDTH + at, mask=live)
    tl.store(k_cache_ptr + destination * WIDTH + at, k, mask=live)
    tl.store(v_cache_ptr + destination * WIDTH + at, v, mask=live)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of production launches, to be compiled for sm_90 in tests."""
    caches = {"k_cache_ptr": "*bf16", "v_cache_ptr": "*bf16"}
    write = {"k_ptr": "*bf16", "v_ptr": "*bf16", **caches, "slots_ptr": "*i64", "k_stride": "i32", "v_stride": "i32"}
    copy = {**caches, "copies_ptr": "*i32", "copy_stride": "i32", "column_stride": "i32"}
    variants = []
    for width in (640, 1024, 2048):
        constants, options = write_constants(width), {"num_warps": warps_for(width)}
        variants.append((f"write-{width}", _write_kernel, write, constants, options))
        variants.append((f"copy-{width}", _copy_kernel, copy, {**constants, "BLOCK_SIZE": 128}, options))
    return variants
