"""The product that asks for its weight early, against the reference ops: as an op, interpreted, and for sm_90."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.kernels import gemm, gemm_config, reference, tune_gemm
from funcllm.kernels.gemm_config import (
    PADDED_ROWS,
    SHARED_SM90,
    GemmConfig,
    choose_config,
    cost,
    cuts,
    padded_rows,
    pieces_of,
    shared_bytes,
    tiles_of,
    unpacked,
    worth,
)
from tests.gluon_on_cpu import Machine, Pointer, launch
from tests.interpreting import assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting process of test_interpreted")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs in the process that does not interpret")

if INTERPRETED:
    from funcllm.kernels import interpret, triton_gemm

    interpret.repair()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def inputs(rows: int, out_features: int, size: int, dtype: torch.dtype, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, a strided view whose neighbours are NaN; the weight, scaled so that outputs are about 1; a bias."""
    wide = torch.full((rows, size + 16), float("nan"), dtype=dtype)
    wide[:, 8 : size + 8] = values(rows, size, dtype=dtype)
    weight = (values(out_features * (2 if silu else 1), size) / size**0.5).to(dtype)
    return wide[:, 8 : size + 8], weight, values(weight.shape[0], dtype=dtype, seed=1)


def composed(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The same by the reference ops; the product in fp64, rounded once."""
    y = x.double() @ weight.double().T
    y = (y if bias is None else y + bias.double()).to(x.dtype)
    return reference.silu_mul(y) if silu else y


def assert_close(y: Tensor, expected: Tensor) -> None:
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[y.dtype], atol=TOLERANCE[y.dtype])


def poisoned(size: int | tuple[int, ...], **kinds: Any) -> Tensor:
    """torch.empty, with NaN in it."""
    return torch.full((size,) if isinstance(size, int) else size, float("nan"), **kinds)


CONFIGS = {
    "all ahead": GemmConfig(block_n=16, block_k=32, ahead=8, x_ahead=2),
    "all ahead, turned": GemmConfig(block_n=16, block_k=32, ahead=8, x_ahead=3, rotate=True),
    "some ahead": GemmConfig(block_n=32, block_k=32, ahead=2, x_ahead=1, num_stages=2, release="late"),
    "none ahead, turned": GemmConfig(block_n=16, block_k=32, ahead=0, num_stages=2, rotate=True),
    "split": GemmConfig(block_n=16, block_k=32, ahead=8, splits=3, release="never"),
    "split, some ahead": GemmConfig(block_n=32, block_k=16, ahead=1, splits=2, num_stages=2, rotate=True),
}


# --- interpreted -----------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size", "silu", "biased"), [(9, 96, False, True), (17, 136, True, False)])
def test_kernel_equals_the_composition(
    config: GemmConfig, dtype: torch.dtype, rows: int, size: int, silu: bool, biased: bool
) -> None:
    """Rows and outputs between the tiles' sizes; whole pieces of columns, and a part of one."""
    x, weight, bias = inputs(rows, 21, size, dtype, silu)
    counters = torch.zeros(8, dtype=torch.int32)
    y = triton_gemm.gemm(x, weight, bias_o=bias if biased else None, silu=silu, counters_p=counters, config=config)
    assert_close(y, composed(x, weight, bias if biased else None, silu))
    assert not counters.any()


TILES = {
    "one part": GemmConfig(block_n=32, block_k=32, parts=1, num_stages=2),
    "three parts": GemmConfig(block_n=16, block_k=32, parts=3, num_stages=3, release="late"),
    "two parts": GemmConfig(block_n=16, block_k=16, parts=2, num_stages=2, release="never"),
}


@interpreted
@pytest.mark.parametrize("config", TILES.values(), ids=TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "out_features", "size", "silu", "biased"),
    [(9, 21, 96, False, True), (17, 24, 136, True, False), (40, 40, 72, True, True), (70, 50, 104, False, False)],
)
def test_tiles_equal_the_composition(
    config: GemmConfig,
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    size: int,
    silu: bool,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles reach over the edges, and all that is written lies in memory that was NaN."""
    x, weight, bias = inputs(rows, out_features, size, dtype, silu)
    monkeypatch.setattr(torch, "empty", poisoned)
    y = triton_gemm.gemm(x, weight, bias_o=bias if biased else None, silu=silu, config=config)
    assert_close(y, composed(x, weight, bias if biased else None, silu))


@interpreted
def test_tiles_take_256_rows() -> None:
    x, weight, bias = inputs(250, 40, 80, torch.bfloat16, True)
    expected = composed(x, weight, bias, True)
    config = GemmConfig(block_n=16, block_k=64, parts=2, num_stages=2)
    assert_close(triton_gemm.gemm(x, weight, bias_o=bias, silu=True, config=config), expected)
    assert choose_config(250, 40, 80, True).parts
    assert_close(triton_gemm.gemm(x, weight, bias_o=bias, silu=True), expected)


@interpreted
@pytest.mark.parametrize("rows", [1, 16, 33, 65])
def test_rows_are_padded_and_the_chosen_configuration_is_right(rows: int) -> None:
    x, weight, bias = inputs(rows, 40, 72, torch.float32, True)
    assert_close(triton_gemm.gemm(x, weight, bias_o=bias, silu=True), composed(x, weight, bias, True))


@interpreted
def test_without_counters_columns_are_not_split() -> None:
    x, weight, _ = inputs(9, 20, 96, torch.float32, False)
    assert_close(triton_gemm.gemm(x, weight, config=CONFIGS["split"]), composed(x, weight, None, False))


@interpreted
def test_partial_sums_are_added_in_split_order() -> None:
    """Bit for bit: the sums of each third of the columns, added from the first to the last."""
    x, weight, _ = inputs(9, 16, 96, torch.float32, False)
    y = triton_gemm.gemm(x, weight, config=CONFIGS["split"], counters_p=torch.zeros(1, dtype=torch.int32))
    whole = GemmConfig(block_n=16, block_k=32, ahead=1)
    parts = [triton_gemm.gemm(x[:, i : i + 32], weight[:, i : i + 32].contiguous(), config=whole) for i in (0, 32, 64)]
    assert torch.equal(y, (parts[0] + parts[1]) + parts[2])


@interpreted
def test_too_few_counters_are_refused() -> None:
    x, weight, _ = inputs(9, 40, 96, torch.float32, False)
    with pytest.raises(ValueError, match="3 tiles need"):
        triton_gemm.gemm(x, weight, config=CONFIGS["split"], counters_p=torch.zeros(2, dtype=torch.int32))


# --- ops -------------------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("silu", [False, True])
def test_op_equals_the_composition(dtype: torch.dtype, silu: bool) -> None:
    x, weight, bias = inputs(11, 24, 40, dtype, silu)
    assert_close(gemm.ahead_linear(x, weight, bias, silu=silu), composed(x, weight, bias, silu))
    assert_close(gemm.ahead_linear(x, weight, silu=silu), composed(x, weight, None, silu))


@compiled
def test_op_compiles_whole_and_passes_torchs_own_checks() -> None:
    x, weight, bias = inputs(11, 24, 40, torch.float32, True)
    x, counters = x.contiguous(), torch.zeros(4, dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        return gemm.ahead_linear(x, weight, bias, silu=True, counters_p=counters, config=GemmConfig(), pdl=True)

    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(x), run(x))
    checks = ("test_schema", "test_faketensor")
    arguments = (x, weight, bias, True, counters, GemmConfig(splits=2).packed(), True)
    torch.library.opcheck(torch.ops.funcllm.ahead_linear.default, arguments, test_utils=checks)


@compiled
def test_op_refuses_transforms_and_gradients() -> None:
    weight = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="REFERENCE"):
        torch.func.grad(lambda x: gemm.ahead_linear(x, weight).sum())(torch.ones(9, 8))
    with pytest.raises(RuntimeError, match="REFERENCE"):
        gemm.ahead_linear(torch.ones(9, 8, requires_grad=True), weight)


@compiled
def test_launches_refuse_too_many_rows_and_strided_weights() -> None:
    from funcllm.kernels import triton_gemm

    with pytest.raises(ValueError, match="257 rows are more than the 256"):
        triton_gemm.gemm(torch.ones(257, 8), torch.ones(4, 8))
    with pytest.raises(ValueError, match="not contiguous"):
        triton_gemm.gemm(torch.ones(9, 4), torch.ones(4, 8).T)


@compiled
def test_tiles_of_parts_refuse_splits() -> None:
    from funcllm.kernels import triton_gemm

    with pytest.raises(ValueError, match=r"splits=2 with parts=3: .* use splits=1"):
        triton_gemm.gemm(torch.ones(9, 8), torch.ones(4, 8), config=GemmConfig(parts=3, splits=2))


@compiled
def test_fits_names_what_the_kernel_takes() -> None:
    weight = torch.zeros(6, 16, dtype=torch.bfloat16)
    assert gemm.fits(9, weight)
    assert gemm.fits(256, weight.half())
    assert gemm.fits(1, weight)
    assert not gemm.fits(0, weight)
    assert not gemm.fits(257, weight)
    assert not gemm.fits(9, weight.float())
    assert not gemm.fits(9, weight.T)
    assert not gemm.fits(9, weight[:, :12].contiguous())


# --- asynchronous copies ---------------------------------------------------------------------------------------------

RINGS = {
    "whole": GemmConfig(block_n=16, block_k=32, ahead=8, x_ahead=8, rings=True),
    "short of x": GemmConfig(block_n=16, block_k=16, ahead=16, x_ahead=2, rings=True, release="late"),
    "short of both, turned": GemmConfig(block_n=32, block_k=16, ahead=3, x_ahead=3, rings=True, rotate=True),
    "short of both, unequal": GemmConfig(block_n=16, block_k=16, ahead=5, x_ahead=2, rings=True, release="never"),
    "one piece": GemmConfig(block_n=16, block_k=256, ahead=4, x_ahead=4, rings=True),
    "split": GemmConfig(block_n=16, block_k=16, ahead=3, x_ahead=2, splits=3, rings=True),
}


def on_rings(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, config: GemmConfig, backwards: bool = False
) -> tuple[Tensor, Tensor, list[list[str]]]:
    """(the product by the kernel's own code on the CPU, its counters, what each program did)."""
    from funcllm.kernels import gluon_gemm, triton_gemm

    rows, size = x.shape
    out_features = weight.shape[0] // (2 if silu else 1)
    constants = triton_gemm.gemm_constants(
        rows, out_features, size, bias=bias is not None, silu=silu, pdl=True, config=config
    )
    tiles = tiles_of(out_features, silu, config)
    y, counters = torch.full((rows, out_features), float("nan"), dtype=x.dtype), torch.zeros(tiles, dtype=torch.int32)
    partials = torch.full((tiles * config.splits * config.block_n * padded_rows(rows),), float("nan"))
    arguments = {
        "x_ptr": Pointer(
            x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0), x.storage_offset()
        ),
        "weight_ptr": Pointer(weight.flatten()),
        "bias_ptr": Pointer(weight.flatten() if bias is None else bias),
        "y_ptr": Pointer(y.view(-1)),
        "partials_ptr": Pointer(partials),
        "counters_ptr": Pointer(counters),
        "x_stride": x.stride(0),
        "rows": rows,
        "pieces": constants["PIECES"],
        **constants,
    }
    programs = list(range(tiles * config.splits))
    events = launch(gluon_gemm, "gemm_kernel", programs[::-1] if backwards else programs, arguments)
    return y, counters, events


@compiled
@pytest.mark.parametrize("config", RINGS.values(), ids=RINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size", "silu", "biased"), [(9, 96, False, True), (17, 136, True, True)])
def test_rings_equal_the_composition(
    config: GemmConfig, dtype: torch.dtype, rows: int, size: int, silu: bool, biased: bool
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    x, weight, bias = inputs(rows, 21, size, dtype, silu)
    y, counters, events = on_rings(x, weight, bias if biased else None, silu, config)
    assert_close(y, composed(x, weight, bias if biased else None, silu))
    assert not counters.any()
    again, _, _ = on_rings(x, weight, bias if biased else None, silu, config, backwards=True)
    assert torch.equal(again, y)
    ahead = min(config.ahead, pieces_of(size, config))
    for event in events:
        assert event.index("wait") == ahead + (config.release == "early")
        assert event[:ahead] == ["ask for weight"] * ahead
        assert event.count("ask for weight") == event.count("ask for x") == pieces_of(size, config)
        assert event.count("release") == (config.release != "never")


@compiled
def test_the_cpus_run_of_rings_sees_a_wait_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    x, weight, _ = inputs(9, 16, 96, torch.bfloat16, False)
    config = RINGS["short of both, unequal"]
    for name in ("wait_group", "product_wait"):
        right = getattr(Machine, name)

        def short(self: Machine, newer: int, right: Any = right, **options: Any) -> Any:
            return right(self, newer + 1 if self.events.count("ask for x") < 6 else newer, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Machine, name, short)
            y, _, _ = on_rings(x, weight, None, False, config)
        assert y.isnan().any(), name
    assert not on_rings(x, weight, None, False, config)[0].isnan().any()


# --- configurations --------------------------------------------------------------------------------------------------

QWEN_SHAPES = [
    (4096, 1024, False),
    (1024, 2048, False),
    (3072, 1024, True),
    (1024, 3072, False),
    (6144, 2560, False),
    (9728, 2560, True),
    (2560, 9728, False),
    (6144, 4096, False),
    (12288, 4096, True),
    (4096, 12288, False),
]


@compiled
@pytest.mark.parametrize(("out_features", "size", "silu"), QWEN_SHAPES)
@pytest.mark.parametrize("rows", PADDED_ROWS)
def test_chosen_configurations_are_legal(rows: int, out_features: int, size: int, silu: bool) -> None:
    config = choose_config(rows, out_features, size, silu)
    assert unpacked(config.packed()) == config
    assert shared_bytes(rows, config, size) <= SHARED_SM90
    assert config.parts or config.ahead * config.block_k * config.splits <= size + config.block_k * config.splits
    tiles = tiles_of(out_features, silu, config)
    assert tiles <= gemm.MAX_TILES
    assert config.splits == 1 or tiles * config.splits <= 132
    assert not silu or config.splits == 1
    is_large = out_features * size * (2 if silu else 1) > 1 << 23
    assert (config.parts > 0) == (rows > 128 or (rows > 32 and is_large))


@compiled
@pytest.mark.parametrize(("out_features", "size", "silu"), QWEN_SHAPES)
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_cuts_run_at_once_and_come_cheapest_first(rows: int, out_features: int, size: int, silu: bool) -> None:
    found = cuts(rows, out_features, size, silu)
    costs = [cost(rows, out_features, size, silu, config) for config in found]
    assert len(found) >= 3
    assert costs == sorted(costs)
    weight = 2 * size * out_features * (2 if silu else 1)
    for config, its_cost in zip(found, costs):
        together = -(-tiles_of(out_features, silu, config) // 132)
        assert shared_bytes(rows, config, size) * together <= SHARED_SM90
        assert 2 <= config.num_stages <= 6
        assert weight / 4.26e6 <= its_cost
        assert config.parts > 0
        assert config.splits == 1
        assert config.block_n * config.parts * rows <= 192 * 32 * config.num_warps


@compiled
def test_a_large_gate_and_up_projection_is_one_wave_of_programs() -> None:
    """192 rows of the weight a program, as 24576 / 192 = 128, which read 2.6 MB each: 335 MB at 6.5 TB/s."""
    config = cuts(128, 12288, 4096, True)[0]
    assert (config.block_n, config.parts, config.splits) == (64, 3, 1)
    assert tiles_of(12288, True, config) == 128
    assert cost(128, 12288, 4096, True, config) == pytest.approx(51.62, abs=0.01)
    assert cost(64, 12288, 4096, True, config) == pytest.approx(2 * 24576 * 4096 / 4.26e6)  # bound by the weight


@compiled
def test_configurations_of_odd_values_travel_as_an_argument() -> None:
    config = GemmConfig(
        block_n=128, block_k=64, num_warps=8, ahead=5, x_ahead=4, num_stages=6, splits=7, prefetch=9, rotate=True,
        rings=True, fence=False, parts=3, early_start=False, release="late",
    )  # fmt: skip
    assert unpacked(config.packed()) == config


@compiled
def test_pieces_tiles_and_padding() -> None:
    config = GemmConfig(block_n=64, block_k=128, splits=4)
    assert [pieces_of(size, config) for size in (512, 520, 1024)] == [1, 2, 2]
    assert [tiles_of(n, silu, config) for n, silu in ((64, False), (65, False), (64, True))] == [1, 2, 2]
    assert tiles_of(200, False, GemmConfig(block_n=64, parts=3)) == 2
    assert [padded_rows(rows) for rows in (1, 16, 17, 64, 65, 128, 129)] == [16, 16, 32, 64, 128, 128, 256]


@compiled
def test_measured_configurations_come_first_and_say_at_how_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size may be worth it at 128 rows and not at 64; rows between two measured numbers count as the next one."""
    assert not worth(16, 64, 512, False)
    config = GemmConfig(block_k=64, num_warps=8)
    table = {(rows, 64, 512, False): config for rows in (16, 32, 128)}
    monkeypatch.setattr(gemm_config, "MEASURED", table)
    assert choose_config(9, 64, 512, False) == config
    assert choose_config(40, 64, 512, False) != config
    expected = {1: True, 32: True, 33: False, 64: False, 65: True, 128: True, 129: False, 257: False}
    assert {rows: worth(rows, 64, 512, False) for rows in expected} == expected
    assert not worth(16, 64, 512, True)


# --- the tuner -------------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("size", tune_gemm.SIZES.values(), ids=tune_gemm.SIZES)
@pytest.mark.parametrize("rows", PADDED_ROWS)
def test_the_tuner_tries_legal_configurations_only(size: tune_gemm.Size, rows: int) -> None:
    for out_features, in_features, silu in size.products().values():
        found = tune_gemm.candidates(rows, out_features, in_features, silu)
        assert found[0] == choose_config(rows, out_features, in_features, silu)
        assert len(found) >= 2
        assert len(set(found)) == len(found)
        if rows > 32 and out_features * in_features > 1 << 23:
            assert 3 <= len(found) <= 20
            assert all(config.parts for config in found)
        assert all(config.parts for config in found) or rows <= 128
        others = tune_gemm.variations(rows, in_features, found[-1])
        assert len(others) >= 3
        assert found[-1] not in others
        for config in [*found, *others]:
            assert shared_bytes(rows, config, in_features) <= SHARED_SM90
            assert config.parts or config == found[0] or tiles_of(out_features, silu, config) * config.splits >= 32
            assert not config.parts or config.splits == 1
            assert config.num_stages > 1
            assert eval(tune_gemm.spelled(config)) == config


@compiled
def test_the_tuner_keeps_what_saves_time_in_the_chain() -> None:
    """gate_up saves 1 us, and 0.5 more when turned; qkv saves nothing; down saves less than is worth it; o costs."""
    plain, turned = GemmConfig(), GemmConfig(rotate=True)
    saved = {"gate_up": 1.0, "qkv": 0.0, "down": 0.01, "o": -1.0}

    def timed(ways: tune_gemm.Ways) -> float:
        gains = [saved[place] + (0.5 if way == turned else 0.0) for place, way in ways.items() if way is not None]
        return 10 - sum(gains)

    def varied(place: str, configs: Any) -> list[GemmConfig]:
        assert list(configs) == [plain]
        return [turned] if place == "gate_up" else []

    best, least, spent = tune_gemm.search(lambda place: [plain], varied, timed)
    assert best == {"gate_up": turned, "qkv": None, "down": None, "o": None}
    assert least == pytest.approx(8.5)
    assert [(time, config) for time, config in spent["gate_up"]] == [(8.5, turned), (9.0, plain)]
    late, least, _ = tune_gemm.search(lambda place: [plain], varied, timed, lambda: True)
    assert set(late.values()) == {None}
    assert least == 10


@compiled
def test_the_tuners_chain_is_the_same_in_every_way() -> None:
    size = tune_gemm.Size(name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, head_dim=16)
    layers = tune_gemm.make_layers(size, 2, device="cpu")
    chain = tune_gemm.make_chain(size, layers, 9)
    library = tune_gemm.run(size, chain, dict.fromkeys(tune_gemm.PLACES))
    ahead = tune_gemm.run(size, chain, dict.fromkeys(tune_gemm.PLACES, GemmConfig()))
    assert library.shape == (9, 64)
    assert library.float().std() > 1
    assert ((ahead - library).norm() / library.norm()).item() < 2e-2
    other = tune_gemm.run(size, chain._replace(layers=layers[:1]), dict.fromkeys(tune_gemm.PLACES))
    assert not torch.allclose(other, library, rtol=0.1, atol=0.1)
    assert tune_gemm.fault(size, chain, "gate_up", GemmConfig()) == ""
    broken = tune_gemm.Layer({**layers[0].products, "o": layers[0].products["o"][:, :8]}, *layers[0][1:])
    assert "Error" in tune_gemm.fault(size, chain._replace(layers=(broken,)), "o", GemmConfig())


@compiled
def test_the_tuner_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune_gemm.main(["0.6B"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


# --- on a GPU --------------------------------------------------------------------------------------------------------

GPU_CONFIGS = {
    "chosen": None,
    "looped": GemmConfig(ahead=2, num_stages=3, prefetch=2, rotate=True),
    "split": GemmConfig(block_k=64, ahead=4, x_ahead=2, splits=4),
    "two warp groups": GemmConfig(block_n=128, block_k=64, num_warps=8, ahead=4, x_ahead=2, splits=2, release="late"),
    "rings": GemmConfig(block_k=64, ahead=8, x_ahead=4, rings=True),
    "rings, split": GemmConfig(block_k=64, ahead=4, x_ahead=4, splits=4, rotate=True, rings=True),
    "rings, two warp groups": GemmConfig(block_n=128, block_k=64, num_warps=8, ahead=4, x_ahead=2, rings=True),
    "rings, no fence": GemmConfig(block_k=64, ahead=8, x_ahead=6, rings=True, fence=False),
    "tiles": GemmConfig(block_k=64, parts=3, num_stages=4, prefetch=4),
    "tiles, two warp groups": GemmConfig(
        block_n=128, block_k=64, num_warps=8, parts=1, num_stages=4, prefetch=4, release="late"
    ),
}


def on_gpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


GPU_CASES = [
    (9, 4096, 1024, False, torch.bfloat16),
    (33, 3072, 1024, True, torch.float16),
    (64, 1024, 3072, False, torch.bfloat16),
    (100, 1000, 2312, False, torch.bfloat16),
    (128, 4096, 4096, False, torch.bfloat16),
]


@compiled
@pytest.mark.gpu
@pytest.mark.parametrize("config", GPU_CONFIGS.values(), ids=GPU_CONFIGS)
@pytest.mark.parametrize(("rows", "out_features", "size", "silu", "dtype"), GPU_CASES)
def test_gpu_equals_the_composition(
    config: GemmConfig | None, rows: int, out_features: int, size: int, silu: bool, dtype: torch.dtype
) -> None:
    """The same bits every time, whoever comes last."""
    x, weight, bias = on_gpu(*inputs(rows, out_features, size, dtype, silu))
    counters = gemm.counters(x.device)
    y = gemm.ahead_linear(x, weight, bias, silu=silu, counters_p=counters, config=config)
    assert_close(y, composed(x, weight, bias, silu))
    for _ in range(50):
        again = gemm.ahead_linear(x, weight, bias, silu=silu, counters_p=counters, config=config)
        assert torch.equal(again, y)
    assert not counters.any()


@compiled
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chosen", "split", "rings", "rings, split", "tiles", "tiles, two warp groups"])
def test_a_chain_of_early_starts_is_the_same_bit_for_bit(name: str) -> None:
    """Each kernel reads what its predecessor wrote, thousands of times, in one graph: a missing wait would show."""
    size = tune_gemm.SIZES["0.6B"]
    chain = tune_gemm.make_chain(size, tune_gemm.make_layers(size, 8), 64)
    given = GPU_CONFIGS[name]
    ways = {place: given or choose_config(64, *sizes) for place, sizes in size.products().items()}
    expected = tune_gemm.run(size, chain, ways, pdl=False)
    assert torch.isfinite(expected).all()
    tune_gemm.run(size, chain, ways)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tune_gemm.run(size, chain, ways)
    for step in range(200):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), step
    assert not chain.counters_p.any()


# --- Triton without a GPU --------------------------------------------------------------------------------------------


@compiled
def test_interpreted() -> None:
    """Runs this file's kernel tests in a process where Triton interprets."""
    assert_passes_interpreted(__file__)


def variants() -> list[Any]:
    if INTERPRETED:
        return []
    pytest.importorskip("triton")
    from funcllm.kernels import triton_gemm

    return [pytest.param(*variant[1:], id=variant[0]) for variant in triton_gemm.compile_variants()]


@compiled
@pytest.mark.parametrize(("kernel", "signature", "constants", "options"), variants())
def test_kernel_compiles_for_sm_90_and_stores_its_weight_before_it_waits(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], tmp_path: Path
) -> None:
    """No spills; the ahead pieces lie in shared memory when the program waits, and x is asked for behind the wait."""
    usage, code = compiled_for_sm_90(kernel, signature, constants, options, tmp_path)
    assert usage["SHARED"] <= SHARED_SM90
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert code.count("ACQBULK") == 1
    assert "HGMMA" in code
    before, behind = code.split("ACQBULK")
    if "PARTS" in constants:
        assert (re.search(r"CCTL\S*PF2", before) is not None) == (constants["PREFETCH"] > 0)
        assert not re.search(r"\b(LDG|STG|LDGSTS)\.", before)
        assert re.search(r"LDGSTS\.E\.\S*128", behind)
        assert not re.search(r"LDGSTS\.E\.(?!\S*128)", behind)
        return
    assert "HGMMA" not in before
    copies = constants["AHEAD"] * constants["BLOCK_N"] * constants["BLOCK_K"] / (8 * 32 * options["num_warps"])
    if "WARPS" in constants:
        assert len(re.findall(r"LDGSTS\.E\.\S*128", before)) == copies
        assert not re.search(r"\b(LDG|STS)\.", before)
        return
    assert len(re.findall(r"LDG\.E\.EF\.128", before)) == copies
    assert len(re.findall(r"STS\.128", before)) == copies
    assert not re.search(r"LDG\.E\.EF", behind)
    assert not re.search(r"LDG\.E\.128", before)
    assert (re.search(r"CCTL\S*PF2", before) is not None) == (constants["PREFETCH"] > 0)


def compiled_for_sm_90(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], folder: Path
) -> tuple[dict[str, int], str]:
    """Resources of a kernel compiled for sm_90 (pointers and the stride divide by 16), and its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: kind for name, kind in signature.items() if name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in signature if name.endswith(("_ptr", "stride"))
    }
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, {name: signature.get(name, "constexpr") for name in names}, constants, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    text = output_of(tools / "cuobjdump", "--dump-resource-usage", cubin)
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return usage | {"SHARED": binary.metadata.shared}, output_of(tools / "nvdisasm", "-c", cubin)


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
