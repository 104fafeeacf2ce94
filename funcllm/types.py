"""The types that flow through funcllm, and the contracts of the functions that a user may replace.

Two kinds only. A `NamedTuple` holds tensors that flow: it is a pytree, and an absent part is `()`, never None.
A frozen, keyword-only dataclass holds static facts: it is hashable and part of every compilation and graph key.

Shape suffixes, one lower-case letter a dimension:

    t tokens of a step     b rows of a step        l rows whose logits are taken   c chunk rows of a step
    r state rows           q longest query         k KV heads                      n query heads
    h head dim             d hidden size           f feed-forward size             v vocabulary
    p KV blocks            s slots of a block      m block-table width             e sequence capacity of a state row

Under tensor parallelism n, k, f and v are this rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from funcllm.config import ModelConfig
    from funcllm.group import Group
    from funcllm.kernels.bundle import Kernels

MAX_STOP_IDS = 8

PyTree = Any


# --- parameters ------------------------------------------------------------------------------------------------------


class LinearParams(NamedTuple):
    """A dense layer. `weight` may be any pytree that the `linear` in use knows (quantised, low-rank, ...)."""

    weight: PyTree  # [out, in]
    bias: PyTree = ()  # [out]; () where absent, and on ranks that do not own it


class NormParams(NamedTuple):
    weight: PyTree  # [d] or [h]


class EmbedParams(NamedTuple):
    weight: PyTree  # [v, d]


class AttentionParams(NamedTuple):
    qkv_proj: LinearParams  # [(n + 2k) h, d]: query, key, value rows of this rank
    o_proj: LinearParams  # [d, n h]
    q_norm: PyTree = ()  # NormParams [h], or () without a norm of each head
    k_norm: PyTree = ()
    qk_norm: PyTree = ()  # own parameters of a swapped qk_norm, rope or attention
    rope: PyTree = ()
    attention: PyTree = ()


class MLPParams(NamedTuple):
    gate_up_proj: LinearParams  # [2f, d]: gate rows, then up rows of this rank
    down_proj: LinearParams  # [d, f]


class LayerParams(NamedTuple):
    input_layernorm: PyTree
    self_attn: PyTree
    post_attention_layernorm: PyTree
    mlp: PyTree


class Params(NamedTuple):
    """The parameter tree of one rank, under Hugging Face's names (`params.layers[3].self_attn.o_proj.weight`)."""

    embed_tokens: PyTree
    layers: tuple[PyTree, ...]
    norm: PyTree
    lm_head: PyTree = ()  # () when tied to embed_tokens


# --- parameter specs -------------------------------------------------------------------------------------------------

