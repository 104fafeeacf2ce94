"""The reference kernels against plain formulas, written out a token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from funcllm.kernels import reference

GENERATOR = torch.Generator()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR.manual_seed(seed + sum(shape)))


# --- attention -------------------------------------------------------------------------------------------------------


def attend_one(
    q_nh: Tensor,
    k_Lkh: Tensor,
    v_Lkh: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """One query, head by head, over all the keys it may see (they end with its own)."""
    if window:
        k_Lkh, v_Lkh = k_Lkh[-window:], v_Lkh[-window:]
    out = []
    for n, q_h in enumerate(q_nh):
        head = n * k_Lkh.shape[1] // q_nh.shape[0]
        scores = [float(q_h @ k_h) * scale for k_h in k_Lkh[:, head]]
        if softcap:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (math.exp(float(sinks_n[n])) if sinks_n is not None else 0.0)
        out.append(sum(w / total * v_h for w, v_h in zip(weights, v_Lkh[:, head])))
    return torch.stack(out)


def paged(lengths: list[int], block_size: int, kv_heads: int, h: int) -> tuple[list[Tensor], list[Tensor], Any]:
    """Each row's own keys and values, and (k cache, v cache, tables): scattered blocks, NaN elsewhere."""
    keys = [randn(n, kv_heads, h, seed=i) for i, n in enumerate(lengths)]
    values = [randn(n, kv_heads, h, seed=50 + i) for i, n in enumerate(lengths)]
    width = max(1, -(-max(lengths) // block_size)) + 1
    caches = [torch.full((1 + width * len(lengths), block_size, kv_heads, h), float("nan")) for _ in range(2)]
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for i, row in enumerate(zip(keys, values)):
        for position in range(lengths[i]):
            block = 1 + (position // block_size) * len(lengths) + (len(lengths) - 1 - i)
            tables[i, position // block_size] = block
            for cache, own in zip(caches, row):
                cache[block, position % block_size] = own[position]
    return keys, values, (*caches, tables)


OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks_n": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"window": 4, "softcap": 1.5, "sinks_n": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("block_size", "kv_heads"), [(1, 4), (3, 2), (4, 1)])
def test_attention_of_decode_rows_and_chunks(options: dict[str, Any], block_size: int, kv_heads: int) -> None:
    lengths, chunks = [5, 1, 9, 0, 7, 4], [0, 0, 4, 0, 7, 1]
    h, n = 6, 4
    keys, values, (k_cache, v_cache, tables) = paged(lengths, block_size, kv_heads, h)
    q = randn(2 + 4 + 0 + 7 + 1 + 3, n, h)
    decode = (tables[:2], torch.tensor(lengths[:2], dtype=torch.int32))
    starts = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32)
    chunk_rows = (tables[2:], torch.tensor(lengths[2:], dtype=torch.int32), starts, torch.empty(7, dtype=torch.uint8))
    got = reference.attend(q, k_cache, v_cache, decode, chunk_rows, scale=0.3, **options)
    expected = [attend_one(q[i], keys[i], values[i], scale=0.3, **options) for i in range(2)]
    token = 2
    for row, count in list(enumerate(chunks))[2:]:
        for i in range(count):
            seen = lengths[row] - count + i + 1
            expected.append(attend_one(q[token], keys[row][:seen], values[row][:seen], scale=0.3, **options))
            token += 1
    torch.testing.assert_close(got[:token], torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert got[token:].eq(0).all()


def test_a_row_without_keys_is_zero_and_not_nan() -> None:
    _, _, (k_cache, v_cache, tables) = paged([2, 3], 2, 2, 4)
    q = randn(2, 4, 4)
    got = reference.attend(q, k_cache, v_cache, (tables, torch.tensor([0, 3], dtype=torch.int32)), (), scale=0.5)
    assert got[0].eq(0).all()
    assert got[1].abs().min() > 0


def test_attention_is_rounded_to_the_queries_dtype_once() -> None:
    keys, values, (k_cache, v_cache, tables) = paged([6], 2, 2, 8)
    q = randn(1, 4, 8).bfloat16()
    lens = torch.tensor([6], dtype=torch.int32)
    got = reference.attend(q, k_cache.bfloat16(), v_cache.bfloat16(), (tables, lens), (), scale=0.5)
    k, v = keys[0].bfloat16().float(), values[0].bfloat16().float()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[0], attend_one(q[0].float(), k, v, scale=0.5).bfloat16())


def test_write_kv_is_out_of_place_and_leaves_other_slots() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 5), torch.ones(3, 4, 2, 5)
    k, v = randn(3, 2, 5), randn(3, 2, 5, seed=1)
    new_k, new_v = reference.write_kv(k, v, k_cache, v_cache, torch.tensor([6, 0, 11]))
    assert k_cache.eq(0).all()
    assert v_cache.eq(1).all()
    for new, old, own in ((new_k, k_cache, k), (new_v, v_cache, v)):
        flat = new.flatten(0, 1)
        assert torch.equal(flat[[6, 0, 11]], own)
        assert torch.equal(flat[[1, 2, 3, 4, 5, 7, 8, 9, 10]], old.flatten(0, 1)[:9])


# --- norms and the like ----------------------------------------------------------------------------------------------


def test_rms_norm_is_the_formula_and_rounds_before_the_weight() -> None:
    x, weight = randn(3, 10) * 5, torch.rand(10)
    expected = [
        [v / math.sqrt(sum(u * u for u in row) / 10 + 0.1) * w for v, w in zip(row, weight.tolist())]
        for row in x.tolist()
    ]
    torch.testing.assert_close(reference.rms_norm(x, weight, 0.1), torch.tensor(expected))
    torch.testing.assert_close(reference.rms_norm(x, weight, 0.1), F.rms_norm(x, (10,), weight, 0.1))
    low = x.bfloat16()
    normed = F.rms_norm(low.float(), (10,), None, 0.1).bfloat16()
    assert torch.equal(reference.rms_norm(low, weight, 0.1), weight.bfloat16() * normed)
    assert reference.rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6).eq(0).all()


def test_add_rms_norm_reads_the_rounded_sum() -> None:
    x, update = (
        torch.full((1, 4), 256.0, dtype=torch.bfloat16),
        torch.tensor([[0.0, 1.0, 1.0, 3.0]], dtype=torch.bfloat16),
    )
    total, normed = reference.add_rms_norm(x, update, torch.ones(4, dtype=torch.bfloat16), 1e-6)
    assert total.tolist() == [[256.0, 256.0, 256.0, 260.0]]
    assert torch.equal(normed, reference.rms_norm(total, torch.ones(4), 1e-6))


def test_rotate_turns_pairs_of_halves() -> None:
    x = randn(3, 2, 6)
    angle = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3], [2.0, -1.0, 7.0]])
    got = reference.rotate(x, angle.cos(), angle.sin())
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(3, 3), angle)[:, None]
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1))
    assert torch.equal(got[0], x[0])


