"""Gradients through the pure model: those of transformers at tp 1, and the same at every tensor-parallel size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from funcllm import layers as defaults
from funcllm.config import ModelConfig
from funcllm.grads import sync_grads
from funcllm.group import SINGLE, Group, run_threads
from funcllm.kernels.bundle import FAST
from funcllm.qwen3 import _frequencies, logits, param_specs, qwen3, rope_frequencies, whole_inputs
from funcllm.record import Layers
from funcllm.specs import named
from funcllm.types import Component, Part, Spec
from tests.steps import Pair, random_ids, random_params, relative
from tests.tiny import tiny_config

IDS = random_ids(17)


def loss(
    params: Any, config: ModelConfig, group: Group = SINGLE, layers: Layers = Layers(), ids: Tensor = IDS
) -> Tensor:
    values = logits(params, ids[:-1], config=config, layers=layers, group=group)
    return F.cross_entropy(values, ids[1:])


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {"vocab_size": 199, "attention_bias": True}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"vocab_size": 257, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 199}),
    "llama": ("LlamaForCausalLM", {"vocab_size": 199, "attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_transformers(case: str) -> None:
    architecture, overrides = CASES[case]
    pair = Pair(architecture, **overrides)
    pair.theirs.zero_grad()
    F.cross_entropy(pair.theirs(IDS[None, :-1]).logits[0], IDS[1:]).backward()
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    grads = torch.func.grad(loss)(pair.params(), pair.config)
    ours = named(grads, param_specs(pair.config))
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        # A shift of all keys changes no softmax: the gradient of a key bias is 0 up to rounding.
        assert relative(ours[name], expected) < 1e-4 or expected.abs().max() < 1e-6, name
    params = tree_map(lambda x: x.requires_grad_(), pair.params())
    loss(params, pair.config).backward()
    for ours_leaf, parameter in zip(tree_flatten(grads)[0], tree_flatten(params)[0]):
        torch.testing.assert_close(parameter.grad, ours_leaf)


SHARDED = {
    "default": {"vocab_size": 199, "o_bias": True, "qkv_bias": True, "mlp_bias": True},
    "tied": {"vocab_size": 257, "tie_word_embeddings": True},
    "one KV head": {"vocab_size": 199, "num_kv_heads": 1, "qkv_bias": True},
}


def full_grads(config: ModelConfig, tp: int, layers: Layers = Layers()) -> dict[str, Tensor]:
    """The synced gradients by checkpoint name, put together from all ranks; replicas must agree."""

    def run(group: Group) -> list[tuple[str, int | None, int, Tensor]]:
        specs = param_specs(config, layers, group)
        params = random_params(config, layers, group)
        grads = sync_grads(torch.func.grad(loss)(params, config, group, layers), specs, group)
        parts = {part.name: part for spec in _specs(specs) for part in spec.parts}
        return [(n, parts[n].axis, parts[n].shards, g) for n, g in named(grads, specs, group).items()]

    ranks = [run(SINGLE)] if tp == 1 else run_threads(run, tp)
    whole: dict[str, Tensor] = {}
    for name in {item[0]: None for rank in ranks for item in rank}:
        held = [item for rank in ranks for item in rank if item[0] == name]
        _, axis, shards, _ = held[0]
        copies = len(held) // shards
        pieces = [item[3] for item in held]
        for index, piece in enumerate(pieces):
            assert relative(piece, pieces[index // copies * copies]) == 0, name
        whole[name] = torch.cat(pieces[::copies], axis) if axis is not None else pieces[0]
    return whole


def _specs(specs: Any) -> list[Spec]:
    return tree_flatten(specs, is_leaf=lambda x: isinstance(x, Spec))[0]


@pytest.mark.parametrize("case", SHARDED)
@pytest.mark.parametrize("tp", [2, 4])
def test_synced_gradients_are_those_of_one_rank(case: str, tp: int) -> None:
    config = tiny_config(**SHARDED[case])
    expected, got = full_grads(config, 1), full_grads(config, tp)
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        error = (got[name] - value).abs().max()
        assert error <= 1e-5 * value.abs().max() + 1e-7, (name, error)
        assert value.abs().max() > 1e-4 or name.endswith("k_proj.bias"), name


def test_without_sync_the_gradients_are_not_those_of_one_rank() -> None:
    config = tiny_config(vocab_size=199)

    def run(group: Group) -> Tensor:
        return torch.func.grad(loss)(random_params(config, group=group), config, group).norm.weight

    [expected] = [torch.func.grad(loss)(random_params(config), config).norm.weight]
    assert relative(run_threads(run, 2)[0], expected) > 0.1


def test_own_parameters_are_synced_by_their_specs() -> None:
    """A component's whole parameter, used in a partial sum, and its source of gradient on every rank."""

    def specs(config: ModelConfig, group: Group, place: str) -> dict[str, Any]:
        layer = int(place.split(".")[1])
        part = Part(name=f"{place}.gate", shape=(config.hidden_size,))
        gate = Spec(parts=(part,), init=lambda shape, generator: torch.randn(shape, generator=generator))
        return {"usual": param_specs(config, group=group).layers[layer].mlp, "gate": gate}

    def mlp(x: Tensor, params: Any, context: Any, /) -> Tensor:
        return params["gate"] * defaults.swiglu(x, params["usual"], context)

    layers = Layers().at(1, mlp=Component(mlp, specs=specs))
    config = tiny_config(vocab_size=199)
    expected, got = full_grads(config, 1, layers), full_grads(config, 2, layers)
    assert expected["layers.1.mlp.gate"].abs().max() > 1e-4
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-7, name


