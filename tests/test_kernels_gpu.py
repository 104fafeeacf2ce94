"""Attention and cache kernels on a CUDA GPU: against the reference, behind 2^31 elements, and in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcllm.kernels import fast, reference
from funcllm.kernels.bundle import FAST, fast_kernels
from tests.attention_cases import Heads, assert_close, chunk_rows, paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:(?s).*aux_data"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BF16 = Heads(heads=16, kv_heads=8, head_dim=128, block_size=128, dtype=torch.bfloat16)
CASES = {
    "0.6b": BF16,
    "8b, block 32": replace(BF16, heads=32, block_size=32),
    "head dim 64": replace(BF16, head_dim=64, block_size=16),
    "head dim 80": replace(BF16, head_dim=80, heads=24),
    "head dim 96": replace(BF16, head_dim=96, block_size=64),
    "head dim 256": replace(BF16, head_dim=256, heads=8, kv_heads=4),
    "seven heads a group": replace(BF16, heads=14, kv_heads=2),
    "one KV head": replace(BF16, heads=20, kv_heads=1),
    "window": replace(BF16, window=200),
    "softcap": replace(BF16, softcap=20.0),
    "sinks": replace(BF16, sinks=True),
    "all options": replace(BF16, window=333, softcap=10.0, sinks=True, block_size=16),
    "half": replace(BF16, dtype=torch.float16),
    "float": replace(BF16, dtype=torch.float32, head_dim=64),
}
LENGTHS = (1, 903, 0, 1030, 128, 129, 2500, 64)


@pytest.mark.parametrize("batch", [1, 8, 160])
@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_decode_equals_reference(heads, batch):
    k_cache, v_cache, table, kv_lens = paged(heads, (LENGTHS[3], *LENGTHS * 20)[:batch], "cuda")
    q, options = heads.queries(batch, "cuda"), heads.options("cuda")
    out = FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), **options)
    assert_close(out, reference.attend(q, k_cache, v_cache, (table, kv_lens), (), **options))


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_decode_rows_and_chunks_equal_reference(heads):
    k_cache, v_cache, tables, kv_lens = paged(heads, (9, 500, 300, 1030, 0, 130, 333), "cuda")
    starts, span = chunk_rows((300, 400, 0, 1, 333), "cuda")
    q, options = heads.queries(2 + int(starts[-1]) + 20, "cuda"), heads.options("cuda")
    decode, chunks = (tables[:2], kv_lens[:2]), (tables[2:], kv_lens[2:], starts, span)
    out = FAST.attend(q, k_cache, v_cache, decode, chunks, **options)
    assert_close(out, reference.attend(q, k_cache, v_cache, decode, chunks, **options))
    assert (out[-20:] == 0).all()


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_flash_attention_equals_reference(heads):
    kernels = fast_kernels(torch.device("cuda"), heads.head_dim, heads.dtype, heads.block_size)
    if kernels.prefill != "flash-attn-4":
        pytest.skip(kernels.why[-1])
    k_cache, v_cache, tables, kv_lens = paged(heads, (9, 500, 300, 1030, 0, 130, 333), "cuda")
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    starts, span = chunk_rows((300, 400, 0, 1, 333), "cuda")
    q, options = heads.queries(2 + int(starts[-1]) + 20, "cuda"), heads.options("cuda")
    decode, chunks = (tables[:2], kv_lens[:2]), (tables[2:], kv_lens[2:], starts, span)
    out = kernels.attend(q, k_cache, v_cache, decode, chunks, **options)
    assert_close(out, reference.attend(q, k_cache, v_cache, decode, chunks, **options))
    assert (out[-20:] == 0).all()


def test_a_cache_above_two_to_the_31_elements():
    heads = replace(BF16, kv_heads=8)
    blocks = 2**31 // (128 * 8 * 128) + 40
    if torch.cuda.mem_get_info()[0] < 3 * blocks * 128 * 8 * 128 * 2:
        pytest.skip("needs 14 GB of free GPU memory")
    k_cache = torch.zeros(blocks, 128, 8, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    assert k_cache.numel() > 2**31
    last = torch.arange(blocks - 1, blocks - 5, -1, device="cuda").int()
    length = 4 * 128 - 3
    position = torch.arange(length, device="cuda")
    slots = last.long()[position // 128] * 128 + position % 128
    k, v = torch.randn(2, length, 8, 128, device="cuda").bfloat16()
    FAST.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    kv_lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    small_table = torch.arange(4, device="cuda").int()[None]
    small = [cache[last.long()] for cache in (k_cache, v_cache)]
    starts, span = chunk_rows((200,), "cuda")
    q = heads.queries(201, "cuda")
    out = FAST.attend(q, k_cache, v_cache, (last[None], kv_lens), (last[None], kv_lens, starts, span), scale=0.1)
    chunks = (small_table, kv_lens, starts, span)
    assert_close(out, reference.attend(q, *small, (small_table, kv_lens), chunks, scale=0.1))
    fast.copy_slots(k_cache, v_cache, torch.tensor([[blocks - 1, blocks - 6, 100]], dtype=torch.int32, device="cuda"))
    assert torch.equal(k_cache[-6, :100], k_cache[-1, :100])
    assert (k_cache[-6, 100:] == 0).all()


@pytest.mark.parametrize("batch", [1, 40])
def test_a_captured_launch_follows_the_lengths(batch):
    k_cache, v_cache, table, kv_lens = paged(BF16, [1500] * batch, "cuda")
    q, options = BF16.queries(batch, "cuda"), BF16.options("cuda")
    kv_lens.fill_(3)
    FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), **options)
    for length in (1500, 1, 700):
        kv_lens.fill_(length)
        graph.replay()
        eager = FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), **options)
        assert torch.equal(out, eager)
        assert_close(out, reference.attend(q, k_cache, v_cache, (table, kv_lens), (), **options))


def test_a_compiled_layer_writes_the_cache_in_place():
    k_cache, v_cache, table, kv_lens = paged(BF16, [700] * 4, "cuda")
    packed = torch.randn(4, 32, 128, device="cuda").bfloat16()
    slots = table.long()[:, 5] * 128 + 59

    def layer(packed, k_cache, v_cache, slots, table, kv_lens):
        q, k, v = packed.split([16, 8, 8], dim=1)
        k_cache, v_cache = FAST.write_kv(k, v, k_cache, v_cache, slots)
        return FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), scale=0.1), k_cache, v_cache

    expected_caches = reference.write_kv(packed[:, 16:24], packed[:, 24:], k_cache, v_cache, slots)
    expected = reference.attend(packed[:, :16], *expected_caches, (table, kv_lens), (), scale=0.1)
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)
        compiled(packed, k_cache, v_cache, slots, table, kv_lens)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, k_after, _ = compiled(packed, k_cache, v_cache, slots, table, kv_lens)
    assert k_after.data_ptr() == k_cache.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < k_cache.nbytes
    assert_close(out, expected)
