"""The plain PyTorch twin of every kernel: out of place, good under torch.func, the oracle of the fast versions.

Shape letters are those of funcllm/types.py. Nothing here reads a tensor's values on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

DecodeTensors = tuple[Any, ...]  # (block_table_bm, kv_lens_b) and, for kernels that use them, counters_bk; or ()
ChunkTensors = tuple[Tensor, Tensor, Tensor, Tensor] | tuple[()]  # block_table_cm, kv_lens_c, query_starts_c1, span_q

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


# --- keys and values -------------------------------------------------------------------------------------------------


def write_kv(
    k_tkh: Tensor, v_tkh: Tensor, k_cache_pskh: Tensor, v_cache_pskh: Tensor, slots_t: Tensor
) -> tuple[Tensor, Tensor]:
    """The caches with k and v at the given slots (slot = block * block_size + offset; slot 0 is trash)."""
    block_size = k_cache_pskh.shape[1]
    where = (slots_t // block_size, slots_t % block_size)
    return k_cache_pskh.index_put(where, k_tkh), v_cache_pskh.index_put(where, v_tkh)


def attend(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    decode: DecodeTensors,
    chunks: ChunkTensors,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | tuple[()] = (),
    early: bool = False,
) -> Tensor:
    """Causal attention of the packed queries over the paged cache -> out_tnh.

    Decode rows come first, one query each, at position kv_len - 1. Query i of a chunk of n stands at position
    kv_len - n + i. window > 0: a query sees the last `window` positions, its own included. softcap > 0: scores become
    softcap * tanh(score / softcap). sinks_n: one more logit a head in the softmax that carries no value. Tokens behind
    the last chunk come out as 0, and so does a row without keys. Slots outside a row's own length are never used, not
    even multiplied by 0. early: this step wrote nothing but each decode row's newest key, so that a kernel may read the
    others before its predecessor has ended; it changes no value.
    """
    out_tnh = torch.zeros_like(q_tnh)
    token_t = torch.arange(q_tnh.shape[0], device=q_tnh.device)
    num_decode = decode[0].shape[0] if decode else 0
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_n": sinks_n}
    if decode:
        block_table_bm, kv_lens_b = decode[:2]
        rows = [
            _attend_row(q_tnh[i : i + 1], k_cache_pskh, v_cache_pskh, table_m, length[None] - 1, length, **options)
            for i, (table_m, length) in enumerate(zip(block_table_bm, kv_lens_b))
        ]
        out_tnh = torch.cat([*rows, out_tnh[num_decode:]])
    if chunks:
        block_table_cm, kv_lens_c, query_starts_c1, _ = chunks
        starts = query_starts_c1.long() + num_decode
        for i in range(block_table_cm.shape[0]):
            inside_t = (token_t >= starts[i]) & (token_t < starts[i + 1])
            position_t = torch.where(inside_t, token_t - starts[i + 1] + kv_lens_c[i], -1)
            row_tnh = _attend_row(
                q_tnh, k_cache_pskh, v_cache_pskh, block_table_cm[i], position_t, kv_lens_c[i], **options
            )
            out_tnh = torch.where(inside_t[:, None, None], row_tnh, out_tnh)
    return out_tnh


def _attend_row(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    table_m: Tensor,
    position_t: Tensor,
    kv_len: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks_n: Tensor | tuple[()],
) -> Tensor:
    k_Lkh = rearrange(k_cache_pskh.index_select(0, table_m), "m s k h -> (m s) k h").float()
    v_Lkh = rearrange(v_cache_pskh.index_select(0, table_m), "m s k h -> (m s) k h").float()
    key_L = torch.arange(k_Lkh.shape[0], device=q_tnh.device)
    valid_L = key_L < kv_len
    k_Lkh, v_Lkh = (torch.where(valid_L[:, None, None], x, 0.0) for x in (k_Lkh, v_Lkh))
    q_tkgh = rearrange(q_tnh.float(), "t (k g) h -> t k g h", k=k_Lkh.shape[1])
    scores_tkgL = torch.einsum("tkgh,Lkh->tkgL", q_tkgh, k_Lkh) * scale
    if softcap > 0:
        scores_tkgL = softcap * torch.tanh(scores_tkgL / softcap)
    seen_tL = (key_L[None, :] <= position_t[:, None]) & valid_L[None, :]
    if window > 0:
        seen_tL = seen_tL & (key_L[None, :] > position_t[:, None] - window)
    scores_tkgL = torch.where(seen_tL[:, None, None, :], scores_tkgL, -1e30)
    if isinstance(sinks_n, Tensor):
        sinks_tkg1 = repeat(
            sinks_n.float(), "(k g) -> t k g 1", t=q_tkgh.shape[0], k=q_tkgh.shape[1], g=q_tkgh.shape[2]
        )
        scores_tkgL = torch.cat([scores_tkgL, sinks_tkg1], dim=-1)
    weights_tkgL = torch.softmax(scores_tkgL, dim=-1)[..., : key_L.shape[0]]
    weights_tkgL = torch.where(seen_tL[:, None, None, :], weights_tkgL, 0.0)
    out_tkgh = torch.einsum("tkgL,Lkh->tkgh", weights_tkgL, v_Lkh)
    return rearrange(out_tkgh, "t k g h -> t (k g) h").to(q_tnh.dtype)


# --- embedding and rotary angles -------------------------------------------------------------------------------------


def embed_rows(token_ids_t: Tensor, weight_vd: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """(zeros, the embeddings of this shard) [t, d]: row i of the weight is that of id first_id + i.

    Ids of other shards have rows of 0. The zeros are what a residual stream starts with.
    """
    rows_td = shard_rows(token_ids_t, weight_vd, first_id)
    return torch.zeros_like(rows_td), rows_td


def shard_rows(token_ids_t: Tensor, weight_vd: Tensor, first_id: int) -> Tensor:
    """The embeddings [t, d] of a shard whose first id is first_id; 0 for ids of other shards."""
    local_t = token_ids_t - first_id
    mine_t = (local_t >= 0) & (local_t < weight_vd.shape[0])
    rows_td = torch.nn.functional.embedding(torch.where(mine_t, local_t, 0), weight_vd)
    return torch.where(mine_t[:, None], rows_td, 0.0)


def rope_angles(positions_t: Tensor, frequencies_h: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position x frequency in fp32 [t, h / 2], times the last element of `frequencies_h`, [h / 2 + 1]."""
    angle_th = positions_t.float()[:, None] * frequencies_h[None, :-1]
    return angle_th.cos() * frequencies_h[-1], angle_th.sin() * frequencies_h[-1]


