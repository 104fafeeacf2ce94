"""The record of functions: swaps equal the same written by hand, refusals name both sides, keys go by value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcllm import layers as defaults
from funcllm.attention import attend, paged_attention, write_kv
from funcllm.config import ModelConfig
from funcllm.group import Group, all_reduce
from funcllm.kernels.bundle import FAST
from funcllm.qwen3 import logits, param_specs, qwen3
from funcllm.record import Layers, check_arity, value_key
from funcllm.specs import init_params, specs_of
from funcllm.types import (
    Component,
    Context,
    EmbedParams,
    Extra,
    LayerCache,
    LinearParams,
    MLPParams,
    NormParams,
    Part,
    Spec,
)
from tests.steps import Driver, Request, generate, on_ranks, params_for, random_ids, random_params, relative
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=199)
IDS = random_ids(24)


def swapped_logits(layers: Layers, config: ModelConfig = CONFIG, tp: int = 1) -> Tensor:
    def run(group: Group) -> Tensor:
        with torch.no_grad():
            return logits(random_params(config, layers, group), IDS, config=config, layers=layers, group=group)

    results = on_ranks(run, tp)
    assert all(relative(result, results[0]) == 0 for result in results)
    return results[0]


# --- a model by hand, against which swaps are compared ---------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def swiglu_by_hand(x: Tensor, params: Any) -> Tensor:
    gate, up = (x @ params.gate_up_proj.weight.T).chunk(2, -1)
    return (F.silu(gate) * up) @ params.down_proj.weight.T


def rotate_by_hand(x_tnh: Tensor) -> Tensor:
    half = x_tnh.shape[-1] // 2
    angle = torch.arange(x_tnh.shape[0])[:, None] / 10_000.0 ** (torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.complex(x_tnh[..., :half], x_tnh[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def causal(scores_ntt: Tensor, layer: int) -> Tensor:
    later = torch.ones(scores_ntt.shape[-2:]).triu(1).bool()
    return scores_ntt.masked_fill(later, float("-inf")).softmax(-1)


def model_by_hand(
    params: Any,
    *,
    mlp: Callable[[Tensor, Any, int], Tensor] = lambda x, p, i: swiglu_by_hand(x, p),
    norm: Callable[[Tensor, Tensor], Tensor] = rms,
    qk: Callable[[Tensor, Tensor], Tensor] = rms,
    rotate: Callable[[Tensor], Tensor] = rotate_by_hand,
    weights: Callable[[Tensor, int], Tensor] = causal,
    parallel: bool = False,
    scale_of_embedding: float = 1.0,
) -> Tensor:
    """Logits of IDS by a Qwen3 of plain matrix products, with the parts that the swaps replace as arguments."""
    x = params.embed_tokens.weight[IDS] * scale_of_embedding
    for i, layer in enumerate(params.layers):
        attn = layer.self_attn
        normed = norm(x, layer.input_layernorm.weight)
        heads = (normed @ attn.qkv_proj.weight.T).unflatten(-1, (8, 16))
        q, k, v = heads[:, :4], heads[:, 4:6].repeat_interleave(2, 1), heads[:, 6:].repeat_interleave(2, 1)
        q, k = rotate(qk(q, attn.q_norm.weight)), rotate(qk(k, attn.k_norm.weight))
        weights_nts = weights(torch.einsum("tnh,snh->nts", q, k) / 4, i)
        update = torch.einsum("nts,snh->tnh", weights_nts, v).flatten(1) @ attn.o_proj.weight.T
        if parallel:
            x = x + update + mlp(norm(x, layer.post_attention_layernorm.weight), layer.mlp, i)
        else:
            x = x + update
            x = x + mlp(norm(x, layer.post_attention_layernorm.weight), layer.mlp, i)
    return norm(x, params.norm.weight) @ params.lm_head.weight.T


def test_the_model_by_hand_is_the_default_model() -> None:
    assert relative(swapped_logits(Layers()), model_by_hand(random_params(CONFIG))) < 1e-5


# --- swaps -----------------------------------------------------------------------------------------------------------


def relu2(x_td: Tensor, params: MLPParams, context: Context, /) -> Tensor:
    linear = context.layer.linear
    gate, up = linear(x_td, params.gate_up_proj.weight, (), context).chunk(2, -1)
    return linear(F.relu(gate).square() * up, params.down_proj.weight, (), context)


def relu2_by_hand(x: Tensor, params: Any, layer: int = 0) -> Tensor:
    gate, up = (x @ params.gate_up_proj.weight.T).chunk(2, -1)
    return (F.relu(gate).square() * up) @ params.down_proj.weight.T


@pytest.mark.parametrize("tp", [1, 2])
def test_a_swapped_mlp_equals_the_same_by_hand(tp: int) -> None:
    expected = model_by_hand(random_params(CONFIG), mlp=relu2_by_hand)
    assert relative(swapped_logits(Layers(mlp=relu2), tp=tp), expected) < 1e-5
    assert relative(swapped_logits(Layers()), expected) > 0.05


@pytest.mark.parametrize("tp", [1, 2])
def test_a_function_may_be_swapped_in_some_layers_only(tp: int) -> None:
    config = replace(CONFIG, num_layers=3)

    def mixed(x: Tensor, params: Any, layer: int) -> Tensor:
        return relu2_by_hand(x, params) if layer == 1 else swiglu_by_hand(x, params)

    expected = model_by_hand(random_params(config), mlp=mixed)
    assert relative(swapped_logits(Layers().at([1], mlp=relu2), config, tp), expected) < 1e-5
    assert (
        relative(swapped_logits(Layers(mlp=relu2).at(range(0, 3, 2), mlp=defaults.swiglu), config, tp), expected) < 1e-5
    )


def layer_norm(x: Tensor, params: NormParams, context: Context, /) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params.weight)


def test_a_swapped_norm_stands_for_all_norms_of_the_stream() -> None:
    expected = model_by_hand(random_params(CONFIG), norm=lambda x, w: F.layer_norm(x, x.shape[-1:], w))
    assert relative(swapped_logits(Layers(norm=layer_norm), tp=2), expected) < 1e-5


def test_swapped_qk_norm_and_rope() -> None:
    def unit(q_tnh: Tensor, k_tkh: Tensor, params: Any, context: Context, /) -> tuple[Tensor, Tensor]:
        return F.normalize(q_tnh, dim=-1), F.normalize(k_tkh, dim=-1)

    def none(q_tnh: Tensor, k_tkh: Tensor, params: Any, context: Context, /) -> tuple[Tensor, Tensor]:
        return q_tnh, k_tkh

    params = random_params(CONFIG)
    by_hand = model_by_hand(params, qk=lambda x, _: F.normalize(x, dim=-1))
    assert relative(swapped_logits(Layers(qk_norm=unit), tp=2), by_hand) < 1e-5
    assert relative(swapped_logits(Layers(rope=none), tp=2), model_by_hand(params, rotate=lambda x: x)) < 1e-5


@dataclass(frozen=True)
class Decayed:
    """Attention with a window, as the taught form of hyper-parameters: a frozen dataclass with __call__."""

    window: int

    def __call__(
        self, q_tnh: Tensor, k_tkh: Tensor, v_tkh: Tensor, cache: LayerCache, params: Any, context: Context, /
    ) -> tuple[Tensor, LayerCache]:
        cache = write_kv(k_tkh, v_tkh, cache, context)
        return attend(q_tnh, cache, context, window=self.window), cache


def windowed(scores_ntt: Tensor, layer: int) -> Tensor:
    size = scores_ntt.shape[-1]
    seen = torch.ones(size, size).tril() - torch.ones(size, size).tril(-5)
    return scores_ntt.masked_fill(seen == 0, float("-inf")).softmax(-1)


def test_a_swapped_attention_is_written_once_for_prompts_and_decoding() -> None:
    layers = Layers(attention=Decayed(5))
    params = random_params(CONFIG)
    assert relative(swapped_logits(layers, tp=2), model_by_hand(params, weights=windowed)) < 1e-5
    request = Request(prompt=IDS[:9].tolist(), max_tokens=15)
    [tokens] = generate(CONFIG, params_for(CONFIG), [request], layers=layers, chunk=4)
    greedy = IDS[:9].tolist()
    for _ in range(15):
        greedy.append(int(logits(params, torch.tensor(greedy), config=CONFIG, layers=layers)[-1].argmax()))
    assert tokens == greedy[9:]


class LowRank(NamedTuple):
    weight: Tensor
    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]


def lora(x: Tensor, weight: Any, bias: Any, context: Context, /) -> Tensor:
    if not isinstance(weight, LowRank):
        return defaults.linear(x, weight, bias, context)
    return defaults.linear(x, weight.weight, bias, context) + (x @ weight.down.T) @ weight.up.T


@pytest.mark.parametrize("tp", [1, 2])
def test_a_weight_may_be_any_pytree_that_its_linear_knows(tp: int) -> None:
    """Low-rank additions to the row-parallel down_proj: equal to the merged weight, also over shards."""
    generator = torch.Generator().manual_seed(9)
    down, up = torch.randn(3, 96, generator=generator), torch.randn(64, 3, generator=generator)

    def params_of(group: Group, merged: bool) -> Any:
        params = random_params(CONFIG, group=group)
        mlp = params.layers[1].mlp
        own = down.chunk(group.size, 1)[group.rank]
        weight = mlp.down_proj.weight + up @ own if merged else LowRank(mlp.down_proj.weight, own, up)
        mlp = mlp._replace(down_proj=LinearParams(weight))
        return params._replace(layers=(params.layers[0], params.layers[1]._replace(mlp=mlp)))

    def run(group: Group) -> Tensor:
        return logits(params_of(group, False), IDS, config=CONFIG, layers=Layers(linear=lora), group=group)

    expected = logits(params_of(Group(), True), IDS, config=CONFIG)
    assert all(relative(result, expected) < 1e-5 for result in on_ranks(run, tp))
    assert relative(swapped_logits(Layers()), expected) > 0.05


def test_swapped_embed_and_head() -> None:
    def scaled(token_ids_t: Tensor, params: Any, context: Context, /) -> Tensor:
        return defaults.embed(token_ids_t, params, context) * 3.0

    def capped(x_ld: Tensor, params: Any, context: Context, /) -> Tensor:
        return 5 * torch.tanh(defaults.head(x_ld, params, context) / 5)

    by_hand = model_by_hand(random_params(CONFIG), scale_of_embedding=3.0)
    assert relative(swapped_logits(Layers(embed=scaled, head=capped), tp=4), 5 * torch.tanh(by_hand / 5)) < 1e-5


def test_a_swapped_sampler_gets_whole_columns_at_any_tp() -> None:
    def least(logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]:
        assert logits_lv.shape[1] == 199
        return logits_lv.argmin(-1), {}

    request = Request(prompt=IDS[:5].tolist(), max_tokens=3)
    sequence = list(request.prompt)
    for _ in range(3):
        sequence.append(int(logits(random_params(CONFIG), torch.tensor(sequence), config=CONFIG)[-1].argmin()))
    for tp in (1, 2, 4):
        tokens = generate(CONFIG, params_for(CONFIG), [request], tp=tp, layers=Layers(sample=least))
        assert tokens == [sequence[5:]]


# --- components ------------------------------------------------------------------------------------------------------


class GateParams(NamedTuple):
    usual: MLPParams
    gate: Tensor  # [d], whole on every rank


def gate_specs(config: ModelConfig, group: Group, place: str) -> GateParams:
    layer = int(place.split(".")[1])
    usual = param_specs(config, group=group).layers[layer].mlp
    part = Part(name=f"{place}.gate", shape=(config.hidden_size,))
    return GateParams(usual, Spec(parts=(part,), init=lambda shape, generator: torch.randn(shape, generator=generator)))


def gated(x_td: Tensor, params: GateParams, context: Context, /) -> Tensor:
    return params.gate * defaults.swiglu(x_td, params.usual, context)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_component_brings_its_own_parameters(tp: int) -> None:
    layers = Layers().at(1, mlp=Component(gated, specs=gate_specs))
    params = random_params(CONFIG, layers)
    assert params.layers[1].mlp.gate.std() > 0.5

    def by_hand(x: Tensor, node: Any, layer: int) -> Tensor:
        return node.gate * swiglu_by_hand(x, node.usual) if layer == 1 else swiglu_by_hand(x, node)

    assert relative(swapped_logits(layers, tp=tp), model_by_hand(params, mlp=by_hand)) < 1e-5


def test_a_module_plugs_in_as_a_whole_component() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)).requires_grad_(False)

    def apply(x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        return torch.func.functional_call(module, params, (x_td,))

    layers = Layers(mlp=Component(apply, specs=lambda config, group, place: specs_of(module, place), whole=True))
    expected = model_by_hand(random_params(CONFIG), mlp=lambda x, p, i: module(x))
    for tp in (1, 2):
        assert relative(swapped_logits(layers, tp=tp), expected) < 1e-5


@pytest.mark.parametrize("tp", [1, 2])
def test_a_whole_mlp_reduces_inside_and_is_not_reduced_again(tp: int) -> None:
    def clamped(x_td: Tensor, params: MLPParams, context: Context, /) -> Tensor:
        return all_reduce(defaults.swiglu(x_td, params, context), context.group).clamp(-0.5, 0.5)

    expected = model_by_hand(random_params(CONFIG), mlp=lambda x, p, i: swiglu_by_hand(x, p).clamp(-0.5, 0.5))
    assert relative(swapped_logits(Layers(mlp=Component(clamped, whole=True)), tp=tp), expected) < 1e-5


@pytest.mark.parametrize("tp", [1, 2])
def test_a_whole_embed_is_not_reduced(tp: int) -> None:
    def specs(config: ModelConfig, group: Group, place: str) -> EmbedParams:
        part = Part(name="model.embed_tokens.weight", shape=(config.vocab_size, config.hidden_size))
        return EmbedParams(Spec(parts=(part,)))

    def embed(token_ids_t: Tensor, params: Any, context: Context, /) -> Tensor:
        return F.embedding(token_ids_t, params.embed_tokens.weight)

    layers = Layers(embed=Component(embed, specs=specs, whole=True))
    assert relative(swapped_logits(layers, tp=tp), swapped_logits(Layers())) < 1e-5


def test_a_norm_may_bring_a_bias_of_its_own() -> None:
    def specs(config: ModelConfig, group: Group, place: str) -> dict[str, Spec]:
        names = {"weight": f"model.{place}.weight", "bias": f"model.{place}.bias"}
        return {
            key: Spec(
                parts=(Part(name=name, shape=(config.hidden_size,)),), init=lambda s, g: torch.randn(s, generator=g)
            )
            for key, name in names.items()
        }

    def norm(x: Tensor, params: dict[str, Tensor], context: Context, /) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], params["weight"], params["bias"])

    layers = Layers(norm=Component(norm, specs=specs))
    params = random_params(CONFIG, layers)
    assert set(params.norm) == set(params.layers[1].post_attention_layernorm) == {"weight", "bias"}
    usual = random_params(CONFIG)
    assert relative(swapped_logits(layers, tp=2), model_by_hand(usual)) > 0.05
    one = swapped_logits(layers)
    assert relative(swapped_logits(layers, tp=2), one) < 1e-5


class Running(NamedTuple):
    total_rkh: Tensor


def init_running(config: Any, group: Any, blocks: int, block_size: int, rows: int, device: Any, dtype: Any) -> Running:
    shape = (rows, config.num_kv_heads // min(group.size, config.num_kv_heads), config.head_dim)
    return Running(torch.zeros(shape, device=device, dtype=dtype))


def running_sum(
    q_tnh: Tensor, k_tkh: Tensor, v_tkh: Tensor, cache: Running, params: Any, context: Context, /
) -> tuple[Tensor, Running]:
    """A recurrent layer: every head reads the sum of its row's values so far (causal, with no positions)."""
    rows_t = context.inputs.rows_t.long()
    fresh_t = torch.isin(rows_t, rows_t[context.inputs.positions_t == 0])
    earlier_tkh = torch.where(fresh_t[:, None, None], 0.0, cache.total_rkh[rows_t])
    same_tt = (rows_t[:, None] == rows_t[None, :]).tril().to(v_tkh.dtype)
    sums_tkh = earlier_tkh + torch.einsum("ts,skh->tkh", same_tt, v_tkh)
    total_rkh = cache.total_rkh.index_put((rows_t,), torch.where(fresh_t[:, None, None], 0.0, cache.total_rkh[rows_t]))
    total_rkh = total_rkh.index_put((rows_t,), v_tkh, accumulate=True)
    return sums_tkh.repeat_interleave(q_tnh.shape[1] // v_tkh.shape[1], 1), Running(total_rkh)


def test_a_component_brings_a_cache_that_goes_by_state_rows() -> None:
    component = Component(running_sum, init_cache=init_running, paged=False)
    layers = Layers().at(1, attention=component)
    cache = qwen3(CONFIG, layers).init_cache(5, 4, 7, "cpu", torch.float32)
    assert isinstance(cache[0], LayerCache)
    assert cache[1].total_rkh.shape == (7, 2, 16)
    requests = [Request(prompt=IDS[:n].tolist(), max_tokens=6) for n in (7, 3)]

    def params_of(group: Group, layers: Layers) -> Any:
        return random_params(CONFIG, layers, group)

    expected = []
    for request in requests:
        ids = list(request.prompt)
        for _ in range(6):
            whole = logits(params_of(Group(), layers), torch.tensor(ids), config=CONFIG, layers=layers)
            ids.append(int(whole[-1].argmax()))
        expected.append(ids[len(request.prompt) :])
    for tp in (1, 2):
        assert generate(CONFIG, params_of, requests, layers=layers, tp=tp, chunk=3) == expected

    def sums(scores_nts: Tensor, layer: int) -> Tensor:
        return torch.ones_like(scores_nts).tril() if layer == 1 else causal(scores_nts, layer)

    assert relative(swapped_logits(layers), model_by_hand(random_params(CONFIG, layers), weights=sums)) < 1e-5


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["norm", "qk_norm", "attention", "mlp", "linear", "block", "embed", "head", "sample"])
def test_a_wrong_arity_is_refused_with_both_signatures(name: str) -> None:
    def too_few(x: Tensor) -> Tensor:
        return x

    for wrong in (too_few, Component(too_few)):
        with pytest.raises(ValueError, match=rf"{name} is called as \(.*context, /\).*too_few\(x"):
            Layers(**{name: wrong})
        if name not in ("embed", "head", "sample"):
            with pytest.raises(ValueError, match="too_few"):
                Layers().at(0, **{name: wrong})


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp must be a function \(x_td, params, context, /\).*got 3"):
        check_arity("mlp", 3)
    check_arity("mlp", torch.nn.functional.linear)


