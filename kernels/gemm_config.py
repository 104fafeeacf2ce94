"""How a matrix product of 9 to 256 rows is cut up on a GPU: configurations, and which sizes are worth it.

The kernels are in triton_gemm.py, gluon_gemm.py and triton_tiles.py. A product is left to the matmul library unless
`MEASURED` has its sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal

MAX_ROWS = 256  # more: the matmul library
PADDED_ROWS = (16, 32, 64, 128, 256)
SHARED_SM90 = 232448  # bytes of shared memory that one program may take on sm_90
RELEASES = ("never", "early", "late")
_BLOCK_N = 64  # the rows of a wgmma
_SCRATCH_BYTES = 4096  # of shared memory beside the operands, at least
_SPLIT_COLUMNS = 256  # of the weight, at least, in a split
_PROGRAMS = 64  # that a launch should have at least: fewer leave too much of x to each
LARGE_ELEMENTS = 1 << 23  # of a weight, beyond which no more than a part of it arrives before the wait

Release = Literal["never", "early", "late"]


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How a launch is cut up, and how it stands in a chain of programmatic dependent launches.

    block_n: rows of the weight a program, gate and up rows counted both; 64 a warp group on sm_90. block_k: columns a
    piece. ahead: pieces of the weight that a program asks for before it waits for its predecessor, and keeps in shared
    memory; the other ones come in a pipelined loop with num_stages pieces in flight. x_ahead: pieces of x in flight
    while ahead ones are multiplied. splits: programs that share the columns of a tile; the last one to arrive adds up.
    rotate: programs start at different pieces, so that they do not all ask for the same lines of x at once.

    rings: the kernel of gluon_gemm.py, in which all copies are asynchronous: the weight goes through a ring of `ahead`
    pieces in shared memory, x through one of `x_ahead`, at least 2 and not more than `ahead`; there are no stages.
    fence: whether a proxy fence stands between a copy and the product that reads it, as the PTX manual asks for; loops
    that Triton pipelines by itself go without.

    parts: the kernel of triton_tiles.py, where a program takes so many times block_n rows of the weight, each with sums
    of its own, and has num_stages pieces of weight and x in flight behind the wait; nothing is ahead, and splits is 1.
    0: another kernel.

    early_start: whether the kernel starts before its predecessor has ended, where the caller allows it. release: when
    its own successor may start: "early" (every program has asked for its first weights), "late" (every program has
    multiplied) or "never" (at its end). prefetch: pieces of the weight behind the ahead ones that are brought to the L2
    cache before the wait.
    """

    block_n: int = _BLOCK_N
    block_k: int = 128
    num_warps: int = 4
    ahead: int = 8
    x_ahead: int = 3
    num_stages: int = 3
    splits: int = 1
    prefetch: int = 0
    rotate: bool = False
    rings: bool = False
    fence: bool = True
    parts: int = 0
    early_start: bool = True
    release: Release = "early"

    def packed(self) -> list[int]:
        """The configuration as an op argument."""
        *numbers, release = astuple(self)
        return [*map(int, numbers), RELEASES.index(release)]


