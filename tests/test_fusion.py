"""Fused blocks: which are used, what makes them fall away, and that they mean what the plain composition means."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm import fusion
from funcllm import layers as defaults
from funcllm.attention import paged_attention
from funcllm.config import qwen3_config
from funcllm.group import SINGLE, Group
from funcllm.kernels import gemm_config
from funcllm.kernels.bundle import AHEAD_BLOCKS, FAST, REFERENCE, SMALL_BLOCKS, Kernels, with_ahead_blocks
from funcllm.qwen3 import qwen3
from funcllm.record import FUNCTIONS, Layers
from funcllm.sites import LAYER_SITES, MODEL_SITES
from funcllm.types import Context
from tests.steps import Driver, Request, on_ranks, random_ids, random_params, relative
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=199, o_bias=True, qkv_bias=True, mlp_bias=True)
NAMES = frozenset(entry.name for entry in fusion.ENTRIES)
EVERY = replace(REFERENCE, fused=NAMES, small_rows=8, worth=lambda rows, *sizes: rows <= 64)
EVERY_AHEAD = replace(EVERY, small_rows=0)


class Calls:
    """A bundle that counts its calls."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def bundle(self, kernels: Kernels) -> Kernels:
        ops = [name for name, value in vars(kernels).items() if callable(value)]
        return replace(kernels, **{name: self._counting(name, getattr(kernels, name)) for name in ops})

    def _counting(self, name: str, op: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.count[name] = self.count.get(name, 0) + 1
            return op(*args, **options)

        return call


def run(kernels: Kernels, layers: Layers = Layers(), tp: int = 1, config: Any = CONFIG) -> list[Tensor]:
    """Logits of a prompt step, a mixed step and two decode steps on rank 0."""

    def steps(group: Group) -> list[Tensor]:
        seen = []

        def keep(x: Tensor, context: Context, /) -> Tensor:
            seen.append(x[:, : config.vocab_size // 4].clone())
            return x

        model = qwen3(config, layers.edit("logits", keep), group, kernels)
        driver = Driver(model, _params(config, layers, group))
        driver.admit([1, 2], [Request(prompt=random_ids(6, seed=1).tolist()), Request(prompt=[5, 6, 7, 8])])
        driver.step([], [(1, 6), (2, 2)], padding=3)
        driver.step([1], [(2, 2)])
        driver.step([1, 2])
        driver.step([2, 0, 1])
        return seen

    return on_ranks(steps, tp)[0]


def _params(config: Any, layers: Layers, group: Group) -> Any:
    """Random parameters whose vectors are not all 1 or 0."""
    params = random_params(config, layers, group)

    def scattered(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()))
        return x + 0.3 * noise if x.dim() == 1 and x.shape[0] in (16, 64) else x

    return torch.utils._pytree.tree_map(scattered, params)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_entry_alone_means_what_the_composition_means(name: str) -> None:
    calls = Calls()
    kernels = calls.bundle(replace(EVERY_AHEAD if name in AHEAD_BLOCKS else EVERY, fused=frozenset({name})))
    for fused, plain in zip(run(kernels), run(REFERENCE)):
        assert relative(fused, plain) < 1e-5
    plain_calls = Calls()
    run(plain_calls.bundle(REFERENCE))
    assert calls.count != plain_calls.count, "the entry was not used"


@pytest.mark.parametrize("tp", [1, 2])
def test_all_entries_together_mean_what_the_composition_means(tp: int) -> None:
    expected = run(REFERENCE, tp=tp)
    for kernels in (EVERY, EVERY_AHEAD, FAST):
        for fused, plain in zip(run(kernels, tp=tp), expected):
            assert relative(fused, plain) < 1e-5


def test_the_default_bundles_fuse_nothing_or_what_they_say() -> None:
    calls = Calls()
    run(calls.bundle(REFERENCE))
    always = {"rope_angles", "attend", "head_logits", "noise_keys", "pick", "token_of"}
    assert set(calls.count) == always | {"write_kv"}
    calls = Calls()
    run(calls.bundle(FAST))
    assert set(calls.count) == always | {"embed_rows", "add_rms_norm", "qk_norm_rope_write", "silu_mul"}
    assert SMALL_BLOCKS | AHEAD_BLOCKS < NAMES


def context_of(layer: Layers, batch: str = "small", kernels: Kernels = EVERY, config: Any = CONFIG) -> Context:
    inputs: Any = ()
    return Context(config=config, group=Group(), kernels=kernels, layer=layer, inputs=inputs, batch=batch)


def of_rows(rows: int, kernels: Kernels, config: Any = CONFIG) -> Context:
    """A step of so many rows, as far as products see it."""
    inputs: Any = SimpleNamespace(token_ids_t=torch.empty(rows, device="meta"))
    return replace(context_of(Layers(), "ahead", kernels, config), inputs=inputs)


def fitting(layer: Layers, batch: str = "small", kernels: Kernels = EVERY, config: Any = CONFIG) -> set[str]:
    context = context_of(layer, batch, kernels, config)
    return {entry.name for entry in fusion.ENTRIES if fusion.fits(entry, context)}


BATCHES = {"small": NAMES - AHEAD_BLOCKS, "ahead": NAMES - SMALL_BLOCKS}


def test_all_entries_fit_the_default_layer_in_their_batch_and_the_large_ones_in_any() -> None:
    for batch, names in BATCHES.items():
        assert fitting(Layers(), batch) == names
    for batch in ("decode", "mixed"):
        assert fitting(Layers(), batch) == NAMES - SMALL_BLOCKS - AHEAD_BLOCKS
    assert fitting(Layers(), kernels=REFERENCE) == set()
    assert fitting(Layers(), kernels=FAST) == FAST.fused
    assert fitting(Layers(), config=tiny_config(hidden_size=60)) == NAMES - SMALL_BLOCKS - AHEAD_BLOCKS


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("block", "sample")])
def test_a_swapped_function_takes_away_exactly_the_entries_that_contain_it(name: str) -> None:
    default = getattr(Layers(), name)

    def swapped(*args: Any) -> Any:
        return default(*args)

    layers = Layers(**{name: swapped})
    left = {entry.name for entry in fusion.ENTRIES if name not in entry.stands_for}
    assert left != NAMES
    for batch, names in BATCHES.items():
        assert fitting(layers, batch) == left & names
    for kernels in (EVERY, EVERY_AHEAD):
        for fused, plain in zip(run(kernels, layers), run(REFERENCE)):
            assert relative(fused, plain) < 1e-5


