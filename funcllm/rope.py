"""The rotary embedding's static facts, and the inverse frequencies that follow from them.

Owns RopeConfig and its parsing from a config.json of either spelling. An unknown type is an error: to read it as plain
RoPE would give fluent nonsense beyond the original context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from funcllm.config import ModelConfig

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Which rotary embedding, and its numbers. What a type does not use stays at its default."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, yarn, llama3
    original_max_position_embeddings: int = 0  # yarn, llama3
    attention_factor: float | None = None  # yarn; None: from factor, mscale and mscale_all_dim
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3


def parse_rope(raw: Mapping[str, Any], *, max_position_embeddings: int) -> RopeConfig:
    """The RopeConfig of a config.json: rope_theta and rope_scaling, or rope_parameters; absent and null are plain RoPE.

    Raises ValueError for a type that is not one of ROPE_TYPES, for missing or senseless numbers, for a rotation of part
    of the head, and for tables that differ from layer to layer.
    """
    scaling = _scaling(raw)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; use a model whose rope type is {_any_of(ROPE_TYPES)}")
    part = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise ValueError(f"partial_rotary_factor={part} is not supported; only heads that rotate whole (1.0) are")
    theta = _number(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0, "rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    original = _original_length(raw, scaling, max_position_embeddings)
    factor = _factor(scaling, kind, max_position_embeddings, original)
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=factor)
    if kind == "llama3":
        return _llama3(scaling, theta=theta, factor=factor, original=original)
    return _yarn(scaling, theta=theta, factor=factor, original=original)


def rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    """rope_theta and rope_scaling, the spelling that transformers 4 and 5 both read."""
    if rope.type == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        optional = {name: getattr(rope, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        scaling |= {name: value for name, value in optional.items() if value is not None}
        scaling |= {} if rope.truncate else {"truncate": False}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(inv_freq, attention_factor): fp32 [h / 2] on the CPU, and what cosine and sine are multiplied by.

    linear: position interpolation; yarn: https://arxiv.org/abs/2309.00071, section 3; llama3: the scaling of Llama 3.1.
    """
    rope, head_dim = config.rope, config.head_dim
    with torch.device("cpu"):
        plain = 1.0 / _wavenumbers(rope.theta, head_dim)
        if rope.type == "linear":
            return plain / rope.factor, 1.0
        if rope.type == "llama3":
            return _llama3_frequencies(plain, rope), 1.0
        if rope.type == "yarn":
            return _yarn_frequencies(rope, head_dim), yarn_attention_factor(rope)
        return plain, 1.0


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies cosine and sine by: as given, or from the factor and the two mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


# --- tables ----------------------------------------------------------------------------------------------------------


def _wavenumbers(theta: float, head_dim: int) -> Tensor:
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _llama3_frequencies(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Short waves stay, long waves are divided by the factor, those between are blended."""
    wavelength = 2 * math.pi / plain
    length = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (length / wavelength - low) / (high - low)
    between = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > length / low, plain / rope.factor, between)
    return torch.where(wavelength < length / high, plain, scaled)


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn over beta_fast times in the original context stay, those below beta_slow interpolate."""

    def dimension_turning(turns: float) -> float:
        length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp's slope stays finite
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    wavenumbers = _wavenumbers(rope.theta, head_dim)
    return (1.0 / (rope.factor * wavenumbers)) * (1 - keep) + (1.0 / wavenumbers) * keep


# --- parsing ---------------------------------------------------------------------------------------------------------


def _scaling(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters (transformers 5) over rope_scaling (transformers 4); one table for all layers."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling must be an object or null in config.json, and is {scaling!r}")
    nested = {name: value for name, value in scaling.items() if isinstance(value, Mapping)}
    if not nested:
        return dict(scaling)
    tables = list(nested.values())
    if any(table != tables[0] for table in tables):
        raise ValueError(f"rope_parameters differ between {_any_of(tuple(nested))}; only one for all layers works")
    return dict(tables[0])


def _original_length(raw: Mapping[str, Any], scaling: Mapping[str, Any], max_position_embeddings: int) -> int:
    key = "original_max_position_embeddings"
    length = raw.get(key) or scaling.get(key) or max_position_embeddings
    return int(_number(length, key))


def _factor(scaling: Mapping[str, Any], kind: str, max_position_embeddings: int, original: int) -> float:
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position_embeddings / original
    if factor is None:
        raise ValueError(f"rope type {kind!r} needs a factor; add it to rope_scaling in config.json")
    return _number(factor, "rope factor")


def _llama3(scaling: Mapping[str, Any], *, theta: float, factor: float, original: int) -> RopeConfig:
    missing = [name for name in ("low_freq_factor", "high_freq_factor") if scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope type 'llama3' needs {' and '.join(missing)}; add it to rope_scaling in config.json")
    low = _number(scaling["low_freq_factor"], "low_freq_factor")
    high = _number(scaling["high_freq_factor"], "high_freq_factor")
    if high <= low:
        raise ValueError(f"high_freq_factor={high} must be above low_freq_factor={low}")
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Mapping[str, Any], *, theta: float, factor: float, original: int) -> RopeConfig:
    def optional(name: str) -> float | None:
        value = scaling.get(name)
        return None if value is None else _number(value, name, zero=True)

    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        beta_fast=_number(scaling.get("beta_fast") or 32.0, "beta_fast"),
        beta_slow=_number(scaling.get("beta_slow") or 1.0, "beta_slow"),
        truncate=bool(scaling.get("truncate", True)),
    )


def _number(value: Any, name: str, *, zero: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={value!r} in config.json must be a positive number")
    return float(value)


def _any_of(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}" if len(names) > 1 else names[0]