InitFn = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One checkpoint tensor, or this rank's slice of it, inside a parameter.

    name: its name in the checkpoint; shape: its whole shape there; axis: the axis that is sharded, or None when every
    rank holds all of it; shards: into how many slices it is cut (fewer than the group's size: neighbours hold the same
    slice). The last slice of an axis that `shards` does not divide is filled up with zeros. owner: the only rank that
    holds the part (on every other rank the leaf is `()`), as for the bias of a row-parallel layer; None: as axis says.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    shards: int = 1
    owner: int | None = None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One parameter tensor: its parts, concatenated along axis 0, or stacked along a new axis 0 when `stack`.

    init: a function (shape, generator) -> tensor, for random initialisation and for own parameters without a source.
    """

    parts: tuple[Part, ...]
    init: InitFn | None = None
    stack: bool = False
    dtype: torch.dtype | None = None  # None: the dtype that the model is loaded in


# --- cache -----------------------------------------------------------------------------------------------------------


class LayerCache(NamedTuple):
    """Paged keys and values of one layer: two separate allocations. Donated: rebind what a call returns."""

    k_pskh: Tensor
    v_pskh: Tensor


KVCache = tuple[Any, ...]  # one LayerCache (or a Component's own cache) a layer


# --- the device-resident state of all sequences ----------------------------------------------------------------------


class SamplingState(NamedTuple):
    """Sampling parameters of every state row."""

    temperature_r: Tensor  # float32; 0 is greedy
    top_k_r: Tensor  # int32; 0 is off
    top_p_r: Tensor  # float32; 1 is off
    min_p_r: Tensor  # float32; 0 is off
    seed_r: Tensor  # int64
    min_length_r: Tensor  # int32; below it, no stop id is sampled
    stop_ids_rs: Tensor  # int32 [r, MAX_STOP_IDS]; -1 is none
    penalties: PyTree = ()
    grammar: PyTree = ()


class SequenceState(NamedTuple):
    """One row for each admitted sequence, for its whole life. Row 0 is the trash row. Donated; rows never move."""

    token_ids_re: Tensor  # int32; the prompt and every sampled token
    length_r: Tensor  # int32; tokens known
    computed_r: Tensor  # int32; tokens whose keys and values are in the cache
    prompt_length_r: Tensor  # int32
    limit_r: Tensor  # int32; a row dies when its length reaches this
    alive_r: Tensor  # bool
    block_table_rm: Tensor  # int32
    sampling: SamplingState
    extras: dict[str, Tensor]  # [r, ...]


# --- one step --------------------------------------------------------------------------------------------------------


class DecodeRows(NamedTuple):
    """Rows with one query each; their tokens come first in the packed step."""

    block_table_bm: Tensor  # int32
    kv_lens_b: Tensor  # int32; with the token of this step; padding rows point at the trash block with length 1
    counters_bk: Tensor | tuple[()] = ()  # int32 zeros, which every kernel that counts on them leaves behind


class ChunkRows(NamedTuple):
    """Rows with a chunk of prompt each; their tokens are packed behind the decode tokens."""

    block_table_cm: Tensor  # int32
    kv_lens_c: Tensor  # int32; with the tokens of this step; 0 for padding rows
    query_starts_c1: Tensor  # int32 [c + 1], cumulative, 0 = first chunk token; tokens behind the last are padding
    span_q: Tensor  # uint8, a stride-0 view; only its size counts: an upper bound of the longest chunk


class Filters(NamedTuple):
    """What narrows the choice of a token; () in SamplingInputs while no row asks."""

    top_k_l: Tensor
    top_p_l: Tensor
    min_p_l: Tensor
    forbidden_ls: Tensor  # int32 ids that must not be sampled; -1 is none


class SamplingInputs(NamedTuple):
    temperature_l: Tensor  # float32
    seed_l: Tensor  # int64
    positions_l: Tensor  # int32; the position that the sampled token will have
    filters: Filters | tuple[()] = ()
    noise_keys_l2: Tensor | tuple[()] = ()  # int64; noise_keys of seed and position, where a kernel made them already


class StepInputs(NamedTuple):
    """All that one step reads. Decode tokens first, then chunk tokens, then padding (state row 0)."""

    token_ids_t: Tensor  # int32
    positions_t: Tensor  # int32
    slots_t: Tensor  # int64; block * block_size + offset; 0 for padding
    rows_t: Tensor  # int32; state row of each token
    rows_b: Tensor  # int32; state row of each row: decode rows, then chunk rows
    prompt_lens_b: Tensor  # int32
    query_lens_b: Tensor  # int32; 0 for dead and padding rows
    logit_tokens_l: Tensor  # int32; packed tokens that reach the head; here l = b, the last token of each row
    samples_l: Tensor  # bool; whether the row's sampled token counts (its last known token is computed in this step)
    decode: DecodeRows | tuple[()]
    chunks: ChunkRows | tuple[()]
    sampling: SamplingInputs | tuple[()]
    capture_tokens_k: Tensor | tuple[()] = ()  # packed tokens that capturing sites record
    extras: dict[str, Tensor] = {}  # noqa: RUF012  # per state row: index with rows_t or rows_b


class StepOutputs(NamedTuple):
    token_ids_l: Tensor  # int32; -1 where the logits held NaN
    count_l: Tensor  # int32; 1 where the token counts, else 0
    alive_l: Tensor  # bool; whether the row goes on
    logprobs: PyTree = ()
    captured: dict[str, Tensor] = {}  # noqa: RUF012
    extras: dict[str, Tensor] = {}  # noqa: RUF012  # what the sampler changed, [l, ...]


class Stream(NamedTuple):
    """The residual stream between blocks: it means x + all_reduce(update). An empty update is ()."""

    x_td: Tensor
    update_td: Tensor | tuple[()] = ()


class Angles(NamedTuple):
    """Cosine and sine of the rotary angles of the step's tokens, fp32, attention factor included."""

    cos_th: Tensor  # [t, h / 2]
    sin_th: Tensor  # [t, h / 2]


# --- static facts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A per-request value that a swapped or edited function reads: `context.inputs.extras[name][rows]`.

    shape and dtype of one request's value; default: what a request that gives none gets (a number or nested lists);
    affects_kv: whether it changes keys and values, and so must be part of the prefix-cache tag.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    default: Any = 0.0
    affects_kv: bool = True


