"""check_layer: what is wrong as a partial sum is found, what is right passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from funcllm import layers as defaults
from funcllm.check import check_layer, relative_error
from funcllm.config import qwen3_config
from funcllm.group import all_reduce
from funcllm.record import FUNCTIONS, Layers
from funcllm.types import Component


@pytest.mark.parametrize("place", FUNCTIONS)
def test_the_defaults_pass_at_every_place(place: str) -> None:
    assert check_layer(getattr(Layers(), place), place) < 1e-5


def clamped(x: Tensor, params: Any, context: Any, /) -> Tensor:
    return defaults.swiglu(x, params, context).clamp(-0.5, 0.5)


def biased(x: Tensor, params: Any, context: Any, /) -> Tensor:
    return defaults.swiglu(x, params, context) + 0.5


def normed_over_ffn(x: Tensor, params: Any, context: Any, /) -> Tensor:
    gate, up = defaults.linear(x, params.gate_up_proj.weight, (), context).chunk(2, -1)
    hidden = F.silu(gate) * up
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    return defaults.linear(hidden, params.down_proj.weight, (), context)


def replicated(x: Tensor, params: Any, context: Any, /) -> Tensor:
    return x * 0.1


def local_ids(x: Tensor, params: Any, context: Any, /) -> Tensor:
    hidden = defaults.linear(x, params.gate_up_proj.weight, (), context).chunk(2, -1)[0]
    scale = torch.arange(hidden.shape[1]) / hidden.shape[1]
    return defaults.linear(hidden * scale, params.down_proj.weight, (), context)


@pytest.mark.parametrize("fn", [clamped, biased, normed_over_ffn, replicated, local_ids])
@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_wrong_as_a_partial_sum_is_refused(fn: Any, tp: int) -> None:
    with pytest.raises(ValueError, match=rf"mlp differs at tp {tp} from tp 1 by .*Component\(fn, whole=True\)"):
        check_layer(fn, tp=tp)
    assert check_layer(fn, tolerance=1e9) > 0.01


def test_the_same_declared_whole_passes() -> None:
    def whole_clamp(x: Tensor, params: Any, context: Any, /) -> Tensor:
        return all_reduce(defaults.swiglu(x, params, context), context.group).clamp(-0.5, 0.5)

    def whole_norm(x: Tensor, params: Any, context: Any, /) -> Tensor:
        gate, up = defaults.linear(x, params.gate_up_proj.weight, (), context).chunk(2, -1)
        hidden = F.silu(gate) * up
        width = context.config.intermediate_size
        square = all_reduce(hidden.square().sum(-1, keepdim=True), context.group) / width
        return defaults.linear(hidden * torch.rsqrt(square + 1e-6), params.down_proj.weight, (), context)

    assert check_layer(Component(whole_clamp, whole=True)) < 1e-5
    assert check_layer(Component(replicated, whole=True), tp=4) < 1e-5
    assert check_layer(whole_norm) < 1e-5
    with pytest.raises(ValueError, match="mlp differs"):
        check_layer(whole_clamp)


def test_a_biased_linear_is_found() -> None:
    def linear(x: Tensor, weight: Any, bias: Any, context: Any, /) -> Tensor:
        return F.linear(x, weight) + 0.1

    with pytest.raises(ValueError, match="linear differs at tp 2"):
        check_layer(linear, "linear")


def test_a_whole_record_is_checked_and_named() -> None:
    assert check_layer(Layers().at(0, mlp=Component(replicated, whole=True))) < 1e-5
    with pytest.raises(ValueError, match="the record differs at tp 2"):
        check_layer(Layers().at(1, mlp=replicated))  # proportional to the stream, were the norms all 1
    with pytest.raises(ValueError, match="the record differs at tp 2"):
        check_layer(Layers().edit("layers.0.attention.heads", lambda x, c: x - x.mean(1, keepdim=True)))


def test_nan_is_a_difference() -> None:
    with pytest.raises(ValueError, match="by inf"):
        check_layer(lambda x, p, c: defaults.swiglu(x, p, c) * (1.0 if c.group.size == 1 else float("nan")))
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])) == 0.25


def test_a_rank_that_skips_a_collective_is_an_error_and_no_deadlock() -> None:
    def skipping(x: Tensor, params: Any, context: Any, /) -> Tensor:
        update = defaults.swiglu(x, params, context)
        return all_reduce(update, context.group) if context.group.rank == 0 else update

    with pytest.raises((ValueError, RuntimeError)):
        check_layer(Component(skipping, whole=True))


def test_an_unknown_place_and_an_undividable_config_are_refused() -> None:
    with pytest.raises(ValueError, match="'mpl' is no place of a layer function; use one of norm"):
        check_layer(clamped, "mpl")
    with pytest.raises(ValueError, match="num_heads=4 does not divide by tp=3"):
        check_layer(defaults.swiglu, tp=3)


def test_another_config_is_used() -> None:
    config = qwen3_config("tiny", num_layers=1)
    with pytest.raises(ValueError, match="layer 1 is replaced, but the model has layers 0 to 0"):
        check_layer(Layers().at(1, mlp=defaults.swiglu), config=config)
