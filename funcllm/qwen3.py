"""Qwen3 (and Qwen2, and Llama-type models) as pure functions over explicit parameters and a paged cache.

`qwen3(config, layers, group, kernels)` binds the static facts and returns a `Model`. An architecture is such a builder:
this one reads every difference between its families from explicit facts of the config. `build` does what is common to
all architectures: it walks the layers, and writes `step` and `logits` once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from funcllm import attention, fusion
from funcllm.block import is_whole, settle
from funcllm.config import ModelConfig, validate_tp
from funcllm.group import SINGLE, Group, all_gather, all_reduce
from funcllm.kernels.bundle import REFERENCE, Kernels
from funcllm.layers import head_weight, vocab_ids
from funcllm.record import Layers, check_layers, value_key
from funcllm.rope import inverse_frequencies
from funcllm.sampling import sample
from funcllm.sites import LAYER_SITES, active, check_passed, describe, site
from funcllm.types import (
    Angles,
    AttentionParams,
    ChunkRows,
    Component,
    Context,
    EmbedParams,
    KVCache,
    LayerParams,
    LinearParams,
    MLPParams,
    Model,
    NormParams,
    Params,
    Part,
    PyTree,
    Spec,
    StepInputs,
    StepOutputs,
    Stream,
)

Unit = Callable[..., Any]
Transform = Callable[[Unit, str], Unit]


def qwen3(
    config: ModelConfig,
    layers: Layers = Layers(),
    group: Group = SINGLE,
    kernels: Kernels = REFERENCE,
    transform: Transform = lambda unit, name: unit,
) -> Model:
    """The model of this config as functions of (params, cache, inputs), for this rank of the group.

    transform(unit, name): wraps each compilation unit ("embed", "layer", "final") whose work is not all done by kernels
    already; the identity by default. Raises ValueError for a tp size that does not divide the model, and for layers,
    sites or functions that do not fit.
    """
    layers = with_windows(layers, config)
    return build(config, layers, group, kernels, param_specs(config, layers, group), transform)


def with_windows(layers: Layers, config: ModelConfig) -> Layers:
    """The record with the config's sliding window in the layers that have one and keep the default attention."""
    if not config.sliding_window:
        return layers
    default = [i for i in config.sliding_layers if layers.of(i).attention is attention.paged_attention]
    return layers.at(default, attention=functools.partial(attention.paged_attention, window=config.sliding_window))


# --- parameters: one table --------------------------------------------------------------------------------------------


def param_specs(config: ModelConfig, layers: Layers = Layers(), group: Group = SINGLE) -> Params:
    """The Spec tree of this rank: names in the checkpoint, shapes, and the axis that is sharded."""
    validate_tp(config, group.size)
    d, vocabulary = config.hidden_size, config.vocab_size
    embed_tokens = EmbedParams(_spec("model.embed_tokens.weight", (vocabulary, d), 0, group.size))
    lm_head: PyTree = EmbedParams(_spec("lm_head.weight", (vocabulary, d), 0, group.size))
    return Params(
        embed_tokens=_node(layers.embed, embed_tokens, config, group, "embed"),
        layers=tuple(_layer_specs(i, config, layers.of(i), group) for i in range(config.num_layers)),
        norm=_node(layers.norm, NormParams(_norm_spec("model.norm", d)), config, group, "norm"),
        lm_head=_node(layers.head, () if config.tie_word_embeddings else lm_head, config, group, "head"),
    )


