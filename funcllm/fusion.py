"""Which fused block may stand for which layer functions, and under which limits.

Each half of a layer is the first fitting entry of a short list, most fused first; the last is the plain composition. An
entry names the layer functions that must be the defaults and the sites it swallows: replace one of them, or touch such
a site, and exactly the entries that contain it fall away, in that layer only. A fused block rounds where the
composition rounds, and is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcllm import layers as defaults
from funcllm.sites import active
from funcllm.types import Context


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A fused block: `stands_for` names the functions it replaces, `swallows` the sites that pass inside it."""

    name: str
    stands_for: tuple[str, ...]
    swallows: tuple[str, ...] = ()
    fits: Callable[[Context], bool] = lambda context: True


def decode_only(context: Context) -> bool:
    """Whether the step holds decode rows only."""
    return bool(context.inputs.decode) and not context.inputs.chunks


ADD_NORM = Fused(name="add_norm", stands_for=("norm",))
QK_NORM_ROPE_WRITE = Fused(
    name="qk_norm_rope_write",
    stands_for=("qk_norm", "rope", "attention"),
    swallows=("attention.q", "attention.k", "attention.v"),
    fits=lambda context: context.config.head_dim % 2 == 0,
)
SILU_MUL = Fused(name="silu_mul", stands_for=("mlp",), swallows=())
ENTRIES = (ADD_NORM, QK_NORM_ROPE_WRITE, SILU_MUL)


def fits(entry: Fused, context: Context) -> bool:
    """Whether the entry may be used in this layer: kernels, default functions, untouched sites, its own limits."""
    return (
        entry.name in context.kernels.fused
        and all(is_default(name, getattr(context.layer, name)) for name in entry.stands_for)
        and not any(active(name, context) for name in entry.swallows)
        and entry.fits(context)
    )


def is_default(name: str, fn: Any) -> bool:
    """Whether `fn` is funcllm's own function for that place."""
    return fn is _default_functions()[name]


def _default_functions() -> dict[str, Any]:
    from funcllm.attention import paged_attention

    return {
        "norm": defaults.norm,
        "qk_norm": defaults.qk_norm,
        "rope": defaults.rope,
        "attention": paged_attention,
        "mlp": defaults.swiglu,
        "linear": defaults.linear,
    }
