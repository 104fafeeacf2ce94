"""How a small-batch matrix product is cut up on a GPU: configurations, and the choice among them from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_ROWS = 16
_STREAM_ROWS = 4  # up to here the streaming kernel is chosen
_STREAM_ROWS_NARROW = 8  # the same where tensor-core tiles would be too few to fill the GPU
_NARROW = 1024  # outputs
_VECTOR = 8  # elements of a 16-byte load
_SHARE = 32  # elements of the weight that a thread of the streaming kernel holds, about


@dataclass(frozen=True, kw_only=True)
class GemvConfig:
    """How a launch is cut up. block_n: rows of the weight a program; block_k: columns a piece (0: all at once);
    tensor_cores: which of the two kernels; num_stages: pieces in flight where there are several."""

    block_n: int
    num_warps: int
    block_k: int = 0
    num_stages: int = 1
    tensor_cores: bool = False

    def packed(self) -> list[int]:
        """The configuration as an op argument."""
        return [self.block_n, self.num_warps, self.block_k, self.num_stages, int(self.tensor_cores)]


_LARGE = 1 << 23  # elements of a weight from which tensor cores are faster at any number of rows
_HEAD = 65536  # outputs of a vocabulary

MEASURED: Mapping[tuple[int, int, int, bool], GemvConfig] = {
    (2, 3072, 1024, True): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (2, 151936, 1024, False): GemvConfig(block_n=2, num_warps=2),
    (2, 6144, 4096, False): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (2, 4096, 4096, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (2, 12288, 4096, True): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (2, 4096, 12288, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (2, 6144, 2560, False): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (2, 2560, 4096, False): GemvConfig(block_n=2, num_warps=8),
    (2, 9728, 2560, True): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (2, 2560, 9728, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (8, 4096, 1024, False): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (8, 1024, 2048, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (8, 3072, 1024, True): GemvConfig(block_n=32, num_warps=4, block_k=256, num_stages=4, tensor_cores=True),
    (8, 1024, 3072, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (8, 151936, 1024, False): GemvConfig(block_n=64, num_warps=4, block_k=128, num_stages=5, tensor_cores=True),
    (8, 4096, 4096, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (8, 4096, 12288, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (8, 2560, 4096, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
    (8, 2560, 9728, False): GemvConfig(block_n=16, num_warps=2, block_k=256, num_stages=4, tensor_cores=True),
}
"""(rows, outputs, inputs, silu) -> the fastest configuration on an H200, where it beats the rule; see tune_gemv.py."""


def unpacked(config: list[int]) -> GemvConfig:
    """The configuration that `packed` gave."""
    block_n, num_warps, block_k, num_stages, tensor_cores = config
    return GemvConfig(
        block_n=block_n, num_warps=num_warps, block_k=block_k, num_stages=num_stages, tensor_cores=bool(tensor_cores)
    )


def choose_config(rows: int, out_features: int, in_features: int, silu: bool) -> GemvConfig:
    """The measured configuration of these sizes, or else a good one by rule. out_features counts after silu * up."""
    measured = MEASURED.get((rows, out_features, in_features, silu))
    if measured is not None:
        return measured
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
