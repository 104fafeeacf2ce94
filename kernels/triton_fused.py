"""Triton kernels for what stands between the matrix products of a step.

Embedding, rotary angles, norms, q/k norm + rope + cache write, SwiGLU.

Each launcher takes the tensors of its twin in reference.py and returns new ones, except that the caches are written in
place. They round where the reference rounds; only the order of the sum of squares differs. With pdl=True a kernel is
started by programmatic dependent launch (sm_90 and later): it loads weights first and waits before it reads or writes
anything else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_NORM_SIZE = 32768
_ROW_ELEMENTS = 1024  # of one program, where rows are shorter than that


_ANGLES = 256  # of one program
_ANGLES_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


# --- launchers -------------------------------------------------------------------------------------------------------


def embed_rows(token_ids_t: Tensor, weight_vd: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """(zeros, the rows of this shard) [t, d], both by one kernel; 0 for ids outside the shard."""
    weight_vd = unit_stride(weight_vd)
    num_tokens, (num_ids, size) = token_ids_t.shape[0], weight_vd.shape
    zeros_td = torch.empty((num_tokens, size), dtype=weight_vd.dtype, device=weight_vd.device)
    rows_td = torch.empty_like(zeros_td)
    if rows_td.numel() == 0:
        return zeros_td, rows_td
    block = min(_ROW_ELEMENTS, triton.next_power_of_2(size))
    _embed_kernel[(num_tokens, triton.cdiv(size, block))](
        token_ids_t.contiguous(),
        weight_vd,
        zeros_td,
        rows_td,
        weight_vd.stride(0),
        first_id,
        num_ids,
        SIZE=size,
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
        enable_fp_fusion=False,
    )
    return zeros_td, rows_td


def rope_angles(positions_t: Tensor, frequencies_h: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) [t, h / 2] of position x frequency, times the last of the frequencies [h / 2 + 1].

    Triton lowers cos and sin of fp32 to libdevice's (__nv_cosf, __nv_sinf): no approximate instructions, and a full
    reduction of the argument, so that they are right within 2 units in the last place at any position.
    """
    num_tokens, half = positions_t.shape[0], frequencies_h.shape[0] - 1
    cos_th = torch.empty((num_tokens, half), dtype=torch.float32, device=positions_t.device)
    sin_th = torch.empty_like(cos_th)
    if cos_th.numel() == 0:
        return cos_th, sin_th
    constants = _angles_constants(half)
    _angles_kernel[(triton.cdiv(num_tokens, constants["ROWS"]),)](
        positions_t.contiguous(), frequencies_h.contiguous(), cos_th, sin_th, num_tokens, **constants, **_ANGLES_OPTIONS
    )
    return cos_th, sin_th


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """The rms norm over the last axis of [..., d] or of a strided [t, n, h]; contiguous."""
    x_ond = _three_axes(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    outer, inner, size = x_ond.shape
    constants, grid = _norm_shape(outer * inner, size)
    _norm_kernel[grid](
        x_ond,
        x_ond,
        weight,
        out,
        out,
        outer * inner,
        inner,
        x_ond.stride(0),
        x_ond.stride(1),
        0,
        eps,
        ADD=False,
        **constants,
        **launch_options(pdl),
    )
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """(x + update rounded once, the rms norm of that sum), for [t, d]."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty_like(total)
    if total.numel() == 0:
        return total, normed
    x_td, update_td = _rows(x), _rows(update)
    rows, size = x_td.shape
    constants, grid = _norm_shape(rows, size)
    _norm_kernel[grid](
        x_td,
        update_td,
        weight,
        total,
        normed,
        rows,
        1,
        x_td.stride(0),
        0,
        update_td.stride(0),
        eps,
        ADD=True,
        **constants,
        **launch_options(pdl),
    )
    return total, normed


def qk_norm_rope_write(
    q_tnh: Tensor,
    k_tkh: Tensor,
    v_tkh: Tensor,
    q_weight_h: Tensor | None,
    k_weight_h: Tensor | None,
    eps: float,
    cos_th: Tensor,
    sin_th: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    slots_t: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """q after norm and rotation; k (likewise) and v go into the caches. q, k, v may be views of one packed tensor."""
    num_tokens, num_heads, head_dim = q_tnh.shape
    num_kv_heads = k_tkh.shape[1]
    out_tnh = torch.empty(q_tnh.shape, dtype=q_tnh.dtype, device=q_tnh.device)
    if num_tokens == 0:
        return out_tnh
    q_tnh, k_tkh, v_tkh, cos_th, sin_th = (unit_stride(x) for x in (q_tnh, k_tkh, v_tkh, cos_th, sin_th))
    normed = q_weight_h is not None and k_weight_h is not None
    heads = heads_of_a_program(num_tokens, num_heads, num_kv_heads)
    q_groups, kv_groups = triton.cdiv(num_heads, heads), triton.cdiv(num_kv_heads, heads)
    half = triton.next_power_of_2(head_dim // 2)
    _qkv_kernel[(num_tokens, q_groups + 2 * kv_groups)](
        q_tnh,
        k_tkh,
        v_tkh,
        q_weight_h if normed else cos_th,
        k_weight_h if normed else cos_th,
        cos_th,
        sin_th,
        out_tnh,
        k_cache_pskh,
        v_cache_pskh,
        slots_t,
        q_tnh.stride(0),
        q_tnh.stride(1),
        k_tkh.stride(0),
        k_tkh.stride(1),
        v_tkh.stride(0),
        v_tkh.stride(1),
        cos_th.stride(0),
        sin_th.stride(0),
        eps,
        NORM=normed,
        HEADS=heads,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PADDED_HALF=half,
        num_warps=max(1, min(4, heads * half // 64)),
        **launch_options(pdl),
    )
    return out_tnh


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up of [..., 2f], gate first; contiguous."""
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    gate_up_tf = _rows(gate_up)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(gate_up_tf.shape[0], triton.cdiv(width, block))](
        gate_up_tf,
        out,
        gate_up_tf.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
        **launch_options(pdl),
    )
    return out


