"""The pure model beside transformers': logits, greedy tokens, paged steps, at every tensor-parallel size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from funcllm.config import ModelConfig
from funcllm.group import SINGLE, Group
from funcllm.kernels.bundle import FAST, REFERENCE
from funcllm.qwen3 import logits, param_specs, qwen3
from funcllm.specs import spec_leaves
from tests.steps import Driver, Pair, Request, generate, on_ranks, random_ids, random_params, relative
from tests.tiny import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {"vocab_size": 199}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"vocab_size": 257, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"vocab_size": 199, "attention_bias": True}),
    "qwen3-odd": (
        "Qwen3ForCausalLM",
        {"vocab_size": 257, "hidden_size": 44, "intermediate_size": 52, "head_dim": 10, "num_hidden_layers": 3},
    ),
    "qwen3-one-kv-head": ("Qwen3ForCausalLM", {"vocab_size": 199, "num_key_value_heads": 1}),
    "qwen3-yarn": ("Qwen3ForCausalLM", {"vocab_size": 199, "rope_parameters": YARN}),
    "qwen3-linear": ("Qwen3ForCausalLM", {"vocab_size": 199, "rope_parameters": LINEAR}),
    "qwen3-sliding": ("Qwen3ForCausalLM", {"vocab_size": 199, **SLIDING}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 199}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"vocab_size": 257, "tie_word_embeddings": True}),
    "llama": ("LlamaForCausalLM", {"vocab_size": 257}),
    "llama-biases": ("LlamaForCausalLM", {"vocab_size": 199, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaForCausalLM", {"vocab_size": 199, "rope_parameters": LLAMA3}),
}
cases = pytest.mark.parametrize("case", CASES)


def pair_of(case: str) -> Pair:
    architecture, overrides = CASES[case]
    return Pair(architecture, **overrides)


@cases
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_agree_with_transformers(case: str, tp: int) -> None:
    pair = pair_of(case)
    ids = random_ids(70)
    theirs = pair.their_logits(ids)

    def ours(group: Group) -> torch.Tensor:
        with torch.no_grad():
            return logits(pair.params(group), ids, config=pair.config, group=group)

    for result in on_ranks(ours, tp):
        assert result.dtype == torch.float32
        assert result.shape == (70, pair.config.vocab_size)
        assert relative(result, theirs) < 1e-5


def test_the_cases_really_differ() -> None:
    """Each family's feature changes the logits, so that parity above says something about it."""
    ids = random_ids(70)
    for case, off in {
        "qwen3": {"qk_norm": False},
        "qwen3-yarn": {"rope": tiny_config().rope},
        "qwen3-linear": {"rope": tiny_config().rope},
        "llama3-rope": {"rope": tiny_config().rope},
        "qwen3-sliding": {"sliding_window": 0, "sliding_layers": ()},
    }.items():
        pair = pair_of(case)
        without = logits(pair.params(), ids, config=replace(pair.config, **off))
        assert relative(without, pair.their_logits(ids)) > 0.05, case
    for case in ("qwen2", "llama-biases"):
        pair = pair_of(case)
        leaves, structure = torch.utils._pytree.tree_flatten(pair.params())
        specs = spec_leaves(param_specs(pair.config))
        unbiased = [x * 0 if s.parts[0].name.endswith("bias") else x for x, s in zip(leaves, specs)]
        without = logits(torch.utils._pytree.tree_unflatten(unbiased, structure), ids, config=pair.config)
        assert relative(without, pair.their_logits(ids)) > 0.05, case


@pytest.mark.parametrize(
    ("case", "tp"),
    [("qwen3", 1), ("qwen3-tied", 2), ("qwen2", 1), ("qwen2-tied", 4), ("llama-biases", 1), ("llama", 2)],
)
def test_128_greedy_tokens_are_identical(case: str, tp: int) -> None:
    pair = pair_of(case)
    prompt = random_ids(9, seed=3)
    theirs = pair.their_greedy(prompt, 128)
    assert len(set(theirs)) > 10
    [ours] = generate(pair.config, pair.params, [Request(prompt=prompt.tolist(), max_tokens=128)], tp=tp, block_size=16)
    assert ours == theirs


@pytest.mark.parametrize("chunk", range(1, 14))
def test_any_chunking_gives_the_same_tokens_and_logits(chunk: int) -> None:
    pair = pair_of("qwen3")
    prompt = random_ids(13, seed=5)
    expected = pair.their_greedy(prompt, 6)
    request = Request(prompt=prompt.tolist(), max_tokens=6)
    driver = Driver(qwen3(pair.config, kernels=FAST), pair.params(), block_size=1 + chunk % 4, capacity=20, num_rows=2)
    assert driver.run([request], chunk=chunk, padding=chunk % 3) == [expected]
    assert generate(pair.config, pair.params, [request], chunk=chunk, kernels=REFERENCE) == [expected]


