"""Every production variant of the Triton kernels compiles for sm_90 without a GPU: no spills, shared memory in bounds.

Each kernel module lists its variants in `compile_variants()`. This file is also the script that compiles one module's
variants, in a process that does not interpret.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SHARED_LIMIT = 232448
STACK_LIMIT = 8  # bytes of a thread: triton 3.8 takes them for two numbers of a decode variant
SHARED_SM89 = 101376
MODULES = ("attention_decode", "attention_prefill", "kv", "triton_step")
HOPPER_MMA = {"attention_prefill"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODULES)
def kernel_variants(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, int]]]:
    """A kernel module's name, and by variant: registers, stack, local, shared memory, wgmma and mma instructions."""
    return request.param, compile_module(request.param)


def test_variants_fit_sm90(kernel_variants: tuple[str, dict[str, dict[str, int]]]) -> None:
    module, variants = kernel_variants
    assert len(variants) >= 2
    spilling = {name: use for name, use in variants.items() if use["stack"] > STACK_LIMIT or use["local"]}
    assert not spilling, spilling
    too_large = {name: use["shared"] for name, use in variants.items() if use["shared"] > SHARED_LIMIT}
    assert not too_large, too_large
    assert all(0 < use["registers"] <= 255 for use in variants.values())
    if module in HOPPER_MMA:
        assert all(use["wgmma"] > 0 for name, use in variants.items() if name.startswith("prefill"))


def test_decode_keeps_two_programs_on_a_multiprocessor_and_uses_tensor_cores(
    kernel_variants: tuple[str, dict[str, dict[str, int]]],
) -> None:
    module, variants = kernel_variants
    if module != "attention_decode":
        pytest.skip("about the decode kernel")
    decode = {name: use for name, use in variants.items() if name.startswith("decode")}
    assert len(decode) == 15
    for name, use in decode.items():
        assert 2 * (use["shared"] + 1024) <= 233472, name
        assert 2 * 128 * use["registers"] <= 65536, name
        assert use["mma"] > 0, name
        assert use["cp_async"] >= 32, name


@pytest.mark.parametrize("module", ["attention_decode", "attention_prefill"])
def test_attention_fits_the_smallest_gpus(module: str) -> None:
    variants = compile_module(module, capability=89, shared=SHARED_SM89, names="(decode|prefill)-.*-16$")
    assert len(variants) == 5
    for name, use in variants.items():
        assert 0 < use["shared"] <= SHARED_SM89, name
        assert use["stack"] == use["local"] == 0, name
        assert use["mma"] > 0, name


def compile_module(module: str, **options: Any) -> dict[str, dict[str, int]]:
    """What each variant of a kernel module takes, compiled in a process that does not interpret."""
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, module, json.dumps(options)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int], *, capability: int
) -> Any:
    """A compiled kernel, pointers and strides divisible by 16 as the launcher finds them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [name for name in signature if name.endswith(("_ptr", "stride"))]
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(kernel: Any) -> dict[str, int]:
    """What a compiled kernel takes, as cuobjdump and its PTX tell."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = kernel.asm["ptx"]
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "local": found["LOCAL"],
        "shared": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "cp_async": ptx.count("cp.async.cg"),
    }


def main(module_name: str, *, capability: int = 90, shared: int | None = None, names: str = "") -> None:
    """Prints what each variant of a kernel module takes, as JSON; `names` is searched for in the variants' names."""
    module = importlib.import_module(f"funcllm.kernels.{module_name}")
    variants = module.compile_variants() if shared is None else module.compile_variants(shared)
    found = [variant for variant in variants if re.search(names, variant[0])]
    print(json.dumps({name: usage(compiled(*rest, capability=capability)) for name, *rest in found}))


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
