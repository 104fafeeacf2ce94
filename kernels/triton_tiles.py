"""A Triton matrix product for 33 to 256 rows of a large weight, one pipelined loop of tensor-core products a program.

Where a weight is larger than what arrives before the wait, a product is bound by two things: the bytes of the weight
from memory, and the bytes of x, which every tile of outputs reads again from the L2 cache, at about 6.5 TB/s for both
together. So a program takes many rows of the weight at once, `parts` blocks of them with sums of their own, and all
rows of x; splits over the columns bring the number of programs near that of the multiprocessors, so that they all stand
in one wave. Three parts of 64 rows make 128 programs of the 24576 rows of a gate and up projection.

The weight is the left factor, as in triton_gemm.py, whose tiles, epilogue and order of gate and up rows are used here.
With `tma` pieces come by tensor maps: the weight of gate and up is read as [output / 8, gate or up, 8, column], so that
one box brings the rows in their order; tensor cores then take it from registers, since Triton does not fold that shape
in shared memory. Else pieces come by 16-byte asynchronous copies.

Before the wait a program brings its first pieces of the weight to the L2 cache. With splits the programs of a tile
leave partial sums and count, as in triton_gemm.py. With `spread` each waits until all are counted and adds up its share
of the rows of x, in split order; the last one to leave sets the counter back. That needs all programs of a launch to
run at the same time, so there are no more of them than multiprocessors, and two such launches must not run at once.
Else the last one to arrive adds up all.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from funcllm.kernels.gemm_config import GemmConfig, padded_rows
from funcllm.kernels.triton_fused import to_l2
from funcllm.kernels.triton_gemm import finish, piece, weight_rows


def tensor_maps(x_td: Tensor, weight_od: Tensor, silu: bool, config: GemmConfig) -> tuple[Any, Any]:
    """(of x, of the weight) what the kernel takes as its last operands: tensor maps, or nothing of use without tma."""
    if not config.tma:
        return x_td, weight_od
    rows, size = x_td.shape
    x_map = TensorDescriptor(x_td, [rows, size], [x_td.stride(0), 1], [padded_rows(rows), config.block_k])
    outputs = weight_od.shape[0]
    if not silu:
        return x_map, TensorDescriptor(weight_od, [outputs, size], [size, 1], [config.block_n, config.block_k])
    shape, strides = [outputs // 16, 2, 8, size], [8 * size, outputs // 2 * size, size, 1]
    return x_map, TensorDescriptor(weight_od, shape, strides, [config.block_n // 16, 2, 8, config.block_k])


def maps_fit(x_td: Tensor, weight_od: Tensor, silu: bool) -> bool:
    """Whether tensor maps can describe the operands: rows at multiples of 16 bytes, whole eights of gate rows."""
    size, element = x_td.shape[1], x_td.element_size()
    addresses = x_td.data_ptr(), weight_od.data_ptr(), x_td.stride(0) * element, size * element
    return all(address % 16 == 0 for address in addresses) and (not silu or weight_od.shape[0] % 16 == 0)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _weight_piece(
    weight_ptr, weight_map, block, k,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SILU: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of the weight from column k on, for the outputs of a block."""
    if TMA:
        if SILU:
            planes = weight_map.load([block * (BLOCK_N // 16), 0, 0, k])
            return tl.reshape(planes, (BLOCK_N, BLOCK_K))
        else:
            return weight_map.load([block * BLOCK_N, k])
    else:
        row_n1 = (weight_ptr + weight_rows(block, N, BLOCK_N, SILU).to(tl.int64) * K)[:, None]
        return piece(row_n1, k + tl.arange(0, BLOCK_K), K, EVEN, True)


@triton.jit
def _x_piece(
    x_ptr, x_map, x_stride, rows, k,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        return x_map.load([0, k])
    else:
        row_m1 = (x_ptr + tl.minimum(tl.arange(0, BLOCK_M), rows - 1) * x_stride)[:, None]
        return piece(row_m1, k + tl.arange(0, BLOCK_K), K, EVEN, False)


@triton.jit
def _add_up(
    partials_ptr, bias_ptr, y_ptr, tile, share, rows,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The outputs of a tile for one of SPLITS shares of the rows of x, from the partial sums in split order."""
    SHARE_M: tl.constexpr = triton.next_power_of_2((BLOCK_M + SPLITS - 1) // SPLITS)
    first_m = share * SHARE_M
    if first_m < rows:
        n_n1, m_1m = tl.arange(0, BLOCK_N)[:, None], first_m + tl.arange(0, SHARE_M)[None, :]
        is_row_nm = (m_1m < rows) & (n_n1 >= 0)
        for part in tl.static_range(PARTS):
            at_nm = partials_ptr + ((tile * SPLITS * PARTS + part) * BLOCK_N + n_n1) * BLOCK_M + m_1m
            total_nm = tl.zeros((BLOCK_N, SHARE_M), tl.float32)
            for split in tl.static_range(SPLITS):
                from_nm = at_nm + split * (PARTS * BLOCK_N * BLOCK_M)
                total_nm += tl.load(from_nm, mask=is_row_nm, other=0.0, cache_modifier=".cg")
            finish(total_nm, bias_ptr, y_ptr, tile * PARTS + part, first_m, rows, N, SHARE_M, BLOCK_N, BIAS, SILU)


@triton.jit(do_not_specialize=["rows", "pieces"])
def tiles_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    x_stride,
    rows,
    pieces,  # PIECES, as the bound of a loop that is not to be unrolled
    x_map,
    weight_map,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    TMA: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
    RELEASE: tl.constexpr,
):
    EVEN: tl.constexpr = PIECES * SPLITS * BLOCK_K == K
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    SIZE: tl.constexpr = BLOCK_N * BLOCK_M
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    first_k = split * (PIECES * BLOCK_K)
    if PREFETCH > 0:
        lines: tl.constexpr = PREFETCH * ((BLOCK_K + LINE - 1) // LINE)
        line_1k = tl.minimum(first_k + tl.arange(0, lines) * LINE, K - 1)[None, :]
        for part in tl.static_range(PARTS):
            row_n = weight_ptr + weight_rows(tile * PARTS + part, N, BLOCK_N, SILU).to(tl.int64) * K
            to_l2(row_n[:, None] + line_1k)
    if RELEASE == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()

    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_M), tl.float32),)  # type: ignore[assignment]
    for i in tl.range(0, pieces, num_stages=STAGES):
        k = first_k + i * BLOCK_K
        x_km = tl.trans(_x_piece(x_ptr, x_map, x_stride, rows, k, K, BLOCK_M, BLOCK_K, EVEN, TMA))
        added = ()
        for part in tl.static_range(PARTS):
            block = tile * PARTS + part
            weight_nk = _weight_piece(weight_ptr, weight_map, block, k, N, K, BLOCK_N, BLOCK_K, SILU, EVEN, TMA)
            added = added + (tl.dot(weight_nk, x_km, sums[part], input_precision="ieee"),)  # type: ignore[assignment]
        sums = added
    if RELEASE == 2:
        gdc_launch_dependents()

    if SPLITS == 1:
        for part in tl.static_range(PARTS):
            finish(sums[part], bias_ptr, y_ptr, tile * PARTS + part, 0, rows, N, BLOCK_M, BLOCK_N, BIAS, SILU)
    else:
        n_n1, m_1m = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
        own_nm = partials_ptr + tl.program_id(0) * (PARTS * SIZE) + n_n1 * BLOCK_M + m_1m
        for part in tl.static_range(PARTS):
            tl.store(own_nm + part * SIZE, sums[part], mask=(m_1m < rows) & (n_n1 >= 0))
        tl.debug_barrier()  # the release covers the stores of all threads
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") + 1
        if SPREAD:
            while arrived < SPLITS:
                arrived = tl.atomic_add(counters_ptr + tile, 0, sem="acq_rel", scope="gpu")
            if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == 2 * SPLITS - 1:
                tl.store(counters_ptr + tile, 0)
            _add_up(partials_ptr, bias_ptr, y_ptr, tile, split, rows, N, BLOCK_M, BLOCK_N, PARTS, SPLITS, BIAS, SILU)
        elif arrived == SPLITS:
            tl.store(counters_ptr + tile, 0)
            for share in tl.range(0, SPLITS, num_stages=1):
                _add_up(
                    partials_ptr, bias_ptr, y_ptr, tile, share, rows, N, BLOCK_M, BLOCK_N, PARTS, SPLITS, BIAS, SILU
                )