MEASURED: Mapping[tuple[int, int, int, bool], GemmConfig] = {
    # 0.6B
    (16, 4096, 1024, False): GemmConfig(x_ahead=8, rotate=True, rings=True),
    (16, 1024, 2048, False): GemmConfig(x_ahead=4, splits=2),
    (16, 3072, 1024, True): GemmConfig(x_ahead=8, rings=True, release="late"),
    (16, 1024, 3072, False): GemmConfig(ahead=12, x_ahead=6, splits=2, rings=True),
    (32, 4096, 1024, False): GemmConfig(x_ahead=6, rings=True),
    (32, 1024, 2048, False): GemmConfig(x_ahead=8, splits=2, rings=True),
    (32, 3072, 1024, True): GemmConfig(x_ahead=5, rings=True, release="late"),
    (32, 1024, 3072, False): GemmConfig(ahead=11, x_ahead=5, splits=2, rings=True),
    (64, 4096, 1024, False): GemmConfig(x_ahead=5, rings=True),
    (64, 3072, 1024, True): GemmConfig(x_ahead=5, rings=True, release="late"),
    (64, 1024, 3072, False): GemmConfig(ahead=9, x_ahead=4, splits=2, rings=True),
    # 8B
    (64, 12288, 4096, True): GemmConfig(block_n=128, block_k=64, num_warps=8, num_stages=4, prefetch=4, parts=1),
    (128, 12288, 4096, True): GemmConfig(block_k=64, num_stages=5, prefetch=4, parts=3, release="late"),
}
"""(padded rows, outputs, inputs, silu) -> the configuration that beat the matmul library in a chain of layers on an
H200; see tune_gemm.py. Sizes that are not here are not used by a model."""


def unpacked(config: list[int]) -> GemmConfig:
    """The configuration that `packed` gave."""
    *numbers, rotate, rings, fence, parts, early_start, release = config
    block_n, block_k, num_warps, ahead, x_ahead, num_stages, splits, prefetch = numbers
    return GemmConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        ahead=ahead,
        x_ahead=x_ahead,
        num_stages=num_stages,
        splits=splits,
        prefetch=prefetch,
        rotate=bool(rotate),
        rings=bool(rings),
        fence=bool(fence),
        parts=parts,
        early_start=bool(early_start),
        release=RELEASES[release],  # type: ignore[arg-type]
    )


def padded_rows(rows: int) -> int:
    """The rows that a launch computes for so many."""
    return next(padded for padded in PADDED_ROWS if rows <= padded)


def worth(rows: int, out_features: int, in_features: int, silu: bool) -> bool:
    """Whether the product of so many rows and these sizes is measured to be faster than the matmul library.

    Each padded number of rows is measured by itself: a size may be worth it at 128 rows and not at 64.
    """
    return rows <= MAX_ROWS and (padded_rows(rows), out_features, in_features, silu) in MEASURED


def choose_config(rows: int, out_features: int, in_features: int, silu: bool, element_size: int = 2) -> GemmConfig:
    """The measured configuration of these sizes, or else a good one by rule. out_features counts after silu * up."""
    measured = MEASURED.get((padded_rows(rows), out_features, in_features, silu))
    return measured or _by_rule(padded_rows(rows), out_features, in_features, silu, element_size)


