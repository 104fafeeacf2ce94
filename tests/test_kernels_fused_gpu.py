"""The fused ops, the sampler and the small-batch matrix kernels on a GPU, against their references there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.kernels import fused, gemv, reference, sampler
from funcllm.kernels.gemv_config import GemvConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EPS = 1e-6
VOCABULARY = 151_936
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def has_pdl() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


# --- embedding, angles, keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33, 5000])
@pytest.mark.parametrize("size", [1000, 1024, 5120])
def test_embed_rows(dtype: torch.dtype, kind: torch.dtype, tokens: int, size: int) -> None:
    weight = values(3001, size, dtype=dtype)
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    ids = torch.randint(0, 9000, (tokens,), device="cuda", generator=generator).to(kind)
    for ours, theirs in zip(fused.embed_rows(ids, weight, 3001), reference.embed_rows(ids, weight, 3001)):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_embed_rows_beyond_two_to_the_31_elements() -> None:
    weight = torch.zeros(2**31 // 4096 + 5, 4096, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 3.0
    _, rows = fused.embed_rows(torch.tensor([weight.shape[0] - 1, 0], device="cuda"), weight, 0)
    assert (rows[0] == 3).all()
    assert (rows[1] == 0).all()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("half", [8, 40, 48, 64, 128])
def test_rope_angles_at_any_position(kind: torch.dtype, half: int) -> None:
    frequencies = torch.cat([1e6 ** (-torch.arange(half, device="cuda") / half), torch.tensor([1.25], device="cuda")])
    huge = torch.tensor([2**24 + 1, 2**30 + 129, 2**31 - 1], device="cuda")
    positions = torch.cat([torch.arange(0, 131_072, 7, device="cuda"), huge]).to(kind)
    angle = (positions.float()[:, None] * frequencies[:-1]).double()
    ours = fused.rope_angles(positions, frequencies)
    theirs = reference.rope_angles(positions, frequencies)
    for mine, plain, exact in zip(ours, theirs, (angle.cos() * 1.25, angle.sin() * 1.25)):
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=3e-7)
        torch.testing.assert_close(mine, plain, rtol=0, atol=3e-7)


@pytest.mark.parametrize("rows", [0, 1, 127, 1024, 5001])
def test_noise_keys_and_tokens(rows: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda", generator=generator)
    positions = torch.randint(0, 2**31 - 1, (rows,), device="cuda", generator=generator).to(torch.int32)
    assert torch.equal(fused.noise_keys(seeds, positions), reference.noise_keys(seeds, positions))
    seeds[::3] = (seeds[::3] & 0xFFFFFFFF) | (0x7FFFFFFF << 32)
    tokens = fused.token_of(seeds)
    assert torch.equal(tokens, reference.token_of(seeds))
    assert (tokens[::3] == -1).all()


@pytest.mark.parametrize("rows", [1, 300])
def test_min_p_raises_the_threshold(rows: int) -> None:
    largest, below = values(rows, dtype=torch.float32) * 9, values(rows, dtype=torch.float32, seed=1).abs() * 30
    heat, min_p = values(rows, dtype=torch.float32, seed=2), values(rows, dtype=torch.float32, seed=3)
    below[::4] = float("inf")
    given = (largest - below, largest, heat, min_p)
    limit = torch.ops.funcllm.with_min_p.default(*given)
    torch.testing.assert_close(limit, reference.with_min_p(*given), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(limit.cpu(), reference.with_min_p(*(x.cpu() for x in given)), rtol=1e-6, atol=1e-6)


def test_each_small_op_is_one_launch() -> None:
    from torch.profiler import ProfilerActivity, profile

    ids = torch.arange(33, dtype=torch.int32, device="cuda")
    weight, frequencies, row = values(50, 256), values(65, dtype=torch.float32), torch.ones(33, device="cuda")

    def run() -> None:
        fused.embed_rows(ids, weight, 10)
        fused.rope_angles(ids, frequencies)
        fused.noise_keys(keys, ids)
        fused.token_of(keys)
        torch.ops.funcllm.with_min_p.default(row, row, row, row)

    keys = torch.zeros(33, dtype=torch.int64, device="cuda")
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    launched = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(launched) == [
        "_angles_kernel",
        "_embed_kernel",
        "_min_p_kernel",
        "_noise_keys_kernel",
        "_token_kernel",
    ]


# --- elementwise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64, 257, 70_000])
@pytest.mark.parametrize("size", [128, 1000, 2560])
def test_norms_and_silu(dtype: torch.dtype, rows: int, size: int) -> None:
    x, update, weight = values(rows, size, dtype=dtype), values(rows, size, dtype=dtype, seed=1), values(size)
    assert_close(fused.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    total, normed = fused.add_rms_norm(x, update, weight, EPS)
    expected_total, expected_normed = reference.add_rms_norm(x, update, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected_normed)
    assert_close(fused.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 48, 300, 3000])
def test_qk_norm_rope_write(dtype: torch.dtype, normed: bool, head_dim: int, tokens: int) -> None:
    heads, kv_heads, block_size = 6, 2, 16
    packed = values(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    weights: Any = (values(head_dim), values(head_dim, seed=1)) if normed else ((), ())
    angle = values(tokens, head_dim // 2, dtype=torch.float32) * 100
    shape = (tokens // block_size + 2, block_size, kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    slots = torch.randperm(tokens, device="cuda") + block_size
    slots[-1] = 0
    inputs = (q, k, v, *weights, EPS, angle.cos(), angle.sin(), *caches, slots)
    expected = reference.qk_norm_rope_write(*inputs)
    out = fused.qk_norm_rope_write(*inputs)
    assert out[1].data_ptr() == caches[0].data_ptr()
    for ours, theirs in zip(out, expected):
        assert_close(ours.nan_to_num(nan=1000.0), theirs.nan_to_num(nan=1000.0))


def test_slots_beyond_two_to_the_31_elements() -> None:
    """The last block of a cache above 2^31 elements is written, and nothing else."""
    kv_heads, head_dim, block_size = 8, 128, 16
    blocks = (2**31 // (kv_heads * head_dim * block_size)) + 3
    needed = 2 * blocks * block_size * kv_heads * head_dim * 2
    if torch.cuda.mem_get_info()[0] < needed + (2 << 30):
        pytest.skip(f"needs {needed >> 30} GiB")
    caches = [torch.zeros(blocks, block_size, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    q, k, v = values(2, 16, head_dim), values(2, kv_heads, head_dim), values(2, kv_heads, head_dim, seed=1)
    slots = torch.tensor([blocks * block_size - 1, 16], device="cuda")
    fused.qk_norm_rope_write(
        q, k, v, (), (), EPS, torch.ones(2, 64, device="cuda"), torch.zeros(2, 64, device="cuda"), *caches, slots
    )
    for cache, written in zip(caches, (k, v)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots], written)
        assert sum(torch.count_nonzero(part).item() for part in flat.split(1 << 20)) == torch.count_nonzero(written)


# --- head and sampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
def test_head_logits_are_the_accumulators(dtype: torch.dtype, rows: int) -> None:
    x, weight = values(rows, 256, dtype=dtype), values(5003, 256, dtype=dtype)
    logits = fused.head_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (x.double() @ weight.double().T).float(), rtol=1e-5, atol=2e-4)


def test_noise_bits_are_the_references() -> None:
    from funcllm.kernels import triton_sampler

    keys = reference.noise_keys(torch.arange(7, device="cuda") * 2**33, torch.arange(7, device="cuda"))
    for first_id in (0, 75_968, 2**31 - VOCABULARY):
        ids = first_id + torch.arange(VOCABULARY, device="cuda")
        assert torch.equal(triton_sampler.noise_bits(keys, first_id, VOCABULARY), reference.noise_bits(keys, ids))


@pytest.mark.parametrize("rows", [1, 2, 33, 256])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("filtered", [False, True])
def test_pick_equals_the_reference(rows: int, spread: float, filtered: bool) -> None:
    logits = values(rows, VOCABULARY, dtype=torch.float32) * spread
    temperature = torch.tensor([0.6, 0.0, 1.0, 2.0], device="cuda").repeat(rows)[:rows]
    keys = reference.noise_keys(torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") + 5)
    threshold: Any = logits.topk(20).values[:, -1] if filtered else ()
    ours = fused.pick(logits, temperature, keys, threshold, 1000, VOCABULARY - 3)
    theirs = reference.pick(logits, temperature, keys, threshold, 1000, VOCABULARY - 3)
    assert torch.equal(reference.token_of(ours), reference.token_of(theirs))
    assert ((ours >> 32) - (theirs >> 32)).abs().max() <= 16


def test_pick_marks_nan_and_takes_the_lowest_of_a_tie() -> None:
    logits = torch.zeros(3, 40_000, device="cuda")
    logits[0, [39_999, 20_000, 3]] = 1.0
    logits[1, 39_000] = float("nan")
    keys = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    temperature = torch.tensor([0.0, 1.0, 1.0], device="cuda")
    tokens = reference.token_of(fused.pick(logits, temperature, keys, (), 0, 40_000)).tolist()
    assert tokens[:2] == [3, -1]
    assert tokens[2] >= 0


@pytest.mark.parametrize("spread", [0.5, 4.0, 30.0])
def test_threshold_on_the_gpu_is_the_cpus_bit_for_bit(spread: float) -> None:
    rows = 24
    logits = values(rows, VOCABULARY, dtype=torch.float32) * spread
    logits[3, ::2], logits[4] = float("-inf"), 1.0
    settings = (
        torch.tensor([0.0, 0.7, 1.0, 2.5] * 6),
        torch.tensor([0, 3, 20, 1000, 50, -1] * 4, dtype=torch.int32),
        torch.tensor([1.0, 0.9, 0.5, 0.95] * 6),
        torch.zeros(rows),
    )
    on_gpu = [setting.cuda() for setting in settings]
    ours = sampler.threshold(logits, *on_gpu, 0, VOCABULARY, sampler.identity, sampler.identity)
    theirs = sampler.threshold(logits.cpu(), *settings, 0, VOCABULARY, sampler.identity, sampler.identity)
    assert torch.equal(ours.cpu(), theirs)


def test_threshold_replays_in_a_graph() -> None:
    logits = values(4, 30_000, dtype=torch.float32) * 4
    settings = (
        torch.tensor([0.7, 0.0, 1.0, 2.5], device="cuda"),
        torch.tensor([20, 20, 0, 0], dtype=torch.int32, device="cuda"),
        torch.tensor([0.95, 0.9, 0.5, 1.0], device="cuda"),
        torch.tensor([0.0, 0.0, 0.0, 0.1], device="cuda"),
    )

    def run() -> Tensor:
        return sampler.threshold(logits, *settings, 0, 30_000, sampler.identity, sampler.identity)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    logits.copy_(values(4, 30_000, dtype=torch.float32, seed=8) * 4)
    graph.replay()
    assert torch.equal(out, run())
    assert out[1].item() == float("-inf")
    assert (logits[0] >= out[0]).sum().item() <= 20


# --- matrix kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out_features", "size"), [(4096, 1024), (1024, 3072), (1000, 5120), (777, 264)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
def test_small_linear(dtype: torch.dtype, out_features: int, size: int, rows: int) -> None:
    x, update = values(rows, size, dtype=dtype), values(rows, size, dtype=dtype, seed=1)
    weight = (values(2 * out_features, size, dtype=torch.float32) / size**0.5).to(dtype)
    norm_weight, bias = values(size, dtype=dtype), values(out_features, dtype=dtype)
    residual = values(rows, out_features, dtype=dtype, seed=2)
    half = weight[:out_features]
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}

    plain = (x.double() @ half.double().T + bias.double()).to(dtype)
    expected = (residual.float() + plain.float()).to(dtype)
    torch.testing.assert_close(gemv.small_linear(x, half, bias, residual_to=residual), expected, **tolerance)

    total, y = gemv.add_norm_small_linear(x, update, norm_weight, EPS, weight, silu=True)
    expected_total, normed = reference.add_rms_norm(x, update, norm_weight, EPS)
    expected = reference.silu_mul((normed.double() @ weight.double().T).to(dtype))
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(y, expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])

    wide = gemv.norm_small_linear(x, norm_weight, EPS, half, wide=True)
    normed = reference.rms_norm(x, norm_weight, EPS)
    torch.testing.assert_close(wide.double(), normed.double() @ half.double().T, rtol=1e-2, atol=1e-2)


def test_small_linear_is_the_same_every_time() -> None:
    x, weight = values(1, 4096), values(4096, 4096)
    first = gemv.small_linear(x, weight)
    for _ in range(200):
        assert torch.equal(gemv.small_linear(x, weight), first)


CONFIGS = [
    pytest.param(GemvConfig(block_n=4, num_warps=4), id="stream"),
    pytest.param(GemvConfig(block_n=4, num_warps=4, block_k=512, num_stages=3), id="stream in pieces"),
    pytest.param(GemvConfig(block_n=16, num_warps=4, block_k=256, num_stages=3, tensor_cores=True), id="tensor cores"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_chain_by_programmatic_dependent_launch_is_the_same_bit_for_bit(config: GemvConfig) -> None:
    """Each kernel reads what its predecessor wrote, thousands of times, in one graph: a missing wait would show."""
    if not has_pdl():
        pytest.skip("needs compute capability 9.0")
    size, ffn, layers = 1024, 3072, 40
    norm_weight = values(size)
    up = [values(2 * ffn, size, seed=i) / 32 for i in range(4)]
    down = [values(size, ffn, seed=i) / 55 for i in range(4)]

    def run(x: Tensor, pdl: bool) -> Tensor:
        for i in range(layers):
            hidden = gemv.norm_small_linear(x, norm_weight, EPS, up[i % 4], silu=True, config=config, pdl=pdl)
            x = gemv.small_linear(hidden, down[i % 4], residual_to=x, config=config, pdl=pdl)
            x = fused.rms_norm(x, norm_weight, EPS, pdl=pdl)
        return x

    x = values(2, size)
    expected = run(x, False)
    assert torch.isfinite(expected).all()
    run(x, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, True)
    for step in range(100):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), step


def test_ops_compile_and_replay_in_a_graph() -> None:
    weight, norm_weight = values(512, 256) / 16, values(256)

    def run(x: Tensor, update: Tensor) -> Tensor:
        total, normed = fused.add_rms_norm(x, update, norm_weight, EPS)
        return fused.head_logits(fused.silu_mul(normed @ weight.T) @ weight[:256, :256].T[:256] + total, weight)

    with torch.no_grad():
        x, update = values(16, 256), values(16, 256, seed=1)
        fast = torch.compile(run, fullgraph=True)
        torch.testing.assert_close(fast(x, update), run(x, update), rtol=3e-2, atol=3e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(x, update)
        expected = fast(values(16, 256, seed=9), update)
        x.copy_(values(16, 256, seed=9))
        graph.replay()
        assert torch.equal(out, expected)
