"""Which fused block may stand for which layer functions, and under which limits.

Each half of a layer is the first fitting entry of a short list, most fused first; the last is the plain composition. An
entry names the layer functions that must be the defaults and the sites it swallows: replace one of them, or touch such
a site, and exactly the entries that contain it fall away, in that layer only. A fused block rounds where the
composition rounds, and is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from funcllm import layers as defaults
from funcllm.attention import paged_attention
from funcllm.kernels.gemm_config import PADDED_ROWS
from funcllm.sites import active
from funcllm.types import Context, StepInputs

if TYPE_CHECKING:
    from torch import Tensor

    from funcllm.config import ModelConfig
    from funcllm.group import Group
    from funcllm.kernels.bundle import Kernels


@dataclass(frozen=True, kw_only=True)
class Fused:
    """A fused block: `stands_for` names the functions it replaces, `swallows` the sites that pass inside it."""

    name: str
    stands_for: tuple[str, ...]
    swallows: tuple[str, ...] = ()
    fits: Callable[[Context], bool] = lambda context: True


SMALL_ELEMENTS = 1 << 23  # of the largest weight of a layer, up to which small blocks beat the library at several rows


def batch_class(inputs: StepInputs, small_rows: int, ahead_rows: int = 0) -> str:
    """Which variant of the compiled units a step runs: "mixed" with prompts, else by its rows, padding included.

    "small": at most `small_rows`; "ahead": more, but at most `ahead_rows`; "decode": more than either.
    """
    if inputs.chunks or not inputs.decode:
        return "mixed"
    rows = inputs.token_ids_t.shape[0]
    if rows <= small_rows:
        return "small"
    return "ahead" if rows <= ahead_rows else "decode"


def small_rows(config: ModelConfig, group: Group, kernels: Kernels) -> int:
    """Up to how many decode rows the small blocks are worth it: only one where a layer's weights are large."""
    largest = 2 * config.intermediate_size // group.size * config.hidden_size
    return kernels.small_rows if largest <= SMALL_ELEMENTS else min(kernels.small_rows, 1)


def is_small(context: Context) -> bool:
    """Whether weights are streamed for so few rows that a matrix product is a handful of dot products."""
    config = context.config
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    return context.batch == "small" and all(width % (8 * context.group.size) == 0 for width in widths)


def ahead_rows(config: ModelConfig, group: Group, kernels: Kernels) -> int:
    """The most decode rows at which some product of a layer is worth asking for its weight early; 0 if none is."""
    if not kernels.fused & {AHEAD_LINEAR.name, AHEAD_MLP.name}:
        return 0
    hidden, ffn = config.hidden_size, config.intermediate_size // group.size
    heads, kv_heads = config.num_heads // group.size, max(1, config.num_kv_heads // group.size)
    products = (
        ((heads + 2 * kv_heads) * config.head_dim, hidden, False),
        (hidden, heads * config.head_dim, False),
        (2 * ffn, hidden, False),
        (ffn, hidden, True),
        (hidden, ffn, False),
    )
    return max((rows for rows in PADDED_ROWS for sizes in products if kernels.worth(rows, *sizes)), default=0)


def is_ahead(context: Context) -> bool:
    """Whether the step has so many rows that products of some sizes ask for their weights early."""
    return context.batch == "ahead"


def asks_ahead(weight: Tensor, silu: bool, context: Context) -> bool:
    """Whether this product is worth asking for its weight early at the number of rows of this step."""
    rows, (out_features, size) = context.inputs.token_ids_t.shape[0], weight.shape
    return context.kernels.worth(rows, out_features // 2 if silu else out_features, size, silu)


EMBED = Fused(name="embed", stands_for=("embed",), swallows=("embed",))
ADD_NORM = Fused(name="add_norm", stands_for=("norm",))
QK_NORM_ROPE_WRITE = Fused(
    name="qk_norm_rope_write",
    stands_for=("qk_norm", "rope", "attention"),
    swallows=("attention.q", "attention.k", "attention.v"),
)
SILU_MUL = Fused(name="silu_mul", stands_for=("mlp",))
SMALL_LINEAR = Fused(name="small_linear", stands_for=("linear",), fits=is_small)
SMALL_QKV = Fused(name="small_qkv", stands_for=("norm", "linear"), swallows=("residual_pre",), fits=is_small)
SMALL_MLP = Fused(
    name="small_mlp", stands_for=("norm", "linear", "mlp"), swallows=("residual_mid", "mlp.hidden"), fits=is_small
)
SMALL_HEAD = Fused(name="small_head", stands_for=("norm", "head"), swallows=("final",), fits=is_small)
AHEAD_LINEAR = Fused(name="ahead_linear", stands_for=("linear",), fits=is_ahead)
AHEAD_MLP = Fused(name="ahead_mlp", stands_for=("linear", "mlp"), fits=is_ahead)
ENTRIES = (
    EMBED,
    ADD_NORM,
    QK_NORM_ROPE_WRITE,
    SILU_MUL,
    SMALL_LINEAR,
    SMALL_QKV,
    SMALL_MLP,
    SMALL_HEAD,
    AHEAD_LINEAR,
    AHEAD_MLP,
)


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
    return fn is _DEFAULTS[name]


_DEFAULTS: dict[str, Any] = {
    "embed": defaults.embed,
    "norm": defaults.norm,
    "qk_norm": defaults.qk_norm,
    "rope": defaults.rope,
    "attention": paged_attention,
    "mlp": defaults.swiglu,
    "linear": defaults.linear,
    "head": defaults.head,
}