@dataclass(frozen=True)
class Component:
    """A function together with what it owns.

    specs(config, group, place) -> the parameter node at that place; source: where its tensors are read before the
    checkpoint (a mapping name -> tensor, a safetensors file, or an nn.Module); init_cache(config, group, num_blocks,
    block_size, num_rows, device, dtype) -> the layer's cache; paged=False: its cache goes by state rows, and the prefix
    cache is off; whole=True: it returns the full value on every rank and the block does not reduce it.
    """

    apply: Callable[..., Any]
    specs: Callable[..., PyTree] | None = None
    source: Any = field(default=None, compare=False)
    init_cache: Callable[..., PyTree] | None = None
    paged: bool = True
    whole: bool = False

    def __call__(self, *args: Any) -> Any:
        return self.apply(*args)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a layer function may read besides its arguments. Made anew for every call; nothing survives in it.

    `layer` is the record of functions resolved for this layer. `batch` is the batch class that this variant is compiled
    for: "small" (few decode rows), "ahead" (more), "decode" (decode rows only) or "mixed". `captured` collects what
    sites record during this call, `passed` the names of the active sites that were passed.
    """

    config: ModelConfig
    group: Group
    kernels: Kernels
    layer: Any
    inputs: StepInputs
    angles: Angles | tuple[()] = ()
    batch: str = "mixed"
    captured: dict[str, Tensor] = field(default_factory=dict, compare=False)
    passed: dict[str, None] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class Model:
    """An architecture as functions. `params` and `cache` are always arguments; the cache is donated.

    hidden(params, cache, inputs) -> (Stream, cache, captured)
    head(params, stream, inputs) -> (logits_lv of this rank, captured): fp32, padding columns -inf
    step(params, cache, inputs) -> (StepOutputs, cache)
    logits(params, token_ids_t, *, extras={}) -> logits_tv, whole vocabulary, differentiable
    init_cache(num_blocks, block_size, num_rows, device, dtype) -> KVCache
    """

    config: ModelConfig
    layers: Any
    group: Group
    kernels: Kernels
    specs: PyTree
    init_cache: Callable[..., KVCache]
    hidden: Callable[..., Any]
    head: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    step: Callable[..., tuple[StepOutputs, KVCache]]
    logits: Callable[..., Tensor]


# --- contracts -------------------------------------------------------------------------------------------------------
# Common to all: pure; no .item() and no Python branch on a tensor's values; the input's dtype out; traceable with
# fullgraph=True. `params` is the node of the parameter tree at that place, whatever type its specs gave it.


class NormFn(Protocol):
    """x_td -> x_td, also over [t, heads, h]. Used for the input, post-attention and final norms."""

    def __call__(self, x: Tensor, params: PyTree, context: Context, /) -> Tensor: ...


class QKFn(Protocol):
    """Queries and keys in, the same shapes out: the per-head norm, then the rotary embedding. params: self_attn."""

    def __call__(self, q_tnh: Tensor, k_tkh: Tensor, params: PyTree, context: Context, /) -> tuple[Tensor, Tensor]: ...


class AttentionFn(Protocol):
    """Writes this step's keys and values, attends over the cache; returns the heads' outputs and the cache."""

    def __call__(
        self, q_tnh: Tensor, k_tkh: Tensor, v_tkh: Tensor, cache: PyTree, params: PyTree, context: Context, /
    ) -> tuple[Tensor, PyTree]: ...


class MLPFn(Protocol):
    """x_td -> this rank's partial sum of the update [t, d] (the full value when declared whole)."""

    def __call__(self, x_td: Tensor, params: PyTree, context: Context, /) -> Tensor: ...


class LinearFn(Protocol):
    """x [t, in] -> [t, out] by this rank's weight; bias is () where this rank adds none."""

    def __call__(self, x: Tensor, weight: PyTree, bias: PyTree, context: Context, /) -> Tensor: ...


class BlockFn(Protocol):
    """One decoder layer: a Stream in, a Stream and the layer's cache out. params: the layer's node."""

    def __call__(self, stream: Stream, params: PyTree, cache: PyTree, context: Context, /) -> tuple[Stream, PyTree]: ...


class EmbedFn(Protocol):
    """token_ids_t -> this rank's partial sum [t, d]. params: the whole tree."""

    def __call__(self, token_ids_t: Tensor, params: PyTree, context: Context, /) -> Tensor: ...


class HeadFn(Protocol):
    """x_ld -> this rank's logits [l, v], fp32. params: the whole tree."""

    def __call__(self, x_ld: Tensor, params: PyTree, context: Context, /) -> Tensor: ...


class SampleFn(Protocol):
    """logits_lv -> (token_ids_l, changed extras, usually {}). A swapped sampler gets whole columns."""

    def __call__(self, logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]: ...


class EditFn(Protocol):
    """What passes a site in, the same shape out."""

    def __call__(self, x: Tensor, context: Context, /) -> Tensor: ...


Read = Callable[[str, tuple[slice, ...]], Tensor]
Source = Mapping[str, Tensor]
