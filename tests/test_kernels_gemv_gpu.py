"""The persistent matrix kernel, and every way to take part in a chain of early starts, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from funcllm.kernels import fused, gemv, reference, tune_chain
from funcllm.kernels.gemv_config import GemvConfig
from funcllm.kernels.tune_chain import SIZES, Size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EPS = 1e-6
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(block_n=2, num_warps=2, programs_per_sm=4),
        GemvConfig(block_n=2, num_warps=4, num_stages=2, programs_per_sm=1),
        GemvConfig(block_n=4, num_warps=8, programs_per_sm=2),
    ],
    ids=["2 warps", "two ahead", "8 warps"],
)
@pytest.mark.parametrize(
    ("out_features", "size", "dtype"),
    [
        (4096, 2048, torch.bfloat16),
        (1024, 3072, torch.float16),
        (1000, 5120, torch.bfloat16),
        (777, 2568, torch.float16),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_persistent_programs(rows: int, out_features: int, size: int, config: GemvConfig, dtype: torch.dtype) -> None:
    x, update = values(rows, size, dtype=dtype), values(rows, size, dtype=dtype, seed=1)
    weight = (values(2 * out_features, size, dtype=torch.float32) / size**0.5).to(dtype)
    norm_weight, bias = values(size, dtype=dtype), values(out_features, dtype=dtype)
    residual = values(rows, out_features, dtype=dtype, seed=2)
    half = weight[:out_features]
    tolerance = TOLERANCE[dtype]

    plain = (x.double() @ half.double().T + bias.double()).to(dtype)
    expected = (residual.float() + plain.float()).to(dtype)
    y = gemv.small_linear(x, half, bias, residual_to=residual, config=config)
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)

    total, y = gemv.add_norm_small_linear(x, update, norm_weight, EPS, weight, silu=True, config=config)
    expected_total, normed = reference.add_rms_norm(x, update, norm_weight, EPS)
    expected = reference.silu_mul((normed.double() @ weight.double().T).to(dtype))
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(y, expected, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(block_n=4, num_warps=4),
        GemvConfig(block_n=4, num_warps=4, block_k=512, num_stages=3),
        GemvConfig(block_n=2, num_warps=4, programs_per_sm=2),
        GemvConfig(block_n=2, num_warps=4, programs_per_sm=1, prefetch=2),
        GemvConfig(block_n=16, num_warps=4, block_k=256, num_stages=3, tensor_cores=True),
        GemvConfig(block_n=16, num_warps=4, block_k=256, num_stages=3, tensor_cores=True, prefetch=4),
    ],
    ids=["stream", "stream in pieces", "persistent", "persistent to L2", "tensor cores", "tensor cores to L2"],
)
@pytest.mark.parametrize("release", ["early", "late"])
def test_a_chain_gives_the_same_bits_however_early_it_starts(release: str, config: GemvConfig) -> None:
    """Each kernel reads what its predecessor wrote, thousands of times, in one graph: a missing wait would show."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    size, ffn, layers = 1024, 3072, 40
    config = replace(config, release=release)
    not_early = replace(config, early_start=False)
    norm_weight = values(size)
    up = [values(2 * ffn, size, seed=i) / 32 for i in range(4)]
    down = [values(size, ffn, seed=i) / 55 for i in range(4)]

    def run(x: Tensor, pdl: bool) -> Tensor:
        update = torch.zeros_like(x)
        for i in range(layers):
            chosen = not_early if i % 5 == 4 else config
            x, hidden = gemv.add_norm_small_linear(
                x, update, norm_weight, EPS, up[i % 4], silu=True, config=chosen, pdl=pdl
            )
            update = gemv.small_linear(hidden, down[i % 4], config=config, pdl=pdl)
        return fused.rms_norm(x, norm_weight, EPS, pdl=pdl)

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


@pytest.mark.parametrize("rows", [1, 2])
def test_the_tuners_ways_are_right(rows: int) -> None:
    size = replace(SIZES["0.6B"], layers=1, vocabulary=4096)
    tensors = tune_chain.chain_tensors(size, rows)
    wrong = [
        (place, way)
        for place, case in size.places.items()
        for way in dict.fromkeys([*tune_chain.ways(case, rows)[::5], None])
        if not tune_chain.is_right(case, tensors, way)
    ]
    assert not wrong


def test_the_chain_of_kernels_is_the_chain_of_the_library() -> None:
    size = Size(name="two layers", layers=2, hidden=1024, heads=16, kv_heads=8, ffn=3072, vocabulary=4096)
    tensors = tune_chain.chain_tensors(size, 2)
    kernels = tune_chain.fast_kernels(torch.device("cuda"), 128, torch.bfloat16, 32)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    with torch.no_grad():
        library = tune_chain.chain(tensors, size, dict.fromkeys(size.places), kernels, pdl=pdl)
        ours = tune_chain.chain(tensors, size, tune_chain.in_use(size, 2), kernels, pdl=pdl)
    assert tune_chain.relative_error(ours, library) < 2e-2
