"""`Layers`: the record of functions that an experiment may replace. Hashable; part of every compilation and graph key.

`Layers(mlp=my_mlp)` replaces a function in every layer, `Layers().at(range(3, 8), mlp=my_mlp)` in some; `.edit(site,
fn)` and `.capture(site)` touch what passes a site; `.extra(...)` declares a per-request value. Each returns a new
record.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from funcllm import attention as attention_module
from funcllm import block as block_module
from funcllm import layers as layer_functions
from funcllm import sampling as sampling_module
from funcllm.config import ModelConfig
from funcllm.sites import LAYER_SITES, MODEL_SITES
from funcllm.types import (
    AttentionFn,
    BlockFn,
    Component,
    EditFn,
    EmbedFn,
    Extra,
    HeadFn,
    LinearFn,
    MLPFn,
    NormFn,
    QKFn,
    SampleFn,
)

ARITY = {
    "norm": "(x, params, context, /) -> x",
    "qk_norm": "(q_tnh, k_tkh, params, context, /) -> (q_tnh, k_tkh)",
    "rope": "(q_tnh, k_tkh, params, context, /) -> (q_tnh, k_tkh)",
    "attention": "(q_tnh, k_tkh, v_tkh, cache, params, context, /) -> (out_tnh, cache)",
    "mlp": "(x_td, params, context, /) -> partial_td",
    "linear": "(x, weight, bias, context, /) -> y",
    "block": "(stream, params, cache, context, /) -> (stream, cache)",
    "embed": "(token_ids_t, params, context, /) -> partial_td",
    "head": "(x_ld, params, context, /) -> logits_lv",
    "sample": "(logits_lv, context, /) -> (token_ids_l, extras)",
}
FUNCTIONS = tuple(ARITY)
MODEL_FUNCTIONS = ("embed", "head", "sample")
WITHOUT_NODE = ("linear", "sample")
PARTIAL_SUMS = ("embed", "mlp")
_EDIT_ARITY = "(x, context, /) -> x"


@dataclass(frozen=True)
class Override:
    """Functions that stand in for the record's own in some layers."""

    indices: tuple[int, ...]
    functions: tuple[tuple[str, Callable[..., Any]], ...]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What an experiment may replace; every field has the contract of its Protocol in funcllm/types.py."""

    norm: NormFn = layer_functions.norm
    qk_norm: QKFn = layer_functions.qk_norm
    rope: QKFn = layer_functions.rope
    attention: AttentionFn = attention_module.paged_attention
    mlp: MLPFn = layer_functions.swiglu
    linear: LinearFn = layer_functions.linear
    block: BlockFn = block_module.pre_norm_block
    embed: EmbedFn = layer_functions.embed
    head: HeadFn = layer_functions.head
    sample: SampleFn = sampling_module.sample
    edits: tuple[tuple[str, EditFn], ...] = ()
    captures: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        for name in FUNCTIONS:
            check_arity(name, getattr(self, name))
        for override in self.overrides:
            for name, fn in override.functions:
                check_arity(name, fn)

    def at(self, indices: int | Iterable[int], **functions: Callable[..., Any]) -> Layers:
        """The record with these functions in the layers of these indices; a later call wins over an earlier one."""
        chosen = (indices,) if isinstance(indices, int) else tuple(indices)
        for name in functions:
            if name not in FUNCTIONS or name in MODEL_FUNCTIONS:
                legal = ", ".join(n for n in FUNCTIONS if n not in MODEL_FUNCTIONS)
                raise ValueError(f"{name!r} is no function of a single layer; use one of {legal}")
        return replace(self, overrides=(*self.overrides, Override(chosen, tuple(functions.items()))))

    def edit(self, site: str, fn: EditFn) -> Layers:
        """The record with `fn` at a site: "layers.3.residual_mid", "layers.*.residual_mid" or "final"."""
        _check_site_name(site)
        _check_call(f"the edit of {site!r}", fn, _EDIT_ARITY)
        return replace(self, edits=(*self.edits, (site, fn)))

    def capture(self, *sites: str) -> Layers:
        """The record that records what passes these sites, at the tokens whose logits are taken."""
        for name in sites:
            _check_site_name(name)
        return replace(self, captures=(*self.captures, *(s for s in sites if s not in self.captures)))

    def extra(self, name: str, **options: Any) -> Layers:
        """The record with a per-request value: see `Extra`."""
        if any(extra.name == name for extra in self.extras):
            raise ValueError(f"the extra {name!r} is declared twice; give each its own name")
        if "default" in options:
            options["default"] = _hashable(options["default"])
        return replace(self, extras=(*self.extras, Extra(name=name, **options)))

    def of(self, index: int | None) -> Layers:
        """The functions of one layer, with sites by their local names; None: of what stands outside the layers."""
        functions: dict[str, Any] = {
            name: fn
            for override in self.overrides
            if index is not None and index in override.indices
            for name, fn in override.functions
        }
        edits = tuple((local, fn) for site, fn in self.edits if (local := _local(site, index)))
        captures = tuple(dict.fromkeys(local for site in self.captures if (local := _local(site, index))))
        return replace(self, **functions, edits=edits, captures=captures, overrides=())


def check_layers(layers: Layers, config: ModelConfig) -> None:
    """Refuses layer numbers, sites and declarations that the model does not have, with ValueError."""
    for override in layers.overrides:
        for index in override.indices:
            if not 0 <= index < config.num_layers:
                raise ValueError(f"layer {index} is replaced, but the model has layers 0 to {config.num_layers - 1}")
    for name in (*(site for site, _ in layers.edits), *layers.captures):
        _check_site_name(name)
        number, local = _split(name)
        if number is None:
            continue
        if number != "*" and int(number) >= config.num_layers:
            raise ValueError(f"the site {name!r} is in layer {number}; the layers are 0 to {config.num_layers - 1}")
        indices = range(config.num_layers) if number == "*" else (int(number),)
        if local not in LAYER_SITES and not any(_has_own_functions(layers.of(index)) for index in indices):
            raise ValueError(f"no site is called {name!r}; known here: {', '.join(LAYER_SITES)}")


def check_arity(name: str, fn: Any) -> None:
    """Refuses a function that cannot stand in its place, with ValueError and both signatures."""
    _check_call(name, fn.apply if isinstance(fn, Component) else fn, ARITY[name])
    if isinstance(fn, Component) and fn.whole and name not in PARTIAL_SUMS:
        raise ValueError(
            f"{name}=Component(..., whole=True) means nothing, for {name} returns no partial sum; whole is for "
            f"{' and '.join(PARTIAL_SUMS)}"
        )
    if isinstance(fn, Component) and fn.specs is not None and name in WITHOUT_NODE:
        raise ValueError(
            f"{name}=Component(..., specs=...) has no node of its own in the parameter tree; give the specs to the "
            "function whose weights it uses (mlp, block, ...)"
        )


def value_key(value: Any) -> Any:
    """A hashable key that is equal for functions that do the same: partials by function and arguments, closures by code
    and cells, bound methods by function and object, records by their fields. Everything else goes by identity or by its
    own hash.
    """
    return _key(value, ())


def _key(value: Any, outer: tuple[int, ...]) -> Any:
    """value_key inside of the values whose ids are `outer`: a function that calls itself is in its own cells."""
    if id(value) in outer:
        return ("inside", outer.index(id(value)))
    inner = (*outer, id(value))

    def keys(values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(_key(item, inner) for item in values)

    if isinstance(value, functools.partial):
        return ("partial", *keys((value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return ("method", *keys((value.__func__, value.__self__)))
    if isinstance(value, Component):
        return ("component", *keys(getattr(value, f.name) for f in fields(value) if f.name != "source"))
    if isinstance(value, types.FunctionType):
        if "<locals>" not in value.__qualname__:
            return value
        cells = keys(cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
        defaults = keys((value.__defaults__, value.__kwdefaults__))
        return ("function", value.__code__, id(value.__globals__), cells, defaults)
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *keys(getattr(value, f.name) for f in fields(value)))
    if isinstance(value, (tuple, list)):
        return (type(value), *keys(value))
    if isinstance(value, dict):
        return ("dict", *keys(sorted(value.items(), key=repr)))
    if isinstance(value, (bool, int, float)):
        return (type(value), repr(value))  # 0.0 is not -0.0, and a NaN is itself
    if isinstance(value, torch.Tensor):
        return _ById(value)
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value


class _ById:
    """A value that equals only itself. It keeps the value alive, lest another takes over its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _check_call(name: str, function: Any, wanted: str) -> None:
    if not callable(function):
        raise ValueError(f"{name} must be a function {wanted}; got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(wanted.split("/")[0].count(",")))
    except TypeError:
        raise ValueError(
            f"{name} is called as {wanted}; {getattr(function, '__qualname__', function)}{signature} cannot take that"
        ) from None


def _has_own_functions(layer: Layers) -> bool:
    """Whether a function of this layer may pass sites of its own."""
    plain = Layers()
    own = (getattr(layer, name) for name in FUNCTIONS if name not in MODEL_FUNCTIONS)
    usual = [getattr(plain, name) for name in FUNCTIONS]
    return any((fn.func if isinstance(fn, functools.partial) else fn) not in usual for fn in own)


def _hashable(value: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _split(site: str) -> tuple[str | None, str]:
    if not site.startswith("layers.") or site.count(".") < 2:
        return None, site
    _, number, local = site.split(".", 2)
    return number, local


def _local(site: str, index: int | None) -> str | None:
    number, local = _split(site)
    if index is None:
        return local if number is None else None
    return local if number in ("*", str(index)) else None


def _check_site_name(site: str) -> None:
    parts = site.split(".", 2)
    if parts[0] == "layers":
        if len(parts) == 3 and (parts[1] == "*" or parts[1].isdigit()):
            return
    elif site in MODEL_SITES:
        return
    raise ValueError(
        f"{site!r} is no site; write layers.<number or *>.<{' | '.join(LAYER_SITES)}>, or {' | '.join(MODEL_SITES)}"
    )
