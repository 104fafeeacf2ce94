"""The engine on GPUs: judged against fp32, graphs against none, seams under graphs. Real shapes, random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.config import ModelConfig, qwen3_config
from funcllm.kernels.bundle import fast_kernels
from funcllm.kernels.ops import FLASH
from funcllm.launch.engine import Engine, Output
from funcllm.launch.request import SamplingParams
from funcllm.layers import swiglu
from funcllm.qwen3 import logits, param_specs
from funcllm.record import Layers
from funcllm.specs import init_params

pytestmark = pytest.mark.gpu

CONFIG = replace(qwen3_config("0.6b", num_layers=4), eos_token_ids=())
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SHAPES = [("0.6b", 1), ("0.6b", 2), ("8b", 1), ("8b", 2)]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 10_000, (n,), generator=generator).tolist() for n in (7, 130, 33, 1, 257)]


def run(
    layers: Layers = Layers(), sampling: SamplingParams = GREEDY, config: ModelConfig = CONFIG, **options: Any
) -> list[Output]:
    options = {"max_num_seqs": 8, "max_model_len": 1024, "kv_blocks": 400, "max_num_batched_tokens": 256} | options
    with Engine(config=config, random_weights=True, seed=5, layers=layers, device="cuda", **options) as engine:
        outputs = engine.generate(prompts(), sampling)
        assert not engine.describe()["notes"], engine.describe()["notes"]
        assert options.get("graphs", True) == (engine.describe()["graphs"] > 0)
    return outputs


def reference_params(config: ModelConfig) -> Any:
    """The weights that the engine has, in bfloat16, on one GPU."""
    return init_params(param_specs(config), seed=5, device="cuda", dtype=torch.bfloat16)


def whole_logits(output: Output, config: ModelConfig, params: Any, dtype: torch.dtype) -> Tensor:
    """Reference logits at the tokens that produced the output's tokens."""
    wide = torch.utils._pytree.tree_map(lambda x: x.to(dtype), params)
    ids = torch.tensor(output.prompt_token_ids + output.token_ids[:-1], device="cuda")
    with torch.no_grad():
        return logits(wide, ids, config=config)[len(output.prompt_token_ids) - 1 :].float()


@pytest.mark.parametrize(("size", "tp"), SHAPES, ids=[f"{size}-tp{tp}" for size, tp in SHAPES])
def test_logits_are_as_near_to_fp32_as_the_bf16_reference(size: str, tp: int) -> None:
    """Teacher-forced: at each position, given the same tokens before. At tp 2 rank 0's half of the logits is seen."""
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    config = replace(qwen3_config(size, num_layers=4), eos_token_ids=())
    outputs = run(Layers().capture("logits"), config=config, tp=tp, compile=tp == 1)
    params = reference_params(config)
    for output in outputs:
        exact = whole_logits(output, config, params, torch.float32)
        noise = (whole_logits(output, config, params, torch.bfloat16) - exact).square().mean().sqrt()
        ours = output.captured["logits"].to(exact.device)
        assert ours.shape == (len(output.token_ids), config.vocab_size // tp)
        assert (ours - exact[:, : ours.shape[1]]).square().mean().sqrt() <= 1.5 * noise
        chosen = exact.gather(1, torch.tensor(output.token_ids, device=exact.device)[:, None])[:, 0]
        worst = (exact.amax(1) - chosen).amax() / noise  # of two logits, whose errors are up to 1.5 each: 2.1 together
        assert worst <= 6, "a token lies further below the best one than rounding explains"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_equal_no_graphs_bit_for_bit(temperature: float) -> None:
    sampling = replace(GREEDY, temperature=temperature, seed=11, top_p=0.9)
    layers = Layers().capture("logits", "layers.2.residual_mid")
    captured, plain = (run(layers, sampling, graphs=graphs) for graphs in (True, False))
    for first, second in zip(captured, plain):
        assert first.token_ids == second.token_ids
        for name in ("logits", "layers.2.residual_mid"):
            assert torch.equal(first.captured[name], second.captured[name])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_steps_with_prompts_equal_uncaptured_ones_bit_for_bit(temperature: float) -> None:
    """The same lengths come again with other ids, alone and beside decoding rows: their steps are replayed."""
    sampling = replace(GREEDY, temperature=temperature, seed=3, top_k=40)

    def rounds(graphs: bool) -> list[Output]:
        options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "kv_blocks": 400, "prefix_caching": False}
        layers, results = Layers().capture("logits"), list[Output]()
        with Engine(
            config=CONFIG, random_weights=True, seed=5, layers=layers, device="cuda", graphs=graphs, **options
        ) as engine:
            for shift in range(4):
                batch = [[(i + shift) % 9000 for i in ids] for ids in prompts()]
                results += engine.generate(batch, sampling)
                results += engine.generate(batch[4:5], sampling)
            if graphs:
                assert engine.describe()["captured_tokens"] >= 1024
                mixed = [key for key in engine._runner._graphs._mixed if key.token_bucket < 1024]
                assert len(mixed) >= 2
            assert not engine.describe()["notes"]
        return results

    captured, plain = rounds(True), rounds(False)
    assert len(captured) == len(plain) == 4 * (len(prompts()) + 1)
    for first, second in zip(captured, plain):
        assert first.token_ids == second.token_ids
        assert torch.equal(first.captured["logits"], second.captured["logits"])


def test_nothing_is_compiled_and_little_allocated_after_the_start() -> None:
    """A swapped function compiles at the start; later steps neither compile nor hold a layer of the cache."""
    with small(layers=Layers(mlp=half_mlp)) as engine:
        compiled = engine.describe()["compiled"]
        assert compiled > 0
        engine.generate(prompts(), GREEDY)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.generate([ids[::-1] for ids in prompts()], GREEDY)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < engine._runner.cache[0].k_pskh.nbytes
        assert engine.describe()["compiled"] == compiled


