"""Triton matrix kernels for few rows (1 to 16): y = x @ weight.T at the speed of reading the weight once.

Three kernels. The streaming one holds `block_n` whole rows of the weight in registers (or walks over them in pieces of
`block_k`) and multiplies on the CUDA cores, in fp32: best for 1 to 4 rows. The persistent one does the same with a few
programs a multiprocessor, which read and norm x once, keep it in registers and go over groups of `block_n` rows of the
weight, the next group being on its way while one is multiplied. The tensor-core one pads the rows of x to 16.
All can norm x on the fly (each program norms all of it: a row is a few KB and stays in cache), after adding an update
to it, and end in silu(gate) * up over matching rows of a fused gate/up weight, or in the sum with a residual. They
round where the composition of the ops rounds. No kernel but the tensor-core one computes rows of x that do not exist.

With pdl=True a kernel starts while its predecessor still runs: the streaming ones ask for their whole share of the
weight, or their first groups, before they wait for what the predecessor wrote.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from funcllm.kernels.gemv_config import MAX_ROWS, RELEASES, GemvConfig, choose_config, programs_of
from funcllm.kernels.triton_fused import silu_product, to_l2, unit_stride


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
    config = config or choose_config(rows, out_features, size, silu, norm_weight_d is not None)
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
        pdl=pdl,
        config=config,
    )
    programs = triton.cdiv(out_features, config.block_n)
    if config.programs_per_sm:
        programs = programs_of(programs, config.programs_per_sm, multiprocessors(x_td.device))
    kernel_of(config)[(programs,)](
        *pointers,
        *strides,
        eps,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if constants["PDL"] else {}),
    )
    return y_to, total_td


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; two for the interpreter's CPU tensors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def kernel_of(config: GemvConfig) -> Any:
    """The kernel that a configuration is for."""
    if config.tensor_cores:
        return _tensor_core_kernel
    return _persistent_stream_kernel if config.programs_per_sm else _stream_kernel


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
    pdl: bool = False,
    config: GemvConfig,
) -> dict[str, Any]:
    """The compile-time arguments of a launch."""
    whole = triton.next_power_of_2(size)
    constants: dict[str, Any] = {"M": rows, "N": out_features, "K": size, "BIAS": bias, "NORM": norm, "ADD": add}
    constants |= {"SILU": silu, "RESIDUAL": residual, "BLOCK_N": config.block_n, "BLOCK_K": max(whole, 16)}
    constants |= {"PDL": pdl and config.early_start, "RELEASE": RELEASES.index(config.release) if pdl else 0}
    prefetch = config.prefetch if constants["PDL"] else 0
    if config.programs_per_sm:
        return constants | {"PADDED_M": triton.next_power_of_2(rows), "AHEAD": config.num_stages, "PREFETCH": prefetch}
    constants["BLOCK_K"] = min(config.block_k or whole, constants["BLOCK_K"])
    if config.tensor_cores:
        return constants | {"PREFETCH": prefetch}
    return constants | {"PADDED_K": whole, "STAGES": config.num_stages}


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
def _values(
    y, up, bias, up_bias, residual,
    dtype: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Outputs in fp32 from the sums; bias, up_bias and residual are fp32 where they are used at all."""
    if BIAS:
        y += bias
        if SILU:
            up += up_bias
    if SILU:
        y = silu_product(y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype).to(tl.float32)
    if RESIDUAL:
        y = residual + y.to(dtype).to(tl.float32)
    return y


@triton.jit
def _finish(
    y, up, bias_ptr, residual_ptr, y_ptr, residual_at, y_at, n, live,
    dtype: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    bias, up_bias, residual = y, y, y
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if SILU:
            up_bias = tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + residual_at, mask=live, other=0.0).to(tl.float32)
    y = _values(y, up, bias, up_bias, residual, dtype, BIAS, RESIDUAL, SILU)
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=live)


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
    RELEASE: tl.constexpr,
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
        if RELEASE == 1:
            gdc_launch_dependents()
        if PDL:
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
            if RELEASE == 2 and m == M - 1:
                gdc_launch_dependents()
            _finish(
                y_n, up_n, bias_ptr, residual_ptr, y_ptr, m * residual_stride + n, m * N + n, n, live_n,
                dtype, N, BIAS, RESIDUAL, SILU,
            )  # fmt: skip
    else:
        if RELEASE == 1:
            gdc_launch_dependents()
        if PDL:
            gdc_wait()
        for m in tl.static_range(M):
            scale_11 = tl.full((1, 1), 1.0, tl.float32)
            if NORM:
                whole_1k = tl.arange(0, PADDED_K)[None, :]
                whole_x_1k = _read_x(
                    x_ptr, update_ptr, total_ptr, m * x_stride + whole_1k, whole_1k < K, m * K + whole_1k,
                    m * update_stride + whole_1k, program == 0, ADD,
                )  # fmt: skip
                scale_11 = tl.rsqrt(tl.sum(whole_x_1k * whole_x_1k, axis=1) / K + eps)[:, None]
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
            if RELEASE == 2 and m == M - 1:
                gdc_launch_dependents()
            _finish(
                tl.sum(y_nk, axis=1), tl.sum(up_nk, axis=1), bias_ptr, residual_ptr, y_ptr,
                m * residual_stride + n, m * N + n, n, live_n, dtype, N, BIAS, RESIDUAL, SILU,
            )  # fmt: skip


