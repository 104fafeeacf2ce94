"""The fused elementwise ops against their references: in eager, compiled, under Triton's interpreter, and for sm_90."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from funcllm.kernels import fused, reference, sampler  # noqa: F401  registers its ops
from tests.interpreting import assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting process of test_interpreted")
compiled = pytest.mark.skipif(INTERPRETED, reason="runs in the process that does not interpret")

if INTERPRETED:
    from funcllm.kernels import interpret, triton_fused

    interpret.repair()

IMPLEMENTATIONS = [
    pytest.param("op", id="op", marks=compiled),
    pytest.param("triton", id="triton", marks=interpreted),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def function(implementation: str, name: str) -> Callable[..., Any]:
    return getattr(fused if implementation == "op" else triton_fused, name)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * 2).to(dtype)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to a unit or two in the last place of the dtype: only the order of a sum may differ."""
    assert ours.dtype == theirs.dtype
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# --- embedding and rotary angles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "size", "first_id"), [(1, 64, 0), (7, 100, 0), (9, 1030, 13), (0, 8, 0)])
def test_embed_rows(
    implementation: str, dtype: torch.dtype, kind: torch.dtype, tokens: int, size: int, first_id: int
) -> None:
    weight = values(13, size, dtype=dtype)
    ids = first_id + torch.randperm(13, generator=torch.Generator().manual_seed(tokens))[:tokens].to(kind)
    zeros, rows = function(implementation, "embed_rows")(ids, weight, first_id)
    assert zeros.dtype == rows.dtype == dtype
    assert zeros.shape == rows.shape == (tokens, size)
    assert (zeros == 0).all()
    assert torch.equal(rows, weight[ids.long() - first_id])
    assert zeros.is_contiguous()
    assert rows.is_contiguous()
    assert zeros.data_ptr() != rows.data_ptr() or tokens == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_ids_of_other_shards_have_rows_of_zero(implementation: str, kind: torch.dtype) -> None:
    weight = values(5, 40)
    ids = torch.tensor([-1, 9, 10, 12, 14, 15, 151_935, 2**31 - 1, 0, -(2**31)], dtype=kind)
    zeros, rows = function(implementation, "embed_rows")(ids, weight, 10)
    assert torch.equal(rows[[2, 3, 4]], weight[[0, 2, 4]])
    assert (rows[[0, 1, 5, 6, 7, 8, 9]] == 0).all()
    assert (zeros == 0).all()
    for ours, theirs in zip((zeros, rows), reference.embed_rows(ids, weight, 10)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_embed_rows_of_a_weight_inside_a_wider_one(implementation: str) -> None:
    wide = values(6, 48)
    _, rows = function(implementation, "embed_rows")(torch.tensor([5, 0]), wide[:, :32], 0)
    assert torch.equal(rows, wide[[5, 0], :32])


HUGE = [0, 1, 7, 4095, 40_960, 105_616, 131_071, 1_048_575, 2**24 - 1, 2**24 + 1, 2**30 + 129, 2**31 - 1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("half", [8, 40, 48, 64, 128])
def test_rope_angles_at_any_position(implementation: str, kind: torch.dtype, half: int) -> None:
    """Against fp64 trigonometry of the angle that fp32 has: the reduction of a huge angle loses nothing."""
    frequencies = torch.cat([1e6 ** (-torch.arange(half) / half), torch.tensor([1.25])])
    positions = torch.tensor(HUGE, dtype=kind)
    cos, sin = function(implementation, "rope_angles")(positions, frequencies)
    angle = (positions.float()[:, None] * frequencies[:-1]).double()
    torch.testing.assert_close(cos.double(), angle.cos() * 1.25, rtol=0, atol=3e-7)
    torch.testing.assert_close(sin.double(), angle.sin() * 1.25, rtol=0, atol=3e-7)
    for ours, theirs in zip((cos, sin), reference.rope_angles(positions, frequencies)):
        assert ours.dtype == torch.float32
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-7)
    assert (cos[0] == 1.25).all()
    assert (sin[0] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 33])
