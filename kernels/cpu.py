"""The cache and attention ops on the CPU: in place, decode rows batched, lengths read on the host.

They equal reference.py up to fp32 rounding. A slot outside a row's own length is never read: the gather points it at
the row's first position instead, whose weight is 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

_SCORES_AT_ONCE = 1 << 22


def write_kv(k_tkh: Tensor, v_tkh: Tensor, k_cache_pskh: Tensor, v_cache_pskh: Tensor, slots_t: Tensor) -> None:
    """Writes k and v into the caches at the given slots, in place."""
    k_cache_pskh.flatten(0, 1).index_put_((slots_t,), k_tkh)
    v_cache_pskh.flatten(0, 1).index_put_((slots_t,), v_tkh)


def copy_slots(k_cache_pskh: Tensor, v_cache_pskh: Tensor, copies_n3: Tensor) -> None:
    """Copies the first slots of blocks, in place: rows are (source block, destination block, number of slots)."""
    block_size = k_cache_pskh.shape[1]
    offset_1s = torch.arange(block_size)[None, :]
    source_n1, destination_n1, count_n1 = copies_n3.long().split(1, dim=1)
    copied_ns = offset_1s < count_n1
    source = (source_n1 * block_size + offset_1s)[copied_ns]
    destination = (destination_n1 * block_size + offset_1s)[copied_ns]
    for cache in (k_cache_pskh.flatten(0, 1), v_cache_pskh.flatten(0, 1)):
        cache.index_copy_(0, destination, cache.index_select(0, source))


def attend_decode(
    q_bnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    block_table_bm: Tensor,
    kv_lens_b: Tensor,
    out_bnh: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | None = None,
) -> None:
    """Attention of one query a row, all rows at once over as many keys as the longest row sees; written to out_bnh."""
    longest = int(kv_lens_b.max()) if kv_lens_b.numel() else 0
    span = min(longest, window) if window > 0 else longest
    if span == 0:
        out_bnh.zero_()
        return
    position_bL = kv_lens_b.long()[:, None] + torch.arange(-span, 0)
    unseen_b1L = (position_bL < 0)[:, None, :]
    num_kv_heads = k_cache_pskh.shape[2]
    index = _index(block_table_bm, position_bL.clamp_(min=0), k_cache_pskh.shape[1], num_kv_heads)
    q_xgh = rearrange(q_bnh, "b (k g) h -> (b k) g h", k=num_kv_heads).float()
    scores_xgL = torch.bmm(q_xgh, _gathered(k_cache_pskh, index).float().transpose(1, 2)).mul_(scale)
    if softcap > 0:
        scores_xgL = softcap * torch.tanh(scores_xgL / softcap)
    scores_bnL = rearrange(scores_xgL, "(b k) g L -> b (k g) L", k=num_kv_heads)
    weights_bnL = _softmax(scores_bnL.masked_fill_(unseen_b1L, float("-inf")), sinks_n)
    weights_xgL = rearrange(weights_bnL, "b (k g) L -> (b k) g L", k=num_kv_heads)
    out_xgh = torch.bmm(weights_xgL, _gathered(v_cache_pskh, index).float())
    out_bnh.copy_(rearrange(out_xgh, "(b k) g h -> b (k g) h", k=num_kv_heads))
    out_bnh.masked_fill_((kv_lens_b == 0)[:, None, None], 0.0)


def attend_chunks(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    block_table_cm: Tensor,
    kv_lens_c: Tensor,
    query_starts_c1: Tensor,
    out_tnh: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | None = None,
) -> None:
    """Causal attention of packed chunks, one after the other; written to out_tnh, 0 behind the last chunk."""
    starts, kv_lens = query_starts_c1.tolist(), kv_lens_c.tolist()
    for row, (start, end, kv_len) in enumerate(zip(starts, starts[1:], kv_lens)):
        num_queries = end - start
        if num_queries == 0:
            continue
        first = max(0, kv_len - num_queries - window + 1) if window > 0 else 0
        position_1L = torch.arange(first, kv_len)[None, :]
        if kv_len == 0:
            out_tnh[start:end] = 0.0
            continue
        index = _index(block_table_cm[row : row + 1], position_1L, k_cache_pskh.shape[1], k_cache_pskh.shape[2])
        k_kLh, v_kLh = _gathered(k_cache_pskh, index), _gathered(v_cache_pskh, index)
        queries = max(1, _SCORES_AT_ONCE // (q_tnh.shape[1] * position_1L.shape[1]))
        for at in range(start, end, queries):
            until = min(at + queries, end)
            position_q = torch.arange(at, until) - end + kv_len
            seen_qL = position_1L <= position_q[:, None]
            if window > 0:
                seen_qL &= position_1L > position_q[:, None] - window
            out_tnh[at:until] = _attend_chunk(
                q_tnh[at:until], k_kLh, v_kLh, seen_qL, scale=scale, softcap=softcap, sinks_n=sinks_n
            )
    out_tnh[starts[-1] :] = 0.0


def _attend_chunk(
    q_qnh: Tensor,
    k_kLh: Tensor,
    v_kLh: Tensor,
    seen_qL: Tensor,
    *,
    scale: float,
    softcap: float,
    sinks_n: Tensor | None,
) -> Tensor:
    """Masked attention of queries over the gathered keys of one sequence."""
    if softcap == 0 and sinks_n is None:
        q_1nqh = q_qnh.transpose(0, 1)[None]
        out_1nqh = F.scaled_dot_product_attention(
            q_1nqh, k_kLh[None], v_kLh[None], attn_mask=seen_qL, scale=scale, enable_gqa=True
        )
        return out_1nqh[0].transpose(0, 1)
    num_kv_heads, num_queries = k_kLh.shape[0], q_qnh.shape[0]
    q_kxh = rearrange(q_qnh, "q (k g) h -> k (g q) h", k=num_kv_heads).float()
    scores_kxL = torch.bmm(q_kxh, k_kLh.float().transpose(1, 2)).mul_(scale)
    if softcap > 0:
        scores_kxL = softcap * torch.tanh(scores_kxL / softcap)
    scores_qnL = rearrange(scores_kxL, "k (g q) L -> q (k g) L", q=num_queries)
    weights_qnL = _softmax(scores_qnL.masked_fill(~seen_qL[:, None, :], float("-inf")), sinks_n)
    weights_kxL = rearrange(weights_qnL, "q (k g) L -> k (g q) L", k=num_kv_heads)
    out_kxh = torch.bmm(weights_kxL, v_kLh.float())
    return rearrange(out_kxh, "k (g q) h -> q (k g) h", q=num_queries).to(q_qnh.dtype)


def _index(block_table_bm: Tensor, position_bL: Tensor, block_size: int, num_kv_heads: int) -> Tensor:
    """Where the rows' positions lie in a cache seen as [(p s k), h]; [(b k), L]."""
    block_bL = block_table_bm.gather(1, position_bL // block_size).long()
    slot_bL = block_bL * block_size + position_bL % block_size
    return (slot_bL[:, None, :] * num_kv_heads + torch.arange(num_kv_heads)[:, None]).flatten(0, 1)


def _gathered(cache_pskh: Tensor, index_xL: Tensor) -> Tensor:
    """Keys or values at an index, [(b k), L, h]; one cache at a time, so that the second reuses the first's memory."""
    head_dim = cache_pskh.shape[3]
    return cache_pskh.view(-1, head_dim).index_select(0, index_xL.flatten()).view(*index_xL.shape, head_dim)


def _softmax(scores: Tensor, sinks_n: Tensor | None) -> Tensor:
    """Softmax over the last axis of [..., n, L], with one more logit a head that carries no value."""
    if sinks_n is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks_n.float()[:, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
