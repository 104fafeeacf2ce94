"""Sites: what passes each named place is read and changed there, per layer or everywhere, at any tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from funcllm import layers as defaults
from funcllm.group import Group, all_gather, all_reduce
from funcllm.kernels.bundle import FAST, REFERENCE
from funcllm.layers import head_ids, vocab_ids
from funcllm.qwen3 import logits, qwen3
from funcllm.record import Layers
from funcllm.sites import LAYER_SITES, MODEL_SITES, site
from funcllm.types import Component, Context
from tests.steps import Driver, Request, generate, on_ranks, params_for, random_ids, random_params, relative
from tests.test_record import rms, rotate_by_hand
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=199, num_kv_heads=4)
IDS = random_ids(12)
ALL = [*(f"layers.1.{name}" for name in LAYER_SITES), *MODEL_SITES]
SHARDED = ("attention.q", "attention.k", "attention.v", "attention.heads", "mlp.hidden", "logits")


def by_hand(scale: dict[str, float] | None = None) -> dict[str, Tensor]:
    """What passes every site, by plain products; scale: what is multiplied in there (full names)."""
    scale = scale or {}
    params = random_params(CONFIG)
    seen: dict[str, Tensor] = {}

    def passed(name: str, x: Tensor) -> Tensor:
        seen[name] = x * scale.get(name, 1.0)
        return seen[name]

    x = passed("embed", params.embed_tokens.weight[IDS])
    for i, layer in enumerate(params.layers):
        attn, at = layer.self_attn, f"layers.{i}."
        x = passed(f"{at}residual_pre", x)
        normed = rms(x, layer.input_layernorm.weight)
        heads = (normed @ attn.qkv_proj.weight.T).unflatten(-1, (12, 16))
        q = passed(f"{at}attention.q", rotate_by_hand(rms(heads[:, :4], attn.q_norm.weight)))
        k = passed(f"{at}attention.k", rotate_by_hand(rms(heads[:, 4:8], attn.k_norm.weight)))
        v = passed(f"{at}attention.v", heads[:, 8:])
        scores = torch.einsum("tnh,snh->nts", q, k) / 4
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf")).softmax(-1)
        mixed = passed(f"{at}attention.heads", torch.einsum("nts,snh->tnh", scores, v))
        x = x + passed(f"{at}attention.out", mixed.flatten(1) @ attn.o_proj.weight.T)
        x = passed(f"{at}residual_mid", x)
        gate, up = (rms(x, layer.post_attention_layernorm.weight) @ layer.mlp.gate_up_proj.weight.T).chunk(2, -1)
        hidden = passed(f"{at}mlp.hidden", F.silu(gate) * up)
        x = passed(f"{at}residual_post", x + passed(f"{at}mlp.out", hidden @ layer.mlp.down_proj.weight.T))
    x = passed("final", rms(x, params.norm.weight))
    passed("logits", x @ params.lm_head.weight.T)
    return seen


def captured_of(layers: Layers, tp: int, kernels: Any) -> list[dict[str, Tensor]]:
    """What a prompt's last chunk records on each rank (all of its tokens, in one chunk)."""

    def run(group: Group) -> dict[str, Tensor]:
        driver = Driver(qwen3(CONFIG, layers, group, kernels), random_params(CONFIG, layers, group))
        driver.admit([2], [Request(prompt=IDS.tolist())])
        return dict(driver.step([], [(2, 12)], padding=3, capturing=True).captured)

    return on_ranks(run, tp)


def whole(name: str, ranks: list[dict[str, Tensor]]) -> Tensor:
    """The captured value of all ranks together: shares side by side, else one that all agree on."""
    if any(name.endswith(part) for part in SHARDED):
        return torch.cat([rank[name] for rank in ranks], dim=1)
    assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
    return ranks[0][name]