def test_rope_angles_of_any_number_of_tokens(implementation: str, tokens: int) -> None:
    frequencies = torch.cat([1e4 ** (-torch.arange(64) / 64), torch.ones(1)])
    positions = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:tokens].to(torch.int32)
    ours = function(implementation, "rope_angles")(positions, frequencies)
    for mine, theirs in zip(ours, reference.rope_angles(positions, frequencies)):
        assert mine.shape == (tokens, 64)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-7)


# --- norms and activation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 1030), (5, 3, 16), (0, 8)], ids=str)
def test_rms_norm(implementation: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = values(*shape, dtype=dtype), values(shape[-1])
    out = function(implementation, "rms_norm")(x, weight, EPS)
    assert_close(out, reference.rms_norm(x, weight, EPS))
    assert out.is_contiguous()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rms_norm_of_heads_inside_a_packed_tensor(implementation: str) -> None:
    packed = values(5, 7 * 16)
    heads_tnh = packed.view(5, 7, 16)[:, 2:5]
    out = function(implementation, "rms_norm")(heads_tnh, values(16), EPS)
    assert_close(out, reference.rms_norm(heads_tnh, values(16), EPS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (9, 130)], ids=str)
def test_add_rms_norm(implementation: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, update = values(*shape, dtype=dtype), values(*shape, dtype=dtype, seed=1)
    weight = values(shape[-1], dtype=dtype)
    total, normed = function(implementation, "add_rms_norm")(x, update, weight, EPS)
    expected_total, expected_normed = reference.add_rms_norm(x, update, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected_normed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_add_rms_norm_reads_the_rounded_sum(implementation: str) -> None:
    """1 + 2^-9 rounds to 1 in bfloat16, so the norm of a row of them is exactly the weight."""
    x, update = torch.ones(1, 64).bfloat16(), torch.full((1, 64), 2.0**-9).bfloat16()
    weight = torch.full((64,), 256.0)
    total, normed = function(implementation, "add_rms_norm")(x, update, weight, EPS)
    assert (total == 1).all()
    assert (normed == 256).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (3, 2 * 77), (2, 2, 2 * 1100), (0, 16)], ids=str)
def test_silu_mul(implementation: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate_up = values(*shape, dtype=dtype)
    out = function(implementation, "silu_mul")(gate_up)
    assert_close(out, reference.silu_mul(gate_up))


# --- q/k norm, rope, cache write -------------------------------------------------------------------------------------


def qkv_inputs(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> list[Any]:
    """Views of one packed qkv with rows wider than needed, angles, a poisoned cache and slots (the last one trash)."""
    width = (heads + 2 * kv_heads) * head_dim
    packed = values(tokens, width + 16, dtype=dtype)[:, :width]
    q, k, v = packed.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    angle = values(tokens, head_dim // 2) * 10
    caches = [torch.full((9, block_size, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    slots = torch.randperm(8 * block_size, generator=torch.Generator().manual_seed(tokens))[:tokens] + block_size
    slots[-1] = 0
    return [
        q.unflatten(-1, (heads, head_dim)),
        k.unflatten(-1, (kv_heads, head_dim)),
        v.unflatten(-1, (kv_heads, head_dim)),
        values(head_dim),
        values(head_dim, seed=1),
        EPS,
        angle.cos(),
        angle.sin(),
        *caches,
        slots,
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (1, 4, 2, 16, 16, torch.float32),
        (5, 6, 3, 64, 16, torch.bfloat16),
        (3, 5, 1, 80, 7, torch.float32),
        (3, 4, 4, 96, 1, torch.float16),
        (2, 16, 8, 128, 32, torch.bfloat16),
        (2, 2, 1, 256, 16, torch.float32),
    ],
)
def test_qk_norm_rope_write(
    implementation: str,
    normed: bool,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    inputs = qkv_inputs(tokens, heads, kv_heads, head_dim, dtype, block_size)
    none: Any = None if implementation == "triton" else ()
    if not normed:
        inputs[3:5] = (), ()
    q, k_cache, v_cache = reference.qk_norm_rope_write(*inputs)
    if not normed:
        inputs[3:5] = none, none
    before = inputs[0].clone()
    result = function(implementation, "qk_norm_rope_write")(*inputs)
    ours = result if implementation == "triton" else result[0]
    assert_close(ours, q)
    assert ours.is_contiguous()
    assert torch.equal(inputs[0], before)
    assert_close(*(torch.nan_to_num(x, nan=1000.0) for x in (inputs[8], k_cache)))
    assert torch.equal(*(torch.nan_to_num(x, nan=1000.0) for x in (inputs[9], v_cache)))
    assert torch.isnan(inputs[8]).any()
    if implementation == "op":
        assert result[1] is inputs[8]
        assert result[2] is inputs[9]


@interpreted
@pytest.mark.parametrize("heads", [2, 8])
def test_qk_norm_rope_write_with_several_heads_a_program(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = qkv_inputs(6, 12, 5, 8, torch.float32, 16)
    q, k_cache, v_cache = reference.qk_norm_rope_write(*inputs)
    monkeypatch.setattr(triton_fused, "heads_of_a_program", lambda *_: heads)
    assert_close(triton_fused.qk_norm_rope_write(*inputs), q)
    for ours, theirs in zip(inputs[8:10], (k_cache, v_cache)):
        assert_close(*(torch.nan_to_num(x, nan=1000.0) for x in (ours, theirs)))


# --- as ops ----------------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_logits_are_fp32_and_not_rounded_in_between(dtype: torch.dtype) -> None:
    x, weight = values(3, 48, dtype=dtype), values(101, 48, dtype=dtype)
    logits = fused.head_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-6, atol=1e-5)


@compiled
def test_head_logits_widen_a_narrow_weight_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcllm.kernels import ops_fused

    x, weight = values(2, 16, dtype=torch.bfloat16), values(37, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(ops_fused, "_CHUNK_ELEMENTS", 80)
    torch.testing.assert_close(fused.head_logits(x, weight), x.float() @ weight.float().T, rtol=1e-6, atol=1e-5)


def layer(
    hidden: Tensor, update: Tensor, weights: dict[str, Tensor], positions: Tensor, caches: Any, slots: Tensor
) -> Any:
    """A stand-in for a layer that goes through every op."""
    zeros, rows = fused.embed_rows(positions, weights["out"], 20)
    update = update + (zeros + rows).repeat(1, 2)
    cos, sin = fused.rope_angles(positions, weights["frequencies"])
    total, normed = fused.add_rms_norm(hidden, update, weights["norm"], EPS)
    qkv = normed @ weights["qkv"].T
    q, k, v = (x.unflatten(-1, (-1, 16)) for x in qkv.split([64, 32, 32], dim=-1))
    q, k_cache, v_cache = fused.qk_norm_rope_write(
        q, k, v, weights["head"], weights["head"], EPS, cos, sin, *caches, slots
    )
    out = fused.silu_mul(fused.rms_norm(q.flatten(1), weights["norm"], EPS))
    logits = fused.head_logits(out, weights["out"])
    heat = torch.zeros(logits.shape[0])
    keys = fused.noise_keys(slots, positions)
    winner = fused.pick(logits, heat, keys, (), 0, logits.shape[1])
    return total, fused.token_of(winner), keys, k_cache, v_cache


def layer_inputs(tokens: int) -> list[Any]:
    shapes = {"norm": (64,), "qkv": (128, 64), "head": (16,), "out": (50, 32), "frequencies": (9,)}
    weights = {name: values(*shape) for name, shape in shapes.items()}
    caches = [torch.zeros(9, 16, 2, 16) for _ in range(2)]
    slots = torch.arange(tokens) + 16
    positions = torch.arange(tokens, dtype=torch.int32) * 3
    return [values(tokens, 64), values(tokens, 64, seed=1), weights, positions, caches, slots]


@compiled
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ops_compile_whole_with_a_dynamic_token_count_and_write_the_caches(backend: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    fast = torch.compile(layer, fullgraph=True, backend=counter, dynamic=False)
    for tokens in (16, 48, 32):
        inputs, expected = layer_inputs(tokens), layer_inputs(tokens)
        for x in (*inputs[:2], inputs[3], inputs[5]):
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            total, winner, keys, k_cache, v_cache = fast(*inputs)
            eager = layer(*expected)
        torch.testing.assert_close((total, winner, keys, k_cache, v_cache), eager)
        assert k_cache.data_ptr() == inputs[4][0].data_ptr()
        assert inputs[4][0].abs().sum() > 0
        assert torch.equal(inputs[4][1], expected[4][1])
    assert counter.frame_count == 1


@compiled
def test_ops_pass_torchs_own_checks() -> None:
    x, weight = values(3, 32), values(32)
    ops = torch.ops.funcllm
    qkv = qkv_inputs(3, 4, 2, 16, torch.float32, 16)
    qkv[8:10] = torch.zeros_like(qkv[8]), torch.zeros_like(qkv[9])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.rms_norm.default, (x, weight, EPS), test_utils=checks)
    torch.library.opcheck(ops.add_rms_norm.default, (x, x * 2, weight, EPS), test_utils=checks)
    torch.library.opcheck(ops.silu_mul.default, (x,), test_utils=checks)
    torch.library.opcheck(ops.qk_norm_rope_write.default, tuple(qkv), test_utils=checks)
    torch.library.opcheck(ops.head_logits.default, (x, values(7, 32)), test_utils=checks)
    keys = torch.zeros(3, 2, dtype=torch.int64)
    torch.library.opcheck(ops.pick.default, (x, torch.ones(3), keys, None, 0, 32), test_utils=checks)
    ids = torch.tensor([4, 2, 9], dtype=torch.int32)
    torch.library.opcheck(ops.embed_rows.default, (ids, values(7, 32), 0), test_utils=checks)
    torch.library.opcheck(ops.rope_angles.default, (ids, values(9)), test_utils=checks)
    torch.library.opcheck(ops.noise_keys.default, (keys[:, 0], ids), test_utils=checks)
    torch.library.opcheck(ops.token_of.default, (keys[:, 0],), test_utils=checks)
    for min_p in (torch.zeros(3), torch.tensor([0.0, 0.5, 0.1])):
        torch.library.opcheck(ops.with_min_p.default, (ids.float(), ids.float(), x[:, 0], min_p), test_utils=checks)


CALLS: list[Any] = [
    pytest.param(lambda x: fused.rms_norm(x, torch.ones(16), EPS), id="rms_norm"),
    pytest.param(lambda x: fused.add_rms_norm(x, x, torch.ones(16), EPS)[1], id="add_rms_norm"),
    pytest.param(fused.silu_mul, id="silu_mul"),
    pytest.param(lambda x: fused.head_logits(x, torch.ones(5, 16)), id="head_logits"),
    pytest.param(lambda x: fused.embed_rows(torch.tensor([2, 0]), x, 0)[1], id="embed_rows"),
    pytest.param(lambda x: fused.rope_angles(torch.tensor([2, 0]), x.flatten())[1], id="rope_angles"),
]


@compiled
@pytest.mark.parametrize("call", CALLS)
def test_kernels_refuse_transforms_and_gradients(call: Callable[[Tensor], Tensor]) -> None:
    x = values(3, 16)
    for transform in (
        lambda: torch.func.grad(lambda y: call(y).sum())(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
        lambda: torch.func.vmap(call)(x[None]),
        lambda: call(x.clone().requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="REFERENCE"):
            transform()
    with torch.no_grad():
        assert call(x.clone().requires_grad_()).isfinite().all()


@compiled
@pytest.mark.parametrize("call", [fused.token_of, lambda x: fused.noise_keys(x, x)], ids=["token_of", "noise_keys"])
def test_kernels_of_integers_refuse_transforms(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="REFERENCE"):
        torch.func.vmap(call)(torch.zeros(2, 3, dtype=torch.int64))


@compiled
def test_the_plain_twins_bear_transforms() -> None:
    weight, ids = values(5, 4), torch.tensor([11, 9, 14])
    gradient = torch.func.grad(lambda w: reference.embed_rows(ids, w, 10)[1].sum())(weight)
    assert gradient[:, 0].tolist() == [0, 1, 0, 0, 1]
    _, slope = torch.func.jvp(
        lambda f: reference.rope_angles(torch.tensor([3]), f)[1],
        (torch.tensor([0.5, 2.0]),),
        (torch.tensor([1.0, 0.0]),),
    )
    torch.testing.assert_close(slope, 6 * torch.tensor([[1.5]]).cos())
    keys = torch.func.vmap(reference.noise_keys)(torch.arange(4).view(2, 2), torch.arange(4).view(2, 2))
    assert torch.equal(keys.flatten(0, 1), reference.noise_keys(torch.arange(4), torch.arange(4)))


@compiled
def test_a_norm_too_wide_is_refused() -> None:
    from funcllm.kernels import triton_fused

    with pytest.raises(ValueError, match="32769 values is above 32768"):
        triton_fused._norm_shape(1, 32769)


@compiled
def test_programs_take_more_heads_as_tokens_grow() -> None:
    from funcllm.kernels.triton_fused import heads_of_a_program

    assert [heads_of_a_program(tokens, 16, 8) for tokens in (1, 64, 100, 256, 4096)] == [1, 1, 2, 2, 8]
    assert heads_of_a_program(10**6, 2, 1) == 2


# --- Triton without a GPU --------------------------------------------------------------------------------------------


@compiled
def test_interpreted() -> None:
    """Runs this file's kernel tests in a process where Triton interprets."""
    assert_passes_interpreted(__file__)


def variants() -> list[Any]:
    if INTERPRETED:
        return []
    pytest.importorskip("triton")
    from funcllm.kernels import triton_fused, triton_radix, triton_sampler

    modules = (triton_fused, triton_sampler, triton_radix)
    return [pytest.param(*variant, id=variant[0]) for module in modules for variant in module.compile_variants()]


@compiled
@pytest.mark.parametrize(("name", "kernel", "signature", "constants", "options"), variants())
def test_kernel_compiles_for_sm_90_without_spills(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    tmp_path: Path,
) -> None:
    usage = resources(kernel, signature, constants, options, tmp_path)
    assert usage["SHARED"] <= 232448, name
    assert usage["STACK"] <= (64 if name.startswith("angles") else 0), name  # where huge angles are reduced
    assert usage["LOCAL"] == 0, name
    assert 8 <= usage["REG"] <= 255, name


@compiled
@pytest.mark.parametrize("name", ["angles-64", "min-p"])
def test_cosines_and_logarithms_are_not_approximate(name: str) -> None:
    """No approximate instruction, and for the angles the table of 2 / pi that reduces any of them."""
    ptx = binary(*next(variant.values[1:] for variant in variants() if variant.id == name)).asm["ptx"]
    assert not re.findall(r"(?:cos|sin|lg2|ex2)\.approx", ptx)
    assert ("__cudart_i2opi_f" in ptx) == (name == "angles-64")


def resources(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], folder: Path
) -> dict[str, int]:
    """Registers, stack, local and shared bytes of a kernel compiled for sm_90."""
    import triton

    compiled_kernel = binary(kernel, signature, constants, options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled_kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return usage | {"SHARED": compiled_kernel.metadata.shared}


def binary(kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> Any:
    """A kernel compiled for sm_90; pointers and sizes divide by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(names.values()) if kind[0] in "*i"}
    source = ASTSource(kernel, names, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
