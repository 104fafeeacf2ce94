"""Triton matrix kernels for few rows (1 to 16): y = x @ weight.T at the speed of reading the weight once.

Two kernels. The streaming one holds `block_n` whole rows of the weight in registers (or walks over them in pieces of
`block_k`) and multiplies on the CUDA cores, in fp32: best for 1 to 4 rows. The tensor-core one pads the rows to 16.
Both can norm x on the fly (each program norms all of it: a row is a few KB and stays in cache), after adding an update
to it, and end in silu(gate) * up over matching rows of a fused gate/up weight, or in the sum with a residual. They
round where the composition of the ops rounds.

With pdl=True a kernel starts while its predecessor still runs: the streaming one asks for its whole share of the weight
first, and only then waits for what the predecessor wrote.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from funcllm.kernels.gemv_config import MAX_ROWS, GemvConfig, choose_config
from funcllm.kernels.triton_fused import silu_product, unit_stride


def gemv(
    x_td: Tensor,
    weight_od: Tensor,
    *,
    bias_o: Tensor | None = None,
    norm_weight_d: Tensor | None = None,
    eps: float = 0.0,
    update_td: Tensor | None = None,
    residual_to: Tensor | None = None,
    silu: bool = False,
    wide: bool = False,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y_to, the sum x + update, or x without an update).

    y = norm(x + update) @ weight.T + bias, each part where it is given; then silu(first half) * second half, or the sum
    with the residual. wide: y is the fp32 accumulator. update needs norm_weight. The weight is contiguous.
    """
    rows, size = x_td.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than the {MAX_ROWS} of the small-batch kernels; use a plain linear")
    if not weight_od.is_contiguous():
        raise ValueError(f"a weight with strides {weight_od.stride()} is not contiguous; pass weight.contiguous()")
    x_td = unit_stride(x_td)
    update_td = None if update_td is None else unit_stride(update_td)
    residual_to = None if residual_to is None else unit_stride(residual_to)
    out_features = weight_od.shape[0] // 2 if silu else weight_od.shape[0]
    y_to = torch.empty((rows, out_features), dtype=torch.float32 if wide else x_td.dtype, device=x_td.device)
    total_td = torch.empty((rows, size), dtype=x_td.dtype, device=x_td.device) if update_td is not None else x_td
    if y_to.numel() == 0:
        return y_to, total_td
    config = config or choose_config(rows, out_features, size, silu)
    pointers = (
        x_td,
        weight_od,
        weight_od if bias_o is None else bias_o,
        weight_od if norm_weight_d is None else norm_weight_d,
        x_td if update_td is None else update_td,
        x_td if residual_to is None else residual_to,
        total_td,
        y_to,
    )
    strides = (
        x_td.stride(0),
        0 if update_td is None else update_td.stride(0),
        0 if residual_to is None else residual_to.stride(0),
    )
    constants = gemv_constants(
        rows,
        out_features,
        size,
        bias=bias_o is not None,
        norm=norm_weight_d is not None,
        add=update_td is not None,
        residual=residual_to is not None,
        silu=silu,
        config=config,
    )
    kernel = _tensor_core_kernel if config.tensor_cores else _stream_kernel
    kernel[(triton.cdiv(out_features, config.block_n),)](
        *pointers,
        *strides,
        eps,
        **constants,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y_to, total_td


def gemv_constants(
    rows: int,
    out_features: int,
    size: int,
    *,
    bias: bool = False,
    norm: bool = False,
    add: bool = False,
    residual: bool = False,
    silu: bool = False,
    config: GemvConfig,
) -> dict[str, Any]:
    """The compile-time arguments of a launch."""
    whole = triton.next_power_of_2(size)
    constants = {"M": rows, "N": out_features, "K": size, "BIAS": bias, "NORM": norm, "ADD": add, "SILU": silu}
    constants |= {
        "RESIDUAL": residual,
        "BLOCK_N": config.block_n,
        "BLOCK_K": min(config.block_k or whole, max(whole, 16)),
    }
    return constants | {"PADDED_K": whole} | ({} if config.tensor_cores else {"STAGES": config.num_stages})


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _read_x(
    x_ptr, update_ptr, total_ptr, at_rk, live_rk, total_at_rk, update_at_rk, writes, ADD: tl.constexpr
):  # -> fp32 rows of x, or of the rounded sum, which the first program keeps
    x_rk = tl.load(x_ptr + at_rk, mask=live_rk, other=0.0)
    if ADD:
        update_rk = tl.load(update_ptr + update_at_rk, mask=live_rk, other=0.0).to(tl.float32)
        x_rk = (x_rk.to(tl.float32) + update_rk).to(x_ptr.dtype.element_ty)
        if writes:
            tl.store(total_ptr + total_at_rk, x_rk, mask=live_rk)
    return x_rk.to(tl.float32)


@triton.jit
def _finish(
    y, up, bias_ptr, residual_ptr, y_ptr, residual_at, y_at, n, live,
    dtype: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if SILU:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
    out: tl.constexpr = y_ptr.dtype.element_ty
    if SILU:
        y = silu_product(y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype).to(tl.float32)
    if RESIDUAL:
        y = tl.load(residual_ptr + residual_at, mask=live, other=0.0).to(tl.float32) + y.to(dtype).to(tl.float32)
    tl.store(y_ptr + y_at, y.to(out), mask=live)


@triton.jit
def _stream_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    update_ptr,
    residual_ptr,
    total_ptr,
    y_ptr,
    x_stride,
    update_stride,
    residual_stride,
    eps,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    live_n = n < N
    row_n1 = (weight_ptr + n.to(tl.int64) * K)[:, None]
    k_1k = tl.arange(0, BLOCK_K)[None, :]
    if BLOCK_K >= K:
        live_1k = k_1k < K
        live_nk = live_n[:, None] & live_1k
        weight_nk = tl.load(row_n1 + k_1k, mask=live_nk, other=0.0, eviction_policy="evict_first")
        if SILU:
            up_row_n1 = row_n1 + N * K
            up_weight_nk = tl.load(up_row_n1 + k_1k, mask=live_nk, other=0.0, eviction_policy="evict_first")
        if NORM:
            norm_weight_1k = tl.load(norm_weight_ptr + k_1k, mask=live_1k, other=0.0).to(dtype).to(tl.float32)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        for m in tl.static_range(M):
            x_1k = _read_x(
                x_ptr, update_ptr, total_ptr, m * x_stride + k_1k, live_1k, m * K + k_1k, m * update_stride + k_1k,
                program == 0, ADD,
            )  # fmt: skip
            if NORM:
                scale_11 = tl.rsqrt(tl.sum(x_1k * x_1k, axis=1) / K + eps)[:, None]
                x_1k = (x_1k * scale_11).to(dtype).to(tl.float32) * norm_weight_1k
                x_1k = x_1k.to(dtype).to(tl.float32)
            y_n = tl.sum(weight_nk.to(tl.float32) * x_1k, axis=1)
            up_n = y_n
            if SILU:
                up_n = tl.sum(up_weight_nk.to(tl.float32) * x_1k, axis=1)
            _finish(
                y_n, up_n, bias_ptr, residual_ptr, y_ptr, m * residual_stride + n, m * N + n, n, live_n,
                dtype, N, BIAS, RESIDUAL, SILU,
            )  # fmt: skip
    else:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        for m in tl.static_range(M):
            scale_11 = tl.full((1, 1), 1.0, tl.float32)
            if NORM:
                whole_1k = tl.arange(0, PADDED_K)[None, :]
                x_1k = _read_x(
                    x_ptr, update_ptr, total_ptr, m * x_stride + whole_1k, whole_1k < K, m * K + whole_1k,
                    m * update_stride + whole_1k, program == 0, ADD,
                )  # fmt: skip
                scale_11 = tl.rsqrt(tl.sum(x_1k * x_1k, axis=1) / K + eps)[:, None]
            y_nk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            up_nk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                at_1k = start + k_1k
                live_1k = at_1k < K
                live_nk = live_n[:, None] & live_1k
                weight_nk = tl.load(row_n1 + at_1k, mask=live_nk, other=0.0, eviction_policy="evict_first")
                x_1k = _read_x(
                    x_ptr, update_ptr, total_ptr, m * x_stride + at_1k, live_1k, m * K + at_1k,
                    m * update_stride + at_1k, False, ADD,
                )  # fmt: skip
                if NORM:
                    norm_weight_1k = tl.load(norm_weight_ptr + at_1k, mask=live_1k, other=0.0).to(dtype).to(tl.float32)
                    x_1k = (x_1k * scale_11).to(dtype).to(tl.float32) * norm_weight_1k
                    x_1k = x_1k.to(dtype).to(tl.float32)
                y_nk += weight_nk.to(tl.float32) * x_1k
                if SILU:
                    up_at_nk = row_n1 + N * K + at_1k
                    up_weight_nk = tl.load(up_at_nk, mask=live_nk, other=0.0, eviction_policy="evict_first")
                    up_nk += up_weight_nk.to(tl.float32) * x_1k
            _finish(
                tl.sum(y_nk, axis=1), tl.sum(up_nk, axis=1), bias_ptr, residual_ptr, y_ptr,
                m * residual_stride + n, m * N + n, n, live_n, dtype, N, BIAS, RESIDUAL, SILU,
            )  # fmt: skip


@triton.jit
def _tensor_core_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    update_ptr,
    residual_ptr,
    total_ptr,
    y_ptr,
    x_stride,
    update_stride,
    residual_stride,
    eps,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    live_1n = (n < N)[None, :]
    row_1n = (weight_ptr + n.to(tl.int64) * K)[None, :]
    m_r1 = tl.arange(0, 16)[:, None]
    k = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    scale_r1 = tl.full((16, 1), 1.0, tl.float32)
    if NORM:
        squares_rk = tl.zeros((16, BLOCK_K), tl.float32)
        for start in range(0, K, BLOCK_K):
            at_1k = (start + k)[None, :]
            live_rk = (m_r1 < M) & (at_1k < K)
            x_rk = _read_x(
                x_ptr, update_ptr, total_ptr, m_r1 * x_stride + at_1k, live_rk, m_r1 * K + at_1k,
                m_r1 * update_stride + at_1k, program == 0, ADD,
            )  # fmt: skip
            squares_rk += x_rk * x_rk
        scale_r1 = tl.rsqrt(tl.sum(squares_rk, axis=1) / K + eps)[:, None]
    y_rn = tl.zeros((16, BLOCK_N), tl.float32)
    up_rn = tl.zeros((16, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at_1k = (start + k)[None, :]
        at_k1 = (start + k)[:, None]
        live_rk = (m_r1 < M) & (at_1k < K)
        live_kn = (at_k1 < K) & live_1n
        x_rk = tl.load(x_ptr + m_r1 * x_stride + at_1k, mask=live_rk, other=0.0)
        if NORM:
            if ADD:
                update_rk = tl.load(update_ptr + m_r1 * update_stride + at_1k, mask=live_rk, other=0.0)
                x_rk = (x_rk.to(tl.float32) + update_rk.to(tl.float32)).to(dtype)
            norm_weight_1k = tl.load(norm_weight_ptr + at_1k, mask=at_1k < K, other=0.0).to(dtype).to(tl.float32)
            x_rk = (x_rk.to(tl.float32) * scale_r1).to(dtype).to(tl.float32) * norm_weight_1k
            x_rk = x_rk.to(dtype)
        weight_kn = tl.load(row_1n + at_k1, mask=live_kn, other=0.0, eviction_policy="evict_first")
        y_rn = tl.dot(x_rk, weight_kn, y_rn, input_precision="ieee")
        if SILU:
            up_weight_kn = tl.load(row_1n + N * K + at_k1, mask=live_kn, other=0.0, eviction_policy="evict_first")
            up_rn = tl.dot(x_rk, up_weight_kn, up_rn, input_precision="ieee")
    live_rn = (m_r1 < M) & live_1n
    n_1n = n[None, :]
    _finish(
        y_rn, up_rn, bias_ptr, residual_ptr, y_ptr, m_r1 * residual_stride + n_1n, m_r1 * N + n_1n, n_1n, live_rn,
        dtype, N, BIAS, RESIDUAL, SILU,
    )  # fmt: skip


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "norm_weight_ptr", "update_ptr", "residual_ptr", "total_ptr")
    signature = dict.fromkeys((*pointers, "y_ptr"), "*bf16") | {"eps": "fp32"}
    signature |= dict.fromkeys(("x_stride", "update_stride", "residual_stride"), "i32")
    cases: list[tuple[int, int, int, dict[str, bool]]] = [
        (1, 4096, 1024, {"norm": True}),
        (1, 1024, 2048, {"residual": True}),
        (2, 3072, 1024, {"norm": True, "silu": True}),
        (1, 1024, 3072, {"residual": True}),
        (1, 6144, 4096, {"norm": True, "bias": True}),
        (4, 12288, 4096, {"norm": True, "add": True, "silu": True}),
        (1, 4096, 12288, {"residual": True}),
        (1, 151936, 1024, {}),
        (8, 1024, 3072, {"residual": True}),
        (8, 6144, 4096, {"norm": True}),
        (8, 12288, 4096, {"norm": True, "add": True, "silu": True}),
        (16, 4096, 12288, {"residual": True}),
    ]
    variants: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for rows, out_features, size, parts in cases:
        config = choose_config(rows, out_features, size, parts.get("silu", False))
        constants = gemv_constants(rows, out_features, size, **parts, config=config) | {"PDL": True}
        kernel = _tensor_core_kernel if config.tensor_cores else _stream_kernel
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        variants.append((f"gemv-{rows}x{out_features}x{size}", kernel, signature, constants, options))
    looped = GemvConfig(block_n=4, num_warps=4, block_k=1024, num_stages=3)
    constants = gemv_constants(1, 4096, 12288, residual=True, config=looped) | {"PDL": True}
    return [*variants, ("gemv-looped", _stream_kernel, signature, constants, {"num_warps": 4, "num_stages": 3})]
