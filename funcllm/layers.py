"""The default layer functions, each with the signature that a replacement must have (funcllm/types.py).

Plain tensor maths: differentiable, compilable, the same on every device. Fused kernels stand in for groups of them in
funcllm/fusion.py, and step aside where one is replaced.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from funcllm.kernels import reference
from funcllm.sites import site
from funcllm.types import Angles, AttentionParams, Context, MLPParams, NormParams, Params, PyTree


def norm(x: Tensor, params: NormParams, context: Context, /) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich, 2019)."""
    return reference.rms_norm(x, params.weight, context.config.rms_norm_eps)


def qk_norm(q_tnh: Tensor, k_tkh: Tensor, params: AttentionParams, context: Context, /) -> tuple[Tensor, Tensor]:
    """The per-head norms of queries and keys; the identity for an architecture without them."""
    if not context.config.qk_norm:
        return q_tnh, k_tkh
    eps = context.config.rms_norm_eps
    return (
        reference.rms_norm(q_tnh, params.q_norm.weight, eps),
        reference.rms_norm(k_tkh, params.k_norm.weight, eps),
    )


def rope(q_tnh: Tensor, k_tkh: Tensor, params: AttentionParams, context: Context, /) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., 2021) by the step's angles."""
    assert isinstance(context.angles, Angles), "a layer runs behind the embedding, which makes the angles"
    cos_th, sin_th = context.angles
    return reference.rotate(q_tnh, cos_th, sin_th), reference.rotate(k_tkh, cos_th, sin_th)


def swiglu(x_td: Tensor, params: MLPParams, context: Context, /) -> Tensor:
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020): this rank's partial sum."""
    linear = context.layer.linear
    gate_up = linear(x_td, params.gate_up_proj.weight, params.gate_up_proj.bias, context)
    hidden_tf = site("mlp.hidden", reference.silu_mul(gate_up), context)
    return linear(hidden_tf, params.down_proj.weight, params.down_proj.bias, context)


def linear(x: Tensor, weight: PyTree, bias: PyTree, context: Context, /) -> Tensor:
    """x @ weight.T (+ bias)."""
    return F.linear(x, weight, bias if isinstance(bias, Tensor) else None)


def embed(token_ids_t: Tensor, params: Params, context: Context, /) -> Tensor:
    """The rows of this rank's shard of the vocabulary; 0 for ids of other ranks."""
    weight_vd = params.embed_tokens.weight
    if context.group.size == 1:
        return F.embedding(token_ids_t, weight_vd)
    first, _ = vocab_ids(context)
    return reference.shard_rows(token_ids_t, weight_vd, first)


def head(x_ld: Tensor, params: Params, context: Context, /) -> Tensor:
    """Logits of this rank's shard of the vocabulary in fp32, by the tied embedding where there is no lm_head."""
    return context.kernels.head_logits(x_ld, head_weight(params))


def head_weight(params: Params) -> Tensor:
    """The weight [v, d] of the head: the tied embedding's where there is no lm_head."""
    is_tied = isinstance(params.lm_head, tuple) and len(params.lm_head) == 0
    return params.embed_tokens.weight if is_tied else params.lm_head.weight


def vocab_ids(context: Context) -> tuple[int, int]:
    """(first, count): the vocabulary ids first, ..., first + count - 1 are this rank's; padding is not counted."""
    shard = -(-context.config.vocab_size // context.group.size)
    first = context.group.rank * shard
    return first, max(0, min(shard, context.config.vocab_size - first))


def head_ids(context: Context) -> tuple[range, range]:
    """The global query heads and KV heads of this rank."""
    config, group = context.config, context.group
    num_heads = config.num_heads // group.size
    shards = min(group.size, config.num_kv_heads)
    num_kv_heads = config.num_kv_heads // shards
    kv_shard = group.rank * shards // group.size
    return (
        range(group.rank * num_heads, (group.rank + 1) * num_heads),
        range(kv_shard * num_kv_heads, (kv_shard + 1) * num_kv_heads),
    )
