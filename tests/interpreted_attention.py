"""Attention and cache kernels under Triton's interpreter; test_kernels_attention.py runs this in its own process."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from funcllm.kernels import attention_decode, attention_prefill, reference, tune
from funcllm.kernels.attention_decode import DecodeConfig, choose_config, choose_splits, decode_attention
from funcllm.kernels.attention_prefill import (
    PrefillConfig,
    choose_prefill_config,
    prefill_attention,
    zero_padding,
)
from funcllm.kernels.interpret import repair
from funcllm.kernels.kv import copy_slots, write_kv
from tests.attention_cases import Heads, assert_close, chunk_rows, paged

repair()

FP16, BF16 = torch.float16, torch.bfloat16


def sinks_or_none(options):
    return {**options, "sinks_n": options["sinks_n"] if isinstance(options["sinks_n"], torch.Tensor) else None}


DECODE_CASES = {
    "one split": (Heads(), DecodeConfig(tile=32, splits=1)),
    "two splits": (Heads(block_size=32), DecodeConfig(tile=16, splits=2)),
    "five splits": (Heads(heads=6, head_dim=32), DecodeConfig(tile=16, splits=5)),
    "eight splits, some empty": (Heads(heads=2, block_size=64), DecodeConfig(tile=16, splits=8)),
    "splits of two tiles at least": (Heads(), DecodeConfig(tile=16, splits=5, min_tiles=2)),
    "tile over many blocks": (Heads(head_dim=64), DecodeConfig(tile=64, splits=2)),
    "tile inside a block": (Heads(block_size=128), DecodeConfig(tile=16, splits=2)),
    "odd head dim": (Heads(heads=3, kv_heads=3, head_dim=80), DecodeConfig(tile=16, splits=2)),
    "head dim 96": (Heads(heads=7, kv_heads=1, head_dim=96), DecodeConfig(tile=32, splits=1)),
    "head dim 128": (Heads(head_dim=128), DecodeConfig(tile=32, splits=2)),
    "head dim 256": (Heads(heads=2, kv_heads=1, head_dim=256), DecodeConfig(tile=32, splits=1)),
    "group above 16": (Heads(heads=20, kv_heads=1), DecodeConfig(tile=16, splits=2)),
    "window": (Heads(window=20), DecodeConfig(tile=16, splits=1)),
    "window, split": (Heads(window=33, block_size=32), DecodeConfig(tile=16, splits=5)),
    "softcap": (Heads(softcap=2.0), DecodeConfig(tile=32, splits=2)),
    "sinks": (Heads(sinks=True), DecodeConfig(tile=32, splits=1)),
    "sinks, split": (Heads(sinks=True, window=40), DecodeConfig(tile=16, splits=2)),
    "half": (Heads(dtype=FP16, head_dim=64), DecodeConfig(tile=16, splits=2)),
    "bfloat16": (Heads(dtype=BF16, head_dim=64), DecodeConfig(tile=16, splits=2)),
    "bfloat16, all options": (
        Heads(dtype=BF16, head_dim=32, window=30, softcap=3.0, sinks=True),
        DecodeConfig(tile=32, splits=1),
    ),
}


@pytest.mark.parametrize(("heads", "config"), DECODE_CASES.values(), ids=DECODE_CASES)
def test_decode_equals_reference(heads, config):
    k_cache, v_cache, table, kv_lens = paged(heads, (1, 70, 0, 17, 64))
    q, options = heads.queries(5, "cpu"), heads.options("cpu")
    expected = reference.attend(q, k_cache, v_cache, (table, kv_lens), (), **options)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    decode_attention(q, k_cache, v_cache, table, kv_lens, out, **sinks_or_none(options), config=config)
    assert_close(out, expected)
    assert (out[2] == 0).all()


def test_decode_with_its_own_choice_of_splits():
    heads = Heads(head_dim=32)
    k_cache, v_cache, table, kv_lens = paged(heads, (300,))
    q, options = heads.queries(1, "cpu"), heads.options("cpu")
    assert choose_config(1, 2, 32, table.shape[1] * 16, 4, 8).splits > 1
    out = decode_attention(q, k_cache, v_cache, table, kv_lens, torch.empty(q.shape), **sinks_or_none(options))
    assert_close(out, reference.attend(q, k_cache, v_cache, (table, kv_lens), (), **options))


def test_trash_rows_leave_the_others_alone():
    heads = Heads()
    k_cache, v_cache, table, kv_lens = paged(heads, (40, 5))
    q, options = heads.queries(4, "cpu"), sinks_or_none(heads.options("cpu"))
    config = DecodeConfig(tile=16, splits=2)
    alone = decode_attention(q[:2], k_cache, v_cache, table, kv_lens, torch.empty(2, 4, 16), **options, config=config)
    padded = [torch.nn.functional.pad(table, (0, 0, 0, 2)), torch.cat([kv_lens, torch.ones(2, dtype=torch.int32)])]
    out = decode_attention(q, k_cache, v_cache, *padded, torch.empty(4, 4, 16), **options, config=config)
    assert torch.equal(out[:2], alone)


VARIANTS = {
    "one launch": {"one_launch": True},
    "early": {"early": True, "pdl": True},
    "prefetch": {"early": True, "prefetch": True, "pdl": True},
    "prefetch, one launch": {"early": True, "prefetch": True, "one_launch": True},
}
VARIANT_CASES = (
    "one split",
    "five splits",
    "eight splits, some empty",
    "splits of two tiles at least",
    "tile over many blocks",
    "odd head dim",
    "group above 16",
    "window, split",
    "softcap",
    "sinks, split",
    "bfloat16",
)
TRASH_ROWS = 2  # act as state row 0: one key, in block 0
VARIANT_LENGTHS = (1, 70, 0, 17, 64)


class Decode(NamedTuple):
    """The tensors of a decode launch, trash rows at the end."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    kv_lens: Tensor