def _layer_specs(index: int, config: ModelConfig, layer: Layers, group: Group) -> PyTree:
    prefix = f"model.layers.{index}"
    d, f, h, tp = config.hidden_size, config.intermediate_size, config.head_dim, group.size
    q_rows, kv_rows = config.num_heads * h, config.num_kv_heads * h
    kv_shards = min(tp, config.num_kv_heads)
    qkv = (("q_proj", q_rows, tp), ("k_proj", kv_rows, kv_shards), ("v_proj", kv_rows, kv_shards))
    head_norm = functools.partial(_norm_spec, size=h)

    def node(place: str, default: PyTree) -> PyTree:
        return _node(getattr(layer, place), default, config, group, f"layers.{index}.{place}")

    specs = LayerParams(
        input_layernorm=_node(
            layer.norm,
            NormParams(_norm_spec(f"{prefix}.input_layernorm", d)),
            config,
            group,
            f"layers.{index}.input_layernorm",
        ),
        self_attn=AttentionParams(
            qkv_proj=_column(f"{prefix}.self_attn", qkv, d, config.qkv_bias),
            o_proj=_row(f"{prefix}.self_attn.o_proj", (d, q_rows), group, config.o_bias),
            q_norm=NormParams(head_norm(f"{prefix}.self_attn.q_norm")) if config.qk_norm else (),
            k_norm=NormParams(head_norm(f"{prefix}.self_attn.k_norm")) if config.qk_norm else (),
            qk_norm=node("qk_norm", ()),
            rope=node("rope", ()),
            attention=node("attention", ()),
        ),
        post_attention_layernorm=_node(
            layer.norm,
            NormParams(_norm_spec(f"{prefix}.post_attention_layernorm", d)),
            config,
            group,
            f"layers.{index}.post_attention_layernorm",
        ),
        mlp=node(
            "mlp",
            MLPParams(
                gate_up_proj=_column(f"{prefix}.mlp", (("gate_proj", f, tp), ("up_proj", f, tp)), d, config.mlp_bias),
                down_proj=_row(f"{prefix}.mlp.down_proj", (d, f), group, config.mlp_bias),
            ),
        ),
    )
    return _node(layer.block, specs, config, group, f"layers.{index}.block")


def _spec(name: str, shape: tuple[int, ...], axis: int | None = None, shards: int = 1) -> Spec:
    return Spec(parts=(Part(name=name, shape=shape, axis=axis, shards=shards),))


def _norm_spec(prefix: str, size: int) -> Spec:
    return Spec(parts=(Part(name=f"{prefix}.weight", shape=(size,)),), init=_ones)