@pytest.mark.parametrize("name", [*LAYER_SITES, "embed", "final"])
def test_a_touched_site_takes_away_exactly_the_entries_that_swallow_it(name: str) -> None:
    """And an edit there acts, whatever is fused around it."""
    is_outside = name in MODEL_SITES
    site = name if is_outside else f"layers.0.{name}"
    layers = Layers().edit(site, lambda x, c: x * 1.5 + 0.1)
    resolved = layers.of(None if is_outside else 0)
    left = {entry.name for entry in fusion.ENTRIES if name not in entry.swallows}
    for batch, names in BATCHES.items():
        assert fitting(resolved, batch) == left & names
        assert fitting(layers.of(1), batch) == names
    assert fitting(Layers().capture(site).of(None if is_outside else 0)) == fitting(resolved)
    expected = run(REFERENCE, layers)
    for kernels in (EVERY, EVERY_AHEAD, FAST):
        for fused, plain in zip(run(kernels, layers), expected):
            assert relative(fused, plain) < 1e-5
    assert max(relative(a, b) for a, b in zip(expected, run(REFERENCE))) > 1e-3


def test_the_batch_class_goes_by_rows_and_chunks() -> None:
    driver = Driver(qwen3(CONFIG, kernels=EVERY), random_params(CONFIG))
    driver.admit([1, 2], [Request(prompt=[1, 2]), Request(prompt=[3, 4, 5])])
    driver.step([], [(1, 2), (2, 2)])
    assert fusion.batch_class(driver.inputs, EVERY.small_rows) == "mixed"
    driver.step([1], [(2, 1)])
    assert fusion.batch_class(driver.inputs, EVERY.small_rows) == "mixed"
    driver.step([1, 2])
    assert fusion.batch_class(driver.inputs, EVERY.small_rows) == "small"
    assert fusion.batch_class(driver.inputs, 1) == "decode"
    assert fusion.batch_class(driver.inputs, FAST.small_rows) == "decode"
    assert fusion.batch_class(driver.inputs, EVERY.small_rows, 64) == "small"
    assert fusion.batch_class(driver.inputs, 1, 2) == "ahead"
    assert fusion.batch_class(driver.inputs, 0, 1) == "decode"


