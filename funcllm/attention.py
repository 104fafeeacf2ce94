"""The paged cache, and attention over it.

The cache of a layer is two tensors [blocks, block_size, kv_heads, head_dim]; block 0 is trash. It is donated: what a
call returns is the cache from then on. A sequence's position i lives in slot i % block_size of block_table[i //
block_size].
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcllm.config import ModelConfig
from funcllm.group import Group
from funcllm.kernels.cpu import zeros
from funcllm.types import AttentionParams, Context, LayerCache


def init_cache(
    config: ModelConfig,
    group: Group,
    num_blocks: int,
    block_size: int,
    num_rows: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> LayerCache:
    """One layer's empty cache for this rank's KV heads, filled with zeros (an unwritten slot must not hold NaN)."""
    num_kv_heads = config.num_kv_heads // min(group.size, config.num_kv_heads)
    shape = (num_blocks, block_size, num_kv_heads, config.head_dim)
    return LayerCache(zeros(shape, dtype, device), zeros(shape, dtype, device))


def write_kv(k_tkh: Tensor, v_tkh: Tensor, cache: LayerCache, context: Context) -> LayerCache:
    """The cache with this step's keys and values in the step's slots."""
    return LayerCache(
        *context.kernels.write_kv(k_tkh, v_tkh, cache.k_pskh, cache.v_pskh, context.inputs.slots_t),
    )


def attend(
    q_tnh: Tensor,
    cache: LayerCache,
    context: Context,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | tuple[()] = (),
    scale: float | None = None,
    early: bool = False,
) -> Tensor:
    """Causal attention of the step's queries over the cache -> out_tnh, decode rows and chunks alike.

    window: a query sees the last `window` positions, its own included (0: all). softcap: scores become
    softcap * tanh(score / softcap) (0: off). sinks_n: one logit a head that takes weight and gives no value.
    scale: of the scores; head_dim ** -0.5 by default. early: this step writes nothing into the cache but each token's
    own key and value, which lets a kernel read older ones before its predecessor has ended.
    """
    inputs = context.inputs
    return context.kernels.attend(
        q_tnh,
        cache.k_pskh,
        cache.v_pskh,
        tuple(inputs.decode),
        tuple(inputs.chunks),
        scale=q_tnh.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        sinks_n=sinks_n,
        early=early,
    )


def paged_attention(
    q_tnh: Tensor,
    k_tkh: Tensor,
    v_tkh: Tensor,
    cache: LayerCache,
    params: AttentionParams,
    context: Context,
    /,
    *,
    window: int = 0,
) -> tuple[Tensor, LayerCache]:
    """Writes this step's keys and values and attends over the cache; window: as in `attend`."""
    cache = write_kv(k_tkh, v_tkh, cache, context)
    return attend(q_tnh, cache, context, window=window), cache


def split_qkv(qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Views of this rank's query, key and value heads in the fused projection [t, (n + 2k) h]."""
    num_kv_heads = context.config.num_kv_heads // min(context.group.size, context.config.num_kv_heads)
    num_heads = context.config.num_heads // context.group.size
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, context.config.head_dim))
    q_tnh, k_tkh, v_tkh = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q_tnh, k_tkh, v_tkh
