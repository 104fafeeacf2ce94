"""Paged caches and queries for attention tests: every slot that no sequence owns holds NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RELATIVE_RMSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of an attention layer and its options."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def options(self, device: torch.device | str) -> dict[str, Any]:
        """The keyword arguments of `attend`."""
        generator = torch.Generator().manual_seed(5)
        sinks = torch.randn(self.heads, generator=generator).to(device) if self.sinks else ()
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks_n": sinks}

    def queries(self, num_tokens: int, device: torch.device | str) -> Tensor:
        """Random queries, a view of a packed projection as the model has them."""
        generator = torch.Generator().manual_seed(num_tokens)
        packed = torch.randn(num_tokens, self.heads + 2 * self.kv_heads, self.head_dim, generator=generator)
        return packed.to(device, self.dtype)[:, : self.heads]


def paged(
    heads: Heads, kv_lens: Sequence[int], device: torch.device | str = "cpu", spare_blocks: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches with random keys and values of sequences of these lengths, their block table and lengths."""
    generator = torch.Generator().manual_seed(sum(kv_lens) + len(kv_lens))
    size = heads.block_size
    width = max(1, -(-max(kv_lens, default=1) // size)) + 1
    used = [-(-length // size) for length in kv_lens]
    num_blocks = 1 + sum(used) + spare_blocks
    order = 1 + torch.randperm(num_blocks - 1, generator=generator)
    table = torch.zeros(len(kv_lens), width, dtype=torch.int32)
    slots = []
    for row, (length, count) in enumerate(zip(kv_lens, used)):
        first = sum(used[:row])
        table[row, :count] = order[first : first + count].int()
        position = torch.arange(length)
        slots.append(table[row].long()[position // size] * size + position % size)
    slot = torch.cat(slots).to(device)
    shape = (num_blocks * size, heads.kv_heads, heads.head_dim)
    caches = []
    for _ in range(2):
        cache = torch.full(shape, float("nan"), dtype=heads.dtype, device=device)
        cache[slot] = torch.randn(len(slot), *shape[1:], generator=generator).to(device, heads.dtype)
        caches.append(cache.unflatten(0, (num_blocks, size)))
    return caches[0], caches[1], table.to(device), torch.tensor(kv_lens, dtype=torch.int32, device=device)


def chunk_rows(query_lens: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cumulative starts of chunks of these lengths, and a span whose size bounds them."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    return starts, torch.zeros(1, dtype=torch.uint8, device=device).expand(max(query_lens, default=1))


def relative_rmse(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    difference = (actual.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt().clamp(min=1e-30))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of the dtype, every value finite."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    error = relative_rmse(actual, expected)
    assert error <= RELATIVE_RMSE[actual.dtype], f"relative rmse {error:.2e}"