def test_the_logits_of_every_step_are_those_of_the_whole_sequence() -> None:
    pair = pair_of("qwen3-biases")
    params = pair.params()
    model = qwen3(pair.config, kernels=FAST)
    prompts = [random_ids(n, seed=n).tolist() for n in (13, 2, 7)]
    driver = Driver(model, params, block_size=3, capacity=24)
    driver.admit([3, 1, 5], [Request(prompt=prompt) for prompt in prompts])
    whole = {row: logits(params, torch.tensor(p), config=pair.config) for row, p in zip([3, 1, 5], prompts)}

    def step_logits(decode: list[int], chunks: list[tuple[int, int]]) -> dict[int, torch.Tensor]:
        driver.step(decode, chunks, padding=2)
        with torch.no_grad():
            stream, _, _ = model.hidden(params, driver.cache, driver.inputs)
            values, _ = model.head(params, stream, driver.inputs)
        return dict(zip([*decode, *(row for row, _ in chunks)], values))

    first = step_logits([], [(3, 4), (1, 2), (5, 1)])
    assert relative(first[3], whole[3][3]) < 1e-5
    assert relative(first[1], whole[1][1]) < 1e-5
    assert relative(first[5], whole[5][0]) < 1e-5
    second = step_logits([1], [(5, 6), (3, 9)])
    assert relative(second[3], whole[3][12]) < 1e-5
    assert relative(second[5], whole[5][6]) < 1e-5
    known = driver.state.token_ids_re[1, :3].long()
    assert relative(second[1], logits(params, known, config=pair.config)[2]) < 1e-5


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kernels", [REFERENCE, FAST], ids=["reference", "fast"])
def test_a_batch_of_unequal_requests_generates_as_each_alone(tp: int, kernels: Any) -> None:
    pair = pair_of("qwen3-tied")
    lengths, counts = (3, 11, 1, 6), (7, 2, 9, 5)
    requests = [Request(prompt=random_ids(n, seed=n).tolist(), max_tokens=m) for n, m in zip(lengths, counts)]
    expected = [pair.their_greedy(torch.tensor(r.prompt), r.max_tokens) for r in requests]
    got = generate(pair.config, pair.params, requests, tp=tp, kernels=kernels, chunk=4, block_size=2, padding=3)
    assert got == expected


def test_sliding_window_layers_generate_as_transformers() -> None:
    pair = pair_of("qwen3-sliding")
    prompt = random_ids(20, seed=8)
    [ours] = generate(pair.config, pair.params, [Request(prompt=prompt.tolist(), max_tokens=20)], chunk=6)
    assert ours == pair.their_greedy(prompt, 20)


def test_a_window_without_listed_layers_means_the_same_everywhere() -> None:
    config = tiny_config(sliding_window=7, sliding_layers=())
    params, ids = random_params(config), random_ids(30)
    windowed = all(config.window(i) for i in range(config.num_layers))
    everywhere = logits(params, ids, config=replace(config, sliding_layers=(0, 1)))
    nowhere = logits(params, ids, config=replace(config, sliding_window=0))
    assert relative(logits(params, ids, config=config), everywhere if windowed else nowhere) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fast_kernels_on_the_cpu_equal_the_reference(dtype: torch.dtype) -> None:
    config = tiny_config(vocab_size=199, o_bias=True, qkv_bias=True)
    params = torch.utils._pytree.tree_map(lambda x: x.to(dtype), random_params(config))
    drivers = [Driver(qwen3(config, kernels=kernels), params) for kernels in (REFERENCE, FAST)]
    values = []
    for driver in drivers:
        driver.admit([1, 2], [Request(prompt=range(9)), Request(prompt=range(50, 54))])
        driver.step([], [(1, 9), (2, 3)])
        with torch.no_grad():
            inputs = driver.inputs
            stream, _, _ = driver.model.hidden(params, driver.cache, inputs)
            values.append(driver.model.head(params, stream, inputs)[0])
    assert values[0].dtype == torch.float32
    assert relative(values[1], values[0]) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_the_cache_is_donated_only_by_kernels_that_write_in_place() -> None:
    config = tiny_config()
    params = random_params(config)
    for kernels in (REFERENCE, FAST):
        driver = Driver(qwen3(config, kernels=kernels), params)
        before = driver.cache[0].k_pskh
        driver.admit([1], [Request(prompt=[1, 2, 3])])
        driver.step([], [(1, 3)])
        assert (driver.cache[0].k_pskh is before) == kernels.in_place
        assert bool(before.any()) == kernels.in_place
        assert int((driver.cache[0].k_pskh.abs().sum((2, 3)) > 0).sum()) == 3


