"""Bundles of kernels: which function does each op. A bundle is a static argument of the model, never a global switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from funcllm.kernels import reference


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One function an op, each with the signature and the contract of its twin in reference.py.

    in_place: whether the ops that write the cache do so in place (the caches returned are those passed in).
    fused: names of the fused blocks (funcllm/fusion.py) that may use these kernels. prefill, decode: the back ends in
    use, and why: for people, and part of the graph key.
    """

    name: str
    write_kv: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope_write: Callable[..., tuple[Tensor, Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    head_logits: Callable[[Tensor, Tensor], Tensor]
    pick: Callable[..., Tensor]
    in_place: bool = False
    fused: frozenset[str] = frozenset()
    prefill: str = "reference"
    decode: str = "reference"
    why: tuple[str, ...] = ()
    tuning: Any = ()


REFERENCE = Kernels(
    name="reference",
    write_kv=reference.write_kv,
    attend=reference.attend,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    qk_norm_rope_write=reference.qk_norm_rope_write,
    silu_mul=reference.silu_mul,
    head_logits=reference.head_logits,
    pick=reference.pick,
)
