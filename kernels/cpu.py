"""The ops on the CPU: caches written in place, decode rows batched, values read on the host, few torch calls.

They equal reference.py up to fp32 rounding, and its rounding in narrower dtypes. A step of a small model is dozens of
calls of microseconds, so their number counts as much as the arithmetic.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from funcllm.kernels import reference

_SCORES_AT_ONCE = 1 << 22
_LARGE_BYTES = 1 << 24  # of a tensor of zeros that is not filled by hand
_ALIGNMENT = 64
_FEW_INPUTS = 4096  # rows x inputs up to which weight @ x.T is faster than x @ weight.T, by measurement


# --- embedding and rotary angles -------------------------------------------------------------------------------------


def embed_rows(token_ids_t: Tensor, weight_vd: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """reference.embed_rows; where all ids are this shard's, a plain gather."""
    lowest, highest = token_ids_t.aminmax() if len(token_ids_t) else (first_id, first_id)
    if first_id <= int(lowest) and int(highest) < first_id + weight_vd.shape[0]:
        rows_td = F.embedding(token_ids_t - first_id if first_id else token_ids_t, weight_vd)
    else:
        rows_td = reference.shard_rows(token_ids_t, weight_vd, first_id)
    return torch.zeros_like(rows_td), rows_td


def rope_angles(positions_t: Tensor, frequencies_h: Tensor) -> tuple[Tensor, Tensor]:
    """reference.rope_angles."""
    angle_th, factor = torch.outer(positions_t.float(), frequencies_h[:-1]), frequencies_h[-1]
    return angle_th.cos().mul_(factor), angle_th.sin_().mul_(factor)


# --- dense layers, norms, rotary embedding ---------------------------------------------------------------------------


def linear(x_td: Tensor, weight_od: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. Few rows go as columns, or as a vector: matrix libraries are slow at a low left factor."""
    rows, inputs = x_td.shape
    if x_td.dtype != torch.float32 or rows == 0 or rows * inputs > _FEW_INPUTS:
        return F.linear(x_td, weight_od, bias_o)
    y_to = torch.mv(weight_od, x_td[0])[None] if rows == 1 else torch.mm(weight_od, x_td.t()).t().contiguous()
    return y_to if bias_o is None else y_to.add_(bias_o)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """reference.rms_norm, contiguous."""
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps).contiguous()
    return F.rms_norm(x, x.shape[-1:], weight.float(), eps).contiguous()


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """reference.add_rms_norm, contiguous."""
    if x.dtype == torch.float32 and update.dtype == torch.float32:
        total = (x + update).contiguous()
    else:
        total = (x.float() + update.float()).to(x.dtype).contiguous()
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """reference.silu_mul, contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up).contiguous()


def qk_norm_rope_write(
    q_tnh: Tensor,
    k_tkh: Tensor,
    v_tkh: Tensor,
    q_weight_h: Tensor | None,
    k_weight_h: Tensor | None,
    eps: float,
    cos_th: Tensor,
    sin_th: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    slots_t: Tensor,
) -> Tensor:
    """q after its norm and rotation, contiguous; k (likewise) and v are written into the caches, in place."""
    num_heads = q_tnh.shape[1]
    if q_tnh.dtype == torch.float32:
        heads_tnh = _side_by_side(q_tnh, k_tkh)
        if q_weight_h is not None and k_weight_h is not None:
            heads_tnh = F.rms_norm(heads_tnh, heads_tnh.shape[-1:], None, eps)
            heads_tnh[:, :num_heads].mul_(q_weight_h)
            heads_tnh[:, num_heads:].mul_(k_weight_h)
        heads_tnh = _rotate(heads_tnh, cos_th, sin_th)
        q_tnh, k_tkh = heads_tnh[:, :num_heads], heads_tnh[:, num_heads:]
    else:
        if q_weight_h is not None and k_weight_h is not None:
            q_tnh = reference.rms_norm(q_tnh, q_weight_h, eps)
            k_tkh = reference.rms_norm(k_tkh, k_weight_h, eps)
        q_tnh, k_tkh = reference.rotate(q_tnh, cos_th, sin_th), reference.rotate(k_tkh, cos_th, sin_th)
    write_kv(k_tkh, v_tkh, k_cache_pskh, v_cache_pskh, slots_t)
    return q_tnh.contiguous()


def _side_by_side(q_tnh: Tensor, k_tkh: Tensor) -> Tensor:
    """The heads of q, then those of k: a view where both lie so in one packed projection."""
    num_heads, num_kv_heads = q_tnh.shape[1], k_tkh.shape[1]
    behind = q_tnh.storage_offset() + num_heads * q_tnh.stride(1)
    is_packed = (
        q_tnh.stride() == k_tkh.stride()
        and k_tkh.storage_offset() == behind
        and q_tnh.untyped_storage().data_ptr() == k_tkh.untyped_storage().data_ptr()
    )
    if not is_packed:
        return torch.cat([q_tnh, k_tkh], dim=1)
    return q_tnh.as_strided((q_tnh.shape[0], num_heads + num_kv_heads, q_tnh.shape[2]), q_tnh.stride())


