"""The sampler inside the model: greedy and random rows, filters, seeds, ranks, and how often each token comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.group import Group
from funcllm.kernels.bundle import FAST, REFERENCE
from funcllm.qwen3 import logits, qwen3
from funcllm.record import Layers
from funcllm.sampling import forbid, sample
from funcllm.types import Context, Filters, SamplingInputs
from tests.steps import Driver, Request, generate, on_ranks, params_for, random_ids, random_params
from tests.tiny import tiny_config

INF = float("inf")
CONFIG = tiny_config(vocab_size=199)
bundles = pytest.mark.parametrize("kernels", [REFERENCE, FAST], ids=["reference", "fast"])


def draw(
    logits_lv: Tensor,
    *,
    temperature: Any = 1.0,
    seed: Any = 0,
    position: Any = 0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    forbidden: list[list[int]] | None = None,
    filtered: bool | None = None,
    kernels: Any = FAST,
    tp: int = 1,
    padding: float = 100.0,
) -> list[int]:
    """The sampled ids, at a tensor-parallel size: shards padded with `padding` where the vocabulary does not divide."""
    rows, columns = logits_lv.shape
    config = tiny_config(vocab_size=columns)

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    plain = top_k == 0 and top_p == 1.0 and min_p == 0.0 and forbidden is None
    filters: Any = ()
    if not plain if filtered is None else filtered:
        ids = torch.tensor(forbidden if forbidden is not None else [[-1]] * rows, dtype=torch.int32)
        filters = Filters(column(top_k, torch.int32), column(top_p, torch.float32), column(min_p, torch.float32), ids)
    sampling = SamplingInputs(
        column(temperature, torch.float32), column(seed, torch.int64), column(position, torch.int32), filters
    )

    def run(group: Group) -> list[int]:
        width = -(-columns // group.size)
        shard = logits_lv[:, group.rank * width : (group.rank + 1) * width]
        shard = torch.nn.functional.pad(shard, (0, width - shard.shape[1]), value=padding)
        inputs: Any = type("Inputs", (), {"sampling": sampling})
        context = Context(config=config, group=group, kernels=kernels, layer=Layers(), inputs=inputs)
        token_ids_l, extras = sample(shard.contiguous(), context)
        assert token_ids_l.dtype == torch.int32
        assert extras == {}
        return token_ids_l.tolist()

    results = on_ranks(run, tp)
    assert all(result == results[0] for result in results)
    return results[0]


def random_logits(rows: int, columns: int = 199, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2


# --- greedy ----------------------------------------------------------------------------------------------------------


@bundles
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_temperature_0_is_the_argmax_and_the_lowest_id_of_a_tie(tp: int, kernels: Any) -> None:
    values = random_logits(6)
    values[1, [150, 20, 90]] = 50.0
    values[2] = 0.0
    values[3] = -INF
    values[4, 198] = INF
    expected = [int(values[0].argmax()), 20, 0, 0, 198, int(values[5].argmax())]
    assert draw(values, temperature=0.0, tp=tp, kernels=kernels) == expected
    assert draw(values, temperature=0.0, tp=tp, kernels=kernels, filtered=True) == expected


@bundles
@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_rows_are_exact_beside_sampled_and_filtered_rows(tp: int, kernels: Any) -> None:
    values = random_logits(6)
    temperature, top_k, top_p = [0.0, 1.0, 0.0, 5.0, 0.0, 1e-4], [3, 0, 1, 2, 0, 0], [0.1, 1.0, 1.0, 0.5, 1.0, 1.0]
    ids = draw(values, temperature=temperature, top_k=top_k, top_p=top_p, tp=tp, kernels=kernels)
    best = values.argmax(-1).tolist()
    assert [ids[i] for i in (0, 2, 4, 5)] == [best[i] for i in (0, 2, 4, 5)]
    assert ids[3] in values[3].topk(2).indices.tolist()


@bundles
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_gives_minus_1_in_its_row_only(temperature: float, kernels: Any) -> None:
    values = random_logits(4)
    values[1, 7] = float("nan")
    values[2, 198] = -float("nan")
    for tp in (1, 2, 4):
        ids = draw(values, temperature=temperature, tp=tp, kernels=kernels)
        assert ids[1] == ids[2] == -1
        assert ids[0] == draw(values[:1], temperature=temperature, kernels=kernels)[0] >= 0
        assert draw(values, temperature=temperature, tp=tp, kernels=kernels, top_k=5)[1] == -1
    assert -1 not in draw(random_logits(2), temperature=temperature, tp=2, padding=float("nan"), kernels=kernels)


# --- seeds -----------------------------------------------------------------------------------------------------------

FROZEN = [
    ({"temperature": 1.0}, [150, 150, 150, 143, 143, 143, 6, 71]),
    ({"temperature": 0.7, "seed": 42}, [60, 132, 172, 84, 184, 60, 140, 172]),
    ({"temperature": 2.0, "seed": 2**40 + 7, "position": 1000}, [189, 189, 189, 189, 189, 189, 189, 189]),
    ({"temperature": 1.0, "seed": -1, "top_k": 5}, [90, 44, 32, 61, 83, 116, 136, 99]),
    ({"temperature": 1.5, "seed": 3, "top_p": 0.6, "min_p": 0.01}, [8, 33, 118, 171, 112, 118, 171, 95]),
]


@bundles
@pytest.mark.parametrize(("options", "expected"), FROZEN)
def test_sampling_is_frozen(options: dict[str, Any], expected: list[int], kernels: Any) -> None:
    """These ids are a promise: the noise is a function of (seed, position, vocabulary id) alone, for ever."""
    ids_v = torch.arange(199)
    values = torch.stack([((ids_v * (37 + 2 * row)) % 101) / 20.0 for row in range(8)])
    for tp in (1, 2, 4):
        assert draw(values, kernels=kernels, tp=tp, **options) == expected


def test_a_row_is_the_same_in_any_batch_and_place() -> None:
    row = random_logits(1, seed=5)
    alone = draw(row, temperature=1.3, seed=42, position=17, top_p=0.9)
    for place in (0, 3, 6):
        batch = random_logits(7, seed=6)
        batch[place] = row[0]
        seeds = torch.arange(100, 107)
        seeds[place] = 42
        positions = torch.arange(7)
        positions[place] = 17
        temperature = torch.full((7,), 0.0)
        temperature[place] = 1.3
        ids = draw(batch, temperature=temperature, seed=seeds, position=positions, top_p=0.9)
        assert ids[place] == alone[0]


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_seeds_and_positions_give_different_tokens(vary: str) -> None:
    values = torch.zeros(300, 199)
    ids = draw(values, **{vary: torch.arange(300)})
    assert len(set(ids)) > 120
    assert draw(values) == [draw(values[:1])[0]] * 300


def test_requests_draw_the_same_tokens_in_any_batch_chunking_and_tp() -> None:
    requests = [
        Request(prompt=random_ids(n, seed=n).tolist(), max_tokens=7, temperature=t, seed=s, top_k=k, top_p=p, min_p=m)
        for n, t, s, k, p, m in [
            (9, 0.8, 42, 0, 1.0, 0.0),
            (3, 0.0, 0, 0, 1.0, 0.0),
            (6, 1.5, -7, 20, 0.9, 0.0),
            (5, 3.0, 42, 0, 1.0, 0.05),
        ]
    ]
    alone = [generate(CONFIG, params_for(CONFIG), [request], chunk=64)[0] for request in requests]
    assert len({tuple(tokens) for tokens in alone}) == 4
    for tp, chunk, order in [(1, 2, [0, 1, 2, 3]), (2, 5, [3, 1, 0, 2]), (4, 3, [2, 3, 1, 0]), (1, 7, [1, 1, 0, 3])]:
        got = generate(CONFIG, params_for(CONFIG), [requests[i] for i in order], tp=tp, chunk=chunk, padding=1)
        assert got == [alone[i] for i in order]
    assert generate(CONFIG, params_for(CONFIG), requests, kernels=REFERENCE) == alone


# --- filters ---------------------------------------------------------------------------------------------------------


def support(values: Tensor, **options: Any) -> set[int]:
    """The ids that are ever drawn from one row, at a temperature that makes them about equally likely."""
    rows = values[None].expand(200, -1)
    return set(draw(rows.contiguous(), seed=torch.arange(200), **options))


@bundles
def test_top_p_keeps_the_token_that_crosses_p(kernels: Any) -> None:
    values = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert support(values, top_p=0.6, kernels=kernels) == {2, 3}
    assert support(values, top_p=0.75, kernels=kernels) == {1, 2, 3}
    assert support(values, top_p=0.3, kernels=kernels) == {3}
    assert support(values, top_p=1e-6, kernels=kernels) == {3}
    assert support(values, top_p=0.0, kernels=kernels) == {3}
    assert support(values, kernels=kernels, filtered=True) == {0, 1, 2, 3}


@bundles
def test_top_k_edges(kernels: Any) -> None:
    values = torch.arange(256) * 0.001
    for off in (-1, 0, 256, 10**6):
        assert draw(values[None], top_k=off, filtered=True, seed=9, kernels=kernels) == draw(values[None], seed=9)
    assert support(values, top_k=1, kernels=kernels) == {255}
    assert support(values, top_k=3, kernels=kernels) == {253, 254, 255}
    assert 0 not in support(values[:8], top_k=7, kernels=kernels)


@bundles
def test_min_p_is_relative_to_the_most_probable(kernels: Any) -> None:
    values = torch.tensor([0.05, 0.15, 0.3, 0.5]).log()
    assert support(values, min_p=0.25, kernels=kernels) == {1, 2, 3}
    assert support(values, min_p=0.35, kernels=kernels) == {2, 3}
    assert support(values, min_p=1.0, kernels=kernels) == {3}


def test_filters_hold_at_the_rows_temperature_and_on_every_rank() -> None:
    values = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    heated = torch.softmax(values / 4, -1)
    assert heated[[2, 3]].sum() < 0.56
    for tp in (1, 2, 4):
        assert support(values, top_p=0.6, temperature=4.0, tp=tp) == {1, 2, 3}
        assert support(values, top_k=2, temperature=9.0, tp=tp) == {2, 3}


def test_filters_are_per_row() -> None:
    values = random_logits(5) * 0.01
    ids = draw(
        values, temperature=9.0, top_k=[1, 0, 2, 0, 0], top_p=[1.0, 0.001, 1.0, 1.0, 1.0], min_p=[0, 0, 0, 1.0, 0]
    )
    best = values.argmax(-1).tolist()
    assert [ids[0], ids[1], ids[3]] == [best[0], best[1], best[3]]
    assert ids[2] in values[2].topk(2).indices.tolist()
    assert ids[4] == draw(values, temperature=9.0)[4]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_forbidden_ids_are_never_drawn_greedy_or_not(tp: int) -> None:
    values = random_logits(3)
    best = values.argsort(-1, descending=True)
    forbidden = [[int(best[0, 0]), -1, -1], [int(best[1, 0]), int(best[1, 1]), int(best[1, 0])], [-1, -1, -1]]
    greedy = draw(values, temperature=0.0, forbidden=forbidden, tp=tp)
    assert greedy == [int(best[0, 1]), int(best[1, 2]), int(best[2, 0])]
    assert draw(values, temperature=1.0, top_k=1, forbidden=forbidden, tp=tp) == greedy


def test_forbid_sets_only_this_shards_columns() -> None:
    values = torch.zeros(2, 5)
    got = forbid(values, torch.tensor([[10, 14, -1], [9, 15, 12]], dtype=torch.int32), 10)
    assert torch.isinf(got).nonzero().tolist() == [[0, 0], [0, 4], [1, 2]]
    assert not values.any()


@bundles
@pytest.mark.parametrize("tp", [2, 4])
def test_padded_rows_of_the_vocabulary_are_never_sampled(tp: int, kernels: Any) -> None:
    """Rows of +100 behind the last of 199 ids, a high temperature, top-p only."""

    def params_of(group: Group, layers: Layers) -> Any:
        params = random_params(CONFIG, layers, group)
        if group.rank == group.size - 1:
            params.lm_head.weight[-1] = 100.0
        return params

    requests = [Request(prompt=[3, 4], max_tokens=16, temperature=5.0, top_p=0.99, seed=seed) for seed in range(5)]
    got = generate(CONFIG, params_of, requests, tp=tp, kernels=kernels)
    assert all(0 <= token < 199 for tokens in got for token in tokens)
    assert got == generate(CONFIG, params_for(CONFIG), requests)


# --- frequencies -----------------------------------------------------------------------------------------------------


def chi_square(ids: list[int], probabilities: Tensor) -> float:
    """The statistic over its degrees of freedom: about 1 for draws from these probabilities."""
    counts = torch.bincount(torch.tensor(ids), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(ids)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return float(((counts - expected)[kept].square() / expected[kept]).sum() / (kept.sum() - 1))


@bundles
@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_come_as_often_as_softmax_says(kernels: Any, tp: int) -> None:
    draws = 10_000
    row = random_logits(1, 40, seed=3)
    values = row.expand(draws, -1).contiguous()
    seeds = torch.arange(draws)
    hot = torch.softmax(row[0] / 1.7, -1)
    ids = draw(values, temperature=1.7, seed=seeds, kernels=kernels, tp=tp)
    assert chi_square(ids, hot) < 1.8
    assert chi_square(ids, torch.softmax(row[0] / 1.5, -1)) > 2.5
    kept = torch.zeros(40).index_fill(0, row[0].topk(10).indices, 1.0) * hot
    ids = draw(values[:2000], temperature=1.7, seed=seeds[:2000], top_k=10, kernels=kernels, tp=tp)
    assert chi_square(ids, kept / kept.sum()) < 2.6


def test_one_seed_over_positions_draws_as_softmax_says() -> None:
    """The tokens of one request over its length, not only one position over many seeds."""
    row = random_logits(1, 40, seed=4)
    ids = draw(row.expand(20_000, -1).contiguous(), seed=123, position=torch.arange(20_000))
    assert chi_square(ids, torch.softmax(row[0], -1)) < 1.8


def test_a_request_samples_from_the_models_own_distribution() -> None:
    prompt = [5, 6, 7]
    expected = torch.softmax(logits(random_params(CONFIG), torch.tensor(prompt), config=CONFIG)[-1] / 3.0, -1)
    requests = [Request(prompt=prompt, max_tokens=1, temperature=3.0, seed=seed) for seed in range(1000)]
    ids = [tokens[0] for tokens in generate(CONFIG, params_for(CONFIG), requests, chunk=3)]
    top = expected.topk(12).indices
    grouped = torch.cat([expected[top], (1 - expected[top].sum())[None]])
    place = {int(token): index for index, token in enumerate(top)}
    assert chi_square([place.get(token, 12) for token in ids], grouped) < 2.5


# --- padding columns -------------------------------------------------------------------------------------------------


@bundles
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}], ids=["plain", "filtered"])
def test_padding_columns_that_would_win_are_passed_over(kernels: Any, filters: dict[str, Any]) -> None:
    """200 columns over 2 ranks for 199 ids: the last one holds 1e9, then NaN, and no token changes."""
    requests = [Request(prompt=[5, 6, 7], temperature=heat, max_tokens=6, seed=3, **filters) for heat in (0.0, 1.0)]
    expected = generate(CONFIG, params_for(CONFIG), requests, kernels=kernels)
    for spoiler in (1e9, float("nan")):
        spoiled = replace(kernels, head_logits=spoiled_head(kernels, spoiler))
        assert generate(CONFIG, params_for(CONFIG), requests, tp=2, kernels=spoiled) == expected


def spoiled_head(kernels: Any, spoiler: float) -> Any:
    """The bundle's head, with another value in the column behind a shard whose weight row there is padding."""

    def head_logits(x_ld: Tensor, weight_vd: Tensor) -> Tensor:
        logits_lv = kernels.head_logits(x_ld, weight_vd).clone()
        logits_lv[:, 99] = torch.where((weight_vd[99] == 0).all(), spoiler, logits_lv[:, 99])
        return logits_lv

    return head_logits