def pieces_of(in_features: int, config: GemmConfig) -> int:
    """Pieces of columns that each split goes over."""
    return -(-in_features // (config.block_k * config.splits))


def tiles_of(out_features: int, silu: bool, config: GemmConfig) -> int:
    """Tiles of outputs, and so counters that a split launch needs."""
    return -(-out_features * (2 if silu else 1) // rows_of_weight(config))


def rows_of_weight(config: GemmConfig) -> int:
    """Rows of the weight in a tile."""
    return config.block_n * max(1, config.parts)


def shared_bytes(rows: int, config: GemmConfig, in_features: int, element_size: int = 2) -> int:
    """Bytes of shared memory that the operands of a program take, about."""
    pieces = pieces_of(in_features, config)
    weight, x = (count * config.block_k * element_size for count in (rows_of_weight(config), padded_rows(rows)))
    if config.parts:
        return config.num_stages * (weight + x)
    if config.rings:
        return min(config.ahead, pieces) * weight + min(config.ahead, config.x_ahead, pieces) * x
    ahead = min(config.ahead, pieces) * weight + x
    return ahead if pieces <= config.ahead else max(ahead, (config.num_stages + 1) * (weight + x))


def cost(rows: int, out_features: int, in_features: int, silu: bool, config: GemmConfig) -> float:
    """About how many microseconds a launch with `parts` takes on an H200, to compare configurations with each other.

    The largest of four limits: the weight from memory; what programs read through the L2 cache; the same and the
    arithmetic of the busiest multiprocessor.
    """
    tile, padded = rows_of_weight(config), padded_rows(rows)
    programs = tiles_of(out_features, silu, config)
    moved = 2 * in_features * (tile + padded)
    most = -(-programs // MULTIPROCESSORS)
    memory = 2 * in_features * out_features * (2 if silu else 1) / _MEMORY_BYTES
    work = max(most * moved / _SM_BYTES, most * 2 * in_features * tile * padded / _SM_FLOPS)
    return max(memory, programs * moved / _L2_BYTES, work)


MULTIPROCESSORS = 132
_MEMORY_BYTES, _L2_BYTES, _SM_BYTES = 4.26e6, 6.5e6, 8e4  # a microsecond
_SM_FLOPS = 5e6  # a microsecond


def cuts(rows: int, out_features: int, in_features: int, silu: bool, element_size: int = 2) -> list[GemmConfig]:
    """Ways with `parts` to cut a product, the one of the least cost first.

    All programs of a multiprocessor fit into its shared memory together, so that none waits for another one to end.
    """
    sizes = (padded_rows(rows), out_features, in_features, silu)
    tiles = [
        GemmConfig(block_n=block_n, block_k=_TILE_K, num_warps=num_warps, parts=parts, prefetch=4)
        for block_n, parts, num_warps in _TILES
        if block_n * parts * padded_rows(rows) <= _SUMS * 32 * num_warps
    ]
    deep = [_deepest(*sizes, tile, element_size) for tile in tiles]
    return sorted((way for way in deep if way.num_stages > 1), key=lambda way: cost(*sizes, way))


def _deepest(
    padded: int, out_features: int, in_features: int, silu: bool, config: GemmConfig, element_size: int
) -> GemmConfig:
    """The configuration with as many stages as fit, up to 6, where all programs run at once."""
    together = -(-tiles_of(out_features, silu, config) // MULTIPROCESSORS)
    one = shared_bytes(padded, replace(config, num_stages=1), in_features, element_size)
    return replace(config, num_stages=min(6, (SHARED_SM90 // together - 2 * _SCRATCH_BYTES) // one))


_TILES = ((128, 1, 8), (64, 2, 4), (64, 2, 8), (64, 3, 8), (64, 3, 4), (128, 2, 8), (64, 4, 8), (64, 1, 4))
_TILE_K = 64
_SUMS = 192  # fp32 sums that a thread may hold


def _by_rule(padded: int, out_features: int, in_features: int, silu: bool, element_size: int) -> GemmConfig:
    """Tiles of many parts for many rows and large weights, else as much of the weight ahead as fits."""
    elements = out_features * in_features * (2 if silu else 1)
    if padded > 128 or (padded > 32 and elements > LARGE_ELEMENTS):
        return cuts(padded, out_features, in_features, silu, element_size)[0]
    return _ahead_by_rule(padded, out_features, in_features, silu, element_size)


def _ahead_by_rule(padded: int, out_features: int, in_features: int, silu: bool, element_size: int) -> GemmConfig:
    """Whole columns ahead where they fit; so many splits that there is a program for every other multiprocessor."""
    block_k = min(128 if padded <= 64 else 64, max(16, _next_power_of_2(in_features)))
    tiles = -(-out_features * (2 if silu else 1) // _BLOCK_N)
    splits = 1
    while tiles * splits < _PROGRAMS and in_features // (splits * 2) >= _SPLIT_COLUMNS and not silu:
        splits *= 2
    config = GemmConfig(block_k=block_k, splits=splits, x_ahead=2 if padded > 64 else 3)
    ahead = pieces_of(in_features, config)
    while ahead > 0:
        config = GemmConfig(block_k=block_k, splits=splits, x_ahead=config.x_ahead, ahead=ahead)
        if shared_bytes(padded, config, in_features, element_size) <= SHARED_SM90 - _SCRATCH_BYTES:
            return config
        ahead -= 1
    return config


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