def _angles_constants(half: int) -> dict[str, int]:
    padded = triton.next_power_of_2(half)
    return {"HALF": half, "PADDED_HALF": padded, "ROWS": max(1, _ANGLES // padded)}


def heads_of_a_program(num_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Heads that one program handles: few where there are too few programs to fill the GPU, else up to eight."""
    total = num_tokens * (num_heads + 2 * num_kv_heads)
    most = triton.next_power_of_2(max(num_heads, num_kv_heads))
    return min(most, 1 if total <= 2048 else 2 if total <= 8192 else 8)


def launch_options(pdl: bool) -> dict[str, Any]:
    """The launch arguments of a kernel with a PDL flag. Products and sums are not contracted: eager does not either."""
    return {"PDL": pdl, "enable_fp_fusion": False} | ({"launch_pdl": True} if pdl else {})


def _norm_shape(rows: int, size: int) -> tuple[dict[str, Any], tuple[int]]:
    if size > MAX_NORM_SIZE:
        raise ValueError(f"a norm over {size} values is above {MAX_NORM_SIZE}; use the REFERENCE bundle for this model")
    padded = triton.next_power_of_2(size)
    tile = max(1, _ROW_ELEMENTS // padded)
    warps = max(1, min(16, tile * padded // 512))
    return {"SIZE": size, "PADDED_SIZE": padded, "ROWS": tile, "num_warps": warps}, (triton.cdiv(rows, tile),)


def unit_stride(x: Tensor) -> Tensor:
    """x, copied only where its last axis is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    return unit_stride(x.reshape(-1, x.shape[-1]))


def _three_axes(x: Tensor) -> Tensor:
    return unit_stride(x) if x.dim() == 3 else _rows(x)[:, None, :]


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _embed_kernel(
    token_ids_ptr,
    weight_ptr,
    zeros_ptr,
    rows_ptr,
    stride,
    first_id,
    num_ids,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live_d = at_d < SIZE
    local = tl.load(token_ids_ptr + token).to(tl.int64) - first_id
    width = tl.where((local >= 0) & (local < num_ids), SIZE, 0)
    row_d = tl.load(weight_ptr + local * stride + at_d, mask=at_d < width, other=0.0)
    tl.store(rows_ptr + token * SIZE + at_d, row_d, mask=live_d)
    tl.store(zeros_ptr + token * SIZE + at_d, tl.zeros((BLOCK,), zeros_ptr.dtype.element_ty), mask=live_d)


@triton.jit(do_not_specialize=["num_tokens"])
def _angles_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    num_tokens,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    token_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at_h = tl.arange(0, PADDED_HALF)
    live_rh = (token_r < num_tokens)[:, None] & (at_h < HALF)[None, :]
    position_r = tl.load(positions_ptr + token_r, mask=token_r < num_tokens, other=0).to(tl.float32)
    frequency_h = tl.load(frequencies_ptr + at_h, mask=at_h < HALF, other=0.0)
    factor = tl.load(frequencies_ptr + HALF)
    angle_rh = position_r[:, None] * frequency_h[None, :]
    at_rh = token_r[:, None] * HALF + at_h[None, :]
    tl.store(cos_ptr + at_rh, tl.cos(angle_rh) * factor, mask=live_rh)
    tl.store(sin_ptr + at_rh, tl.sin(angle_rh) * factor, mask=live_rh)


@triton.jit
def to_l2(pointers):
    """Asks for the cache lines behind the pointers, without waiting; only for a GPU."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def normed(x_rd, weight_d, size, eps, dtype: tl.constexpr):
    """Rows of fp32 x after the rms norm, rounded to dtype before and after the weight. Padding columns of x are 0."""
    scale_r = tl.rsqrt(tl.sum(x_rd * x_rd, axis=1) / size + eps)
    rounded_rd = (x_rd * scale_r[:, None]).to(dtype).to(tl.float32)
    return (rounded_rd * weight_d.to(dtype).to(tl.float32)[None, :]).to(dtype)


@triton.jit
def _norm_kernel(
    x_ptr,
    update_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    update_stride,
    eps,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at_d = tl.arange(0, PADDED_SIZE)
    live_d = at_d < SIZE
    live_rd = (row_r < num_rows)[:, None] & live_d[None, :]
    weight_d = tl.load(weight_ptr + at_d, mask=live_d, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start_r = (row_r // inner) * outer_stride + (row_r % inner) * inner_stride
    x_rd = tl.load(x_ptr + start_r[:, None] + at_d[None, :], mask=live_rd, other=0.0).to(tl.float32)
    out_at_rd = row_r[:, None] * SIZE + at_d[None, :]
    if ADD:
        update_at_rd = row_r[:, None] * update_stride + at_d[None, :]
        update_rd = tl.load(update_ptr + update_at_rd, mask=live_rd, other=0.0)
        total_rd = (x_rd + update_rd.to(tl.float32)).to(dtype)
        tl.store(total_ptr + out_at_rd, total_rd, mask=live_rd)
        x_rd = total_rd.to(tl.float32)
    tl.store(out_ptr + out_at_rd, normed(x_rd, weight_d, SIZE, eps, dtype), mask=live_rd)


@triton.jit
def _qkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    cos_stride,
    sin_stride,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if group < q_groups:
        _rotate_heads(
            q_ptr + token * q_stride,
            q_head_stride,
            q_weight_ptr,
            cos_ptr + token * cos_stride,
            sin_ptr + token * sin_stride,
            out_ptr + token * (NUM_HEADS * 2 * HALF),
            group * HEADS,
            eps,
            NORM,
            HEADS,
            NUM_HEADS,
            HALF,
            PADDED_HALF,
        )
    elif group < q_groups + kv_groups:
        _rotate_heads(
            k_ptr + token * k_stride,
            k_head_stride,
            k_weight_ptr,
            cos_ptr + token * cos_stride,
            sin_ptr + token * sin_stride,
            k_cache_ptr + slot * (NUM_KV_HEADS * 2 * HALF),
            (group - q_groups) * HEADS,
            eps,
            NORM,
            HEADS,
            NUM_KV_HEADS,
            HALF,
            PADDED_HALF,
        )
    else:
        head_r = (group - q_groups - kv_groups) * HEADS + tl.arange(0, HEADS)
        at_h = tl.arange(0, 2 * PADDED_HALF)
        live_rh = (head_r < NUM_KV_HEADS)[:, None] & (at_h < 2 * HALF)[None, :]
        v_rh = tl.load(
            v_ptr + token * v_stride + head_r[:, None] * v_head_stride + at_h[None, :], mask=live_rh, other=0.0
        )
        to_rh = v_cache_ptr + slot * (NUM_KV_HEADS * 2 * HALF) + head_r[:, None] * (2 * HALF) + at_h[None, :]
        tl.store(to_rh, v_rh.to(v_cache_ptr.dtype.element_ty), mask=live_rh)


@triton.jit
def _rotate_heads(
    x_ptr,
    head_stride,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    first_head,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    head_r = first_head + tl.arange(0, HEADS)
    at_h = tl.arange(0, PADDED_HALF)
    live_h = at_h < HALF
    live_rh = (head_r < NUM_HEADS)[:, None] & live_h[None, :]
    from_rh = x_ptr + head_r[:, None] * head_stride + at_h[None, :]
    first_rh = tl.load(from_rh, mask=live_rh, other=0.0).to(tl.float32)
    second_rh = tl.load(from_rh + HALF, mask=live_rh, other=0.0).to(tl.float32)
    cos_h = tl.load(cos_ptr + at_h, mask=live_h, other=0.0)[None, :]
    sin_h = tl.load(sin_ptr + at_h, mask=live_h, other=0.0)[None, :]
    if NORM:
        squares_r = tl.sum(first_rh * first_rh + second_rh * second_rh, axis=1)
        scale_r1 = tl.rsqrt(squares_r / (2 * HALF) + eps)[:, None]
        first_weight_h = tl.load(weight_ptr + at_h, mask=live_h, other=0.0).to(dtype).to(tl.float32)
        second_weight_h = tl.load(weight_ptr + HALF + at_h, mask=live_h, other=0.0).to(dtype).to(tl.float32)
        first_rh = (first_rh * scale_r1).to(dtype).to(tl.float32) * first_weight_h[None, :]
        second_rh = (second_rh * scale_r1).to(dtype).to(tl.float32) * second_weight_h[None, :]
        first_rh = first_rh.to(dtype).to(tl.float32)
        second_rh = second_rh.to(dtype).to(tl.float32)
    to_rh = out_ptr + head_r[:, None] * (2 * HALF) + at_h[None, :]
    rotated_first_rh = (first_rh * cos_h - second_rh * sin_h).to(dtype)
    rotated_second_rh = (second_rh * cos_h + first_rh * sin_h).to(dtype)
    tl.store(to_rh, rotated_first_rh.to(out_ptr.dtype.element_ty), mask=live_rh)
    tl.store(to_rh + HALF, rotated_second_rh.to(out_ptr.dtype.element_ty), mask=live_rh)


@triton.jit
def silu_product(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 values; silu is rounded to dtype before the product."""
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live_f = at_f < WIDTH
    gate_f = tl.load(gate_up_ptr + row * stride + at_f, mask=live_f, other=0.0).to(tl.float32)
    up_f = tl.load(gate_up_ptr + row * stride + WIDTH + at_f, mask=live_f, other=0.0).to(tl.float32)
    out_f = silu_product(gate_f, up_f, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + at_f, out_f, mask=live_f)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    variants: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for size in (128, 1024, 2560, 4096, 5120):
        for add in (False, True):
            constants, _ = _norm_shape(64, size)
            warps = constants.pop("num_warps")
            signature = dict.fromkeys(("x_ptr", "update_ptr", "weight_ptr", "total_ptr", "out_ptr"), "*bf16")
            signature |= dict.fromkeys(("num_rows", "inner", "outer_stride", "inner_stride"), "i32")
            signature |= {"update_stride": "i32", "eps": "fp32"}
            variants.append(
                (
                    f"norm-{size}-{'add' if add else 'plain'}",
                    _norm_kernel,
                    signature,
                    {"ADD": add, "PDL": add, **constants},
                    {"num_warps": warps},
                )
            )
    for size in (128, 1000, 5120):
        signature = {"token_ids_ptr": "*i32", "weight_ptr": "*bf16", "zeros_ptr": "*bf16", "rows_ptr": "*bf16"}
        signature |= dict.fromkeys(("stride", "first_id", "num_ids"), "i32")
        block = min(_ROW_ELEMENTS, triton.next_power_of_2(size))
        options = {"num_warps": max(1, min(4, block // 256))}
        variants.append((f"embed-{size}", _embed_kernel, signature, {"SIZE": size, "BLOCK": block}, options))
    for half in (32, 48, 64, 128):
        signature = {"positions_ptr": "*i32", "frequencies_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        signature |= {"num_tokens": "i32"}
        variants.append((f"angles-{half}", _angles_kernel, signature, _angles_constants(half), {"num_warps": 4}))
    strides = ("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride")
    for head_dim, heads in ((64, 8), (80, 8), (96, 1), (128, 1), (128, 8), (256, 8)):
        signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        signature |= dict.fromkeys(("out_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
        signature |= {"slots_ptr": "*i64"} | dict.fromkeys((*strides, "cos_stride", "sin_stride"), "i32")
        signature |= {"eps": "fp32"}
        half = triton.next_power_of_2(head_dim // 2)
        constants = {"NORM": True, "HEADS": heads, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": head_dim // 2}
        constants |= {"PADDED_HALF": half, "PDL": heads == 1}
        options = {"num_warps": max(1, min(4, heads * half // 64))}
        variants.append((f"qkv-{head_dim}-{heads}", _qkv_kernel, signature, constants, options))
    for width in (3072, 12288):
        signature = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32"}
        constants = {"WIDTH": width, "BLOCK": 1024, "PDL": False}
        variants.append((f"silu-{width}", _silu_mul_kernel, signature, constants, {"num_warps": 4}))
    return variants