def test_an_edit_that_takes_no_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the edit of 'final' is called as \(x, context, /\) -> x"):
        Layers().edit("final", lambda x: x)


def test_whole_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValueError, match="whole is for embed and mlp"):
        Layers(attention=Component(paged_attention, whole=True))


@pytest.mark.parametrize(
    ("name", "fn", "message"),
    [
        ("mlp", lambda x, p, c: x[:, :3], r"mlp must return float32\[24, 64\].*float32\[24, 3\]"),
        ("mlp", lambda x, p, c: x.double(), r"mlp must return float32\[24, 64\].*float64"),
        ("mlp", lambda x, p, c: (x,), "mlp must return .* returned tuple"),
        ("norm", lambda x, p, c: x.double(), r"norm must return float32\[24, 64\].*float64"),
        ("rope", lambda q, k, p, c: (q, q), r"rope must return float32\[24, 2, 16\].*\[24, 4, 16\]"),
        ("attention", lambda q, k, v, cache, p, c: (v, cache), r"attention must return float32\[24, 4, 16\]"),
        ("embed", lambda ids, p, c: p.embed_tokens.weight[ids][:, :5], r"embed must return \[t, 64\].*\[24, 5\]"),
        ("head", lambda x, p, c: x, r"head must return float32\[24, 199\] on this rank.*float32\[24, 64\]"),
        ("head", lambda x, p, c: defaults.head(x, p, c).half(), "head must return float32.*float16"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(name: str, fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swapped_logits(Layers(**{name: fn}))


def test_a_sampler_that_returns_no_ids_is_refused() -> None:
    driver = Driver(qwen3(CONFIG, Layers(sample=lambda x, c: (x.amax(-1), {}))), random_params(CONFIG))
    driver.admit([1], [Request(prompt=[1, 2])])
    with pytest.raises(ValueError, match=r"sample must return int32\[1\] ids; it returned float32\[1\]"):
        driver.step([], [(1, 2)])


@pytest.mark.parametrize("index", [2, -1])
def test_a_layer_that_the_model_has_not_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"layer {index} is replaced, but the model has layers 0 to 1"):
        qwen3(CONFIG, Layers().at([0, index], mlp=relu2))


def test_at_takes_functions_of_a_layer_only() -> None:
    with pytest.raises(ValueError, match=r"'head' is no function of a single layer; use one of norm, .*block"):
        Layers().at(0, head=defaults.head)
    with pytest.raises(ValueError, match="'mpl' is no function"):
        Layers().at(0, mpl=relu2)


@pytest.mark.parametrize("site", ["residual_pre", "layers.3", "layers.x.mlp.out", "layers.-1.mlp.out", "Final", ""])
def test_what_is_no_site_is_refused(site: str) -> None:
    with pytest.raises(ValueError, match=r"is no site; write layers\.<number or \*>\.<residual_pre \|.*\| logits"):
        Layers().edit(site, lambda x, c: x)
    with pytest.raises(ValueError, match="is no site"):
        Layers().capture("final", site)
    with pytest.raises(ValueError, match="is no site"):
        qwen3(CONFIG, Layers(captures=(site,)))


def test_sites_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'layers.2.mlp.out' is in layer 2; the layers are 0 to 1"):
        qwen3(CONFIG, Layers().capture("layers.2.mlp.out"))
    with pytest.raises(ValueError, match=r"no site is called 'layers.\*.mlp.gate'; known here: residual_pre"):
        qwen3(CONFIG, Layers().edit("layers.*.mlp.gate", lambda x, c: x))
    with pytest.raises(ValueError, match=r"no site is called 'layers.0.gate'"):
        qwen3(CONFIG, Layers().at(1, mlp=relu2).capture("layers.0.gate"))


def test_extras_are_declared_once() -> None:
    layers = Layers().extra("steer", shape=(64,))
    with pytest.raises(ValueError, match="'steer' is declared twice"):
        layers.extra("steer")
    with pytest.raises(ValueError, match="no extra is called stear"):
        logits(random_params(CONFIG), IDS, config=CONFIG, layers=layers, extras={"stear": 0.0})


# --- the record ------------------------------------------------------------------------------------------------------


def test_every_method_returns_a_new_hashable_record() -> None:
    plain = Layers()
    edited = (
        plain.capture("final", "embed").capture("final").extra("a", default=[1.0, 2.0], shape=(2,)).at(1, mlp=relu2)
    )
    assert plain == Layers()
    assert edited.captures == ("final", "embed")
    assert edited.extras == (Extra(name="a", default=(1.0, 2.0), shape=(2,)),)
    assert len({hash(plain), hash(edited), hash(edited.extra("b"))}) == 3


def test_of_resolves_a_layer_the_last_call_winning() -> None:
    first, second = (lambda x, p, c: x), (lambda x, p, c: x)
    edit = lambda x, c: x  # noqa: E731
    layers = (
        Layers(mlp=relu2)
        .at(range(1, 4), mlp=first)
        .at(2, mlp=second, norm=layer_norm)
        .edit("layers.*.mlp.out", edit)
        .edit("layers.2.residual_mid", edit)
        .capture("final", "layers.1.residual_pre", "layers.*.residual_pre")
    )
    assert [layers.of(i).mlp for i in range(5)] == [relu2, first, second, first, relu2]
    assert layers.of(2).norm is layer_norm
    assert layers.of(1).norm is defaults.norm
    assert layers.of(1).edits == (("mlp.out", edit),)
    assert layers.of(2).edits == (("mlp.out", edit), ("residual_mid", edit))
    assert layers.of(1).captures == ("residual_pre",)
    assert layers.of(None).captures == ("final",)
    assert layers.of(None).edits == ()


# --- keys by value ---------------------------------------------------------------------------------------------------


def closure(scale: float, other: Any = None) -> Callable[..., Any]:
    return lambda x, p, c: x * scale if other is None else other


def edit_by(scale: float) -> Callable[..., Any]:
    return lambda x, c: x * scale


def defaulted(value: Any, keyword: Any = 0) -> Callable[..., Any]:
    def fn(x: Any, p: Any, c: Any, scale: Any = value, *, shift: Any = keyword) -> Any:
        return x * scale + shift

    return fn


def recursive() -> Callable[..., Any]:
    def fn(x: Any, p: Any, c: Any) -> Any:
        return fn(x, p, c)

    return fn


@dataclass(frozen=True)
class Scaled:
    scale: float
    tag: Any = ()

    def __call__(self, x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        return x_td * self.scale

    def method(self, x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        return x_td * self.scale


TENSOR = torch.ones(3)
EQUAL = {
    "partial": lambda: functools.partial(relu2, 1, scale=2.0),
    "nested partial": lambda: functools.partial(functools.partial(relu2, [1, 2]), a={"b": 1}),
    "closure": lambda: closure(2.0),
    "closure over a closure": lambda: closure(1.0, closure(2.0)),
    "defaults": lambda: defaulted(1, 2),
    "recursive": recursive,
    "dataclass": lambda: Scaled(2.0),
    "dataclass with a list": lambda: Scaled(2.0, [1]),
    "component": lambda: Component(closure(2.0), source={"a": 1}),
    "method": lambda: Scaled(2.0).method,
    "same tensor": lambda: closure(1.0, TENSOR),
    "nan": lambda: closure(float("nan")),
    "record": lambda: Layers(mlp=closure(2.0)).at(1, norm=functools.partial(layer_norm)),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_functions_that_do_the_same_have_equal_keys(make: Callable[[], Any]) -> None:
    first, second = value_key(make()), value_key(make())
    assert first == second
    assert hash(first) == hash(second)


DIFFERENT = {
    "partial": (functools.partial(relu2, 1), functools.partial(relu2, 2)),
    "keyword": (functools.partial(relu2, a=1), functools.partial(relu2, b=1)),
    "number type": (closure(1), closure(1.0)),
    "bool": (closure(1), closure(True)),
    "signed zero": (closure(0.0), closure(-0.0)),
    "closure": (closure(1.0), closure(2.0)),
    "default": (defaulted(1), defaulted(2)),
    "keyword default": (defaulted(1, 2), defaulted(1, 3)),
    "dataclass": (Scaled(1.0), Scaled(2.0)),
    "list inside": (Scaled(1.0, [1]), Scaled(1.0, [2])),
    "method": (Scaled(1.0).method, Scaled(2.0).method),
    "tensors": (closure(1.0, torch.ones(3)), closure(1.0, torch.ones(3))),
    "functions": (relu2, layer_norm),
    "whole": (Component(relu2), Component(relu2, whole=True)),
    "captures": (Layers(), Layers().capture("final")),
    "edits": (Layers().edit("final", edit_by(1.0)), Layers().edit("final", edit_by(2.0))),
    "extras": (Layers().extra("a"), Layers().extra("a", default=1.0)),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_functions_that_differ_have_different_keys(pair: tuple[Any, Any]) -> None:
    assert value_key(pair[0]) != value_key(pair[1])


def test_a_key_keeps_what_it_goes_by_alive() -> None:
    """Else a new tensor at the freed address would pass for the old one."""
    keys = {value_key(closure(1.0, torch.ones(1))) for _ in range(50)}
    assert len(keys) == 50


def test_equal_functions_share_a_unit_and_different_ones_do_not() -> None:
    kinds: list[str] = []

    def count(unit: Any, name: str) -> Any:
        kinds.append(name)
        return unit

    config = replace(CONFIG, num_layers=4)
    layers = Layers().at(0, mlp=Scaled(1.0)).at(1, mlp=Scaled(1.0)).at(2, mlp=Scaled(2.0))
    composed = replace(FAST, fused=frozenset())
    driver = Driver(qwen3(config, layers, kernels=composed, transform=count), random_params(config))
    driver.admit([1], [Request(prompt=[1, 2])])
    driver.step([], [(1, 2)])
    assert sorted(kinds) == ["embed", "final", "layer", "layer", "layer"]
    driver.step([1])
    driver.step([1])
    assert sorted(kinds) == sorted(["embed", "final", "layer", "layer", "layer"] * 2)


def test_random_init_is_used_for_own_parameters() -> None:
    layers = Layers().at(0, mlp=Component(gated, specs=gate_specs))
    specs = param_specs(CONFIG, layers)
    assert specs.layers[0].mlp.gate.parts[0].name == "layers.0.mlp.gate"
    assert init_params(specs).layers[0].mlp.gate.shape == (64,)
