"""A decoder layer as two halves, Stream -> Stream, made of the functions in `context.layer`.

Between halves flows `Stream(x, update)`, which means x + all_reduce(update): the reduction, the addition and the next
norm wait for each other in `settle`, so that one kernel may do all three.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcllm import fusion
from funcllm.attention import attend, split_qkv
from funcllm.group import all_reduce
from funcllm.sites import active, describe, site
from funcllm.types import AttentionParams, Component, Context, LayerCache, LayerParams, LinearParams, PyTree, Stream


def pre_norm_block(stream: Stream, params: LayerParams, cache: PyTree, context: Context, /) -> tuple[Stream, PyTree]:
    """x += attention(norm(x)); x += mlp(norm(x))."""
    stream, cache = attention_half(stream, params, cache, context)
    return mlp_half(stream, params, context), cache


def attention_half(stream: Stream, params: LayerParams, cache: PyTree, context: Context, /) -> tuple[Stream, PyTree]:
    """Norm, projections, per-head norm, rotary embedding, attention over the cache, output projection."""
    x_td, qkv = settle_qkv(stream, params, context)
    heads_tnh, cache = heads_of(qkv, params.self_attn, cache, context)
    heads_tnh = site("attention.heads", heads_tnh, context)
    update_td = dense(heads_tnh.flatten(1), params.self_attn.o_proj, context)
    return join(x_td, update_td, "attention", False, context), cache


def mlp_half(stream: Stream, params: LayerParams, context: Context, /) -> Stream:
    """Norm and feed-forward network."""
    x_td, update_td = settle_mlp(stream, params, context)
    stream = join(x_td, update_td, "mlp", is_whole(context.layer.mlp), context)
    if not active("residual_post", context):
        return stream
    return Stream(site("residual_post", total(stream, context), context))


def settle_qkv(stream: Stream, params: LayerParams, context: Context, /) -> tuple[Tensor, Tensor]:
    """(x, queries, keys and values before their norms [t, (n + 2k) h]): settle, then the fused projection."""
    qkv_proj = params.self_attn.qkv_proj
    if isinstance(stream.update_td, Tensor) and fusion.fits(fusion.SMALL_QKV, context):
        return context.kernels.add_norm_small_linear(
            stream.x_td,
            all_reduce(stream.update_td, context.group),
            params.input_layernorm.weight,
            context.config.rms_norm_eps,
            qkv_proj.weight,
            qkv_proj.bias,
        )
    x_td, normed_td = settle(stream, params.input_layernorm, "residual_pre", context)
    return x_td, dense(normed_td, qkv_proj, context)


def settle_mlp(stream: Stream, params: LayerParams, context: Context, /) -> tuple[Tensor, Tensor]:
    """(x, the update of the feed-forward network): settle, then the mlp."""
    if isinstance(stream.update_td, Tensor) and fusion.fits(fusion.SMALL_MLP, context):
        gate_up = params.mlp.gate_up_proj
        x_td, hidden_tf = context.kernels.add_norm_small_linear(
            stream.x_td,
            all_reduce(stream.update_td, context.group),
            params.post_attention_layernorm.weight,
            context.config.rms_norm_eps,
            gate_up.weight,
            gate_up.bias,
            silu=True,
        )
        return x_td, dense(hidden_tf, params.mlp.down_proj, context)
    x_td, normed_td = settle(stream, params.post_attention_layernorm, "residual_mid", context)
    return x_td, mlp_of(normed_td, params.mlp, context)


def dense(x: Tensor, params: LinearParams, context: Context, /) -> Tensor:
    """x through a dense layer, by `context.layer.linear` or what stands for it in a batch of this size."""
    if fusion.fits(fusion.SMALL_LINEAR, context):
        return context.kernels.small_linear(x, params.weight, params.bias)
    if fusion.fits(fusion.AHEAD_LINEAR, context) and fusion.asks_ahead(params.weight, False, context):
        return context.kernels.ahead_linear(x, params.weight, params.bias)
    return context.layer.linear(x, params.weight, params.bias, context)


def settle(stream: Stream, params: PyTree, site_name: str, context: Context, /) -> tuple[Tensor, Tensor]:
    """(x, norm(x)) of the whole residual stream: reduces and adds the update, passes the site, norms.

    x + update is rounded once to x's dtype, and the norm reads the rounded sum. Every rank must call it.
    """
    is_fused = fusion.fits(fusion.ADD_NORM, context)
    if is_fused and isinstance(stream.update_td, Tensor) and not active(site_name, context):
        update_td = all_reduce(stream.update_td, context.group)
        return context.kernels.add_rms_norm(stream.x_td, update_td, params.weight, context.config.rms_norm_eps)
    x_td = site(site_name, total(stream, context), context)
    if is_fused:
        return x_td, context.kernels.rms_norm(x_td, params.weight, context.config.rms_norm_eps)
    return x_td, same(context.layer.norm(x_td, params, context), x_td, "norm")


def total(stream: Stream, context: Context) -> Tensor:
    """x + all_reduce(update)."""
    if isinstance(stream.update_td, tuple):
        return stream.x_td
    return stream.x_td + all_reduce(stream.update_td, context.group)


def heads_of(qkv: Tensor, params: AttentionParams, cache: PyTree, context: Context, /) -> tuple[Tensor, PyTree]:
    """From the projections to the heads' outputs [t, n, h], by the fused write where it fits."""
    q_tnh, k_tkh, v_tkh = split_qkv(qkv, context)
    if fusion.fits(fusion.QK_NORM_ROPE_WRITE, context) and isinstance(cache, LayerCache):
        q_weight_h, k_weight_h = (
            p if isinstance(p, tuple) and not p else p.weight for p in (params.q_norm, params.k_norm)
        )
        q_tnh, *caches = context.kernels.qk_norm_rope_write(
            q_tnh,
            k_tkh,
            v_tkh,
            q_weight_h,
            k_weight_h,
            context.config.rms_norm_eps,
            *context.angles,
            cache.k_pskh,
            cache.v_pskh,
            context.inputs.slots_t,
        )
        cache = LayerCache(*caches)
        return attend(q_tnh, cache, context, early=context.batch != "mixed"), cache
    layer = context.layer
    for place in ("qk_norm", "rope"):
        pair = getattr(layer, place)(q_tnh, k_tkh, own(getattr(params, place), params), context)
        q_tnh, k_tkh = (same(ours, like, place) for ours, like in zip(pair, (q_tnh, k_tkh)))
    q_tnh = site("attention.q", q_tnh, context)
    k_tkh = site("attention.k", k_tkh, context)
    v_tkh = site("attention.v", v_tkh, context)
    heads_tnh, cache = layer.attention(q_tnh, k_tkh, v_tkh, cache, own(params.attention, params), context)
    return same(heads_tnh, q_tnh, "attention"), cache