def test_gradients_of_another_tree_are_refused() -> None:
    config = tiny_config()
    group = Group(0, 2, object())
    specs = param_specs(config, group=group)
    with pytest.raises(ValueError, match="1 gradients for 19 parameters"):
        sync_grads((torch.ones(1),), specs, group)


def test_a_single_rank_needs_no_sync() -> None:
    grads = (torch.ones(2),)
    assert sync_grads(grads, (), SINGLE) is grads


# --- other transforms ------------------------------------------------------------------------------------------------


def test_forward_derivatives_agree_with_finite_differences_and_with_gradients() -> None:
    config = tiny_config(vocab_size=199)
    params = random_params(config)
    direction = tree_map(lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())), params)
    value, slope = torch.func.jvp(lambda p: loss(p, config), (params,), (direction,))
    assert float(value) == pytest.approx(float(loss(params, config)), rel=1e-5)
    grads = torch.func.grad(loss)(params, config)
    inner = sum(float((g * d).sum()) for g, d in zip(tree_flatten(grads)[0], tree_flatten(direction)[0]))
    assert float(slope) == pytest.approx(inner, rel=1e-3)


def test_vmap_over_sequences_and_over_stacked_parameters() -> None:
    config = tiny_config(vocab_size=199)
    params = random_params(config)
    batch = torch.stack([random_ids(9, seed=s) for s in range(3)])
    got = torch.func.vmap(lambda ids: logits(params, ids, config=config))(batch)
    for ours, ids in zip(got, batch):
        assert relative(ours, logits(params, ids, config=config)) < 1e-5
    others = [random_params(config, seed=s) for s in (1, 2)]
    stacked = tree_map(lambda *leaves: torch.stack(leaves), *others)
    got = torch.func.vmap(lambda p: logits(p, IDS, config=config))(stacked)
    for ours, one in zip(got, others):
        assert relative(ours, logits(one, IDS, config=config)) < 1e-5


def test_per_example_gradients() -> None:
    config = tiny_config(vocab_size=199)
    params = random_params(config)
    batch = torch.stack([random_ids(6, seed=s) for s in range(3)])
    got = torch.func.vmap(torch.func.grad(lambda p, ids: loss(p, config, ids=ids)), in_dims=(None, 0))(params, batch)
    for index, ids in enumerate(batch):
        expected = torch.func.grad(loss)(params, config, ids=ids)
        assert relative(got.layers[0].self_attn.q_norm.weight[index], expected.layers[0].self_attn.q_norm.weight) < 1e-4


def test_gradients_with_respect_to_a_steering_vector() -> None:
    config = tiny_config(vocab_size=199)

    def edit(x: Tensor, context: Any, /) -> Tensor:
        return x + context.inputs.extras["steer"][context.inputs.rows_t.long()]

    layers = Layers().extra("steer", shape=(64,)).edit("layers.1.residual_pre", edit)
    params = random_params(config)

    def of(vector: Tensor) -> Tensor:
        values = logits(params, IDS[:-1], config=config, layers=layers, extras={"steer": vector})
        return F.cross_entropy(values, IDS[1:])

    gradient = torch.func.grad(of)(torch.zeros(64))
    step = 0.01 * gradient / gradient.norm()
    measured = (of(step).double() - of(-step).double()) / 0.02
    assert float(measured) == pytest.approx(float(gradient.norm()), rel=0.02)


def test_cached_tables_are_plain_tensors_even_when_made_inside_a_transform() -> None:
    config = tiny_config(vocab_size=199)
    params = random_params(config)
    expected = logits(params, IDS, config=config)
    _frequencies.cache_clear()
    torch.func.grad(loss)(params, config)
    table = rope_frequencies(config, torch.device("cpu"))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(table)
    assert torch.equal(logits(params, IDS, config=config), expected)


def test_serving_kernels_refuse_to_be_differentiated_while_logits_may_be() -> None:
    config = tiny_config(vocab_size=199)
    model = qwen3(config, kernels=FAST)
    params = random_params(config)

    def served(params: Any) -> Tensor:
        cache = model.init_cache(2, 17, 2, "cpu", torch.float32)
        inputs = whole_inputs(IDS, Layers(), {})
        stream, _, _ = model.hidden(params, cache, inputs)
        return model.head(params, stream, inputs)[0].sum()

    for transform in (torch.func.grad(served), lambda p: torch.func.jvp(served, (p,), (p,))):
        with pytest.raises(RuntimeError, match="kernels=REFERENCE"):
            transform(params)
    with pytest.raises(RuntimeError, match="kernels=REFERENCE"):
        served(tree_map(lambda x: x.clone().requires_grad_(), params))
    value = torch.func.grad(lambda p: model.logits(p, IDS).square().mean())(params)
    assert value.norm.weight.abs().max() > 0
