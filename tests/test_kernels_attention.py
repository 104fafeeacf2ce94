"""Attention and the cache: CPU ops and torch ops against the reference, Triton kernels under the interpreter.

The interpreter must be chosen before triton is imported, so interpreted_attention.py runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from funcllm.kernels import fast, ops, reference
from funcllm.kernels.bundle import FAST, REFERENCE, fast_kernels, has_flash
from tests.attention_cases import Heads, assert_close, chunk_rows, paged

ROOT = Path(__file__).parent.parent

CASES = {
    "plain": Heads(),
    "odd group": Heads(heads=6, kv_heads=2, head_dim=20, block_size=3),
    "one KV head": Heads(heads=5, kv_heads=1, block_size=1),
    "window": Heads(window=20),
    "window of one": Heads(window=1),
    "softcap": Heads(softcap=2.0),
    "sinks": Heads(sinks=True),
    "all options": Heads(window=30, softcap=3.0, sinks=True, block_size=32),
    "half": Heads(dtype=torch.float16, window=50),
    "bfloat16": Heads(dtype=torch.bfloat16, sinks=True),
}


@pytest.mark.parametrize("group", ["decode", "prefill", "not decode and not prefill"])
def test_triton_kernels_under_the_interpreter(group):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", group]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "tests/interpreted_attention.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout or "100%" in result.stdout


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_attend_of_decode_rows_equals_reference(heads):
    k_cache, v_cache, table, kv_lens = paged(heads, (1, 70, 0, 17, 64))
    q, options = heads.queries(7, "cpu"), heads.options("cpu")
    out = FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), **options)
    assert_close(out, reference.attend(q, k_cache, v_cache, (table, kv_lens), (), **options))
    assert (out[2] == 0).all()
    assert (out[5:] == 0).all()


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_attend_of_decode_rows_and_chunks_equals_reference(heads):
    k_cache, v_cache, tables, kv_lens = paged(heads, (9, 50, 5, 70, 0, 30, 33))
    starts, span = chunk_rows((5, 40, 0, 1, 33))
    q, options = heads.queries(2 + int(starts[-1]) + 4, "cpu"), heads.options("cpu")
    decode, chunks = (tables[:2], kv_lens[:2]), (tables[2:], kv_lens[2:], starts, span)
    out = FAST.attend(q, k_cache, v_cache, decode, chunks, **options)
    assert_close(out, reference.attend(q, k_cache, v_cache, decode, chunks, **options))
    assert (out[-4:] == 0).all()


def test_rows_without_any_key_come_out_as_zero():
    heads = Heads()
    k_cache, v_cache, table, kv_lens = paged(heads, (0, 0))
    out = FAST.attend(heads.queries(2, "cpu"), k_cache, v_cache, (table, kv_lens), (), scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))


def test_long_chunks_are_cut_into_pieces(monkeypatch):
    heads = Heads(softcap=1.0)
    k_cache, v_cache, table, kv_lens = paged(heads, (90,))
    starts, span = chunk_rows((60,))
    q, options = heads.queries(60, "cpu"), heads.options("cpu")
    monkeypatch.setattr("funcllm.kernels.cpu._SCORES_AT_ONCE", 7 * 4 * 90)
    out = FAST.attend(q, k_cache, v_cache, (), (table, kv_lens, starts, span), **options)
    assert_close(out, reference.attend(q, k_cache, v_cache, (), (table, kv_lens, starts, span), **options))


def test_write_kv_writes_in_place_and_returns_the_caches():
    heads = Heads(kv_heads=3, head_dim=20)
    k_cache, v_cache, _, _ = paged(heads, (33,))
    k, v = torch.randn(4, 3, 20), torch.randn(4, 3, 20)
    slots = torch.tensor([40, 3, 17, 64])
    expected = reference.write_kv(k, v, k_cache, v_cache, slots)
    written = FAST.write_kv(k, v, k_cache, v_cache, slots)
    for cache, result, want in zip((k_cache, v_cache), written, expected):
        assert result is cache
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


def test_copied_slots_are_the_first_of_each_block():
    k_cache, v_cache = torch.randn(6, 5, 3, 20), torch.randn(6, 5, 3, 20)
    before = k_cache.clone()
    fast.copy_slots(k_cache, v_cache, torch.tensor([[1, 4, 2], [2, 5, 5], [1, 3, 0]], dtype=torch.int32))
    assert torch.equal(k_cache[4], torch.cat([before[1, :2], before[4, 2:]]))
    assert torch.equal(k_cache[5], before[2])
    assert torch.equal(k_cache[:4], before[:4])
    assert torch.equal(v_cache[5], v_cache[2])


def test_one_compilation_serves_any_number_of_tokens_and_rows():
    heads = Heads()
    k_cache, v_cache, _, _ = paged(heads, (3,), spare_blocks=60)
    counter = CompileCounterWithBackend("inductor")

    def layer(x, k_cache, v_cache, slots, decode, chunks):
        q, k, v = x.split([4, 2, 2], dim=1)
        k_cache, v_cache = FAST.write_kv(k, v, k_cache, v_cache, slots)
        return FAST.attend(q, k_cache, v_cache, decode, chunks, scale=0.25) * 2, k_cache, v_cache

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=counter)
    for num_decode, num_chunks in ((2, 2), (5, 3), (3, 7)):
        starts, span = chunk_rows((16,) * num_chunks)
        x = torch.randn(num_decode + 16 * num_chunks, 8, 16)
        slots = 16 + torch.randperm(900)[: x.shape[0]]
        decode = (1 + torch.randint(60, (num_decode, 4)).int(), 1 + torch.randint(60, (num_decode,)).int())
        chunks = (1 + torch.randint(60, (num_chunks, 4)).int(), torch.full((num_chunks,), 16).int(), starts, span)
        k_cache.fill_(0.5)
        for tensor in (x, slots, *decode, *chunks):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            out, k_after, v_after = compiled(x, k_cache, v_cache, slots, decode, chunks)
            assert k_after is k_cache
            assert v_after is v_cache
            expected, _, _ = layer(x, k_cache, v_cache, slots, decode, chunks)
        assert torch.equal(k_cache.flatten(0, 1)[slots], x[:, 4:6])
        torch.testing.assert_close(out, expected, equal_nan=True)
    assert counter.frame_count == 1


def test_ops_pass_torchs_own_checks():
    heads = Heads()
    k_cache, v_cache, table, kv_lens = paged(heads, (5, 20))
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    write = torch.ops.funcllm.write_kv.default
    torch.library.opcheck(write, (k, k.clone(), k_cache, v_cache, torch.tensor([3, 18])), test_utils=checks)
    arguments = (q, k_cache, v_cache, table, kv_lens, None, None, None, None, None, 0.25, 0, 0.0, ops.TRITON)
    for more in ((), (torch.zeros(2, 2, dtype=torch.int32), True)):
        torch.library.opcheck(torch.ops.funcllm.attend.default, (*arguments, *more), test_utils=checks)


def test_transforms_and_gradients_are_refused():
    heads = Heads()
    k_cache, v_cache, table, kv_lens = paged(heads, (5, 20))

    def total(q):
        return FAST.attend(q, k_cache, v_cache, (table, kv_lens), (), scale=1.0).sum()

    def stored(k):
        return FAST.write_kv(k, k, k_cache, v_cache, torch.tensor([16, 17]))[0].sum()

    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    for function, x in ((total, q), (stored, k)):
        with pytest.raises(RuntimeError, match="kernels=REFERENCE"):
            torch.func.grad(function)(x)
        with pytest.raises(RuntimeError, match="kernels=REFERENCE"):
            torch.func.jvp(function, (x,), (x,))
        with pytest.raises(RuntimeError, match="kernels=REFERENCE"):
            torch.func.vmap(function)(x[None])
        with pytest.raises(RuntimeError, match="kernels=REFERENCE"):
            function(x.clone().requires_grad_())


def test_the_bundle_of_a_cpu_says_what_it_uses():
    kernels = fast_kernels(torch.device("cpu"), 64, torch.float32, 16)
    assert kernels.attend is FAST.attend
    assert (kernels.prefill, kernels.decode) == ("cpu", "cpu")
    assert "cpu" in kernels.why[0]
    assert kernels == fast_kernels(torch.device("cpu"), 64, torch.float32, 16)
    assert kernels != REFERENCE
    assert hash(kernels) == hash(fast_kernels(torch.device("cpu"), 64, torch.float32, 16))


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "reason"),
    [
        ((8, 0), 128, torch.bfloat16, "this GPU is sm_80"),
        ((9, 0), 128, torch.float32, "torch.float32"),
        ((9, 0), 80, torch.bfloat16, "this one is 80"),
        ((9, 0), 128, torch.bfloat16, "is not installed"),
    ],
)
def test_the_bundle_of_a_gpu_says_why_it_does_without_flash_attention(capability, head_dim, dtype, reason, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr("funcllm.kernels.bundle.with_ahead_blocks", lambda kernels, device: kernels)
    assert not has_flash(torch.device("cuda"), head_dim, dtype)
    kernels = fast_kernels(torch.device("cuda"), head_dim, dtype, 128)
    assert kernels.attend is FAST.attend
    assert kernels.prefill == ops.TRITON
    assert reason in kernels.why[-1]


def test_the_bundle_of_a_hopper_gpu_takes_flash_attention(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("funcllm.kernels.attention_prefill._is_installed", lambda: True)
    monkeypatch.setattr("funcllm.kernels.bundle.with_ahead_blocks", lambda kernels, device: kernels)
    assert has_flash(torch.device("cuda"), 128, torch.bfloat16)
    kernels = fast_kernels(torch.device("cuda"), 128, torch.bfloat16, 128)
    assert kernels.attend is fast.attend_flash
    assert kernels.prefill == ops.FLASH
    assert "512 prompt tokens and more" in kernels.why[-1]


FAKE_FLASH = """
import sys, time, warnings
print("imported", file=sys.stderr)
warnings.warn("flash-attn-4's own noise")
import flash_attn_part
def _flash_attn_fwd(cu_seqlens_q, seqused_k, page_table, window_size_left, learnable_sink, softcap, out): ...
"""


def with_fake_flash(
    folder: Path, code: str, part: str = "", interface: str = FAKE_FLASH
) -> subprocess.CompletedProcess:
    """Runs code in a process that finds a flash-attn-4 of ours, whose import prints a line."""
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    (folder / "flash_attn" / "cute" / "__init__.py").write_text("")
    (folder / "flash_attn" / "cute" / "interface.py").write_text(interface)
    (folder / "flash_attn_part.py").write_text(part)
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder), "PYTHONWARNINGS": "default"}
    begin = "import sys, threading, time; import funcllm.kernels.attention_prefill as a\n"
    command = [sys.executable, "-c", begin + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_flash_attention_is_found_without_its_import(tmp_path):
    pytest.importorskip("triton")
    code = "print(a._is_installed(), [name for name in sys.modules if name.startswith('flash_attn')])"
    result = with_fake_flash(tmp_path, code)
    assert result.stdout.strip() == "True []", result.stderr
    (tmp_path / "flash_attn" / "cute" / "interface.py").unlink()  # flash-attn-2 has a package of this name, too
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = "import funcllm.kernels.attention_prefill as a; print(a._is_installed())"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_flash_attention_is_imported_on_a_thread_once_and_quietly(tmp_path):
    pytest.importorskip("triton")
    code = """