# --- norms, rotary embedding, activation -----------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis in fp32, rounded to x's dtype, times weight (as Hugging Face rounds)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + update, its rms norm): the sum is made in fp32 and rounded once, and the norm reads the rounded sum."""
    total = (x.float() + update.float()).to(x.dtype)
    return total, rms_norm(total, weight, eps)


def small_linear(x_td: Tensor, weight_od: Tensor, bias_o: Tensor | tuple[()] = (), *, silu: bool = False) -> Tensor:
    """x @ weight.T + bias; with silu, silu(first half) * second half of the outputs."""
    y = torch.nn.functional.linear(x_td, weight_od, bias_o if isinstance(bias_o, Tensor) else None)
    return silu_mul(y) if silu else y


def add_norm_small_linear(
    x_td: Tensor,
    update_td: Tensor,
    norm_weight_d: Tensor,
    eps: float,
    weight_od: Tensor,
    bias_o: Tensor | tuple[()] = (),
    *,
    silu: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """(x + update, its rms norm through a dense layer); wide: fp32 from the accumulators, and no bias."""
    total, normed = add_rms_norm(x_td, update_td, norm_weight_d, eps)
    return total, head_logits(normed, weight_od) if wide else small_linear(normed, weight_od, bias_o, silu=silu)


def rotate(x_tnh: Tensor, cos_th: Tensor, sin_th: Tensor) -> Tensor:
    """Rotary embedding, halves convention: pairs are (i, i + h/2). cos and sin are fp32 [t, h/2]."""
    first, second = x_tnh.float().chunk(2, dim=-1)
    cos, sin = cos_th[:, None, :], sin_th[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_tnh.dtype)


def qk_norm_rope_write(
    q_tnh: Tensor,
    k_tkh: Tensor,
    v_tkh: Tensor,
    q_weight_h: Tensor | tuple[()],
    k_weight_h: Tensor | tuple[()],
    eps: float,
    cos_th: Tensor,
    sin_th: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    slots_t: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q after its per-head norm (if weights are given) and rotation, and the caches with k (likewise) and v written."""
    if isinstance(q_weight_h, Tensor) and isinstance(k_weight_h, Tensor):
        q_tnh, k_tkh = rms_norm(q_tnh, q_weight_h, eps), rms_norm(k_tkh, k_weight_h, eps)
    q_tnh, k_tkh = rotate(q_tnh, cos_th, sin_th), rotate(k_tkh, cos_th, sin_th)
    return q_tnh, *write_kv(k_tkh, v_tkh, k_cache_pskh, v_cache_pskh, slots_t)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2f], gate first; silu is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


# --- head and sampler ------------------------------------------------------------------------------------------------


def head_logits(x_ld: Tensor, weight_vd: Tensor) -> Tensor:
    """x @ weight.T as fp32 from fp32 accumulation, not rounded to the dtype in between."""
    return torch.nn.functional.linear(x_ld.float(), weight_vd.float())


def noise_keys(seed_l: Tensor, position_l: Tensor) -> Tensor:
    """Two 32-bit words a row, as int64 [l, 2]: the first two words of Philox4x32-10 at counter (position, 0, 0, 0).

    The key is the seed's low and high word. Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    seed = seed_l.long()
    zero = torch.zeros_like(seed)
    counter = [position_l.long() & _MASK32, zero, zero, zero]
    key = [seed & _MASK32, (seed >> 32) & _MASK32]
    for _ in range(_PHILOX_ROUNDS):
        first, second = counter[0] * _PHILOX_MULTIPLIERS[0], counter[2] * _PHILOX_MULTIPLIERS[1]
        counter = [
            ((second >> 32) & _MASK32) ^ counter[1] ^ key[0],
            second & _MASK32,
            ((first >> 32) & _MASK32) ^ counter[3] ^ key[1],
            first & _MASK32,
        ]
        key = [(k + w) & _MASK32 for k, w in zip(key, _PHILOX_WEYL)]
    return torch.stack(counter[:2], dim=-1)


def noise_bits(keys_l2: Tensor, ids_v: Tensor) -> Tensor:
    """32 random bits for each (row, vocabulary id), as int64 [l, v]: two keyed rounds of a 32-bit finaliser."""
    x = (ids_v.long()[None, :] * 0x9E3779B9 + keys_l2[:, :1]) & _MASK32
    x = _mix32(x)
    x = _mix32((x ^ keys_l2[:, 1:]) & _MASK32)
    return x


def _mix32(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def gumbel_noise(keys_l2: Tensor, ids_v: Tensor) -> Tensor:
    """Standard Gumbel noise fp32 [l, v]: -log(-log1p(-u)), u = (bits + 0.5) / 2^32, at most 1 - 2^-24."""
    u = (noise_bits(keys_l2, ids_v).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u.clamp(max=1.0 - 2.0**-24)))


def ordered_bits(score: Tensor) -> Tensor:
    """fp32 -> int32 in the same order (a NaN with a clear sign bit above +inf, one with a set one below -inf)."""
    bits = score.contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def pick(
    logits_lv: Tensor,
    temperature_l: Tensor,
    keys_l2: Tensor,
    threshold_l: Tensor | tuple[()],
    first_id: int,
    num_ids: int,
    *,
    forbidden_ls: Tensor | tuple[()] = (),
) -> Tensor:
    """This shard's winner of every row as an int64 key; the largest key over all ranks wins.

    Columns are the vocabulary ids first_id, first_id + 1, ...; only the first num_ids count. A row's score is its logit
    where temperature is 0, else logit / temperature + noise; logits below threshold_l (in logit units, inclusive) do
    not take part. Key: ordered bits of the score in the high word, 2^32 - 1 - id in the low one, so that the lowest id
    wins a tie. A NaN logit among the columns makes the high word of the key 2^31 - 1. Without ids: the smallest int64.
    forbidden_ls: int32 ids whose logits count as -inf; -1 is none, ids of other shards are passed over.
    """
    if num_ids == 0:
        return torch.full((logits_lv.shape[0],), torch.iinfo(torch.int64).min, device=logits_lv.device)
    ids_v = first_id + torch.arange(num_ids, device=logits_lv.device)
    logits_lv = logits_lv[:, :num_ids]
    if isinstance(forbidden_ls, Tensor):
        logits_lv = forbid(logits_lv, forbidden_ls, first_id)
    greedy_l1 = (temperature_l <= 0)[:, None]
    heat_l1 = torch.where(temperature_l <= 0, 1.0, temperature_l)[:, None]
    noisy_lv = logits_lv / heat_l1 + gumbel_noise(keys_l2, ids_v)
    score_lv = torch.where(greedy_l1, logits_lv, noisy_lv)
    if isinstance(threshold_l, Tensor):
        score_lv = torch.where(logits_lv < threshold_l[:, None], float("-inf"), score_lv)
    high_lv = torch.where(torch.isnan(logits_lv), 0x7FFFFFFF, ordered_bits(score_lv)).long()
    key_lv = (high_lv << 32) | (_MASK32 - ids_v.long())
    return key_lv.amax(dim=-1)


def forbid(logits_lv: Tensor, forbidden_ls: Tensor, first_id: int) -> Tensor:
    """The logits with -inf at each row's forbidden ids; ids of other ranks and -1 are passed over."""
    num_columns = logits_lv.shape[1]
    local_ls = forbidden_ls.long() - first_id
    outside_ls = (forbidden_ls < 0) | (local_ls < 0) | (local_ls >= num_columns)
    padded_lv = torch.nn.functional.pad(logits_lv, (0, 1))
    where_ls = torch.where(outside_ls, num_columns, local_ls)
    return padded_lv.scatter(1, where_ls, float("-inf"))[:, :num_columns].contiguous()


def token_of(key_l: Tensor) -> Tensor:
    """The vocabulary id in a winner's key, int32; -1 where a logit was NaN."""
    token_l = _MASK32 - (key_l & _MASK32)
    return torch.where((key_l >> 32) == 0x7FFFFFFF, -1, token_l).to(torch.int32)


def with_min_p(threshold_l: Tensor, largest_l: Tensor, temperature_l: Tensor, min_p_l: Tensor) -> Tensor:
    """The threshold, raised to the least logit that min-p lets through: largest + temperature * log(min_p), in fp32.

    log is the library's natural logarithm (on CUDA libdevice's, within a unit in the last place). Rows that are greedy
    (temperature <= 0) or do not ask (min_p <= 0) keep their threshold; the largest logit itself always passes.
    """
    sampled_l = temperature_l > 0
    heat_l = torch.where(sampled_l, temperature_l, 1.0)
    least_l = largest_l + heat_l * torch.log(min_p_l.clamp(min=torch.finfo(torch.float32).tiny))
    least_l = torch.where(sampled_l & (min_p_l > 0), torch.minimum(least_l, largest_l), float("-inf"))
    return torch.maximum(threshold_l, least_l)
