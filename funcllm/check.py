"""`check_layer`: does a replaced function mean the same at tensor-parallel size 2 as at 1?

A function that returns a partial sum must be linear behind its row-parallel product; one that is not (a clamp, an added
bias, a norm over the feed-forward width) comes out wrong at tp 2, silently, unless it is declared whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from funcllm.config import ModelConfig, qwen3_config
from funcllm.group import SINGLE, Group, run_threads
from funcllm.qwen3 import logits, param_specs
from funcllm.record import FUNCTIONS, Layers
from funcllm.specs import init_params, map_specs
from funcllm.types import Spec


def check_layer(
    fn: Callable[..., Any] | Layers,
    place: str = "mlp",
    *,
    config: ModelConfig | None = None,
    tp: int = 2,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> float:
    """Compares a model with `fn` at `place` (or with a whole record) at tp 1 and at tp ranks run as threads.

    Random weights in fp32 on the CPU, the same at every tp; config: a tiny Qwen3 by default. Returns the largest
    difference of the logits relative to the largest logit. Raises ValueError when that exceeds `tolerance`.
    """
    if not isinstance(fn, Layers) and place not in FUNCTIONS:
        raise ValueError(f"{place!r} is no place of a layer function; use one of {', '.join(FUNCTIONS)}")
    layers = fn if isinstance(fn, Layers) else replace(Layers(), **{place: fn})  # type: ignore[arg-type]
    config = config or qwen3_config("tiny")
    generator = torch.Generator().manual_seed(seed)
    token_ids_t = torch.randint(0, config.vocab_size, (24,), generator=generator)

    def run(group: Group) -> Tensor:
        with torch.no_grad():
            specs = map_specs(_spread, param_specs(config, layers, group))
            params = init_params(specs, group, seed=seed, std=0.25)
            return logits(params, token_ids_t, config=config, layers=layers, group=group)

    expected = run(SINGLE)
    error = max(relative_error(result, expected) for result in run_threads(run, tp))
    if not error <= tolerance:
        raise ValueError(
            f"{'the record' if isinstance(fn, Layers) else place} differs at tp {tp} from tp 1 by {error:.2g} of the "
            f"largest logit (allowed: {tolerance:.2g}); what it does behind its row-parallel product is not linear, or "
            "it reads global ids as local ones: declare it Component(fn, whole=True) and reduce inside with "
            "all_reduce(x, context.group), or take ids from vocab_ids(context) and head_ids(context)"
        )
    return error


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest magnitude of `expected`; infinite where a NaN is."""
    error = ((result - expected).abs().max() / expected.abs().max()).item()
    return error if error == error else float("inf")


def _spread(spec: Spec) -> Spec:
    """The Spec, its vectors (norms and biases) scattered: all 1 or all 0, they would hide what is done to them."""
    if len(spec.parts[0].shape) != 1 or (spec.dtype is not None and not spec.dtype.is_floating_point):
        return spec
    plain = torch.zeros if spec.parts[0].name.endswith("bias") else torch.ones

    def init(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        value = plain(shape) if spec.init is None else spec.init(shape, generator)
        constant = bool((value == value.flatten()[:1]).all())
        return value + 0.25 * torch.randn(shape, generator=generator) if constant else value

    return replace(spec, init=init)