import os
thread = a.import_flash_ahead()
thread.join()
forward, writes_out = a._flash_forward()
print(forward.__name__, writes_out, round(sys.getswitchinterval(), 6), sys.meta_path[0].__class__.__name__)
print(os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"])
"""
    result = with_fake_flash(tmp_path, code)
    assert result.stdout.split()[:3] == ["_flash_attn_fwd", "True", "0.005"], result.stderr
    assert "SimpleNamespace" not in result.stdout
    assert result.stdout.split()[-1] == str(tmp_path / "funcllm" / "flash-attn-4")
    assert result.stderr == "imported\n"


def test_an_import_of_flash_attention_that_fails_is_met_again_by_who_uses_it(tmp_path):
    pytest.importorskip("triton")
    code = """
a.import_flash_ahead().join()
try:
    a._flash_forward()
except RuntimeError as error:
    print("met", error)
"""
    result = with_fake_flash(tmp_path, code, part="raise RuntimeError('half an install')")
    assert result.stdout.strip() == "met half an install", result.stderr


def test_an_exit_ends_the_import_of_flash_attention_at_its_next_module(tmp_path):
    pytest.importorskip("triton")
    slow = "import time\nfor i in range(3000):\n    time.sleep(0.01)\n    try:\n        __import__(f'no_such_{i}')\n"
    slow += "    except ImportError as error:\n        if 'exits' in str(error):\n            raise\n"
    started = time.monotonic()
    result = with_fake_flash(tmp_path, "a.import_flash_ahead(); time.sleep(0.3); print('done')", part=slow)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
    assert result.stderr == "imported\n"
    assert time.monotonic() - started < 25  # of 30 that the import takes


@pytest.mark.parametrize(
    ("num_tokens", "num_decode", "expected"),
    [(512, 0, "flash"), (511, 0, "triton"), (514, 3, "triton"), (515, 3, "flash")],
)
def test_the_number_of_prompt_tokens_chooses_the_prefill(num_tokens, num_decode, expected, monkeypatch):
    ran = []
    chunks = SimpleNamespace(
        flash_prefill=lambda q, *rest, **options: ran.append(("flash", len(q))),
        prefill_attention=lambda q, *rest, **options: ran.append(("triton", len(q))),
    )
    decode = SimpleNamespace(decode_attention=lambda *arguments, **options: None)
    monkeypatch.setattr(ops, "_triton", lambda: (None, decode, chunks))
    q, table, one = torch.zeros(num_tokens, 2, 16), torch.zeros(num_decode, 1), torch.zeros(2)
    pair = (table, one) if num_decode else (None, None)
    ops._attend_cuda(q, q, q, *pair, one, one, one, None, None, 1.0, 0, 0.0, ops.FLASH)
    assert ran == [(expected, num_tokens - num_decode)]


def test_a_block_size_that_cuda_cannot_take_is_refused():
    with pytest.raises(ValueError, match=r"block_size=24 is not a power of two >= 16"):
        fast_kernels(torch.device("cuda"), 64, torch.float32, 24)


def test_importing_the_bundle_does_not_import_flash_attn_or_transformers():
    code = "import sys, funcllm.kernels.bundle; print([m for m in sys.modules if m in ('flash_attn', 'transformers')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def sm90_instructions():
    """The PTX of variants of the decode kernel by name: memory, barrier and grid instructions in order."""
    pytest.importorskip("triton")
    from funcllm.kernels.attention_decode import compile_variants
    from tests.test_kernels_sm90 import compiled

    names = ("joined-0.6b-128", "joined-8b-16", "joined-early-128", "joined-prefetch-128", "decode-128-128")
    shown = re.compile(r"(bar\.sync|griddepcontrol\.\w+|atom\.[\w.]+|ld\.global[\w.]*|st\.global[\w.]*|cp\.async\.c\w)")
    found = {}
    for name, *rest, options in compile_variants():
        if name in names:
            kernel = compiled(*rest, {**options, "enable_fp_fusion": True}, capability=90)
            found[name] = shown.findall(kernel.asm["ptx"])
    return found


@pytest.mark.slow
def test_splits_are_counted_by_a_release_and_acquire_between_barriers(sm90_instructions):
    assert not any(x.startswith("atom") for x in sm90_instructions["decode-128-128"])
    for name in ("joined-0.6b-128", "joined-8b-16", "joined-early-128", "joined-prefetch-128"):
        instructions = sm90_instructions[name]
        (atom,) = [i for i, x in enumerate(instructions) if x.startswith("atom")]
        assert re.match(r"atom\.global\.gpu\.acq_rel\.add", instructions[atom]), name
        assert instructions[atom - 1] == instructions[atom + 1] == "bar.sync", name
        assert [x for x in instructions[:atom] if x != "bar.sync"][-1].startswith("st.global"), name
        combining = [x for x in instructions[atom:] if x.startswith("ld.global")]
        assert len(combining) >= 8, name
        assert all(x.startswith("ld.global.cg") for x in combining), name


@pytest.mark.slow
def test_an_early_start_reads_past_the_l1_cache_before_it_waits_and_writes_nothing(sm90_instructions):
    assert not any(x.startswith("griddep") for x in sm90_instructions["joined-0.6b-128"])
    grid = ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
    early = sm90_instructions["joined-early-128"]
    assert early[:2] == grid
    prefetch = sm90_instructions["joined-prefetch-128"]
    start = prefetch.index(grid[0])
    assert prefetch[start : start + 2] == grid
    assert start == 2 + 2 * 8  # the length, the block id, 16 bytes a thread of 8 KB each of keys and values
    assert all(x.startswith("ld.global.cg") for x in prefetch[:start])


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("num_heads", [pytest.param(16, marks=gpu), pytest.param(32, marks=gpu)])
def test_one_launch_has_the_bits_of_two_in_replays_on_two_streams(num_heads):
    from funcllm.kernels.attention_decode import DecodeConfig, decode_attention

    heads = Heads(heads=num_heads, kv_heads=8, head_dim=128, block_size=32, dtype=torch.bfloat16)
    config = DecodeConfig(tile=32, num_warps=2, num_stages=5, splits=33, one_launch=True)
    streams, launches = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams:
        case = paged(heads, (1030, 1, 903, 0, 640, 129), "cuda")
        q, counters = heads.queries(6, "cuda"), torch.zeros(6, 8, dtype=torch.int32, device="cuda")
        out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
        decode_attention(q, *case, out, scale=0.1, counters_bk=counters, config=config)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                decode_attention(q, *case, out, scale=0.1, counters_bk=counters, config=config)
        launches.append((graph, q, case, out, counters))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = (torch.rand(6, generator=generator) * torch.tensor([1030, 1, 903, 0, 640, 129])).int()
        for _, _, case, out, _ in launches:
            case[3].copy_(lengths)
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, (graph, *_) in zip(streams, launches):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, q, case, out, counters in launches:
            expected = decode_attention(q, *case, torch.empty_like(q), scale=0.1, config=config)
            assert torch.equal(out, expected)
            assert not counters.any()


@pytest.mark.parametrize("num_heads", [pytest.param(16, marks=gpu), pytest.param(32, marks=gpu)])
@pytest.mark.parametrize("batch", [1, 2, 8, 64])
def test_chains_of_early_starts_have_the_bits_of_full_starts(batch, num_heads):
    from funcllm.kernels import tune
    from funcllm.kernels.attention_decode import choose_config

    shape = tune.Shape(batch=batch, context=700, heads=num_heads, block_size=32, trash=batch // 2)
    case = tune.make_case(shape)
    chain = tune.make_chain(shape, case)
    if not tune.starts_early(case.q.device):
        pytest.skip("needs sm_90 or later")
    config = choose_config(batch, 8, 128, 40960, 2, 132)
    expected = tune.run_chain(shape, case, chain, config)
    for variant in tune.VARIANTS:
        chosen = replace(config, pdl=True, **variant)
        tune.run_chain(shape, case, chain, chosen)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tune.run_chain(shape, case, chain, chosen)
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, expected), variant
        assert not chain.counters.any()
