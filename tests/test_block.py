"""Blocks and their halves: own blocks out of the halves, out of settle alone, or out of nothing of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from funcllm.attention import init_cache, paged_attention
from funcllm.block import attention_half, heads_of, join, mlp_half, mlp_of, own, settle, settle_qkv, total
from funcllm.config import ModelConfig
from funcllm.group import Group, all_reduce
from funcllm.kernels.bundle import FAST, REFERENCE
from funcllm.qwen3 import logits
from funcllm.record import Layers
from funcllm.sites import site
from funcllm.types import Component, Context, LinearParams, Part, Spec, Stream
from tests.steps import Request, generate, on_ranks, params_for, random_ids, random_params, relative
from tests.test_record import model_by_hand, swiglu_by_hand
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=199)
IDS = random_ids(24)
REQUESTS = [Request(prompt=IDS[:n].tolist(), max_tokens=6) for n in (9, 4)]


def logits_of(layers: Layers, group: Group = Group(), config: ModelConfig = CONFIG) -> Tensor:
    return logits(random_params(config, layers, group), IDS, config=config, layers=layers, group=group)


def parallel_block(stream: Stream, params: Any, cache: Any, context: Context, /) -> tuple[Stream, Any]:
    """x + attention(norm1(x)) + mlp(norm2(x)): both read the same x."""
    x_td, qkv = settle_qkv(stream, params, context)
    normed_td = context.layer.norm(x_td, params.post_attention_layernorm, context)
    heads_tnh, cache = heads_of(qkv, params.self_attn, cache, context)
    o_proj = params.self_attn.o_proj
    update_td = context.layer.linear(heads_tnh.flatten(1), o_proj.weight, o_proj.bias, context)
    return Stream(x_td, update_td + mlp_of(normed_td, params.mlp, context)), cache


def settled_block(stream: Stream, params: Any, cache: Any, context: Context, /) -> tuple[Stream, Any]:
    """The default block, with everything settled at once and a site of its own."""
    stream, cache = attention_half(stream, params, cache, context)
    x_td, normed_td = settle(stream, params.post_attention_layernorm, "residual_mid", context)
    update_td = all_reduce(context.layer.mlp(normed_td, params.mlp, context), context.group)
    return Stream(site("mine", x_td + update_td, context)), cache


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_own_block_of_the_halves_pieces(tp: int) -> None:
    layers = Layers(block=parallel_block)
    expected = model_by_hand(random_params(CONFIG), parallel=True)
    assert all(relative(r, expected) < 1e-5 for r in on_ranks(lambda group: logits_of(layers, group), tp))
    assert relative(logits_of(Layers()), expected) > 0.05
    tokens = generate(CONFIG, params_for(CONFIG), REQUESTS, layers=layers, tp=tp, chunk=4, kernels=FAST)
    assert tokens == generate(CONFIG, params_for(CONFIG), REQUESTS, layers=layers, kernels=REFERENCE)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_may_settle_early_and_mark_its_own_sites(tp: int) -> None:
    layers = Layers().at(0, block=settled_block)
    expected = logits_of(Layers())
    assert all(relative(r, expected) < 1e-5 for r in on_ranks(lambda group: logits_of(layers, group), tp))
    doubled = layers.edit("layers.0.mine", lambda x, c: x * 2)
    by_site = logits_of(Layers().edit("layers.0.residual_post", lambda x, c: x * 2))
    assert all(relative(r, by_site) < 1e-5 for r in on_ranks(lambda group: logits_of(doubled, group), tp))
    assert relative(by_site, expected) > 0.01


def test_a_block_may_call_the_halves_twice_or_not_at_all() -> None:
    def looped(stream: Stream, params: Any, cache: Any, context: Context, /) -> tuple[Stream, Any]:
        stream, cache = attention_half(stream, params, cache, context)
        return mlp_half(mlp_half(stream, params, context), params, context), cache

    def skipped(stream: Stream, params: Any, cache: Any, context: Context, /) -> tuple[Stream, Any]:
        return stream, cache

    params = random_params(CONFIG)
    one_layer = replace(CONFIG, num_layers=1)
    for tp in (1, 2):
        got = on_ranks(lambda group: logits_of(Layers().at(1, block=skipped), group), tp)
        expected = logits(params._replace(layers=params.layers[:1]), IDS, config=one_layer)
        assert all(relative(r, expected) < 1e-5 for r in got)
    by_hand = model_by_hand(params, mlp=lambda x, p, i: swiglu_by_hand(x, p))
    twice = logits_of(Layers(block=looped))
    assert relative(twice, by_hand) > 0.05
    assert all(relative(r, twice) < 1e-5 for r in on_ranks(lambda group: logits_of(Layers(block=looped), group), 4))


class OwnParams(NamedTuple):
    dense: LinearParams  # [d, d], whole on every rank


def own_specs(config: ModelConfig, group: Group, place: str) -> OwnParams:
    size = config.hidden_size
    spec = Spec(parts=(Part(name=f"{place}.weight", shape=(size, size)),))
    return OwnParams(LinearParams(spec))


def own_block(stream: Stream, params: OwnParams, cache: tuple[()], context: Context, /) -> tuple[Stream, tuple[()]]:
    """A layer without attention and without a cache: x + tanh(x W)."""
    x_td = total(stream, context)
    return Stream(x_td + torch.tanh(x_td @ params.dense.weight.T)), cache


@pytest.mark.parametrize("tp", [1, 2])
def test_a_component_may_replace_a_whole_layer_parameters_and_cache(tp: int) -> None:
    component = Component(own_block, specs=own_specs, init_cache=lambda *args: ())
    layers = Layers().at(1, block=component)
    params = random_params(CONFIG, layers)
    assert isinstance(params.layers[1], OwnParams)

    def by_hand(x: Tensor) -> Tensor:
        return x + torch.tanh(x @ params.layers[1].dense.weight.T)

    plain = random_params(CONFIG)
    seen: list[Tensor] = []
    record = Layers().edit("layers.1.residual_pre", lambda x, c: seen.append(x) or x)
    logits(plain, IDS, config=CONFIG, layers=record)
    x = by_hand(seen[0])
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * plain.norm.weight
    expected = normed @ plain.lm_head.weight.T
    assert all(relative(r, expected) < 1e-5 for r in on_ranks(lambda group: logits_of(layers, group), tp))
    tokens = generate(CONFIG, params_for(CONFIG), REQUESTS, layers=layers, tp=tp, chunk=3)
    ids = IDS[:4].tolist()
    for _ in range(6):
        ids.append(int(logits(params, torch.tensor(ids), config=CONFIG, layers=layers)[-1].argmax()))
    assert tokens[1] == ids[4:]


def test_settle_reduces_adds_norms_and_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, updates = torch.randn(5, 64, generator=generator), torch.randn(2, 5, 64, generator=generator)
    weight = torch.rand(64, generator=generator)
    params = type("Norm", (), {"weight": weight})

    def run(kernels: Any, dtype: torch.dtype) -> Any:
        def on_rank(group: Group) -> Any:
            inputs: Any = ()
            context = Context(config=CONFIG, group=group, kernels=kernels, layer=Layers(), inputs=inputs)
            with torch.no_grad():
                return settle(Stream(x.to(dtype), updates[group.rank].to(dtype)), params, "residual_mid", context)

        return on_rank

    for kernels in (REFERENCE, FAST):
        for sum_td, normed_td in on_ranks(run(kernels, torch.float32), 2):
            expected = x + updates.sum(0)
            torch.testing.assert_close(sum_td, expected)
            rms = (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            torch.testing.assert_close(normed_td, expected / rms * weight)
        for sum_td, normed_td in on_ranks(run(kernels, torch.bfloat16), 2):
            update = (updates[0].bfloat16() + updates[1].bfloat16()).float()
            rounded = (x.bfloat16().float() + update).bfloat16()
            assert torch.equal(sum_td, rounded)
            wide = rounded.float()
            normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
            assert torch.equal(normed_td, weight.bfloat16() * normed)


def test_join_keeps_partial_sums_until_someone_looks() -> None:
    inputs: Any = type("Inputs", (), {"capture_tokens_k": ()})
    x, update = torch.ones(2, 64), torch.full((2, 64), 3.0)

    def context(layer: Layers, group: Group) -> Context:
        return Context(config=CONFIG, group=group, kernels=REFERENCE, layer=layer, inputs=inputs)

    def run(group: Group) -> tuple[Stream, Stream, Stream]:
        watched = Layers(captures=("mlp.out",))
        return (
            join(x, update, "mlp", False, context(Layers(), group)),
            join(x, update, "mlp", False, context(watched, group)),
            join(x, update, "mlp", True, context(Layers(), group)),
        )

    for partial, seen, whole in on_ranks(run, 2):
        assert torch.equal(partial.update_td, update)
        assert seen.update_td == () == whole.update_td
        assert torch.equal(seen.x_td, torch.full((2, 64), 7.0))
        assert torch.equal(whole.x_td, torch.full((2, 64), 4.0))


def test_own_parameters_stand_before_those_of_the_place() -> None:
    assert own((), "default") == "default"
    assert own({"a": 1}, "default") == {"a": 1}
    assert own(LinearParams(()), "default") == LinearParams(())


def test_default_attention_over_a_cache_of_another_type_takes_the_plain_path() -> None:
    class Tagged(NamedTuple):
        k_pskh: Tensor
        v_pskh: Tensor

    def init(*args: Any) -> Tagged:
        return Tagged(*init_cache(*args))

    def attention(q: Tensor, k: Tensor, v: Tensor, cache: Any, params: Any, context: Context, /) -> Any:
        heads, cache = paged_attention(q, k, v, cache, params, context)
        return heads, Tagged(*cache)

    layers = Layers(attention=Component(attention, init_cache=init))
    assert generate(CONFIG, params_for(CONFIG), REQUESTS, layers=layers) == generate(
        CONFIG, params_for(CONFIG), REQUESTS
    )
