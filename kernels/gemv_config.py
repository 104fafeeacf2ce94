"""How a small-batch matrix product is cut up on a GPU: configurations, and the choice among them from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal

MAX_ROWS = 16
_STREAM_ROWS = 4  # up to here the streaming kernel is chosen
_STREAM_ROWS_NARROW = 8  # the same where tensor-core tiles would be too few to fill the GPU
_NARROW = 1024  # outputs
_VECTOR = 8  # elements of a 16-byte load
_SHARE = 32  # elements of the weight that a thread of the streaming kernel holds, about


RELEASES = ("never", "early", "late")

Release = Literal["never", "early", "late"]


@dataclass(frozen=True, kw_only=True)
class GemvConfig:
    """How a launch is cut up, and how it stands in a chain of programmatic dependent launches.

    block_n: rows of the weight (or pairs of gate and up) a program, or a step of a persistent one. block_k: columns a
    piece (0: all at once). num_stages: pieces in flight where there are several; persistent: groups of rows that are
    loaded ahead of the one being multiplied, 1 or 2. tensor_cores, programs_per_sm: which of the three kernels:
    tensor cores; where programs_per_sm > 0 the persistent streaming one with at most so many programs a
    multiprocessor; else the streaming one.

    Where the caller asks for programmatic dependent launch: early_start: whether the kernel starts before its
    predecessor has ended. release: when its own successor may start: "early" (every program is running), "late" (every
    program is at its last group of rows, or behind its products) or "never" (at its end). A successor starts once all
    programs have let it, so never before the last wave, and fills what is free at that moment. prefetch: groups of rows
    (tensor cores: pieces, a power of two) that a program brings to the L2 cache before it waits, beyond those it loads.
    """

    block_n: int
    num_warps: int
    block_k: int = 0
    num_stages: int = 1
    tensor_cores: bool = False
    programs_per_sm: int = 0
    prefetch: int = 0
    early_start: bool = True
    release: Release = "early"

    def packed(self) -> list[int]:
        """The configuration as an op argument."""
        *numbers, release = astuple(self)
        return [*map(int, numbers), RELEASES.index(release)]


_LARGE = 1 << 23  # elements of a weight from which tensor cores are faster at any number of rows
_HEAD = 65536  # outputs of a vocabulary

_TILES = GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True)
_NARROW_TILES = GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True)

MEASURED: Mapping[tuple[int, int, int, bool], GemvConfig] = {
    # 0.6B
    (1, 4096, 1024, False): GemvConfig(block_n=2, num_warps=4),
    (1, 1024, 2048, False): GemvConfig(block_n=2, num_warps=4),
    (1, 3072, 1024, True): GemvConfig(block_n=2, num_warps=4),
    (1, 1024, 3072, False): GemvConfig(block_n=2, num_warps=4),
    (1, 151936, 1024, False): GemvConfig(block_n=4, num_warps=4, release="late"),
    (2, 4096, 1024, False): GemvConfig(block_n=4, num_warps=4),
    (2, 1024, 2048, False): GemvConfig(block_n=2, num_warps=4),
    (2, 3072, 1024, True): _TILES,
    (2, 1024, 3072, False): GemvConfig(block_n=2, num_warps=8),
    (2, 151936, 1024, False): GemvConfig(block_n=2, num_warps=2, programs_per_sm=8, early_start=False, release="never"),
    (8, 4096, 1024, False): replace(_TILES, early_start=False, release="never"),
    (8, 1024, 2048, False): _NARROW_TILES,
    (8, 3072, 1024, True): _TILES,
    (8, 1024, 3072, False): _NARROW_TILES,
    (8, 151936, 1024, False): GemvConfig(
        block_n=64, num_warps=4, block_k=128, num_stages=5, tensor_cores=True, early_start=False, release="never"
    ),
    # 4B
    (1, 6144, 2560, False): GemvConfig(block_n=2, num_warps=4),
    (1, 2560, 9728, False): GemvConfig(block_n=1, num_warps=8),
    # 8B
    (1, 6144, 4096, False): GemvConfig(block_n=2, num_warps=4),
    (1, 4096, 4096, False): GemvConfig(block_n=1, num_warps=4, release="late"),
    (1, 12288, 4096, True): GemvConfig(block_n=2, num_warps=8, release="late"),
    (1, 4096, 12288, False): GemvConfig(block_n=2, num_warps=16, release="late"),
    (1, 151936, 4096, False): GemvConfig(block_n=2, num_warps=4, release="late"),
}
"""(rows, outputs, inputs, silu) -> the fastest configuration on an H200, where it beats the rule; in a chain of
layers where it was
measured in one; see tune_chain.py and tune_gemv.py."""


def unpacked(config: list[int]) -> GemvConfig:
    """The configuration that `packed` gave."""
    block_n, num_warps, block_k, num_stages, tensor_cores, programs_per_sm, prefetch, early_start, release = config
    return GemvConfig(
        block_n=block_n,
        num_warps=num_warps,
        block_k=block_k,
        num_stages=num_stages,
        tensor_cores=bool(tensor_cores),
        programs_per_sm=programs_per_sm,
        prefetch=prefetch,
        early_start=bool(early_start),
        release=RELEASES[release],  # type: ignore[arg-type]
    )


def programs_of(groups: int, programs_per_sm: int, num_sms: int) -> int:
    """Programs of a persistent launch over so many groups of rows: the fewest whose largest share is the least."""
    return -(-groups // -(-groups // (programs_per_sm * num_sms)))


def choose_config(rows: int, out_features: int, in_features: int, silu: bool, norm: bool = False) -> GemvConfig:
    """The measured configuration of these sizes, or else a good one by rule. out_features counts after silu * up.

    By rule a product of several rows behind a norm takes part in a chain of early starts only if silu(gate) * up
    follows it.
    """
    measured = MEASURED.get((rows, out_features, in_features, silu))
    if measured is not None:
        return measured
    if rows == 1:
        return _one_row(out_features, in_features, silu)
    config = _by_rule(rows, out_features, in_features, silu)
    return replace(config, early_start=False, release="never") if norm and not silu else config


def _one_row(out_features: int, in_features: int, silu: bool) -> GemvConfig:
    """Two rows of the weight a program, so many warps that each of its threads holds 16 to 96 elements of them."""
    width = next_power_of_2(in_features)
    num_warps = max(1, min(16, width // (32 * _VECTOR), 4 if width <= 4096 and not silu else width // 512))
    is_large = in_features * out_features * (2 if silu else 1) >= _LARGE
    return GemvConfig(block_n=2, num_warps=num_warps, release="late" if is_large else "early")


def _by_rule(rows: int, out_features: int, in_features: int, silu: bool) -> GemvConfig:
    if out_features < _HEAD and in_features * out_features * (2 if silu else 1) >= _LARGE:
        narrow = out_features <= 4096 and not silu
        return GemvConfig(
            block_n=16 if narrow else 32, num_warps=2 if narrow else 4, block_k=256, num_stages=4, tensor_cores=True
        )
    if rows > (_STREAM_ROWS_NARROW if out_features <= _NARROW else _STREAM_ROWS):
        block_n = 16 if out_features <= 4096 else 32
        return GemvConfig(
            block_n=block_n, num_warps=4, block_k=min(256, next_power_of_2(in_features)), num_stages=4,
            tensor_cores=True,
        )  # fmt: skip
    width = next_power_of_2(in_features)
    block_n = 2 if silu or width >= 8192 or out_features <= 1024 else 4
    held = width * block_n * (2 if silu else 1)
    warps = max(1, min(16, next_power_of_2(held // (32 * _SHARE)), width // (32 * _VECTOR)))
    return GemvConfig(block_n=block_n, num_warps=warps)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