@triton.jit
def _group(
    weight_ptr, group, k_1k,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A group's rows of the weight; with SILU gate and up rows in turn. Rows that do not exist are arbitrary."""
    planes: tl.constexpr = 2 if SILU else 1
    r = tl.arange(0, BLOCK_N * planes)
    n = group * BLOCK_N + r // planes
    at_rk = weight_ptr + (n.to(tl.int64) * K + (r % planes) * (N * K))[:, None] + k_1k
    live_r1 = (n < N)[:, None]
    if BLOCK_K > K:
        return tl.load(at_rk, mask=live_r1 & (k_1k < K), other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at_rk, mask=live_r1, eviction_policy="evict_first")


@triton.jit
def _group_to_l2(
    weight_ptr, group, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    planes: tl.constexpr = 2 if SILU else 1
    line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    r = tl.arange(0, BLOCK_N * planes)
    n = tl.minimum(group * BLOCK_N + r // planes, N - 1)
    k = tl.minimum(tl.arange(0, (BLOCK_K + line - 1) // line) * line, K - 1)
    to_l2(weight_ptr + (n.to(tl.int64) * K + (r % planes) * (N * K))[:, None] + k[None, :])


@triton.jit
def _row_sums(weight_rk, x_1k, M: tl.constexpr):
    """For each of the M rows of x the sums over k; two at a time, so that they share their exchanges."""
    weight_rk = weight_rk.to(tl.float32)
    sums = ()  # type: Any
    for pair in tl.static_range(M // 2):
        both_rk2 = tl.join(weight_rk * x_1k[2 * pair], weight_rk * x_1k[2 * pair + 1])
        first_r, second_r = tl.split(tl.sum(both_rk2, axis=1))
        sums = sums + (first_r, second_r)
    if M % 2 == 1:
        sums = sums + (tl.sum(weight_rk * x_1k[M - 1], axis=1),)
    return sums


@triton.jit
def _persistent_stream_kernel(
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
    PADDED_M: tl.constexpr,
    AHEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    RELEASE: tl.constexpr,
):
    tl.static_assert(AHEAD == 1 or AHEAD == 2, "a persistent program loads 1 or 2 groups ahead")
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    groups: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    k_1k = tl.arange(0, BLOCK_K)[None, :]
    live_1k = k_1k < K
    weight_rk = _group(weight_ptr, program, k_1k, N, K, BLOCK_N, BLOCK_K, SILU)
    next_rk = _group(weight_ptr, program + programs, k_1k, N, K, BLOCK_N, BLOCK_K, SILU)
    if AHEAD == 2:
        second_rk = _group(weight_ptr, program + 2 * programs, k_1k, N, K, BLOCK_N, BLOCK_K, SILU)
    for i in tl.static_range(PREFETCH):
        _group_to_l2(weight_ptr, program + (1 + AHEAD + i) * programs, N, K, BLOCK_N, BLOCK_K, SILU)
    if NORM:
        norm_weight_1k = tl.load(norm_weight_ptr + k_1k, mask=live_1k, other=0.0).to(dtype).to(tl.float32)
    if RELEASE == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    m_m1 = tl.arange(0, PADDED_M)[:, None]
    x_mk = _read_x(
        x_ptr, update_ptr, total_ptr, m_m1 * x_stride + k_1k, (m_m1 < M) & live_1k, m_m1 * K + k_1k,
        m_m1 * update_stride + k_1k, program == 0, ADD,
    )  # fmt: skip
    if NORM:
        scale_m1 = tl.rsqrt(tl.sum(x_mk * x_mk, axis=1) / K + eps)[:, None]
        x_mk = ((x_mk * scale_m1).to(dtype).to(tl.float32) * norm_weight_1k).to(dtype).to(tl.float32)
    x_1k = ()  # type: Any
    for m in tl.static_range(M):
        x_1k = x_1k + (tl.sum(tl.where(m_m1 == m, x_mk, 0.0), axis=0)[None, :],)
    for group in tl.range(program, groups, programs):
        n = group * BLOCK_N + tl.arange(0, BLOCK_N)
        live_n = n < N
        bias_n, up_bias_n = n, n
        residual_n = ()  # type: Any
        if BIAS:
            bias_n = tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)
            if SILU:
                up_bias_n = tl.load(bias_ptr + N + n, mask=live_n, other=0.0).to(tl.float32)
        for m in tl.static_range(M):
            at_n = residual_ptr + m * residual_stride + n
            residual_n = residual_n + ((tl.load(at_n, mask=live_n, other=0.0).to(tl.float32) if RESIDUAL else n),)
        if RELEASE == 2 and group + programs >= groups:
            gdc_launch_dependents()
        sums_r = _row_sums(weight_rk, x_1k, M)
        weight_rk = next_rk
        if AHEAD == 2:
            next_rk = second_rk
            second_rk = _group(weight_ptr, group + 3 * programs, k_1k, N, K, BLOCK_N, BLOCK_K, SILU)
        else:
            next_rk = _group(weight_ptr, group + 2 * programs, k_1k, N, K, BLOCK_N, BLOCK_K, SILU)
        for m in tl.static_range(M):
            y_n, up_n = sums_r[m], sums_r[m]
            if SILU:
                y_n, up_n = tl.split(tl.reshape(y_n, (BLOCK_N, 2)))
            y_n = _values(y_n, up_n, bias_n, up_bias_n, residual_n[m], dtype, BIAS, RESIDUAL, SILU)
            tl.store(y_ptr + m * N + n, y_n.to(y_ptr.dtype.element_ty), mask=live_n)


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
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    RELEASE: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    live_1n = (n < N)[None, :]
    row_1n = (weight_ptr + n.to(tl.int64) * K)[None, :]
    m_r1 = tl.arange(0, 16)[:, None]
    k = tl.arange(0, BLOCK_K)
    if PREFETCH:
        line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        line_1k = tl.minimum(tl.arange(0, PREFETCH * BLOCK_K // line) * line, K - 1)[None, :]
        line_nk = (weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * K)[:, None] + line_1k
        to_l2(line_nk)
        if SILU:
            to_l2(line_nk + N * K)
    if RELEASE == 1:
        gdc_launch_dependents()
    if PDL:
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
    if RELEASE == 2:
        gdc_launch_dependents()
    live_rn = (m_r1 < M) & live_1n
    n_1n = n[None, :]
    _finish(
        y_rn, up_rn, bias_ptr, residual_ptr, y_ptr, m_r1 * residual_stride + n_1n, m_r1 * N + n_1n, n_1n, live_rn,
        dtype, N, BIAS, RESIDUAL, SILU,
    )  # fmt: skip


# --- for the check without a GPU -------------------------------------------------------------------------------------

_NORMED = {"norm": True, "add": True}


def _persistent(block_n: int, num_warps: int, num_stages: int = 1, **more: Any) -> GemvConfig:
    return GemvConfig(block_n=block_n, num_warps=num_warps, num_stages=num_stages, programs_per_sm=1, **more)


PERSISTENT: tuple[tuple[str, int, int, dict[str, bool], GemvConfig], ...] = (
    ("0.6b-qkv", 4096, 1024, _NORMED, _persistent(8, 4, release="late")),
    ("0.6b-qkv-bias", 4096, 1024, {"norm": True, "bias": True}, _persistent(4, 4)),
    ("0.6b-o", 1024, 2048, {}, _persistent(4, 8, release="late")),
    ("0.6b-gate_up", 3072, 1024, _NORMED | {"silu": True}, _persistent(2, 4, prefetch=2)),
    ("0.6b-down", 1024, 3072, {"residual": True}, _persistent(2, 8, release="late")),
    ("0.6b-head", 151936, 1024, _NORMED, _persistent(4, 4, 2, release="never")),
    ("4b-down", 2560, 9728, {}, _persistent(1, 16, release="late")),
    ("8b-qkv", 6144, 4096, _NORMED, _persistent(4, 16, release="late")),
    ("8b-gate_up", 12288, 4096, _NORMED | {"silu": True}, _persistent(1, 8, release="late")),
    ("8b-down", 4096, 12288, {}, _persistent(1, 16, release="late")),
)


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
    launches = [
        (f"gemv-{rows}x{out_features}x{size}", rows, out_features, size, parts,
         choose_config(rows, out_features, size, parts.get("silu", False)))
        for rows, out_features, size, parts in cases
    ]  # fmt: skip
    looped = GemvConfig(block_n=4, num_warps=4, block_k=1024, num_stages=3)
    prefetched = GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True, prefetch=4)
    all_parts = {"norm": True, "add": True, "silu": True}
    launches += [
        ("gemv-looped", 1, 4096, 12288, {"residual": True}, looped),
        ("gemv-looped-late", 1, 4096, 12288, {"residual": True}, replace(looped, release="late")),
        ("gemv-late", 2, 1024, 2048, {}, GemvConfig(block_n=2, num_warps=4, release="late")),
        ("gemv-tensor-cores-late", 2, 12288, 4096, all_parts, replace(prefetched, release="late")),
    ]
    for name, out_features, size, parts, config in PERSISTENT:
        launches += [(f"persistent-{rows}-{name}", rows, out_features, size, parts, config) for rows in (1, 2)]
    variants: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for name, rows, out_features, size, parts, config in launches:
        constants = gemv_constants(rows, out_features, size, **parts, pdl=True, config=config)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        variants.append((name, kernel_of(config), signature, constants, options))
    return variants