def decode_case(heads: Heads) -> Decode:
    """Rows of VARIANT_LENGTHS and trash rows, whose block holds NaN."""
    k_cache, v_cache, table, kv_lens = paged(heads, VARIANT_LENGTHS)
    table = torch.nn.functional.pad(table, (0, 0, 0, TRASH_ROWS))
    kv_lens = torch.nn.functional.pad(kv_lens, (0, TRASH_ROWS), value=1)
    return Decode(heads.queries(len(kv_lens), "cpu"), k_cache, v_cache, table, kv_lens)


def decoded(case: Decode, heads: Heads, config: DecodeConfig, counters_bk: Tensor | None = None) -> Tensor:
    """What a launch writes into an output full of NaN."""
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype)
    options = sinks_or_none(heads.options("cpu"))
    return decode_attention(*case, out, **options, counters_bk=counters_bk, config=config)


@pytest.fixture(autouse=True)
def no_early_start(monkeypatch):
    """The interpreter runs one kernel after the other, so there is nothing to wait for."""
    monkeypatch.setattr(attention_decode, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(attention_decode, "gdc_wait", lambda: None)


@pytest.fixture
def poisoned_scratch(monkeypatch):
    """Partial results start as NaN, so that reading one that no split has written shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("poisoned_scratch")
@pytest.mark.parametrize("name", VARIANT_CASES)
def test_decode_variants_equal_two_full_launches_bit_for_bit(name):
    heads, config = DECODE_CASES[name]
    case, counters = decode_case(heads), torch.zeros(len(VARIANT_LENGTHS) + TRASH_ROWS, heads.kv_heads + 3).int()
    expected, live = decoded(case, heads, config), len(VARIANT_LENGTHS)
    assert torch.isfinite(expected[:live]).all()
    assert (expected[2] == 0).all()
    for variant in ("one launch", "prefetch", "prefetch, one launch"):
        out = decoded(case, heads, replace(config, **VARIANTS[variant]), counters)
        assert torch.equal(out[:live], expected[:live]), variant
        assert torch.isnan(out[live:]).all(), variant
        assert (counters == 0).all(), variant


@pytest.mark.usefixtures("poisoned_scratch")
def test_only_the_last_split_combines():
    heads, config = Heads(), DecodeConfig(tile=16, splits=5, one_launch=True)
    case = decode_case(heads)
    counters = torch.zeros(len(case.kv_lens), heads.kv_heads).int()
    counters[1, 0] = 1  # as if a split had been counted before it wrote
    out = decoded(case, heads, config, counters)
    assert torch.isnan(out[1, : heads.heads // heads.kv_heads]).all()
    assert torch.isfinite(out[1, heads.heads // heads.kv_heads :]).all()
    assert counters[1, 0] == 1


def test_one_launch_needs_counters_and_takes_one_launch(monkeypatch):
    heads, config = Heads(), DecodeConfig(tile=16, splits=5, one_launch=True)
    case, launches = decode_case(heads), []
    constants = attention_decode.combine_constants
    monkeypatch.setattr(attention_decode, "combine_constants", lambda *a: launches.append("second") or constants(*a))
    expected = decoded(case, heads, config)
    assert launches == ["second"]
    out = decoded(case, heads, config, torch.zeros(len(case.kv_lens), heads.kv_heads).int())
    assert launches == ["second"]
    assert torch.equal(out[: len(VARIANT_LENGTHS)], expected[: len(VARIANT_LENGTHS)])


EARLY_CASES = {
    "five splits": (Heads(), DecodeConfig(tile=16, splits=5)),
    "tile inside a block": (Heads(block_size=64, head_dim=80), DecodeConfig(tile=16, splits=2)),
    "one split": (Heads(window=20, sinks=True), DecodeConfig(tile=32, splits=1)),
}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "one launch"])
@pytest.mark.parametrize(("heads", "config"), EARLY_CASES.values(), ids=EARLY_CASES)
def test_decode_reads_before_the_wait_only_what_is_there(heads, config, variant, monkeypatch):
    """Whenever a program starts, queries and each row's newest key and value become NaN, and without prefetch all keys
    and the lengths wrong as well; they are right from its wait on."""
    case, config = decode_case(heads), replace(config, **VARIANTS[variant])
    expected, whole = decoded(case, heads, config), Decode(*(x.clone() for x in case))
    used = [(row, length - 1) for row, length in enumerate(case.kv_lens.tolist()) if length > 0]
    newest = [(int(whole.table[row, at // heads.block_size]), at % heads.block_size) for row, at in used]
    start, waits = interpreter_builder.set_grid_idx, []

    def program_starts(*index):
        case.q.fill_(float("nan"))
        for cache in (case.k_cache, case.v_cache):
            for block, offset in newest:
                cache[block, offset] = float("nan")
        if not config.prefetch:
            case.k_cache.fill_(float("nan"))
            case.kv_lens.fill_(3)
        start(*index)

    def program_waits():
        waits.append(interpreter_builder.grid_idx)
        for written, right in zip(case, whole):
            written.copy_(right)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", program_starts)
    monkeypatch.setattr(attention_decode, "gdc_wait", program_waits)
    out = decoded(case, heads, config, torch.zeros(len(case.kv_lens), heads.kv_heads).int())
    assert torch.equal(out[: len(VARIANT_LENGTHS)], expected[: len(VARIANT_LENGTHS)])
    every_row = {(kv_head, row, 0) for kv_head in range(heads.kv_heads) for row in range(len(case.kv_lens))}
    assert every_row <= set(waits)


PREFILL_CASES = {
    "plain": (Heads(), PrefillConfig(rows=32, tile=32)),
    "tile inside a block": (Heads(block_size=128), PrefillConfig(rows=32, tile=16)),
    "odd group and head dim": (Heads(heads=6, head_dim=80), PrefillConfig(rows=32, tile=16)),
    "head dim 96": (Heads(heads=5, kv_heads=1, head_dim=96), PrefillConfig(rows=64, tile=32)),
    "head dim 256": (Heads(heads=1, kv_heads=1, head_dim=256), PrefillConfig(rows=16, tile=32)),
    "group as large as a tile": (Heads(heads=20, kv_heads=1), PrefillConfig(rows=16, tile=32)),
    "window": (Heads(window=20), PrefillConfig(rows=32, tile=16)),
    "window below a tile": (Heads(window=3, block_size=32), PrefillConfig(rows=32, tile=32)),
    "softcap": (Heads(softcap=2.0), PrefillConfig(rows=32, tile=32)),
    "sinks": (Heads(sinks=True, block_size=64), PrefillConfig(rows=32, tile=32)),
    "half": (Heads(dtype=FP16, head_dim=64), PrefillConfig(rows=64, tile=32)),
    "bfloat16, all options": (
        Heads(dtype=BF16, head_dim=32, window=30, softcap=3.0, sinks=True),
        PrefillConfig(rows=32, tile=32),
    ),
}


@pytest.mark.parametrize(("heads", "config"), PREFILL_CASES.values(), ids=PREFILL_CASES)
def test_prefill_equals_reference(heads, config):
    k_cache, v_cache, table, kv_lens = paged(heads, (5, 70, 0, 30, 33))
    starts, span = chunk_rows((5, 40, 0, 1, 33))
    q, options = heads.queries(int(starts[-1]) + 7, "cpu"), heads.options("cpu")
    expected = reference.attend(q, k_cache, v_cache, (), (table, kv_lens, starts, span), **options)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    prefill_attention(q, k_cache, v_cache, table, kv_lens, starts, out, **sinks_or_none(options), config=config)
    assert_close(out, expected)
    assert (out[int(starts[-1]) :] == 0).all()


def flash_interface(with_out):
    """Stands in for flash_attn.cute.interface: the arguments of its functions that are used, computed by reference."""

    def attended(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window, softcap, learnable_sink):
        sinks = () if learnable_sink is None else learnable_sink
        out = reference.attend(
            q,
            k,
            v,
            (),
            (page_table, seqused_k, cu_seqlens_q, cu_seqlens_q),
            scale=softmax_scale,
            window=window,
            softcap=softcap,
            sinks_n=sinks,
        )
        out[int(cu_seqlens_q[-1]) :] = float("nan")
        return out

    def _flash_attn_fwd(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        seqused_k,
        max_seqlen_q,
        page_table,
        softmax_scale,
        causal,
        softcap,
        window_size_left=None,
        window_size_right=None,
        learnable_sink=None,
        out=None,
    ):
        assert causal
        assert max_seqlen_q == 40
        assert window_size_right in (None, 0)
        window = 0 if window_size_left is None else window_size_left + 1
        out.copy_(
            attended(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window, softcap, learnable_sink)
        )

    def flash_attn_varlen_func(q, k, v, *, window_size=(None, None), causal, max_seqlen_q, **options):
        assert causal
        assert max_seqlen_q == 40
        window = 0 if window_size[0] is None else window_size[0] + 1
        return attended(q, k, v, window=window, **options), None

    interface = types.ModuleType("interface")
    interface.flash_attn_varlen_func = flash_attn_varlen_func
    if with_out:
        interface._flash_attn_fwd = _flash_attn_fwd
    return interface


@pytest.mark.parametrize("with_out", [True, False])
@pytest.mark.parametrize("heads", [Heads(), Heads(window=20, sinks=True, softcap=2.0)], ids=["plain", "options"])
def test_flash_prefill_passes_its_arguments_on(heads, with_out, monkeypatch):
    package = types.ModuleType("flash_attn.cute")
    package.interface = flash_interface(with_out)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    attention_prefill._flash_forward.cache_clear()
    k_cache, v_cache, table, kv_lens = paged(heads, (5, 70, 0, 33))
    starts, span = chunk_rows((5, 40, 0, 33))
    q, options = heads.queries(int(starts[-1]) + 7, "cpu"), heads.options("cpu")
    out = torch.full(q.shape, float("nan"))
    caches = (q, k_cache, v_cache, table, kv_lens, starts)
    attention_prefill.flash_prefill(*caches, span.shape[0], out, **sinks_or_none(options))
    attention_prefill._flash_forward.cache_clear()
    assert_close(out, reference.attend(q, k_cache, v_cache, (), (table, kv_lens, starts, span), **options))
    assert (out[int(starts[-1]) :] == 0).all()


def test_padding_behind_the_chunks_is_zeroed():
    starts, _ = chunk_rows((2, 3))
    out = torch.full((8, 2, 16), float("nan"))
    out[:5] = 1.0
    zero_padding(out, starts)
    assert (out[:5] == 1).all()
    assert (out[5:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, FP16, BF16], ids=str)
def test_written_keys_and_values_are_found_again(dtype):
    heads = Heads(heads=4, kv_heads=3, head_dim=80, dtype=dtype)
    k_cache, v_cache, _, _ = paged(heads, (33,))
    packed = torch.randn(5, 6, 80).to(dtype)
    k, v = packed[:, :3], packed[:, 3:]
    slots = torch.tensor([40, 3, 17, 95, 64])
    expected = reference.write_kv(k, v, k_cache, v_cache, slots)
    write_kv(k, v, k_cache, v_cache, slots)
    for cache, want in zip((k_cache, v_cache), expected):
        assert torch.equal(cache.view(torch.int16), want.view(torch.int16))


def test_copied_slots_are_the_first_of_each_block():
    k_cache, v_cache = torch.randn(6, 16, 3, 20), torch.randn(6, 16, 3, 20)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    copy_slots(k_cache, v_cache, torch.tensor([[1, 4, 5], [2, 5, 16], [1, 3, 0]], dtype=torch.int32))
    for cache, before in ((k_cache, k_before), (v_cache, v_before)):
        assert torch.equal(cache[4], torch.cat([before[1, :5], before[4, 5:]]))
        assert torch.equal(cache[5], before[2])
        assert torch.equal(cache[:4], before[:4])


def test_splits_depend_on_shapes_and_fill_the_gpu():
    assert choose_splits(1, 8, 32768, 64, 132) * 8 >= 132 * 2 * 0.9
    assert choose_splits(1, 8, 64, 64, 132) == 1
    assert choose_splits(1024, 8, 32768, 64, 132) == 1
    for batch in (1, 2, 3, 7, 16, 40, 131, 256):
        config = choose_config(batch, 8, 128, 4096, 2, 132)
        assert 1 <= config.splits <= 4096 // config.tile
        assert config.tile * 128 * 2 == 8192


def test_less_shared_memory_gives_a_shallower_pipeline():
    depths = [choose_config(8, 8, 256, 4096, 4, 132, shared).num_stages for shared in (232448, 166912, 101376)]
    assert depths == [5, 5, 3]
    assert choose_prefill_config(128, 2, 101376).num_stages <= choose_prefill_config(128, 2).num_stages
    assert choose_prefill_config(256, 2).tile == 32
    assert choose_prefill_config(256, 4).rows == 16


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_tuning_times_a_configuration_and_checks_its_error(kind, monkeypatch, capsys):
    monkeypatch.setattr(tune, "CYCLE_BYTES", 1)
    monkeypatch.setattr(tune, "graph_time", lambda call, tables: float(len([call(table) for table in tables])))
    queries = 5 if kind == "prefill" else 1
    shape = tune.Shape(
        batch=2, context=40, heads=4, kv_heads=2, head_dim=16, block_size=16, ragged=True, queries=queries
    )
    case = tune.make_case(shape, "cpu")
    if kind == "decode":
        config, call = DecodeConfig(tile=16, splits=2), tune.decode_call
    else:
        config, call = PrefillConfig(rows=16, tile=16), tune.prefill_call
    (result,) = tune.timed(shape, case, [config], call, 4.0)
    assert (result.microseconds, result.rate) == (2.0, 2.0)
    assert 0 < result.error <= tune.MAX_ERROR
    assert "error" in capsys.readouterr().out
    assert tune.record(result)["config"]["tile"] == 16


TINY = tune.Shape(batch=3, context=70, heads=4, kv_heads=2, head_dim=16, block_size=16, trash=1)
TINY_CUT = DecodeConfig(tile=16, splits=3, pdl=True)


@pytest.fixture
def tiny_chain(monkeypatch):
    """(case, chain) of TINY, in a process where a chain is two layers and time stands still."""
    monkeypatch.setattr(tune, "CYCLE_BYTES", 1)
    monkeypatch.setattr(tune, "LAYERS", 2)
    monkeypatch.setattr(tune, "graph_time", lambda call, tables: float(len([call(table) for table in tables])) * 10)
    case = tune.make_case(TINY, "cpu")
    chain = tune.make_chain(TINY, case)
    tune.run_chain(TINY, case, chain, None)
    expected = tune.expected_output(TINY, case.q, case.k_cache, case.v_cache, case.tables[0], case.kv_lens)
    return case._replace(expected=expected), chain


def test_variants_are_timed_in_a_chain_and_compared_bit_for_bit(tiny_chain, capsys):
    case, chain = tiny_chain
    results = list(tune.timed_variants(TINY, case, chain, TINY_CUT, 3.0))
    assert [r.config for r in results] == [replace(TINY_CUT, **variant) for variant in tune.VARIANTS]
    assert {r.microseconds for r in results} == {5.0}
    assert results[0].rate == pytest.approx(sum(TINY.kv_lens) * 2 * 16 * 4 / 1e6 / 2.0)
    assert all(0 < r.error <= tune.MAX_ERROR for r in results)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(tune.VARIANTS)
    assert all(line.endswith("adds 2.00 us, same bits") for line in printed)
    whole = list(tune.timed_variants(TINY, case, chain, replace(TINY_CUT, splits=1, pdl=False), 3.0))
    assert [r.config for r in whole] == [replace(TINY_CUT, splits=1, pdl=False)]


def test_variants_that_go_wrong_are_told(tiny_chain, monkeypatch, capsys):
    case, chain = tiny_chain
    call = tune.decode_call

    def broken(shape, case, config, table, counters):
        out = call(shape, case, config, table, counters)
        if config.one_launch:
            counters[0, 0] = 1
            out[0, 0] += 1
        return out

    monkeypatch.setattr(tune, "decode_call", broken)
    monkeypatch.setattr(tune, "VARIANTS", ({}, {"one_launch": True}))
    assert len(list(tune.timed_variants(TINY, case, chain, TINY_CUT, 3.0))) == 2
    right, wrong = capsys.readouterr().out.splitlines()
    assert "same bits" in right
    assert "OTHER BITS  COUNTERS LEFT" in wrong


def test_a_chain_writes_the_newest_keys_of_the_tables_it_goes_through(tiny_chain):
    case, chain = tiny_chain
    for table in case.tables[: tune.LAYERS]:
        last = case.v_cache[table[0, 69 // 16].long(), 69 % 16]
        assert torch.equal(last, chain.v[0])
        assert torch.equal(case.v_cache[table[2, 0].long(), 0], chain.v[2])


@triton.jit
def _bfloat16_kernel(a_ptr, b_ptr, dot_ptr, sum_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(dot_ptr + at, tl.dot(a, b).to(tl.bfloat16))
    tl.store(sum_ptr + at, a + b)


def test_the_repaired_interpreter_computes_bfloat16():
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    dot, total = torch.empty_like(a), torch.empty_like(a)
    _bfloat16_kernel[(1,)](a, b, dot, total, 16)
    assert torch.equal(dot, (a.float() @ b.float()).bfloat16())
    assert torch.equal(total, a + b)