def mlp_of(x_td: Tensor, params: PyTree, context: Context, /) -> Tensor:
    """The update of the feed-forward network, by a fused activation where one fits."""
    if fusion.fits(fusion.AHEAD_MLP, context) and fusion.asks_ahead(params.gate_up_proj.weight, True, context):
        gate_up_proj = params.gate_up_proj
        hidden_tf = context.kernels.ahead_linear(x_td, gate_up_proj.weight, gate_up_proj.bias, silu=True)
        return dense(site("mlp.hidden", hidden_tf, context), params.down_proj, context)
    if fusion.fits(fusion.SILU_MUL, context):
        gate_up = dense(x_td, params.gate_up_proj, context)
        hidden_tf = site("mlp.hidden", context.kernels.silu_mul(gate_up), context)
        return dense(hidden_tf, params.down_proj, context)
    return same(context.layer.mlp(x_td, params, context), x_td, "mlp")


def join(x_td: Tensor, update_td: Tensor, place: str, whole: bool, context: Context) -> Stream:
    """The stream after an update; settled at once where the update is whole or its `.out` site is touched."""
    name = f"{place}.out"
    if not whole and not active(name, context):
        return Stream(x_td, update_td)
    if not whole:
        update_td = all_reduce(update_td, context.group)
    return Stream(x_td + site(name, update_td, context))


def is_whole(fn: Any) -> bool:
    """Whether a function returns the full value on every rank."""
    return isinstance(fn, Component) and fn.whole


def own(node: PyTree, default: PyTree) -> PyTree:
    """A function's own parameters if its specs made some, else the node of its place."""
    return default if isinstance(node, tuple) and not node else node


def same(result: Any, like: Tensor, place: str) -> Tensor:
    """`result`, or ValueError where a replaced function returned another shape or dtype than its contract says."""
    if not isinstance(result, Tensor) or result.shape != like.shape or result.dtype != like.dtype:
        raise ValueError(f"{place} must return {describe(like)}; the function in use returned {describe(result)}")
    return result