def _rotate(x_tnh: Tensor, cos_th: Tensor, sin_th: Tensor) -> Tensor:
    """reference.rotate in fp32: x * cos, then each half minus or plus the other's share."""
    x_tn2h = x_tnh.unflatten(-1, (2, x_tnh.shape[-1] // 2))
    out_tn2h = x_tn2h * cos_th[:, None, None, :]
    sin_t1h = sin_th[:, None, :]
    out_tn2h[:, :, 0].addcmul_(x_tn2h[:, :, 1], sin_t1h, value=-1)
    out_tn2h[:, :, 1].addcmul_(x_tn2h[:, :, 0], sin_t1h)
    return out_tn2h.flatten(2)


# --- keys and values -------------------------------------------------------------------------------------------------


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """torch.zeros; a large tensor on the CPU takes memory only where it is written to."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LARGE_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(size + _ALIGNMENT, np.uint8)  # the system's own zero pages
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def write_kv(k_tkh: Tensor, v_tkh: Tensor, k_cache_pskh: Tensor, v_cache_pskh: Tensor, slots_t: Tensor) -> None:
    """Writes k and v into the caches at the given slots, in place."""
    k_cache_pskh.flatten(0, 1).index_copy_(0, slots_t, k_tkh.to(k_cache_pskh.dtype))
    v_cache_pskh.flatten(0, 1).index_copy_(0, slots_t, v_tkh.to(v_cache_pskh.dtype))


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


# --- attention -------------------------------------------------------------------------------------------------------


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
    """Attention of one query a row, all rows at once over as many keys as the longest row sees; written to out_bnh.

    Whole blocks are gathered first: what lies behind a row's length gets weight 0. Where that leaves a NaN (a number
    times 0 is 0 only if finite), and for windows, each row's own positions alone are gathered.
    """
    longest = int(kv_lens_b.max()) if kv_lens_b.numel() else 0
    if longest == 0:
        out_bnh.zero_()
        return
    block_size, num_kv_heads = k_cache_pskh.shape[1:3]
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks_n": sinks_n}
    if not 0 < window < longest:
        index, unseen_b1L = _blocks_of(block_table_bm, kv_lens_b, longest, block_size, num_kv_heads)
        _attend_gathered(q_bnh, k_cache_pskh, v_cache_pskh, index, unseen_b1L, out_bnh, **options)
        if not math.isnan(float(out_bnh.sum())):
            return
    span = min(longest, window) if window > 0 else longest
    position_bL = kv_lens_b.long()[:, None] + torch.arange(-span, 0)
    unseen_b1L = (position_bL < 0)[:, None, :]
    index = _index(block_table_bm, position_bL.clamp_(min=0), block_size, num_kv_heads)
    _attend_gathered(q_bnh, k_cache_pskh, v_cache_pskh, index, unseen_b1L, out_bnh, **options)
    out_bnh.masked_fill_((kv_lens_b == 0)[:, None, None], 0.0)


def _blocks_of(
    block_table_bm: Tensor, kv_lens_b: Tensor, longest: int, block_size: int, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """(index as in `_index` of all positions in the blocks that `longest` tokens take, which of them are unseen).

    Kept for the other layers of a step: tensors are keys by identity, and their versions tell of writes.
    """
    sizes = (longest, block_size, num_kv_heads)
    if block_table_bm.is_inference() or kv_lens_b.is_inference():
        return _find_blocks.__wrapped__(block_table_bm, kv_lens_b, (), sizes)
    return _find_blocks(block_table_bm, kv_lens_b, (block_table_bm._version, kv_lens_b._version), sizes)


@functools.lru_cache(maxsize=1)
def _find_blocks(
    block_table_bm: Tensor, kv_lens_b: Tensor, versions: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    longest, block_size, num_kv_heads = sizes
    num_blocks, width = -(-longest // block_size), block_size * num_kv_heads
    first_bm = block_table_bm[:, :num_blocks].long() * width
    inside_ks = torch.arange(num_kv_heads)[:, None] + torch.arange(0, width, num_kv_heads)
    index_xL = (first_bm[:, None, :, None] + inside_ks[:, None, :]).reshape(-1, num_blocks * block_size)
    unseen_bL = torch.arange(index_xL.shape[1]) >= kv_lens_b[:, None]
    return index_xL, unseen_bL[:, None, :]


def _attend_gathered(
    q_bnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    index_xL: Tensor,
    unseen_b1L: Tensor,
    out_bnh: Tensor,
    *,
    scale: float,
    softcap: float,
    sinks_n: Tensor | None,
) -> None:
    """Attention of one query a row over the keys at an index [(b k), L]; written to out_bnh."""
    batch, num_heads, head_dim = q_bnh.shape
    num_kv_heads = k_cache_pskh.shape[2]
    q_xgh = q_bnh.reshape(batch * num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    scores_xgL = torch.bmm(q_xgh, _gathered(k_cache_pskh, index_xL).float().transpose(1, 2)).mul_(scale)
    if softcap > 0:
        scores_xgL = softcap * torch.tanh(scores_xgL / softcap)
    scores_bnL = scores_xgL.view(batch, num_heads, -1).masked_fill_(unseen_b1L, float("-inf"))
    weights_xgL = _softmax(scores_bnL, sinks_n).reshape(scores_xgL.shape)
    v_xLh = _gathered(v_cache_pskh, index_xL).float()
    if out_bnh.dtype == torch.float32 and out_bnh.is_contiguous():
        torch.bmm(weights_xgL, v_xLh, out=out_bnh.view(q_xgh.shape))
    else:
        out_bnh.copy_(torch.bmm(weights_xgL, v_xLh).view(out_bnh.shape))


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
