"""The small-batch matrix kernels against the composition of the reference ops: as ops, interpreted, and for sm_90."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.kernels import gemv, gemv_config, reference
from funcllm.kernels.gemv_config import MEASURED, GemvConfig, choose_config, next_power_of_2, unpacked
from tests.interpreting import assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting process of test_interpreted")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs in the process that does not interpret")

if INTERPRETED:
    from funcllm.kernels import interpret, triton_gemv

    interpret.repair()

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

Parts = dict[str, Any]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def inputs(rows: int, out_features: int, size: int, dtype: torch.dtype, silu: bool) -> tuple[Tensor, Tensor, Parts]:
    """x, a strided view; the weight, scaled so that outputs are about 1; and every optional part."""
    weight = (values(out_features * (2 if silu else 1), size) / size**0.5).to(dtype)
    parts = {
        "bias": values(weight.shape[0], dtype=dtype),
        "norm_weight": values(size, dtype=dtype),
        "update": values(rows, size, dtype=dtype, seed=2),
        "residual": values(rows, out_features, dtype=dtype, seed=3),
    }
    return values(rows, size + 8, dtype=dtype)[:, :size], weight, parts


def composed(x: Tensor, weight: Tensor, parts: Parts, silu: bool) -> tuple[Tensor, Tensor]:
    """The same by the reference ops; the product in fp64, rounded once."""
    total = (x.float() + parts["update"].float()).to(x.dtype) if "update" in parts else x
    normed = reference.rms_norm(total, parts["norm_weight"], EPS) if "norm_weight" in parts else total
    y = normed.double() @ weight.double().T
    if "bias" in parts:
        y = y + parts["bias"].double()
    y = y.to(x.dtype)
    if silu:
        y = reference.silu_mul(y)
    if "residual" in parts:
        y = (parts["residual"].float() + y.float()).to(x.dtype)
    return y, total


CONFIGS = [
    pytest.param(GemvConfig(block_n=4, num_warps=4), id="stream"),
    pytest.param(GemvConfig(block_n=2, num_warps=4, block_k=64, num_stages=2), id="stream in pieces"),
    pytest.param(GemvConfig(block_n=16, num_warps=4, block_k=64, num_stages=2, tensor_cores=True), id="tensor cores"),
    pytest.param(GemvConfig(block_n=2, num_warps=4, programs_per_sm=1), id="persistent"),
    pytest.param(GemvConfig(block_n=1, num_warps=4, num_stages=2, programs_per_sm=1), id="persistent, two ahead"),
]


@interpreted
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("names", "rows", "silu"),
    [
        ((), 1, False),
        (("bias",), 1, True),
        (("residual",), 3, False),
        (("norm_weight",), 1, False),
        (("norm_weight", "update"), 3, True),
        (("bias", "norm_weight"), 2, True),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, tuple) else str(value),
)
def test_kernel_equals_the_composition(
    config: GemvConfig, dtype: torch.dtype, names: tuple[str, ...], rows: int, silu: bool
) -> None:
    x, weight, parts = inputs(rows, 9, 72, dtype, silu)
    parts = {name: part for name, part in parts.items() if name in names}
    y, total = triton_gemv.gemv(
        x,
        weight,
        bias_o=parts.get("bias"),
        norm_weight_d=parts.get("norm_weight"),
        eps=EPS,
        update_td=parts.get("update"),
        residual_to=parts.get("residual"),
        silu=silu,
        config=config,
    )
    expected, expected_total = composed(x, weight, parts, silu)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(total, expected_total)


@interpreted
@pytest.mark.parametrize("config", CONFIGS)
def test_wide_results_are_not_rounded(config: GemvConfig) -> None:
    x, weight, _ = inputs(2, 5, 72, torch.bfloat16, False)
    y, _ = triton_gemv.gemv(x, weight, wide=True, config=config)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("block_n", "size"), [(1, 64), (4, 72), (16, 264)], ids=["1 row", "4 rows", "more than all"])
def test_persistent_programs_take_every_row_once(block_n: int, size: int, rows: int) -> None:
    """Groups that do not divide among the programs, a group that is not full, and more rows of x than a pair."""
    config = GemvConfig(block_n=block_n, num_warps=4, programs_per_sm=1)
    x, weight, parts = inputs(rows, 11, size, torch.float32, False)
    parts = {name: parts[name] for name in ("bias", "norm_weight", "residual")}
    y, _ = triton_gemv.gemv(
        x,
        weight,
        bias_o=parts["bias"],
        norm_weight_d=parts["norm_weight"],
        eps=EPS,
        residual_to=parts["residual"],
        config=config,
    )
    torch.testing.assert_close(y, composed(x, weight, parts, False)[0], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("config", CONFIGS[3:])
def test_persistent_programs_write_nothing_behind_their_outputs(config: GemvConfig, monkeypatch: Any) -> None:
    x, weight, _ = inputs(2, 9, 72, torch.float32, False)
    behind = torch.full((64,), 7.0)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: behind[:18].view(2, 9))
    triton_gemv.gemv(x, weight, config=config)
    torch.testing.assert_close(behind[:18].view(2, 9), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert (behind[18:] == 7.0).all()


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16])
def test_the_chosen_configuration_is_right_for_every_number_of_rows(rows: int) -> None:
    x, weight, parts = inputs(rows, 20, 264, torch.float32, False)
    y, _ = triton_gemv.gemv(x, weight, residual_to=parts["residual"])
    torch.testing.assert_close(y, composed(x, weight, {"residual": parts["residual"]}, False)[0], rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("silu", [False, True])
def test_ops_equal_the_composition(dtype: torch.dtype, silu: bool) -> None:
    x, weight, parts = inputs(3, 24, 40, dtype, silu)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    bias, norm_weight = parts["bias"], parts["norm_weight"]
    plain = gemv.small_linear(x, weight, bias, residual_to=parts["residual"], silu=silu)
    expected, _ = composed(x, weight, {name: parts[name] for name in ("bias", "residual")}, silu)
    torch.testing.assert_close(plain, expected, **tolerance)
    normed = gemv.norm_small_linear(x, norm_weight, EPS, weight, silu=silu)
    torch.testing.assert_close(normed, composed(x, weight, {"norm_weight": norm_weight}, silu)[0], **tolerance)
    total, added = gemv.add_norm_small_linear(x, parts["update"], norm_weight, EPS, weight, bias, silu=silu)
    del parts["residual"]
    expected, expected_total = composed(x, weight, parts, silu)
    torch.testing.assert_close(added, expected, **tolerance)
    assert torch.equal(total, expected_total)
    assert gemv.small_linear(x, weight, wide=True).dtype == torch.float32


@compiled
def test_ops_compile_whole_and_pass_torchs_own_checks() -> None:
    x, weight, parts = inputs(2, 24, 40, torch.float32, True)
    x = x.contiguous()
    config = choose_config(2, 24, 40, True)

    def run(x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        total, y = gemv.add_norm_small_linear(
            x, update, parts["norm_weight"], EPS, weight, silu=True, config=config, pdl=True
        )
        return total, gemv.small_linear(y, weight[:24, :24].contiguous(), residual_to=y)

    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(x, parts["update"]), run(x, parts["update"]))
    ops = torch.ops.funcllm
    checks = ("test_schema", "test_faketensor")
    plain = (x, weight, None, None, 0.0, None, True, False, [])
    torch.library.opcheck(ops.small_linear.default, plain, test_utils=checks)
    added = (x, parts["update"], parts["norm_weight"], EPS, weight, None, True, True, [])
    torch.library.opcheck(ops.add_norm_small_linear.default, added, test_utils=checks)


@compiled
def test_kernels_refuse_transforms_and_gradients() -> None:
    weight = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="REFERENCE"):
        torch.func.grad(lambda x: gemv.small_linear(x, weight).sum())(torch.ones(1, 8))
    with pytest.raises(RuntimeError, match="REFERENCE"):
        gemv.norm_small_linear(torch.ones(1, 8, requires_grad=True), torch.ones(8), EPS, weight)


@compiled
def test_launches_refuse_too_many_rows_and_strided_weights() -> None:
    from funcllm.kernels import triton_gemv

    with pytest.raises(ValueError, match="17 rows are more than the 16"):
        triton_gemv.gemv(torch.ones(17, 8), torch.ones(4, 8))
    with pytest.raises(ValueError, match="not contiguous"):
        triton_gemv.gemv(torch.ones(1, 4), torch.ones(4, 8).T)


@compiled
@pytest.mark.parametrize(
    ("groups", "programs_per_sm", "num_sms", "programs"),
    [(512, 1, 132, 128), (512, 2, 132, 256), (1024, 1, 132, 128), (768, 2, 132, 256), (100, 1, 132, 100), (5, 1, 2, 2)],
)
def test_persistent_programs_have_equal_shares(groups: int, programs_per_sm: int, num_sms: int, programs: int) -> None:
    found = gemv_config.programs_of(groups, programs_per_sm, num_sms)
    assert found == programs
    assert found <= programs_per_sm * num_sms
    assert -(-groups // found) == -(-groups // (programs_per_sm * num_sms))


@compiled
def test_configurations_survive_packing() -> None:
    config = GemvConfig(
        block_n=2,
        num_warps=8,
        block_k=64,
        num_stages=3,
        tensor_cores=True,
        programs_per_sm=2,
        prefetch=4,
        early_start=False,
        release="late",
    )
    assert config.packed() == [2, 8, 64, 3, 1, 2, 4, 0, 2]
    assert unpacked(config.packed()) == config


@compiled
def test_a_launch_without_early_start_neither_waits_nor_lets_others_start() -> None:
    from funcllm.kernels.triton_gemv import gemv_constants

    late = GemvConfig(block_n=2, num_warps=4, programs_per_sm=1, prefetch=2, release="late")
    constants = gemv_constants(1, 64, 512, pdl=True, config=late)
    assert (constants["PDL"], constants["RELEASE"], constants["PREFETCH"]) == (True, 2, 2)
    constants = gemv_constants(1, 64, 512, pdl=False, config=late)
    assert (constants["PDL"], constants["RELEASE"], constants["PREFETCH"]) == (False, 0, 0)
    starts_late = GemvConfig(block_n=2, num_warps=4, prefetch=2, early_start=False)
    constants = gemv_constants(1, 64, 512, pdl=True, config=starts_late)
    assert (constants["PDL"], constants["RELEASE"]) == (False, 1)


@compiled
@pytest.mark.parametrize(("silu", "norm", "early"), [(False, True, False), (True, True, True), (False, False, True)])
def test_by_rule_a_product_behind_a_norm_starts_early_before_silu_only(silu: bool, norm: bool, early: bool) -> None:
    assert choose_config(1, 640, 512, silu, norm).early_start, "one row always does"
    config = choose_config(2, 640, 512, silu, norm)
    assert (config.early_start, config.release) == (early, "early" if early else "never")


@compiled
def test_measured_configurations_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GemvConfig(block_n=8, num_warps=2)
    monkeypatch.setattr(gemv_config, "MEASURED", {(1, 64, 512, False): config})
    assert choose_config(1, 64, 512, False) == config
    assert choose_config(2, 64, 512, False) != config


@compiled
def test_fits_names_what_the_kernels_take() -> None:
    weight = torch.zeros(6, 16, dtype=torch.bfloat16)
    assert gemv.fits(1, weight)
    assert gemv.fits(16, weight)
    assert not gemv.fits(17, weight)
    assert not gemv.fits(0, weight)
    assert not gemv.fits(1, weight.float())
    assert not gemv.fits(1, weight.T)
    assert not gemv.fits(1, weight[:, :12].contiguous())


QWEN_SHAPES = [
    (4096, 1024, False),
    (1024, 2048, False),
    (3072, 1024, True),
    (1024, 3072, False),
    (6144, 2560, False),
    (9728, 2560, True),
    (6144, 4096, False),
    (12288, 4096, True),
    (4096, 12288, False),
    (151936, 1024, False),
]


@compiled
@pytest.mark.parametrize(("out_features", "size", "silu"), QWEN_SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_chosen_configurations_are_legal(rows: int, out_features: int, size: int, silu: bool) -> None:
    """Streaming: a thread's 16-byte loads cover a row without exchanging layouts, and a thread holds few registers."""
    config = choose_config(rows, out_features, size, silu)
    assert unpacked(config.packed()) == config
    is_large = out_features < 65536 and out_features * size * (2 if silu else 1) >= 1 << 23
    if (rows, out_features, size, silu) not in MEASURED:
        assert config.tensor_cores == (rows > 1 and (is_large or rows > (8 if out_features <= 1024 else 4)))
    if not config.tensor_cores:
        width = next_power_of_2(size)
        threads = 32 * config.num_warps
        assert threads * 8 <= width
        assert width * config.block_n * (2 if silu else 1) / threads <= 128


