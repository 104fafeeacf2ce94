"""A Triton matrix product for 33 to 256 rows of a large weight, one pipelined loop of tensor-core products a program.

Where a weight is larger than what arrives before the wait, a product is bound by two things: the bytes of the weight
from memory, and the bytes of x, which every tile of outputs reads again from the L2 cache, at about 6.5 TB/s for both
together. So a program takes many rows of the weight at once, `parts` blocks of them with sums of their own, and all
rows of x. Three parts of 64 rows make 128 programs of the 24576 rows of a gate and up projection, which stand in one
wave. Columns are not split.

The weight is the left factor, as in triton_gemm.py, whose tiles, epilogue and order of gate and up rows are used here.
Pieces of weight and x come by 16-byte asynchronous copies. Before the wait a program brings its first pieces of the
weight to the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from funcllm.kernels.triton_fused import to_l2
from funcllm.kernels.triton_gemm import finish, piece, weight_rows


@triton.jit(do_not_specialize=["rows", "pieces"])
def tiles_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    rows,
    pieces,  # of columns: the bound of a loop that is not to be unrolled
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    RELEASE: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    tile = tl.program_id(0)
    if PREFETCH > 0:
        lines: tl.constexpr = PREFETCH * ((BLOCK_K + LINE - 1) // LINE)
        line_1k = tl.minimum(tl.arange(0, lines) * LINE, K - 1)[None, :]
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
        k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        x_row_m1 = (x_ptr + tl.minimum(tl.arange(0, BLOCK_M), rows - 1) * x_stride)[:, None]
        x_km = tl.trans(piece(x_row_m1, k, K, EVEN, False))
        added = ()
        for part in tl.static_range(PARTS):
            row_n = weight_ptr + weight_rows(tile * PARTS + part, N, BLOCK_N, SILU).to(tl.int64) * K
            weight_nk = piece(row_n[:, None], k, K, EVEN, True)
            added = added + (tl.dot(weight_nk, x_km, sums[part], input_precision="ieee"),)  # type: ignore[assignment]
        sums = added
    if RELEASE == 2:
        gdc_launch_dependents()

    for part in tl.static_range(PARTS):
        finish(sums[part], bias_ptr, y_ptr, tile * PARTS + part, rows, N, BLOCK_M, BLOCK_N, BIAS, SILU)