def test_defaults_are_told_by_identity() -> None:
    assert fusion.is_default("attention", paged_attention)
    assert fusion.is_default("mlp", defaults.swiglu)
    assert not fusion.is_default("mlp", lambda *args: defaults.swiglu(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_blocks_round_where_the_composition_rounds(dtype: torch.dtype) -> None:
    """Bit for bit on the reference's twins: norm of the rounded sum, rounded activation, rounded rotation."""
    params = torch.utils._pytree.tree_map(lambda x: x.to(dtype), _params(CONFIG, Layers(), Group()))
    results = []
    for kernels in (REFERENCE, replace(EVERY, fused=NAMES - {"small_head"}), EVERY_AHEAD):
        seen: list[Tensor] = []
        layers = Layers().edit("logits", lambda x, c, seen=seen: seen.append(x.clone()) or x)
        driver = Driver(qwen3(CONFIG, layers, kernels=kernels), params)
        driver.admit([1], [Request(prompt=[3, 1, 4, 1, 5])])
        driver.step([], [(1, 5)])
        driver.step([1, 0])
        results.append(seen)
    for plain, small, ahead in zip(*results):
        assert torch.equal(small, plain)
        assert torch.equal(ahead, plain)


def test_small_blocks_are_left_to_models_with_small_weights() -> None:
    assert fusion.small_rows(qwen3_config("0.6b"), SINGLE, EVERY) == 8
    assert fusion.small_rows(qwen3_config("8b"), SINGLE, EVERY) == 1
    assert fusion.small_rows(qwen3_config("1.7b"), Group(0, 4), EVERY) == 8


def test_products_ask_for_their_weights_early_where_they_are_measured_to_be_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each size at its own numbers of rows, whatever lies between; at tp 2 they are those of a shard."""
    config = qwen3_config("0.6b")
    counts = {(4096, 1024, False): {64}, (3072, 1024, True): {16, 32, 64}, (2048, 1024, False): {16}}
    table = {(rows, *size): gemm_config.GemmConfig() for size, rows_of in counts.items() for rows in rows_of}
    monkeypatch.setattr(gemm_config, "MEASURED", table)
    kernels = replace(EVERY_AHEAD, worth=gemm_config.worth)
    assert fusion.ahead_rows(config, SINGLE, kernels) == 64
    assert fusion.ahead_rows(config, Group(0, 2), kernels) == 16
    assert fusion.ahead_rows(config, SINGLE, replace(kernels, fused=NAMES - AHEAD_BLOCKS)) == 0
    weight = torch.empty(6144, 1024, device="meta")
    for rows, qkv in ((33, True), (64, True), (20, False), (9, False)):
        context = of_rows(rows, kernels, config)
        assert fusion.asks_ahead(weight, True, context)
        assert not fusion.asks_ahead(weight, False, context)
        assert fusion.asks_ahead(weight[:4096], False, context) == qkv
        assert not fusion.asks_ahead(torch.empty(1024, 3072, device="meta"), False, context)


def test_no_product_asks_for_its_weight_early_unless_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = qwen3_config("0.6b")
    bundle = replace(EVERY, worth=gemm_config.worth)
    monkeypatch.setattr(gemm_config, "MEASURED", {})
    assert fusion.ahead_rows(config, SINGLE, bundle) == fusion.ahead_rows(config, SINGLE, FAST) == 0
    assert not fusion.asks_ahead(torch.empty(4096, 1024, device="meta"), False, of_rows(16, bundle))
    monkeypatch.setattr(gemm_config, "MEASURED", {(16, 4096, 1024, False): gemm_config.GemmConfig()})
    assert fusion.ahead_rows(config, SINGLE, bundle) == 16


def test_a_table_of_measured_sizes_is_all_that_the_fast_bundle_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """gate_up with its activation and down are in it, qkv and o are not."""
    calls = Calls()
    bundle = calls.bundle(with_ahead_blocks(FAST, torch.device("cpu")))
    expected = run(REFERENCE)
    run(bundle)
    assert "ahead_linear" not in calls.count
    sizes = [
        (CONFIG.intermediate_size, CONFIG.hidden_size, True),
        (CONFIG.hidden_size, CONFIG.intermediate_size, False),
    ]
    table = {(rows, *size): gemm_config.GemmConfig(splits=2) for rows in (16, 32) for size in sizes}
    monkeypatch.setattr(gemm_config, "MEASURED", table)
    for fused, plain in zip(run(bundle), expected):
        assert relative(fused, plain) < 1e-5
    decode_steps = 2
    assert calls.count["ahead_linear"] == decode_steps * CONFIG.num_layers * len(sizes)
    for name in ("ahead_linear", "add_rms_norm"):
        assert getattr(with_ahead_blocks(FAST, torch.device("cpu")), name).keywords["pdl"]


def test_inspection_shows_what_is_in_use_at_each_number_of_rows() -> None:
    from funcllm.launch.inspect_model import fused_blocks

    rows = fused_blocks(qwen3(CONFIG, kernels=EVERY), EVERY)
    assert [row["layer"] for row in rows] == list(range(CONFIG.num_layers))
    assert set(rows[0]["small"]) == NAMES - AHEAD_BLOCKS
    assert set(rows[0]["ahead"]) == NAMES - SMALL_BLOCKS
    assert set(rows[0]["decode"]) == NAMES - SMALL_BLOCKS - AHEAD_BLOCKS
    assert set(fused_blocks(qwen3(CONFIG, kernels=FAST), FAST)[0]) == {"layer", "decode", "prefill"}