def _ones(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.ones(shape)


def _column(prefix: str, parts: tuple[tuple[str, int, int], ...], d: int, bias: bool) -> LinearParams:
    """A column-parallel dense layer, fused from parts (name, rows, shards)."""

    def spec(leaf: str, tail: tuple[int, ...]) -> Spec:
        return Spec(
            parts=tuple(
                Part(name=f"{prefix}.{name}.{leaf}", shape=(rows, *tail), axis=0, shards=shards)
                for name, rows, shards in parts
            )
        )

    return LinearParams(spec("weight", (d,)), spec("bias", ()) if bias else ())


def _row(name: str, shape: tuple[int, int], group: Group, bias: bool) -> LinearParams:
    """A row-parallel dense layer; its bias is rank 0's, for it must be added once."""
    owned = bias and group.rank == 0
    bias_part = Part(name=f"{name}.bias", shape=shape[:1], owner=0 if group.size > 1 else None)
    return LinearParams(_spec(f"{name}.weight", shape, 1, group.size), Spec(parts=(bias_part,)) if owned else ())


def _node(fn: Any, default: PyTree, config: ModelConfig, group: Group, place: str) -> PyTree:
    if isinstance(fn, Component) and fn.specs is not None:
        return fn.specs(config, group, place)
    return default


# --- any architecture: hidden, head, step, logits ---------------------------------------------------------------------


def build(
    config: ModelConfig,
    layers: Layers,
    group: Group,
    kernels: Kernels,
    specs: PyTree,
    transform: Transform = lambda unit, name: unit,
) -> Model:
    """A Model from the functions in `layers`: embed, one block a layer, final norm, head, sampler."""
    check_layers(layers, config)
    records = [layers.of(i) for i in range(config.num_layers)]
    outside = layers.of(None)
    static: dict[str, Any] = {"config": config, "group": group, "kernels": kernels}
    keys = [value_key(record) for record in records]
    batch_class = functools.partial(
        fusion.batch_class,
        small_rows=fusion.small_rows(config, group, kernels),
        ahead_rows=fusion.ahead_rows(config, group, kernels),
    )

    @functools.cache
    def unit(kind: str, key: Any, batch: str) -> Unit:
        record = outside if key is None else records[keys.index(key)]
        facts = {**static, "batch": batch}
        run = functools.partial(_UNITS[kind], record, facts)
        return run if _is_in_kernels(kind, record, facts) else transform(run, kind)

    def hidden(params: Params, cache: KVCache, inputs: StepInputs) -> tuple[Stream, KVCache, dict[str, Tensor]]:
        batch = batch_class(inputs)
        frequencies_h = rope_frequencies(config, inputs.positions_t.device)
        stream, angles, captured = unit("embed", None, batch)(params, inputs, frequencies_h)
        new_cache = []
        captured = dict(captured)
        for i, key in enumerate(keys):
            run_layer = unit("layer", key, batch)
            stream, layer_cache, recorded = run_layer(stream, params.layers[i], cache[i], inputs, angles)
            new_cache.append(layer_cache)
            captured.update({f"layers.{i}.{name}": value for name, value in recorded.items()})
        return stream, tuple(new_cache), captured

    def head(params: Params, stream: Stream, inputs: StepInputs) -> tuple[Tensor, dict[str, Tensor]]:
        context = Context(layer=outside, inputs=inputs, **static)
        logits_lv = site("logits", _masked(_logits(stream, params, context), context), context)
        return logits_lv, context.captured

    def step(params: Params, cache: KVCache, inputs: StepInputs) -> tuple[StepOutputs, KVCache]:
        stream, cache, captured = hidden(params, cache, inputs)
        run_final = unit("final", None, batch_class(inputs))
        token_ids_l, extras, recorded = run_final(stream, params, inputs)
        outputs = StepOutputs(
            token_ids_l=token_ids_l,
            count_l=inputs.samples_l,
            alive_l=inputs.samples_l,
            captured={**captured, **recorded},
            extras=extras,
        )
        return outputs, cache

    return Model(
        config=config,
        layers=layers,
        group=group,
        kernels=kernels,
        specs=specs,
        init_cache=functools.partial(_init_cache, config, records, group),
        hidden=hidden,
        head=head,
        step=step,
        logits=functools.partial(_whole_logits, config, layers, group, specs),
    )


def logits(
    params: Params,
    token_ids_t: Tensor,
    *,
    config: ModelConfig,
    layers: Layers = Layers(),
    group: Group = SINGLE,
    extras: dict[str, Any] | None = None,
) -> Tensor:
    """logits_tv of a whole sequence, fp32, exactly vocab_size columns, on every rank; differentiable.

    The step's own body over a scratch cache of one block, with the reference kernels: good under torch.func.
    """
    return _whole_logits(config, with_windows(layers, config), group, (), params, token_ids_t, extras=extras)


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """The rotary frequencies [h / 2] in fp32, with the attention factor behind them: [h / 2 + 1].

    Kept for later calls, but not from inside a torch.func transform, where every tensor is one of the transform's.
    """
    transformed = torch._C._functorch.maybe_current_level() is not None
    return (_frequencies.__wrapped__ if transformed else _frequencies)(config, device)


@functools.lru_cache(maxsize=64)
def _frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        frequencies, attention_factor = inverse_frequencies(config)
        return torch.cat([frequencies.float(), torch.tensor([attention_factor])]).to(device)


def _embed_unit(
    record: Layers, static: dict[str, Any], params: Params, inputs: StepInputs, frequencies_h: Tensor
) -> tuple[Stream, Angles, dict[str, Tensor]]:
    context = Context(layer=record, inputs=inputs, **static)
    angles = Angles(*context.kernels.rope_angles(inputs.positions_t, frequencies_h))
    return _first_stream(params, context), angles, context.captured


def _first_stream(params: Params, context: Context) -> Stream:
    """0 + the embedding as an update, so that the first settle reduces it and every layer sees one kind of stream."""
    token_ids_t = context.inputs.token_ids_t
    if fusion.fits(fusion.EMBED, context):
        first_id, _ = vocab_ids(context)
        return Stream(*context.kernels.embed_rows(token_ids_t, params.embed_tokens.weight, first_id))
    x_td = context.layer.embed(token_ids_t, params, context)
    if x_td.shape != (token_ids_t.shape[0], context.config.hidden_size):
        raise ValueError(f"embed must return [t, {context.config.hidden_size}]; it returned {describe(x_td)}")
    whole = is_whole(context.layer.embed)
    if not whole and not active("embed", context):
        return Stream(torch.zeros_like(x_td), x_td)
    return Stream(site("embed", x_td if whole else all_reduce(x_td, context.group), context))


def _layer_unit(
    record: Layers,
    static: dict[str, Any],
    stream: Stream,
    params: PyTree,
    cache: PyTree,
    inputs: StepInputs,
    angles: Angles,
) -> tuple[Stream, PyTree, dict[str, Tensor]]:
    context = Context(layer=record, inputs=inputs, angles=angles, **static)
    stream, cache = record.block(stream, params, cache, context)
    check_passed(context)
    return stream, cache, context.captured


def _final_unit(
    record: Layers, static: dict[str, Any], stream: Stream, params: Params, inputs: StepInputs
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    context = Context(layer=record, inputs=inputs, **static)
    logits_lv = _logits(stream, params, context)
    if record.sample is not sample or active("logits", context):  # the default sampler passes over padding by itself
        logits_lv = site("logits", _masked(logits_lv, context), context)
    if record.sample is not sample:
        logits_lv = all_gather(logits_lv, context.group, dim=1)[:, : context.config.vocab_size]
    token_ids_l, extras = record.sample(logits_lv, context)
    if token_ids_l.shape != logits_lv.shape[:1] or token_ids_l.is_floating_point():
        raise ValueError(f"sample must return int32[{logits_lv.shape[0]}] ids; it returned {describe(token_ids_l)}")
    return token_ids_l.to(torch.int32), extras, context.captured


def _logits(stream: Stream, params: Params, context: Context) -> Tensor:
    """The last norm and the head over the tokens whose logits are wanted; padding columns hold anything."""
    rows = context.inputs.logit_tokens_l
    if context.batch != "mixed":  # every token is wanted, in its order
        return _head(stream, params, context)
    update_ld = stream.update_td.index_select(0, rows) if isinstance(stream.update_td, Tensor) else ()
    return _head(Stream(stream.x_td.index_select(0, rows), update_ld), params, context)


def _masked(logits_lv: Tensor, context: Context) -> Tensor:
    """The logits with -inf in this shard's padding columns."""
    _, num_ids = vocab_ids(context)
    if logits_lv.shape[-1] == num_ids or context.group.size == 1:
        return logits_lv
    padding_v = torch.arange(logits_lv.shape[-1], device=logits_lv.device) >= num_ids
    return logits_lv.masked_fill(padding_v, float("-inf"))


def _head(stream: Stream, params: Params, context: Context) -> Tensor:
    if fusion.fits(fusion.SMALL_HEAD, context) and isinstance(stream.update_td, Tensor):
        update_ld = all_reduce(stream.update_td, context.group)
        _, logits_lv = context.kernels.add_norm_small_linear(
            stream.x_td, update_ld, params.norm.weight, context.config.rms_norm_eps, head_weight(params), (), wide=True
        )
        return logits_lv
    _, normed_ld = settle(stream, params.norm, "", context)
    logits_lv = context.layer.head(site("final", normed_ld, context), params, context)
    wanted = (normed_ld.shape[0], -(-context.config.vocab_size // context.group.size))
    if logits_lv.shape != wanted or logits_lv.dtype != torch.float32:
        raise ValueError(f"head must return float32{[*wanted]} on this rank; it returned {describe(logits_lv)}")
    return logits_lv


_UNITS: dict[str, Unit] = {"embed": _embed_unit, "layer": _layer_unit, "final": _final_unit}

_NEEDED: dict[str, tuple[tuple[str, ...], tuple[fusion.Fused, ...], tuple[str, ...]]] = {
    "embed": (("embed",), (fusion.EMBED,), ("embed",)),
    "layer": (
        ("norm", "qk_norm", "rope", "attention", "mlp", "linear", "block"),
        (fusion.ADD_NORM, fusion.QK_NORM_ROPE_WRITE, fusion.SILU_MUL),
        LAYER_SITES,
    ),
    "final": (("norm", "head", "sample"), (fusion.ADD_NORM,), ("final", "logits")),
}
"""Of a unit that runs in kernels: functions that must be the defaults, entries that must fit, sites left alone."""


def _is_in_kernels(kind: str, record: Layers, facts: dict[str, Any]) -> bool:
    """Whether kernels and matrix products do all the work of a unit, so that compiling it would fuse nothing."""
    functions, entries, sites = _NEEDED[kind]
    context = Context(layer=record, inputs=cast(StepInputs, ()), **facts)
    return (
        all(getattr(record, name) is getattr(_DEFAULTS, name) for name in functions)
        and all(fusion.fits(entry, context) for entry in entries)
        and not any(active(name, context) for name in sites)
    )


_DEFAULTS = Layers()


def _init_cache(
    config: ModelConfig,
    records: list[Layers],
    group: Group,
    num_blocks: int,
    block_size: int,
    num_rows: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> KVCache:
    """The cache of every layer, zero-filled; `num_rows` counts for caches that go by state row."""
    with torch.no_grad():
        makers = [_cache_maker(record) for record in records]
        return tuple(make(config, group, num_blocks, block_size, num_rows, device, dtype) for make in makers)


def _cache_maker(record: Layers) -> Callable[..., PyTree]:
    for fn in (record.block, record.attention):
        if isinstance(fn, Component) and fn.init_cache is not None:
            return fn.init_cache
    return attention.init_cache


def _whole_logits(
    config: ModelConfig,
    layers: Layers,
    group: Group,
    specs: PyTree,
    params: Params,
    token_ids_t: Tensor,
    *,
    extras: dict[str, Any] | None = None,
) -> Tensor:
    _check_ids(token_ids_t)
    model = build(config, layers, group, REFERENCE, specs)
    dtype = _floating_dtype(params)
    num_tokens = token_ids_t.shape[0]
    cache = model.init_cache(2, num_tokens, 2, token_ids_t.device, dtype)
    inputs = whole_inputs(token_ids_t, layers, extras or {})
    stream, _, _ = model.hidden(params, cache, inputs)
    logits_tv, _ = model.head(params, stream, inputs)
    return all_gather(logits_tv, group, dim=1)[:, : config.vocab_size]


def whole_inputs(token_ids_t: Tensor, layers: Layers, extras: dict[str, Any]) -> StepInputs:
    """The inputs of one step that computes a whole sequence as state row 1, in block 1 of a cache of two blocks."""
    device, num_tokens = token_ids_t.device, token_ids_t.shape[0]
    unknown = set(extras) - {extra.name for extra in layers.extras}
    if unknown:
        raise ValueError(f"no extra is called {', '.join(sorted(unknown))}; declare it with Layers().extra(name, ...)")
    index_t = torch.arange(num_tokens, device=device)

    def one(value: int) -> Tensor:
        return torch.full((1,), value, dtype=torch.int32, device=device)

    def both_rows(name: str, shape: tuple[int, ...], dtype: torch.dtype, default: Any) -> Tensor:
        trash = torch.as_tensor(default, dtype=dtype, device=device).expand(shape)
        value = torch.as_tensor(extras[name], dtype=dtype, device=device).expand(shape) if name in extras else trash
        return torch.stack([trash, value])

    return StepInputs(
        token_ids_t=token_ids_t,
        positions_t=index_t.to(torch.int32),
        slots_t=num_tokens + index_t,
        rows_t=torch.ones_like(index_t, dtype=torch.int32),
        rows_b=one(1),
        prompt_lens_b=one(num_tokens),
        query_lens_b=one(num_tokens),
        logit_tokens_l=index_t,
        samples_l=torch.zeros_like(index_t, dtype=torch.bool),
        decode=(),
        chunks=ChunkRows(
            block_table_cm=one(1)[None],
            kv_lens_c=one(num_tokens),
            query_starts_c1=torch.cat([one(0), one(num_tokens)]),
            span_q=torch.empty(1, dtype=torch.uint8, device=device).expand(num_tokens),
        ),
        sampling=(),
        extras={extra.name: both_rows(extra.name, extra.shape, extra.dtype, extra.default) for extra in layers.extras},
    )


def _check_ids(token_ids_t: Tensor) -> None:
    if token_ids_t.dim() != 1 or token_ids_t.shape[0] == 0 or token_ids_t.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids_t must be int32 or int64 ids of one sequence, [t] with t >= 1; got {describe(token_ids_t)}; "
            "for a batch of equal lengths use torch.vmap"
        )


def _floating_dtype(params: PyTree) -> torch.dtype:
    leaves = torch.utils._pytree.tree_leaves(params)
    return next(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


__all__ = ["build", "logits", "param_specs", "qwen3", "rope_frequencies", "whole_inputs"]