@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_write_is_its_three_steps(normed: bool) -> None:
    q, k, v = randn(2, 4, 6), randn(2, 2, 6), randn(2, 2, 6, seed=3)
    weights = (torch.rand(6), torch.rand(6)) if normed else ((), ())
    cos, sin = torch.rand(2, 3), torch.rand(2, 3)
    caches = torch.zeros(2, 2, 2, 6), torch.zeros(2, 2, 2, 6)
    got_q, got_k, got_v = reference.qk_norm_rope_write(q, k, v, *weights, 1e-6, cos, sin, *caches, torch.tensor([3, 1]))
    if normed:
        q, k = F.rms_norm(q, (6,), weights[0], 1e-6), F.rms_norm(k, (6,), weights[1], 1e-6)
    torch.testing.assert_close(got_q, reference.rotate(q, cos, sin))
    torch.testing.assert_close(got_k.flatten(0, 1)[[3, 1]], reference.rotate(k, cos, sin))
    torch.testing.assert_close(got_v.flatten(0, 1)[[3, 1]], v)
    assert got_k.flatten(0, 1)[[0, 2]].eq(0).all()


def test_silu_mul_takes_the_gate_first_and_rounds_between() -> None:
    gate, up = randn(3, 5), randn(3, 5, seed=1)
    torch.testing.assert_close(reference.silu_mul(torch.cat([gate, up], -1)), gate * torch.sigmoid(gate) * up)
    low_gate, low_up = gate.bfloat16(), up.bfloat16()
    rounded = (low_gate.float() * torch.sigmoid(low_gate.float())).bfloat16() * low_up
    assert torch.equal(reference.silu_mul(torch.cat([low_gate, low_up], -1)), rounded)


def test_head_logits_are_not_rounded_between() -> None:
    x, weight = randn(2, 64).bfloat16(), randn(7, 64).bfloat16()
    got = reference.head_logits(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ weight.float().T)
    assert not torch.equal(got, (x @ weight.T).float())


@pytest.mark.parametrize("bias", [True, False])
def test_small_blocks_are_their_compositions(bias: bool) -> None:
    x, update, weight, norm = randn(2, 8), randn(2, 8, seed=1), randn(6, 8), torch.rand(8)
    bias_o: Any = randn(6) if bias else ()
    expected = F.linear(x, weight, bias_o if bias else None)
    torch.testing.assert_close(reference.small_linear(x, weight, bias_o), expected)
    total, out = reference.add_norm_small_linear(x, update, norm, 1e-6, weight, bias_o)
    torch.testing.assert_close(total, x + update)
    normed = F.rms_norm(x + update, (8,), norm, 1e-6)
    torch.testing.assert_close(out, F.linear(normed, weight, bias_o if bias else None))
    _, out = reference.add_norm_small_linear(x, update, norm, 1e-6, weight, bias_o, silu=True)
    gate, up = F.linear(normed, weight, bias_o if bias else None).chunk(2, -1)
    torch.testing.assert_close(out, F.silu(gate) * up)


# --- the pick --------------------------------------------------------------------------------------------------------


def test_ordered_bits_keep_the_order_of_floats() -> None:
    values = torch.tensor([-float("inf"), -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.5, 3e38, float("inf")])
    bits = reference.ordered_bits(values).tolist()
    assert bits == sorted(bits)
    assert len(set(bits)) == len(bits)


def test_a_shard_without_ids_never_wins() -> None:
    keys = reference.noise_keys(torch.tensor([1]), torch.tensor([2]))
    empty = reference.pick(torch.zeros(1, 3), torch.tensor([0.0]), keys, (), 9, 0)
    least = reference.pick(torch.full((1, 3), -float("inf")), torch.tensor([0.0]), keys, (), 0, 3)
    assert empty.item() == torch.iinfo(torch.int64).min
    assert empty < least
    assert reference.token_of(torch.maximum(empty, least)).tolist() == [0]


def test_nothing_of_the_reference_changes_its_arguments() -> None:
    x = randn(2, 8)
    copy = x.clone()
    reference.add_rms_norm(x, x, torch.ones(8), 1e-6)
    reference.silu_mul(x)
    reference.pick(x, torch.tensor([0.0, 1.0]), torch.ones(2, 2, dtype=torch.int64), torch.zeros(2), 0, 8)
    assert torch.equal(x, copy)