# --- Triton without a GPU --------------------------------------------------------------------------------------------


@compiled
def test_interpreted() -> None:
    """Runs this file's kernel tests in a process where Triton interprets."""
    assert_passes_interpreted(__file__)


def variants() -> list[Any]:
    if INTERPRETED:
        return []
    pytest.importorskip("triton")
    from funcllm.kernels import triton_gemv

    return [pytest.param(*variant[1:], id=variant[0]) for variant in triton_gemv.compile_variants()]


@compiled
@pytest.mark.parametrize(("kernel", "signature", "constants", "options"), variants())
def test_kernel_compiles_for_sm_90_and_asks_for_the_weight_before_it_waits(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], tmp_path: Path
) -> None:
    usage, listing = compiled_for_sm_90(kernel, signature, constants, options, tmp_path)
    assert usage["SHARED"] <= 232448
    assert usage["STACK"] == usage["LOCAL"] == 0
    loads = [match.start() for match in re.finditer(r"LDG\.E\.EF\.128", listing)]
    size = constants["BLOCK_N"] * constants["BLOCK_K"] * (2 if constants["SILU"] else 1)
    loads_of_a_group = size // (8 * 32 * options["num_warps"])
    if constants["PDL"]:
        ahead_of_the_wait = [at for at in loads if at < listing.index("ACQBULK")]
    if "STAGES" in constants and constants["BLOCK_K"] >= constants["K"]:
        assert 0.7 * loads_of_a_group <= len(loads) <= loads_of_a_group
        assert ahead_of_the_wait == loads
    if "AHEAD" in constants:  # all but one group: that of the loop
        groups = constants["AHEAD"] + 2
        assert 0.7 * loads_of_a_group <= len(loads) / groups <= loads_of_a_group
        if constants["PDL"]:
            assert len(ahead_of_the_wait) == len(loads) * (groups - 1) // groups
    assert ("ACQBULK" in listing) == constants["PDL"]
    assert ("PREEXIT" in listing) == (constants["RELEASE"] > 0)
    if constants["RELEASE"] and constants["PDL"]:
        assert (listing.index("PREEXIT") > listing.index("ACQBULK")) == (constants["RELEASE"] == 2)
    assert ("CCTL.E.PF2" in listing) == (constants.get("PREFETCH", 0) > 0)


def compiled_for_sm_90(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], folder: Path
) -> tuple[dict[str, int], str]:
    """Resources of a kernel compiled for sm_90 (pointers and strides divide by 16), and its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(names.values()) if kind[0] in "*i"}
    source = ASTSource(kernel, names, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    text = output_of(tools / "cuobjdump", "--dump-resource-usage", cubin)
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return usage | {"SHARED": binary.metadata.shared}, output_of(tools / "nvdisasm", cubin)


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
