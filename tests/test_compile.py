"""Compiled units on the CPU: equal to eager, few and constant in number, and never one function for another."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.compile import compile_unit, num_compiled
from funcllm.kernels.bundle import FAST, Kernels
from funcllm.qwen3 import qwen3
from funcllm.record import Layers
from funcllm.types import Context
from tests.steps import Driver, Request, random_ids, random_params
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=97, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
pytestmark = pytest.mark.slow


def scaled(x: Tensor, params: Any, context: Context, scale: float) -> Tensor:
    """A swapped function whose closure below differs by a default argument only."""
    gate, up = context.layer.linear(x, params.gate_up_proj.weight, (), context).chunk(2, -1)
    return context.layer.linear(torch.relu(gate) * up * scale, params.down_proj.weight, (), context)


def mlp_of_scale(value: float) -> Any:
    def mlp(x_td: Tensor, params: Any, context: Context, scale: float = value) -> Tensor:
        return scaled(x_td, params, context, scale)

    return mlp


COMPOSED = replace(FAST, fused=frozenset())  # fused blocks off: the compiler has something to do


def drivers(
    layers: Layers = Layers(), num_rows: int = 16, kernels: Kernels = COMPOSED, transform: Any = compile_unit
) -> tuple[Driver, Driver]:
    """An eager one and a compiled one."""
    params = random_params(CONFIG, layers)
    eager = Driver(qwen3(CONFIG, layers, kernels=kernels), params, capacity=48, num_rows=num_rows)
    compiled = Driver(
        qwen3(CONFIG, layers, kernels=kernels, transform=transform), params, capacity=48, num_rows=num_rows
    )
    return eager, compiled


def requests(count: int) -> list[Request]:
    return [
        Request(
            prompt=random_ids(3 + n, 97, seed=n).tolist(),
            max_tokens=30,
            temperature=float(n % 2),
            seed=n,
            top_p=0.95 if n % 3 else 1.0,
        )
        for n in range(count)
    ]


def both(pair: tuple[Driver, Driver], *args: Any, **options: Any) -> None:
    """One step of both; the same tokens and the same keys in the cache."""
    eager, compiled = (driver.step(*args, **options) for driver in pair)
    assert compiled.token_ids_l.tolist() == eager.token_ids_l.tolist()
    assert compiled.count_l.tolist() == eager.count_l.tolist()
    for ours, theirs in zip(pair[1].cache, pair[0].cache):
        torch.testing.assert_close(ours.k_pskh[1:], theirs.k_pskh[1:], rtol=1e-4, atol=1e-4)


def warm_up(pair: tuple[Driver, Driver]) -> None:
    """A step of each batch class, in which counts that differ in meaning differ in value."""
    for filtered in (False, True):
        both(pair, [0] * 5, [(0, 0), (0, 0), (0, 0)], padding=17, span=7, filtered=filtered)
        both(pair, [0] * 5, filtered=filtered)
        both(pair, [0], filtered=filtered)


def test_compiled_equals_eager_and_compiles_nothing_after_the_warm_up() -> None:
    pair = drivers()
    for driver in pair:
        driver.admit(list(range(1, 15)), requests(14))
    before = num_compiled()
    warm_up(pair)
    compiled = num_compiled()
    assert compiled - before == 3 + 3 + 6  # embed and layer by batch class, final also by whether it filters
    lengths = {row: 2 + row for row in range(1, 15)}
    both(pair, [0, 0], [(row, min(5, lengths[row])) for row in range(1, 15)], padding=3, span=9, filtered=True)
    rest = [(row, lengths[row] - 5) for row in range(1, 15) if lengths[row] > 5]
    both(pair, [1, 2], rest, padding=9, span=16)
    for batch in range(1, 13):
        both(pair, list(range(1, batch + 1)), filtered=batch % 2 == 0)
    for prompt in range(1, 41, 3):
        for driver in pair:
            driver.admit([15], [Request(prompt=random_ids(prompt, 97, seed=prompt).tolist())])
        both(pair, [13, 14], [(15, prompt), (0, 0)], padding=-prompt % 16, span=prompt + 2)
    assert num_compiled() == compiled


def halved(x: Tensor, context: Context) -> Tensor:
    return x * 0.5


@pytest.mark.parametrize(
    ("layers", "wrapped"),
    [
        (Layers(), []),
        (Layers().at(1, mlp=mlp_of_scale(2.0)), ["layer"]),
        (Layers().edit("layers.0.mlp.out", halved), ["layer"]),
        (Layers().edit("embed", halved), ["embed"]),
        (Layers().edit("logits", halved), ["final"]),
        (Layers(norm=lambda x, params, context: x), ["layer", "final"]),
    ],
    ids=["default", "mlp", "edit of a layer", "edit of the embedding", "edit of the logits", "norm"],
)
def test_units_whose_work_is_all_in_kernels_are_not_compiled(layers: Layers, wrapped: list[str]) -> None:
    seen: list[str] = []

    def transform(unit: Any, name: str) -> Any:
        seen.append(name)
        return unit

    _, driver = drivers(layers, kernels=FAST, transform=transform)
    driver.step([0] * 5, [(0, 0), (0, 0), (0, 0)], padding=17, span=7)
    assert seen == wrapped


def test_functions_that_share_a_code_object_keep_their_own_defaults() -> None:
    layers = Layers().at(0, mlp=mlp_of_scale(1.0)).at(1, mlp=mlp_of_scale(-3.0))
    assert layers.of(0).mlp.__code__ is layers.of(1).mlp.__code__
    pair = drivers(layers, num_rows=4, kernels=FAST)
    for driver in pair:
        driver.admit([1, 2, 3], requests(3))
    both(pair, [0] * 5, [(1, 3), (2, 4), (3, 5)], padding=8, span=9)
    both(pair, [1, 2, 3, 0, 0])


def test_every_unit_has_a_code_object_of_its_own_without_a_limit() -> None:
    """More variants of one function than a code object bears (8): all compile, each with its own value."""

    def add(value: float, x: Tensor, inputs: Any) -> Tensor:
        return x + value

    from funcllm.types import StepInputs

    t = torch.arange(3)
    inputs = StepInputs(t, t, t, t, t, t, t, t, t, (), (), ())
    for value in range(10):
        unit = compile_unit(functools.partial(add, float(value)), "layer")
        assert unit(torch.zeros(3), inputs).tolist() == [value] * 3


def test_importing_the_model_compiles_nothing_and_needs_no_compiler() -> None:
    code = "import funcllm.qwen3, funcllm.compile, sys; assert 'torch._inductor.compile_fx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