def test_unwritten_slots_of_the_cache_are_never_used() -> None:
    """A pool full of NaN gives the same logits: masked slots are not even multiplied by 0."""
    pair = pair_of("qwen3")
    request = Request(prompt=random_ids(7, seed=2).tolist(), max_tokens=6)
    for kernels in (REFERENCE, FAST):
        driver = Driver(qwen3(pair.config, kernels=kernels), pair.params(), block_size=4, capacity=16, num_rows=3)
        driver.cache = torch.utils._pytree.tree_map(lambda x: x.fill_(float("nan")), driver.cache)
        assert (
            driver.run([request, request], chunk=3, padding=2)
            == [pair.their_greedy(torch.tensor(request.prompt), 6)] * 2
        )


def test_compute_is_in_the_parameters_dtype_and_logits_in_fp32() -> None:
    config = tiny_config()
    params = torch.utils._pytree.tree_map(lambda x: x.bfloat16(), random_params(config))
    exact = logits(random_params(config), random_ids(20), config=config)
    rounded = logits(params, random_ids(20), config=config)
    assert rounded.dtype == torch.float32
    assert 1e-4 < relative(rounded, exact) < 0.1
    assert not torch.equal(rounded, rounded.bfloat16().float())


@pytest.mark.parametrize("tp", [3, 8])
def test_a_tp_size_that_does_not_divide_is_refused_with_the_numbers(tp: int) -> None:
    with pytest.raises(ValueError, match=f"num_heads=4 does not divide by tp={tp}.*use tp 1, 2 or 4"):
        qwen3(tiny_config(), group=Group(0, tp))


def test_only_a_whole_sequence_of_ids_has_logits() -> None:
    config = tiny_config()
    params = random_params(config)
    for wrong in (
        torch.tensor(1),
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(0, dtype=torch.long),
        torch.zeros(3),
    ):
        with pytest.raises(ValueError, match="token_ids_t"):
            logits(params, wrong, config=config)


def test_model_logits_are_the_functions_and_ignore_int32_or_int64() -> None:
    config = tiny_config(tie_word_embeddings=True)
    params, ids = random_params(config), random_ids(11)
    model = qwen3(config, kernels=FAST)
    expected = logits(params, ids, config=config)
    with torch.no_grad():
        assert torch.equal(model.logits(params, ids), expected)
        assert torch.equal(model.logits(params, ids.int()), expected)


def test_padded_vocabulary_columns_are_minus_infinity_and_never_returned() -> None:
    config = tiny_config(vocab_size=199)

    def last_rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        params = random_params(config, group=group)
        if group.rank == 3:
            params.lm_head.weight[-1] = 100.0
        model = qwen3(config, group=group)
        driver = Driver(model, params)
        driver.admit([1], [Request(prompt=[1, 2, 3])])
        driver.step([], [(1, 3)])
        with torch.no_grad():
            stream, _, _ = model.hidden(params, driver.cache, driver.inputs)
            return model.head(params, stream, driver.inputs)[0], model.logits(params, torch.tensor([1, 2, 3]))

    shards = on_ranks(last_rank, 4)
    assert [shard.shape for shard, _ in shards] == [(1, 50)] * 4
    assert shards[3][0][0, 49] == float("-inf")
    assert all(torch.isfinite(shard[:, :49]).all() for shard, _ in shards)
    expected = logits(random_params(config), torch.tensor([1, 2, 3]), config=config)
    assert all(relative(whole, expected) < 1e-5 for _, whole in shards)


def test_a_vocabulary_smaller_than_its_shards_leaves_ranks_without_ids() -> None:
    config = tiny_config(vocab_size=9, num_heads=8, num_kv_heads=8, hidden_size=32, head_dim=4, intermediate_size=16)

    def params_of(group: Group, layers: Any) -> Any:
        return random_params(config, layers, group)

    request = Request(prompt=[1, 2, 8], max_tokens=4)
    expected = generate(config, params_of, [request])
    for kernels in (REFERENCE, FAST):
        assert generate(config, params_of, [request], tp=8, kernels=kernels) == expected


def config_hash(config: ModelConfig) -> int:
    return hash(config)


def test_configs_and_models_are_static_facts() -> None:
    config = tiny_config()
    assert config_hash(config) == config_hash(tiny_config())
    assert qwen3(config).group is SINGLE