def test_depth_does_not_change_tokens() -> None:
    results = [[o.token_ids for o in run(depth=depth)] for depth in (0, 1, 2)]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_swapped_mlp_and_an_edit_run_under_graphs(tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")

    def half(x_td: Tensor, params: Any, context: Any, /) -> Tensor:
        return swiglu(x_td, params, context) * 0.5

    def halve(x: Tensor, context: Any, /) -> Tensor:
        return x * 0.5

    options: dict[str, Any] = {"tp": tp, "compile": tp == 1}
    swapped = run(Layers(mlp=half).capture("logits"), **options)
    edited = run(Layers().edit("layers.*.mlp.out", halve).capture("logits"), **options)
    plain = run(Layers().capture("logits"), **options)
    for ours, other, default in zip(swapped, edited, plain):
        first = [o.captured["logits"][0] for o in (ours, other, default)]
        assert (first[0] - first[1]).abs().max() < 0.05 * first[0].abs().max()
        assert (first[0] - first[2]).abs().max() > 0.1 * first[0].abs().max()


def small(seed: int = 5, **options: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_model_len": 1024, "kv_blocks": 400, "max_num_batched_tokens": 256} | options
    return Engine(config=CONFIG, random_weights=True, seed=seed, device="cuda", **options)


def half_mlp(x_td: Tensor, params: Any, context: Any, /) -> Tensor:
    return swiglu(x_td, params, context) * 0.5


def test_new_layers_and_new_weights_take_effect_under_graphs() -> None:
    """As in an engine that was started with them: no graph, compiled unit or prefix of the old ones is used."""

    def fresh(seed: int = 5, **options: Any) -> list[list[int]]:
        with small(seed, **options) as engine:
            return [output.token_ids for output in engine.generate(prompts(), GREEDY)]

    usual, halved, others = fresh(), fresh(layers=Layers(mlp=half_mlp)), fresh(6)
    assert usual != halved
    assert usual != others
    with small() as engine:

        def now() -> list[list[int]]:
            assert engine.describe()["graphs"] > 0
            outputs = engine.generate(prompts(), GREEDY)
            assert {output.cached_tokens for output in outputs} == {0}
            return [output.token_ids for output in outputs]

        assert now() == usual
        engine.update_layers(Layers(mlp=half_mlp))
        assert now() == halved
        engine.update_layers(Layers())
        assert now() == usual
        engine.update_params(init_params(param_specs(CONFIG), seed=6, device="cuda", dtype=torch.bfloat16))
        assert now() == others
        engine.update_params(init_params(param_specs(CONFIG), seed=5, device="cuda", dtype=torch.bfloat16))
        assert now() == usual


def test_layers_that_fail_leave_the_old_ones_in_force() -> None:
    def broken(x_td: Tensor, params: Any, context: Any, /) -> Tensor:
        return swiglu(x_td, params, context)[:, :-1]

    with small(prefix_caching=False) as engine:
        before = [output.token_ids for output in engine.generate(prompts(), GREEDY)]
        with pytest.raises(Exception, match=r"mlp|shape|size"):
            engine.update_layers(Layers(mlp=broken))
        assert engine.layers == engine.model.layers == Layers()
        assert engine.describe()["graphs"] > 0
        assert [output.token_ids for output in engine.generate(prompts(), GREEDY)] == before


def test_captures_stay_with_their_requests_when_rows_come_and_go() -> None:
    """More requests than rows, of unlike lengths, at depth 2: each embedding captured is that of the token before."""
    layers = Layers().capture("embed")
    sampling = [replace(GREEDY, max_tokens=3 + 5 * (i % 7)) for i in range(40)]
    batch = [[100 + i, *range(1, 1 + i % 9)] for i in range(40)]
    with small(layers=layers, depth=2) as engine:
        embedding = engine.params.embed_tokens.weight.cpu()
        for output, params in zip(engine.generate(batch, sampling), sampling):
            assert len(output.token_ids) == params.max_tokens
            ids = torch.tensor([output.prompt_token_ids[-1], *output.token_ids[:-1]])
            assert torch.equal(output.captured["embed"], embedding[ids])


@pytest.mark.parametrize("tp", [1, 2])
def test_flash_attention_comes_with_the_first_long_step_and_changes_no_short_one(tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    bundle = fast_kernels(torch.device("cuda"), CONFIG.head_dim, torch.bfloat16, 128)
    if bundle.prefill != FLASH:
        pytest.skip(bundle.why[-1])
    long = [(7 * i) % 9000 for i in range(1500)]
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 2048, "kv_blocks": 400, "prefix_caching": False}

    def rounds(settled: bool) -> list[list[int]]:
        with Engine(config=CONFIG, random_weights=True, seed=5, device="cuda", tp=tp, **options) as engine:
            if settled:
                engine.settle()
            prefills, results = [engine.describe()["prefill"]], list[Output]()
            for batch in (prompts()[:3], [long], [long], prompts()[:3]):
                results += engine.generate(batch, GREEDY)
                prefills.append(engine.describe()["prefill"])
            coming, there = "triton; flash-attn-4", "flash-attn-4 for 512 prompt tokens"
            expected = [there] * 5 if settled else [coming] * 2 + [there] * 3
            assert all(text.startswith(start) for text, start in zip(prefills, expected, strict=True)), prefills
            assert not engine.describe()["notes"]
        ids = [output.token_ids for output in results]
        assert ids[:3] == ids[5:]
        assert ids[3] == ids[4]
        return ids

    assert rounds(False) == rounds(True)
