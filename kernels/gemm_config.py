"""How a matrix product of 9 to 128 rows is cut up on a GPU: configurations, and which sizes are worth it.

The kernels are in triton_gemm.py. A product is left to the matmul library unless `MEASURED` has its sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Literal

MAX_ROWS = 128  # more: the matmul library
PADDED_ROWS = (16, 32, 64, 128)
SHARED_SM90 = 232448  # bytes of shared memory that one program may take on sm_90
RELEASES = ("never", "early", "late")
_BLOCK_N = 64  # the rows of a wgmma
_SCRATCH_BYTES = 4096  # of shared memory beside the operands, at least
_SPLIT_COLUMNS = 256  # of the weight, at least, in a split
_PROGRAMS = 64  # that a launch should have at least: fewer leave too much of x to each

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

    early_start: whether the kernel starts before its predecessor has ended, where the caller allows it. release: when
    its own successor may start: "early" (every program has asked for its first weights), "late" (every program has
    multiplied) or "never" (at its end). prefetch: pieces behind the ahead ones that are brought to the L2 cache before
    the wait.
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
    early_start: bool = True
    release: Release = "early"

    def packed(self) -> list[int]:
        """The configuration as an op argument."""
        *numbers, release = astuple(self)
        return [*map(int, numbers), RELEASES.index(release)]


MEASURED: Mapping[tuple[int, int, int, bool], GemmConfig] = {}
"""(padded rows, outputs, inputs, silu) -> the configuration that beat the matmul library in a chain of layers on an
H200; see tune_gemm.py. Sizes that are not here are not used by a model."""


def unpacked(config: list[int]) -> GemmConfig:
    """The configuration that `packed` gave."""
    *numbers, rotate, rings, fence, early_start, release = config
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
        early_start=bool(early_start),
        release=RELEASES[release],  # type: ignore[arg-type]
    )


def padded_rows(rows: int) -> int:
    """The rows that a launch computes for so many."""
    return next(padded for padded in PADDED_ROWS if rows <= padded)


def row_limit(out_features: int, in_features: int, silu: bool) -> int:
    """Up to how many rows the product of these sizes is measured to be worth it, from 16 on without a gap; or 0."""
    limit = 0
    for padded in PADDED_ROWS:
        if (padded, out_features, in_features, silu) not in MEASURED:
            return limit
        limit = padded
    return limit


def choose_config(rows: int, out_features: int, in_features: int, silu: bool, element_size: int = 2) -> GemmConfig:
    """The measured configuration of these sizes, or else a good one by rule. out_features counts after silu * up."""
    measured = MEASURED.get((padded_rows(rows), out_features, in_features, silu))
    return measured or _by_rule(padded_rows(rows), out_features, in_features, silu, element_size)


def pieces_of(in_features: int, config: GemmConfig) -> int:
    """Pieces of columns that each split goes over."""
    return -(-in_features // (config.block_k * config.splits))


def tiles_of(out_features: int, silu: bool, config: GemmConfig) -> int:
    """Tiles of outputs, and so counters that a split launch needs."""
    return -(-out_features * (2 if silu else 1) // config.block_n)


def shared_bytes(rows: int, config: GemmConfig, in_features: int, element_size: int = 2) -> int:
    """Bytes of shared memory that the operands of a program take, about."""
    pieces = pieces_of(in_features, config)
    weight, x = (count * config.block_k * element_size for count in (config.block_n, padded_rows(rows)))
    if config.rings:
        return min(config.ahead, pieces) * weight + min(config.ahead, config.x_ahead, pieces) * x
    ahead = min(config.ahead, pieces) * weight + x
    return ahead if pieces <= config.ahead else max(ahead, (config.num_stages + 1) * (weight + x))


def _by_rule(padded: int, out_features: int, in_features: int, silu: bool, element_size: int) -> GemmConfig:
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
