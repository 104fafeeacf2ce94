"""A Triton matrix product for 9 to 128 rows whose programs ask for their weights before they wait: x @ weight.T.

At these sizes a product is bound by latency: reading the weight takes 1 to 3 us, a launch of the matmul library 5 to 7,
most of which it waits for the first bytes behind its predecessor's end. Here a program starts early (programmatic
dependent launch), copies its rows of the weight to shared memory while the predecessor still runs, and only then waits.
What is left behind the wait is to read x, which is in the L2 cache, to multiply and to write.

The weight is the left factor, so that 64 of its rows fill a wgmma and the rows of x, padded to 16, 32, 64 or 128, are
its columns. A tile of gate and up takes both by groups of 8 rows in turn, so that a thread holds the gate and the up of
the same output. All programs read all of x: with tiles of 64 rows that is as many bytes as the weight at 64 rows of x,
which is why tiles are not narrower.

With splits the programs of a tile leave partial sums in fp32, and the last one to arrive adds them up in split order,
so that the bits do not depend on who it is. Each program stores its sums, passes a barrier of its threads and adds 1 to
the tile's counter by an atomic with acquire and release semantics at the GPU's scope; the one that finds all others
counted sets the counter back to 0 and reads the partial sums past the L1 cache. Every program counts once, so that no
counter differs from 0 between launches.

`gemm` launches the kernels of gluon_gemm.py and triton_tiles.py, too, where a configuration asks for them.
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

from funcllm.kernels.gemm_config import (
    MAX_ROWS,
    RELEASES,
    GemmConfig,
    choose_config,
    padded_rows,
    pieces_of,
    rows_of_weight,
    tiles_of,
)
from funcllm.kernels.triton_fused import silu_product, to_l2, unit_stride


def gemm(
    x_td: Tensor,
    weight_od: Tensor,
    *,
    bias_o: Tensor | None = None,
    silu: bool = False,
    counters_p: Tensor | None = None,
    config: GemmConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """x @ weight.T + bias, or silu(first half) * second half of it: [t, o].

    counters_p: int32 zeros, one for each tile of outputs, which a launch leaves at 0 again; launches that may run at
    the same time need counters of their own. Without them columns are not split. The weight is contiguous. A
    configuration with `parts` splits no columns.
    """
    rows, size = x_td.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than the {MAX_ROWS} of this kernel; use a plain linear")
    if not weight_od.is_contiguous():
        raise ValueError(f"a weight with strides {weight_od.stride()} is not contiguous; pass weight.contiguous()")
    x_td = unit_stride(x_td)
    out_features = weight_od.shape[0] // 2 if silu else weight_od.shape[0]
    y_to = torch.empty((rows, out_features), dtype=x_td.dtype, device=x_td.device)
    if y_to.numel() == 0:
        return y_to
    config = config or choose_config(rows, out_features, size, silu, x_td.element_size())
    if config.parts and config.splits > 1:
        raise ValueError(
            f"splits={config.splits} with parts={config.parts}: tiles of parts take all columns; use splits=1"
        )
    config = config if counters_p is not None else replace(config, splits=1)
    tiles, padded = tiles_of(out_features, silu, config), padded_rows(rows)
    partials = y_to
    if config.splits > 1 and counters_p is not None:
        if counters_p.numel() < tiles or counters_p.dtype != torch.int32:
            given = f"{counters_p.numel()} of {counters_p.dtype}"
            raise ValueError(f"{tiles} tiles need as many int32 counters, not {given}; use gemm.counters(device)")
        sums = tiles * config.splits * rows_of_weight(config) * padded
        partials = torch.empty(sums, dtype=torch.float32, device=x_td.device)
    if config.rings and not (size % 16 == 0 and x_td.element_size() == 2 and x_td.is_cuda and rings_work()):
        config = replace(config, rings=False, x_ahead=min(config.x_ahead, 3))
    if config.rings and (x_td.stride(0) % 16 or x_td.data_ptr() % 16):
        x_td = x_td.contiguous()
    constants = gemm_constants(rows, out_features, size, bias=bias_o is not None, silu=silu, pdl=pdl, config=config)
    if "ON_GPU" in constants and (not x_td.is_cuda or x_td.element_size() != 2):
        constants["ON_GPU"] = False
    kernel_of(config)[(tiles * config.splits,)](
        x_td,
        weight_od,
        weight_od if bias_o is None else bias_o,
        y_to,
        *(() if config.parts else (partials, partials if counters_p is None else counters_p)),
        x_td.stride(0),
        rows,
        pieces_of(size, config),
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if constants["PDL"] else {}),
    )
    return y_to


def gemm_constants(
    rows: int,
    out_features: int,
    size: int,
    *,
    bias: bool = False,
    silu: bool = False,
    pdl: bool = False,
    config: GemmConfig,
) -> dict[str, Any]:
    """The compile-time arguments of a launch on a GPU."""
    pieces = pieces_of(size, config)
    constants = {
        "N": out_features,
        "K": size,
        "BIAS": bias,
        "SILU": silu,
        "BLOCK_M": padded_rows(rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PDL": pdl and config.early_start,
        "RELEASE": RELEASES.index(config.release) if pdl else 0,
    }
    if config.parts:
        prefetch = triton.next_power_of_2(min(config.prefetch, pieces)) if pdl and config.prefetch else 0
        return constants | {"PREFETCH": prefetch, "PARTS": config.parts, "STAGES": config.num_stages}
    ahead = min(config.ahead, pieces)
    constants |= {
        "PIECES": pieces,
        "SPLITS": config.splits,
        "AHEAD": ahead,
        "X_AHEAD": min(config.x_ahead, ahead),
        "ROTATE": config.rotate and pieces > 1,
    }
    if config.rings:
        return constants | {"FENCE": config.fence, "WARPS": config.num_warps}
    prefetch = min(config.prefetch, pieces - ahead) if pdl else 0
    return constants | {"STAGES": config.num_stages, "PREFETCH": prefetch, "ON_GPU": True}


@functools.cache
def rings_work() -> bool:
    """Whether this Triton has what gluon_gemm.py needs; Gluon changes from one version to the next."""
    try:
        from funcllm.kernels import gluon_gemm
    except (ImportError, AttributeError):
        return False
    return gluon_gemm.gemm_kernel is not None


def kernel_of(config: GemmConfig) -> Any:
    """The kernel that a configuration is for."""
    if config.rings:
        from funcllm.kernels import gluon_gemm

        return gluon_gemm.gemm_kernel
    if config.parts:
        from funcllm.kernels import triton_tiles

        return triton_tiles.tiles_kernel
    return _gemm_kernel


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _needed_here(x, ON_GPU: tl.constexpr):
    """x, which is not moved to shared memory before this point: loads behind it stay under way, in registers."""
    if ON_GPU:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _first_column(i, first, turn, PIECES: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr):
    """The first column of the i-th piece that a program goes over."""
    if ROTATE:
        return (first + (i + turn) % PIECES) * BLOCK_K
    else:
        return (first + i) * BLOCK_K


@triton.jit
def _columns(i, first, turn, PIECES: tl.constexpr, BLOCK_K: tl.constexpr, ROTATE: tl.constexpr):
    return _first_column(i, first, turn, PIECES, BLOCK_K, ROTATE) + tl.arange(0, BLOCK_K)


@triton.jit
def weight_rows(tile, N: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr):
    """Rows of the weight in a tile. With SILU the gate rows of 8 outputs, then their up rows, and so on."""
    r = tl.arange(0, BLOCK_N)
    if SILU:
        output = tile * (BLOCK_N // 2) + r // 16 * 8 + r % 8
        return tl.minimum(output, N - 1) + r // 8 % 2 * N
    else:
        return tl.minimum(tile * BLOCK_N + r, N - 1)


@triton.jit
def piece(row_r1, k, K: tl.constexpr, EVEN: tl.constexpr, WEIGHT: tl.constexpr):
    policy: tl.constexpr = "evict_first" if WEIGHT else ""
    if EVEN:
        return tl.load(row_r1 + k[None, :], eviction_policy=policy)
    else:
        return tl.load(row_r1 + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy=policy)


@triton.jit
def finish(
    sums_nm, bias_ptr, y_ptr, tile, rows,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Writes a tile of outputs from their sums."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    outputs: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    if BIAS:
        sums_nm += tl.load(bias_ptr + weight_rows(tile, N, BLOCK_N, SILU)).to(tl.float32)[:, None]
    y_nm = sums_nm.to(dtype)
    if SILU:
        planes = tl.permute(tl.reshape(y_nm, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(planes)
        y_nm = tl.reshape(silu_product(gate.to(tl.float32), up.to(tl.float32), dtype), (outputs, BLOCK_M))
    n_1n = (tile * outputs + tl.arange(0, outputs))[None, :]
    m_m1 = tl.arange(0, BLOCK_M)[:, None]
    tl.store(y_ptr + m_m1 * N + n_1n, tl.trans(y_nm), mask=(m_m1 < rows) & (n_1n < N))


@triton.jit(do_not_specialize=["rows", "pieces"])
def _gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    x_stride,
    rows,
    pieces,  # PIECES, as the bound of a loop that is not to be unrolled
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROTATE: tl.constexpr,
    PDL: tl.constexpr,
    RELEASE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    EVEN: tl.constexpr = PIECES * SPLITS * BLOCK_K == K
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    first = split * PIECES
    turn = tl.program_id(0) % PIECES
    weight_row_n1 = (weight_ptr + weight_rows(tile, N, BLOCK_N, SILU).to(tl.int64) * K)[:, None]
    weights = ()
    for i in tl.static_range(AHEAD):
        weight_nk = piece(weight_row_n1, _columns(i, first, turn, PIECES, BLOCK_K, ROTATE), K, EVEN, True)
        weights = weights + (weight_nk,)  # type: ignore[assignment]
    for i in tl.static_range(PREFETCH):
        lines = tl.arange(0, (BLOCK_K + LINE - 1) // LINE) * LINE
        line_k = _first_column(AHEAD + i, first, turn, PIECES, BLOCK_K, ROTATE) + lines
        to_l2(weight_row_n1 + tl.minimum(line_k, K - 1)[None, :])
    if RELEASE == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()

    x_row_m1 = (x_ptr + tl.minimum(tl.arange(0, BLOCK_M), rows - 1) * x_stride)[:, None]
    xs = ()
    for i in tl.static_range(X_AHEAD):
        x_mk = piece(x_row_m1, _columns(i, first, turn, PIECES, BLOCK_K, ROTATE), K, EVEN, False)
        xs = xs + (x_mk,)  # type: ignore[assignment]
    sums_nm = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i in tl.static_range(AHEAD):
        if i + X_AHEAD < AHEAD:
            x_mk = piece(x_row_m1, _columns(i + X_AHEAD, first, turn, PIECES, BLOCK_K, ROTATE), K, EVEN, False)
            xs = xs + (x_mk,)  # type: ignore[assignment]
        sums_nm = tl.dot(weights[i], tl.trans(_needed_here(xs[i], ON_GPU)), sums_nm, input_precision="ieee")
    if AHEAD < PIECES:
        for later in tl.range(AHEAD, pieces, num_stages=STAGES):
            k = _columns(later, first, turn, PIECES, BLOCK_K, ROTATE)
            sums_nm = tl.dot(
                piece(weight_row_n1, k, K, EVEN, True),
                tl.trans(piece(x_row_m1, k, K, EVEN, False)),
                sums_nm,
                input_precision="ieee",
            )
    if RELEASE == 2:
        gdc_launch_dependents()

    if SPLITS == 1:
        finish(sums_nm, bias_ptr, y_ptr, tile, rows, N, BLOCK_M, BLOCK_N, BIAS, SILU)
    else:
        inside_nm = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partials_ptr + tl.program_id(0) * (BLOCK_N * BLOCK_M) + inside_nm, sums_nm)
        tl.debug_barrier()  # the release covers the stores of all threads
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counters_ptr + tile, 0)
            at_nm = partials_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + inside_nm
            total_nm = tl.load(at_nm, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total_nm += tl.load(at_nm + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            finish(total_nm, bias_ptr, y_ptr, tile, rows, N, BLOCK_M, BLOCK_N, BIAS, SILU)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of representative launches, to be compiled for sm_90 in tests."""
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
    signature |= {"partials_ptr": "*fp32", "counters_ptr": "*i32"}
    signature |= dict.fromkeys(("x_stride", "rows", "pieces"), "i32")
    cases: list[tuple[int, int, int, dict[str, bool], GemmConfig | None]] = [
        (64, 4096, 1024, {}, None),
        (16, 4096, 1024, {}, GemmConfig()),
        (64, 1024, 2048, {}, None),
        (32, 3072, 1024, {"silu": True}, None),
        (128, 3072, 1024, {"silu": True, "bias": True}, None),
        (64, 1024, 3072, {"bias": True}, None),
        (128, 6144, 4096, {}, None),
        (64, 1000, 2312, {}, None),
        (64, 12288, 4096, {"silu": True}, GemmConfig(ahead=4, num_stages=4, prefetch=3, rotate=True, release="late")),
        (32, 4096, 4096, {}, GemmConfig(block_n=128, num_warps=8, ahead=4, splits=4)),
        (64, 4096, 1024, {}, GemmConfig(ahead=8, x_ahead=5, rings=True)),
        (64, 3072, 1024, {"silu": True, "bias": True}, GemmConfig(block_k=64, ahead=16, x_ahead=8, rings=True)),
        (16, 1024, 3072, {}, GemmConfig(ahead=3, x_ahead=3, splits=8, rings=True)),
        (
            128,
            1000,
            2320,
            {"bias": True},
            GemmConfig(block_k=64, ahead=6, x_ahead=4, splits=2, rotate=True, rings=True),
        ),
        (32, 6144, 4096, {}, GemmConfig(block_n=128, block_k=64, num_warps=8, ahead=9, x_ahead=6, rings=True)),
    ]
    large = ((6144, 4096, False), (4096, 4096, False), (12288, 4096, True), (4096, 12288, False))
    for rows in (64, 128, 256):
        for out_features, size, silu in large:
            cases += [(rows, out_features, size, {"silu": silu}, None)]
    cases += [(100, 1000, 2312, {"bias": True}, GemmConfig(block_n=128, block_k=128, num_warps=8, parts=1))]
    variants: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for rows, out_features, size, flags, given in cases:
        config = given or choose_config(rows, out_features, size, flags.get("silu", False))
        constants = gemm_constants(rows, out_features, size, **flags, pdl=True, config=config)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        kind = "rings" if config.rings else "tiles" if config.parts else "gemm"
        name = f"{kind}-{rows}x{out_features}x{size}"
        variants.append((name, kernel_of(config), signature, constants, options))
    return variants
