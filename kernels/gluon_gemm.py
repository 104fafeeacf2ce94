"""The product of triton_gemm.py with all copies asynchronous, in Gluon, for sm_90: x @ weight.T for few rows.

The weight and x go to rings of pieces in shared memory by cp.async, without a register between, and tensor cores work
on one piece while the next ones arrive. A ring of the weight is filled before the wait for the predecessor, one of x
behind it; a piece is replaced as soon as its product is done.

Copies are counted in groups: one for each piece of the weight before the wait, one for each piece of x behind it, and
one, possibly empty, for each piece that is multiplied, so that the group that a piece waits for has a fixed number of
groups behind it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # named anew in Triton 3.7
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the same


@gluon.jit
def _first_column(i, first, turn, PIECES: gl.constexpr, BLOCK_K: gl.constexpr, ROTATE: gl.constexpr):
    if ROTATE:
        return (first + (i + turn) % PIECES) * BLOCK_K
    else:
        return (first + i) * BLOCK_K


@gluon.jit
def _weight_rows(r, tile, N: gl.constexpr, BLOCK_N: gl.constexpr, SILU: gl.constexpr):
    """Rows of the weight at the places r of a tile. With SILU the gate rows of 8 outputs, then their up rows."""
    if SILU:
        output = tile * (BLOCK_N // 2) + r // 16 * 8 + r % 8
        return gl.minimum(output, N - 1) + r // 8 % 2 * N
    else:
        return gl.minimum(tile * BLOCK_N + r, N - 1)


@gluon.jit
def _ask(ring, slot, rows, k, K: gl.constexpr, EVEN: gl.constexpr, WEIGHT: gl.constexpr):
    """Copies a piece, columns k of the rows, to its slot; columns that do not exist become 0."""
    policy: gl.constexpr = "evict_first" if WEIGHT else ""
    if EVEN:
        _copy(ring.index(slot), rows + k, eviction_policy=policy)
    else:
        _copy(ring.index(slot), rows + k, mask=k < K, eviction_policy=policy)


@gluon.jit
def _finish(
    sums_nm, bias_ptr, y_ptr, tile, rows,
    N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BIAS: gl.constexpr, SILU: gl.constexpr,
    WARPS: gl.constexpr, summed: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    outputs: gl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    if BIAS:
        r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, summed))
        bias_n = gl.load(bias_ptr + _weight_rows(r, tile, N, BLOCK_N, SILU)).to(gl.float32)
        sums_nm += gl.expand_dims(bias_n, 1)
    y_nm = sums_nm.to(dtype)
    if SILU:
        gate, up = gl.split(gl.permute(gl.reshape(y_nm, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
        gate = gate.to(gl.float32)
        silu = (gate * (1 / (1 + gl.exp(-gate)))).to(dtype)
        y_nm = gl.reshape((silu.to(gl.float32) * up.to(gl.float32)).to(dtype), (outputs, BLOCK_M))
    lanes: gl.constexpr = outputs // 8
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, WARPS], [0, 1])
    y_nm = gl.convert_layout(y_nm, layout)
    n = tile * outputs + gl.arange(0, outputs, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    n_n1, m_1m = gl.expand_dims(n, 1), gl.expand_dims(m, 0)
    gl.store(y_ptr + m_1m * N + n_n1, y_nm, mask=(m_1m < rows) & (n_n1 < N))


@gluon.jit(do_not_specialize=["rows", "pieces"])
def gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    x_stride,
    rows,
    pieces,
    N: gl.constexpr,
    K: gl.constexpr,
    BIAS: gl.constexpr,
    SILU: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PIECES: gl.constexpr,
    SPLITS: gl.constexpr,
    AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr,
    ROTATE: gl.constexpr,
    PDL: gl.constexpr,
    RELEASE: gl.constexpr,
    FENCE: gl.constexpr,
    WARPS: gl.constexpr,
):
    gl.static_assert(X_AHEAD <= AHEAD, "the ring of x is no longer than that of the weight")
    gl.static_assert(X_AHEAD > 1 or PIECES == 1, "the ring of x has two slots at least")
    EVEN: gl.constexpr = PIECES * SPLITS * BLOCK_K == K
    NEWER: gl.constexpr = X_AHEAD - 2 if X_AHEAD > 1 else 0  # groups behind the one that a piece waits for
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    tile = gl.program_id(0) // SPLITS
    first = gl.program_id(0) % SPLITS * PIECES
    turn = gl.program_id(0) % PIECES
    weights = gl.allocate_shared_memory(dtype, [AHEAD, BLOCK_N, BLOCK_K], shared)
    xs = gl.allocate_shared_memory(dtype, [X_AHEAD, BLOCK_M, BLOCK_K], shared)

    k_1k = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, copied)), 0)
    r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, copied))
    weight_row_n1 = weight_ptr + gl.expand_dims(_weight_rows(r, tile, N, BLOCK_N, SILU).to(gl.int64) * K, 1)
    for i in gl.static_range(AHEAD):
        k = k_1k + _first_column(i, first, turn, PIECES, BLOCK_K, ROTATE)
        _ask(weights, i, weight_row_n1, k, K, EVEN, True)
        async_copy.commit_group()
    if RELEASE == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()

    m = gl.minimum(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copied)), rows - 1)
    x_row_m1 = x_ptr + gl.expand_dims(m * x_stride, 1)
    for i in gl.static_range(X_AHEAD):
        k = k_1k + _first_column(i, first, turn, PIECES, BLOCK_K, ROTATE)
        _ask(xs, i, x_row_m1, k, K, EVEN, False)
        async_copy.commit_group()
    sums_nm = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, summed)
    for i in range(0, pieces):
        async_copy.wait_group(NEWER)
        if FENCE:
            fence_async_shared()
        x_km = xs.index(i % X_AHEAD).permute((1, 0))
        sums_nm = warpgroup_mma(weights.index(i % AHEAD), x_km, sums_nm, is_async=True)
        sums_nm = warpgroup_mma_wait(1, deps=[sums_nm])
        if i > 0:
            if X_AHEAD < PIECES:
                _barrier()  # all warps are done with the piece before this one
            if i - 1 + AHEAD < PIECES:
                k = k_1k + _first_column(i - 1 + AHEAD, first, turn, PIECES, BLOCK_K, ROTATE)
                _ask(weights, (i - 1) % AHEAD, weight_row_n1, k, K, EVEN, True)
            if i - 1 + X_AHEAD < PIECES:
                k = k_1k + _first_column(i - 1 + X_AHEAD, first, turn, PIECES, BLOCK_K, ROTATE)
                _ask(xs, (i - 1) % X_AHEAD, x_row_m1, k, K, EVEN, False)
            async_copy.commit_group()
    sums_nm = warpgroup_mma_wait(0, deps=[sums_nm])
    if RELEASE == 2:
        gdc_launch_dependents()

    if SPLITS == 1:
        _finish(sums_nm, bias_ptr, y_ptr, tile, rows, N, BLOCK_M, BLOCK_N, BIAS, SILU, WARPS, summed)
    else:
        n_n1 = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, summed)), 1)
        m_1m = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, summed)), 0)
        inside_nm = n_n1 * BLOCK_M + m_1m
        gl.store(partials_ptr + gl.program_id(0) * (BLOCK_N * BLOCK_M) + inside_nm, sums_nm)
        _barrier()
        if gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            gl.store(counters_ptr + tile, 0)
            at_nm = partials_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + inside_nm
            total_nm = gl.load(at_nm, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                total_nm += gl.load(at_nm + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            _finish(total_nm, bias_ptr, y_ptr, tile, rows, N, BLOCK_M, BLOCK_N, BIAS, SILU, WARPS, summed)