def keep(x: Tensor, context: Context, /) -> Tensor:
    return x


@pytest.mark.parametrize(
    "layers", [Layers().capture("logits"), Layers().edit("logits", keep).capture("logits")], ids=["captured", "edited"]
)
def test_who_looks_at_logits_sees_padding_columns_as_minus_infinity(layers: Layers) -> None:
    spoiled = replace(REFERENCE, head_logits=spoiled_head(REFERENCE, 1e9))

    def run(group: Group) -> tuple[Tensor, Tensor]:
        model = qwen3(CONFIG, layers, group, spoiled)
        driver = Driver(model, params_for(CONFIG)(group, layers))
        driver.admit([1], [Request(prompt=[5, 6, 7])])
        seen = driver.step([], [(1, 3)]).captured["logits"]
        stream, _, _ = model.hidden(driver.params, driver.cache, driver.inputs)
        return seen, model.head(driver.params, stream, driver.inputs)[0]

    shards = on_ranks(run, 2)
    for seen in shards[0]:
        assert torch.isfinite(seen).all()
    for seen in shards[1]:
        assert (seen[:, 99] == -INF).all()
        assert torch.isfinite(seen[:, :99]).all()


def test_a_swapped_sampler_gets_whole_columns_without_padding() -> None:
    spoiled = replace(REFERENCE, head_logits=spoiled_head(REFERENCE, 1e9))

    def largest(logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]:
        assert logits_lv.shape[1] == 199
        return logits_lv.argmax(dim=-1).to(torch.int32), {}

    requests = [Request(prompt=[5, 6, 7], max_tokens=5)]
    expected = generate(CONFIG, params_for(CONFIG), requests, kernels=REFERENCE)
    layers = Layers(sample=largest)
    assert generate(CONFIG, params_for(CONFIG), requests, tp=2, layers=layers, kernels=spoiled) == expected
