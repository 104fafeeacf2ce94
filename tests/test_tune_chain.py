"""The chain in which matrix kernels are chosen: that it is a decode step, and that the search finds what is fastest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.kernels import gemv, reference, tune_chain
from funcllm.kernels.bundle import FAST
from funcllm.kernels.gemv_config import GemvConfig, choose_config, next_power_of_2
from funcllm.kernels.tune_chain import SIZES, ChainTensors, Size, Trial, Way
from funcllm.kernels.tune_gemv import CASES, Case, candidates, entry, spelled

TINY = Size(name="tiny", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, head_dim=16, vocabulary=96)
STREAM = GemvConfig(block_n=2, num_warps=4)
PERSISTENT = GemvConfig(block_n=4, num_warps=4, programs_per_sm=2, release="late")
EPS = 1e-6


def tiny_tensors(dtype: torch.dtype = torch.float32, rows: int = 2) -> ChainTensors:
    return tune_chain.chain_tensors(TINY, rows, device="cpu", dtype=dtype)


def ways_of(way: Way) -> dict[str, Way]:
    return dict.fromkeys(TINY.places, way)


def by_references(tensors: ChainTensors, head: bool) -> Tensor:
    """The same step by the reference ops."""
    x, update = tensors.x_td, torch.zeros_like(tensors.x_td)
    for layer in tensors.layers:
        x, normed = reference.add_rms_norm(x, update, layer.input_norm_d, EPS)
        q, k, v = (normed @ layer.qkv_od.T).view(-1, 8, 16).split([4, 2, 2], dim=1)
        norms = (layer.q_norm_h, layer.k_norm_h, EPS, tensors.cos_th, tensors.sin_th)
        q, *caches = reference.qk_norm_rope_write(
            q, k, v, *norms, layer.k_cache_pskh, layer.v_cache_pskh, tensors.slots_t
        )
        decode = (tensors.block_table_tm, tensors.kv_lens_t)
        update = reference.attend(q, *caches, decode, (), scale=0.25).flatten(1) @ layer.o_do.T
        x, normed = reference.add_rms_norm(x, update, layer.mid_norm_d, EPS)
        update = reference.silu_mul(normed @ layer.gate_up_fd.T) @ layer.down_df.T
    if not head:
        return update
    return reference.add_rms_norm(x, update, tensors.final_norm_d, EPS)[1] @ tensors.head_vd.T


@pytest.mark.parametrize("head", [True, False], ids=["logits", "update"])
@pytest.mark.parametrize("way", [None, STREAM], ids=["library", "kernels"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_chain_is_a_decode_step(rows: int, way: Way, head: bool) -> None:
    expected = by_references(tiny_tensors(rows=rows), head)
    found = tune_chain.chain(tiny_tensors(rows=rows), TINY, ways_of(way), FAST, pdl=True, head=head)
    assert found.shape == (rows, 96 if head else 32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_place_is_done_as_its_way_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {place: GemvConfig(block_n=i + 1, num_warps=4) for i, place in enumerate(TINY.places)}
    seen: list[tuple[int, int, bool, bool]] = []

    def small_linear(x: Tensor, weight: Tensor, *, config: GemvConfig, pdl: bool) -> Tensor:
        seen.append((weight.shape[0], config.block_n, pdl, False))
        return x @ weight.T

    def add_norm_small_linear(x: Tensor, update: Tensor, *rest: Any, config: GemvConfig, **flags: Any) -> Any:
        seen.append((rest[2].shape[0], config.block_n, flags["pdl"], flags["silu"]))
        y = reference.add_rms_norm(x, update, rest[0], rest[1])[1] @ rest[2].T
        return x + update, reference.silu_mul(y) if flags["silu"] else y

    monkeypatch.setattr(gemv, "small_linear", small_linear)
    monkeypatch.setattr(gemv, "add_norm_small_linear", add_norm_small_linear)
    tune_chain.chain(tiny_tensors(), TINY, ways, FAST, pdl=True)
    layer = [(128, 1, True, False), (32, 2, True, False), (96, 3, True, True), (32, 4, True, False)]
    assert seen == [*layer, *layer, (96, 5, True, False)]


def test_layers_have_weights_of_their_own_and_rows_slots_of_their_own() -> None:
    tensors = tiny_tensors()
    pointers = {tensor.data_ptr() for layer in tensors.layers for tensor in layer}
    assert len(pointers) == 2 * len(tensors.layers[0])
    assert tensors.slots_t.tolist() == [17 * 32 - 1, 33 * 32 - 1]
    assert tensors.block_table_tm[0, :17].tolist() == [*range(1, 17), 0]
    assert tensors.layers[0].k_cache_pskh.shape == (33, 32, 2, 16)


@pytest.mark.parametrize("place", ["qkv", "o", "gate_up", "down", "head"])
def test_wrong_values_are_noticed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tensors = TINY.places[place], tiny_tensors(torch.bfloat16)
    assert tune_chain.is_right(case, tensors, STREAM)
    assert tune_chain.is_right(case, tensors, None)
    right, right_normed = gemv.small_linear, gemv.add_norm_small_linear
    monkeypatch.setattr(gemv, "small_linear", lambda *args, **kwargs: 1.03 * right(*args, **kwargs))

    def off(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        total, y = right_normed(*args, **kwargs)
        return total, 1.03 * y

    monkeypatch.setattr(gemv, "add_norm_small_linear", off)
    assert not tune_chain.is_right(case, tensors, STREAM)


# --- search ----------------------------------------------------------------------------------------------------------


def times(costs: Mapping[str, Mapping[Way, float]], asked: list[dict[str, Way]]) -> Any:
    def time_of(ways: Mapping[str, Way]) -> float:
        asked.append(dict(ways))
        return sum(costs[place][way] for place, way in ways.items())

    return time_of


def test_search_takes_the_fastest_way_of_each_place() -> None:
    costs = {"qkv": {None: 5.0, STREAM: 4.0, PERSISTENT: float("inf")}, "o": {None: 1.0, STREAM: 3.0, PERSISTENT: 2.0}}
    asked: list[dict[str, Way]] = []
    ways = [None, STREAM, PERSISTENT]
    start: dict[str, Way] = {"qkv": None, "o": STREAM}
    best, trials = tune_chain.search(times(costs, asked), {"qkv": ways, "o": ways}, start)
    assert best == {"qkv": STREAM, "o": None}
    assert asked[0] == {"qkv": None, "o": STREAM}
    assert asked[3:] == [{"qkv": STREAM, "o": way} for way in ways]
    assert trials[1] == Trial("qkv", STREAM, 7.0)
    assert [trial.way for trial in tune_chain.fastest(trials, "qkv", 5)] == [STREAM, None]
    assert [trial.microseconds for trial in tune_chain.fastest([*trials, Trial("o", None, 0.5)], "o", 2)] == [0.5, 6.0]


def test_search_keeps_what_it_has_when_time_is_over_or_nothing_runs() -> None:
    asked: list[dict[str, Way]] = []
    costs = {"qkv": {None: float("inf"), STREAM: 1.0}}
    best, trials = tune_chain.search(times(costs, asked), {"qkv": [None, STREAM]}, {"qkv": None}, lambda: bool(asked))
    assert best == {"qkv": None}
    assert len(trials) == len(asked) == 1


def test_the_second_round_varies_the_fastest() -> None:
    trials = [Trial("qkv", None, 3.0), Trial("qkv", STREAM, 2.0), Trial("qkv", PERSISTENT, 1.0)]
    found = tune_chain.second_round(trials, {"qkv": PERSISTENT})["qkv"]
    out = GemvConfig(block_n=4, num_warps=4, programs_per_sm=2, early_start=False, release="never")
    prefetching = GemvConfig(block_n=4, num_warps=4, programs_per_sm=2, prefetch=2, release="late")
    stream_out = GemvConfig(block_n=2, num_warps=4, early_start=False, release="never")
    assert found == [PERSISTENT, STREAM, None, out, prefetching, stream_out]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_ways_are_few_and_can_run(size: Size, rows: int) -> None:
    for place, case in size.places.items():
        found = tune_chain.ways(case, rows)
        assert found[:2] == [choose_config(rows, case.out_features, case.size, case.silu, case.norm), None]
        assert 12 <= len(found) <= 26, place
        kinds = {(way.tensor_cores, way.programs_per_sm > 0) for way in found if way is not None}
        assert {(True, False), (False, True)} <= kinds, place
        for way in found:
            if way is not None and not way.tensor_cores:
                assert 256 * way.num_warps <= next_power_of_2(case.size)  # no exchange of layouts
                assert way.programs_per_sm * way.num_warps <= 16


# --- alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_candidates_of_a_case_begin_with_what_is_chosen(case: Case, rows: int) -> None:
    found = candidates(case, rows)
    assert found[0] == choose_config(rows, case.out_features, case.size, case.silu, case.norm)
    assert len(set(found)) == len(found) >= 5


@pytest.mark.parametrize(
    "config",
    [STREAM, PERSISTENT, GemvConfig(block_n=16, num_warps=2, block_k=256, tensor_cores=True, early_start=False)],
    ids=["stream", "persistent", "tensor cores"],
)
def test_spelled_configurations_are_python(config: GemvConfig) -> None:
    text = spelled(config)
    assert eval(text) == config
    assert "prefetch" not in text
    case = Case(name="gate_up", out_features=64, size=32, norm=True, silu=True)
    assert eval("{" + entry(case, 2, config) + "}") == {(2, 64, 32, True): config}


def test_a_report_names_the_best_and_lines_to_paste() -> None:
    record = tune_chain._record(PERSISTENT)
    report = {"size": "tiny", "rows": 2, "layers": 2, "failed": {"o": "wrong values"}, "floor": 7.25}
    report |= {name: {"layer": 30.0 + i, "head": 70.0} for i, name in enumerate(("library", "in_use", "best"))}
    row = {"way": record, "alone": 5.5, "alone_pdl": 4.5, "library": 6.5, "floor": 2.0}
    report |= {"pdl_equal": True, "error": 0.01, "places": {"qkv": row}, "fastest": {"qkv": [(None, 29.5)]}}
    report |= {"entries": [entry(TINY.places["qkv"], 2, PERSISTENT)]}
    text = tune_chain.printed(report)
    assert "best         32.00    70.0" in text
    assert "2.00     6.50    5.50    4.50  GemvConfig(block_n=4, num_warps=4, programs_per_sm=2" in text
    assert "29.50  matrix library" in text
    assert "failed: o: wrong values" in text
    assert text.endswith('(2, 128, 32, False): GemvConfig(block_n=4, num_warps=4, programs_per_sm=2, release="late"),')


def test_tune_searches_checks_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program on a tiny size, with a clock that favours one way at each place and finds the library slow."""
    right, tensors = gemv.small_linear, tiny_tensors(torch.bfloat16)
    wrong = GemvConfig(block_n=8, num_warps=2)

    def small_linear(x: Tensor, weight: Tensor, *, config: GemvConfig, pdl: bool) -> Tensor:
        return right(x, weight) * (2.0 if config == wrong else 1.0)

    def clock(calls: Any, **_: Any) -> float:
        if calls[0].func is not tune_chain.chain:
            return 1.0
        ways, head = calls[0].args[2], calls[0].keywords["head"]
        slow = sum(10.0 for way in ways.values() if way is None or way.release == "early")
        return 40.0 + slow - (0.0 if head else 8.0)

    monkeypatch.setattr(gemv, "small_linear", small_linear)
    monkeypatch.setattr(tune_chain, "microseconds", clock)
    monkeypatch.setattr(tune_chain, "compile_ahead", lambda pool, jobs: None)
    monkeypatch.setattr(tune_chain, "chain_tensors", lambda size, rows: tensors)
    monkeypatch.setattr(tune_chain, "fast_kernels", lambda *_: FAST)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tune_chain, "ways", lambda case, rows: [STREAM, wrong, None, PERSISTENT])
    report, near = tune_chain.tune(TINY, 2, None, float("inf"))  # type: ignore[arg-type]
    assert report["library"] == {"layer": 41.0, "head": 8.0}
    assert report["best"] == {"layer": 16.0, "head": 8.0}
    assert {place: GemvConfig(**row["way"]).release for place, row in report["places"].items()} == dict.fromkeys(
        TINY.places, "late"
    )
    assert report["pdl_equal"]
    assert report["error"] < 0.1
    assert report["failed"] == {f"o {wrong}": "wrong values", f"down {wrong}": "wrong values"}
    assert near["o"][0] == PERSISTENT
    assert wrong not in near["o"]
    assert "best         16.00     8.0" in tune_chain.printed(json.loads(json.dumps(report)))
    again, _ = tune_chain.tune(TINY, 2, None, float("inf"), near)  # type: ignore[arg-type]
    assert again["best"] == report["best"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune_chain.main(["0.6B"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