@pytest.mark.parametrize("kernels", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_site_captures_what_passes_it(tp: int, kernels: Any) -> None:
    expected = by_hand()
    ranks = captured_of(Layers().capture(*ALL), tp, kernels)
    assert set(ranks[0]) == set(ALL)
    for name in ALL:
        assert (
            relative(whole(name, ranks)[..., :199] if name == "logits" else whole(name, ranks), expected[name][-1:])
            < 1e-5
        ), name


@pytest.mark.parametrize("kernels", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("name", ALL)
def test_every_site_alone_is_edited_before_it_is_captured(name: str, kernels: Any) -> None:
    layers = Layers().edit(name, lambda x, c: x * 1.5).capture(name, "logits")
    expected = by_hand({name: 1.5})
    for tp in (1, 2):
        ranks = captured_of(layers, tp, kernels)
        assert (
            relative(whole(name, ranks)[:, :199] if name == "logits" else whole(name, ranks), expected[name][-1:])
            < 1e-5
        )
        assert relative(whole("logits", ranks)[:, :199], expected["logits"][-1:]) < 1e-5
    if name != "layers.1.residual_post":  # the last norm takes its scale away
        assert relative(expected["logits"], by_hand()["logits"]) > 1e-3


def test_wildcards_touch_every_layer_and_edits_run_in_order() -> None:
    layers = (
        Layers()
        .edit("layers.*.mlp.out", lambda x, c: x + 1.0)
        .edit("layers.1.mlp.out", lambda x, c: x * 2.0)
        .capture("layers.*.mlp.out", "layers.0.residual_post")
    )
    plain = captured_of(Layers().capture("layers.*.mlp.out"), 1, FAST)[0]
    [got] = captured_of(layers, 1, FAST)
    assert set(got) == {"layers.0.mlp.out", "layers.1.mlp.out", "layers.0.residual_post"}
    assert relative(got["layers.0.mlp.out"], plain["layers.0.mlp.out"] + 1.0) < 1e-6
    reference = captured_of(
        Layers().edit("layers.0.mlp.out", lambda x, c: x + 1.0).capture("layers.1.mlp.out"), 1, FAST
    )[0]
    assert relative(got["layers.1.mlp.out"], (reference["layers.1.mlp.out"] + 1.0) * 2.0) < 1e-5


def test_captures_are_of_the_tokens_whose_logits_are_taken() -> None:
    layers = Layers().capture("layers.0.residual_mid", "final", "logits")
    config = CONFIG
    params = random_params(config)
    model = qwen3(config, layers, kernels=FAST)
    driver = Driver(model, params)
    prompts = [random_ids(n, seed=n).tolist() for n in (5, 9)]
    driver.admit([1, 2], [Request(prompt=p) for p in prompts])
    driver.step([], [(1, 5), (2, 4)], padding=2, capturing=True)
    outputs = driver.step([1], [(2, 5)], padding=2, capturing=True)
    sequence = torch.tensor([*prompts[0], int(driver.state.token_ids_re[1, 5])])
    alone = []
    for ids in (sequence, torch.tensor(prompts[1])):
        single = Driver(model, params)
        single.admit([1], [Request(prompt=ids.tolist())])
        alone.append(single.step([], [(1, len(ids))], capturing=True).captured)
    for name in layers.captures:
        assert outputs.captured[name].shape[0] == 2
        assert relative(outputs.captured[name], torch.cat([a[name] for a in alone])) < 1e-5


def test_without_capture_tokens_a_site_records_all_tokens() -> None:
    model = qwen3(CONFIG, Layers().capture("layers.0.residual_pre"), kernels=FAST)
    driver = Driver(model, random_params(CONFIG))
    driver.admit([1], [Request(prompt=IDS.tolist())])
    captured = driver.step([], [(1, 12)]).captured
    assert relative(captured["layers.0.residual_pre"], by_hand()["embed"]) == 0


def test_captures_and_edits_that_change_nothing_leave_the_tokens_as_they_are() -> None:
    layers = Layers().capture(*(f"layers.*.{name}" for name in LAYER_SITES), *MODEL_SITES)
    for name in (*(f"layers.*.{name}" for name in LAYER_SITES), *MODEL_SITES):
        layers = layers.edit(name, lambda x, c: x.clone())
    requests = [
        Request(prompt=IDS.tolist(), max_tokens=12),
        Request(prompt=[3], max_tokens=12, temperature=1.0, seed=4),
    ]
    for tp in (1, 2):
        plain = generate(CONFIG, params_for(CONFIG), requests, tp=tp)
        assert generate(CONFIG, params_for(CONFIG), requests, tp=tp, layers=layers) == plain


@pytest.mark.parametrize(
    ("edit", "returned"),
    [
        (lambda x, c: x[:1], r"float32\[1, 64\]"),
        (lambda x, c: x.double(), r"float64\[12, 64\]"),
        (lambda x, c: None, "NoneType"),
    ],
    ids=["shape", "dtype", "none"],
)
def test_an_edit_that_changes_the_shape_is_refused(edit: Any, returned: str) -> None:
    layers = Layers().edit("layers.0.mlp.out", edit)
    with pytest.raises(ValueError, match=rf"site 'mlp.out' returned {returned}; .*got, float32\[12, 64\]"):
        logits(random_params(CONFIG), IDS, config=CONFIG, layers=layers)


def test_an_own_site_of_an_own_function_is_captured_and_a_missing_one_is_an_error() -> None:
    def mlp(x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        return site("mine", defaults.swiglu(x_td, params, context), context)

    layers = (
        Layers().at(1, mlp=mlp).edit("layers.1.mine", lambda x, c: x * 2.0).capture("layers.1.mine", "layers.1.mlp.out")
    )
    [got] = captured_of(layers, 1, FAST)
    expected = by_hand()["layers.1.mlp.out"][-1:] * 2
    assert relative(got["layers.1.mine"], expected) < 1e-5
    assert relative(got["layers.1.mlp.out"], expected) < 1e-5
    with pytest.raises(ValueError, match="nothing passed the site 'yours'"):
        captured_of(Layers().at(1, mlp=mlp).capture("layers.1.yours"), 1, FAST)


def test_an_edit_at_mlp_out_sees_a_whole_component_once() -> None:
    """A bound on the reduced value: right at any tp, without the function being whole."""
    clamp = Layers().edit("layers.*.mlp.out", lambda x, c: x.clamp(-0.5, 0.5))

    def run(layers: Layers, group: Group) -> Tensor:
        return logits(random_params(CONFIG, layers, group), IDS, config=CONFIG, layers=layers, group=group)

    expected = run(clamp, Group())
    assert relative(expected, run(Layers(), Group())) > 0.05
    assert all(relative(result, expected) < 1e-5 for result in on_ranks(lambda g: run(clamp, g), 4))

    def reduced(x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        return all_reduce(defaults.swiglu(x_td, params, context), context.group)

    component = Layers(mlp=Component(reduced, whole=True)).edit("layers.*.mlp.out", lambda x, c: x.clamp(-0.5, 0.5))
    assert all(relative(result, expected) < 1e-5 for result in on_ranks(lambda g: run(component, g), 2))


# --- ids and extras --------------------------------------------------------------------------------------------------


def test_global_head_and_vocabulary_ids() -> None:
    config = tiny_config(num_heads=8, num_kv_heads=2, vocab_size=199)

    def ids(group: Group) -> tuple[Any, Any]:
        context = Context(config=config, group=group, kernels=REFERENCE, layer=Layers(), inputs=())  # type: ignore[arg-type]
        return head_ids(context), vocab_ids(context)

    assert [ids(Group(rank, 4)) for rank in range(4)] == [
        ((range(0, 2), range(0, 1)), (0, 50)),
        ((range(2, 4), range(0, 1)), (50, 50)),
        ((range(4, 6), range(1, 2)), (100, 50)),
        ((range(6, 8), range(1, 2)), (150, 49)),
    ]
    assert ids(Group()) == ((range(0, 8), range(0, 2)), (0, 199))


def ablate(x_tnh: Tensor, context: Context, /) -> Tensor:
    """Head 2 of the whole model is silenced, on whichever rank it lives."""
    own, _ = head_ids(context)
    keep = torch.tensor([0.0 if head == 2 else 1.0 for head in own])
    return x_tnh * keep[:, None]


def test_a_head_is_ablated_by_its_global_id() -> None:
    layers = Layers().edit("layers.0.attention.heads", ablate)

    def run(group: Group) -> Tensor:
        return logits(random_params(CONFIG, layers, group), IDS, config=CONFIG, layers=layers, group=group)

    expected = run(Group())
    assert relative(expected, logits(random_params(CONFIG), IDS, config=CONFIG)) > 1e-3
    for tp in (2, 4):
        assert all(relative(result, expected) < 1e-5 for result in on_ranks(run, tp))


def steer(x_td: Tensor, context: Context, /) -> Tensor:
    return x_td + context.inputs.extras["steer"][context.inputs.rows_t.long()]


def test_a_steering_vector_per_request_reaches_its_own_tokens_only() -> None:
    layers = Layers().extra("steer", shape=(64,)).edit("layers.1.residual_pre", steer)
    vectors = [torch.randn(64, generator=torch.Generator().manual_seed(s)) * 2 for s in (1, 2)]
    prompts = [IDS[:n].tolist() for n in (7, 4, 9)]
    requests = [
        Request(prompt=prompts[0], max_tokens=6, extras={"steer": vectors[0]}),
        Request(prompt=prompts[1], max_tokens=6),
        Request(prompt=prompts[2], max_tokens=6, extras={"steer": vectors[1]}),
    ]
    params = random_params(CONFIG)
    expected = []
    for request in requests:
        ids = list(request.prompt)
        for _ in range(6):
            ids.append(
                int(logits(params, torch.tensor(ids), config=CONFIG, layers=layers, extras=request.extras)[-1].argmax())
            )
        expected.append(ids[len(request.prompt) :])
    for tp in (1, 2):
        assert generate(CONFIG, params_for(CONFIG), requests, tp=tp, layers=layers, chunk=3, padding=2) == expected
    plain = generate(CONFIG, params_for(CONFIG), requests, layers=Layers().extra("steer", shape=(64,)))
    assert plain[1] == expected[1]
    assert plain[0] != expected[0]
    assert plain[2] != expected[2]


def test_extras_of_logits_default_and_broadcast() -> None:
    layers = Layers().extra("steer", shape=(64,), default=[0.5] * 64).edit("embed", steer)
    params = random_params(CONFIG)
    default = logits(params, IDS, config=CONFIG, layers=layers)
    assert torch.equal(default, logits(params, IDS, config=CONFIG, layers=layers, extras={"steer": 0.5}))
    assert torch.equal(default, qwen3(CONFIG, layers).logits(params, IDS, extras={"steer": torch.full((64,), 0.5)}))
    zero = logits(params, IDS, config=CONFIG, layers=layers, extras={"steer": 0.0})
    assert relative(zero, logits(params, IDS, config=CONFIG)) < 1e-6
    assert relative(default, zero) > 0.01


def test_a_sampler_changes_its_extras_only_where_its_token_counts() -> None:
    """A stateful sampler: the n-th token of a request is its n-th best id, counted in an extra."""

    def ranked(logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]:
        count_l = context.inputs.extras["count"][context.inputs.rows_b.long()]
        ids_lv = logits_lv.argsort(dim=-1, descending=True)
        return ids_lv.gather(1, count_l[:, None])[:, 0], {"count": count_l + 1}

    layers = Layers(sample=ranked).extra("count", dtype=torch.int64, default=0)
    requests = [Request(prompt=IDS[:n].tolist(), max_tokens=4) for n in (11, 3)]
    expected = []
    for request in requests:
        ids = list(request.prompt)
        for n in range(4):
            row = logits(random_params(CONFIG), torch.tensor(ids), config=CONFIG)[-1]
            ids.append(int(row.argsort(descending=True)[n]))
        expected.append(ids[len(request.prompt) :])
    driver = Driver(qwen3(CONFIG, layers, kernels=FAST), random_params(CONFIG))
    assert driver.run(requests, chunk=2, padding=1) == expected
    assert driver.state.extras["count"].tolist() == [0, 4, 4, *[0] * 13]
    assert generate(CONFIG, params_for(CONFIG), requests, tp=2, layers=layers, chunk=4) == expected


def test_gathered_shares_are_the_whole_value() -> None:
    def run(group: Group) -> Tensor:
        def edit(x_tnh: Tensor, context: Context, /) -> Tensor:
            heads = all_gather(x_tnh, context.group, dim=1)
            mean = heads.mean(dim=1, keepdim=True)
            return x_tnh - mean

        layers = Layers().edit("layers.*.attention.heads", edit)
        return logits(random_params(CONFIG, layers, group), IDS, config=CONFIG, layers=layers, group=group)

    expected = run(Group())
    assert relative(expected, logits(random_params(CONFIG), IDS, config=CONFIG)) > 0.01
    assert all(relative(result, expected) < 1e-5 for result in on_ranks(run, 4))


def test_an_edit_of_a_site_that_a_swapped_function_does_not_mark_is_refused() -> None:
    def bare(x_td: Tensor, params: Any, context: Any, /) -> Tensor:
        return x_td

    config = tiny_config()
    layers = Layers(mlp=bare).edit("layers.1.mlp.hidden", lambda x, context: x)
    with pytest.raises(ValueError, match=r"nothing passed the site 'mlp\.hidden'"):
        logits(random_params(config), torch.arange(4), config=config, layers=layers)


@pytest.mark.parametrize("place", ["linear", "sample"])
def test_specs_of_a_function_without_a_node_are_refused(place: str) -> None:
    default = getattr(Layers(), place)
    with pytest.raises(ValueError, match="no node of its own"):
        Layers(**{place: Component(default, specs=lambda config, group, place: ())})
