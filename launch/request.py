"""Requests: what a user asks for, checked at the edge, and what the scheduler works with.

`SamplingParams` has vLLM's field names. Whatever it cannot do yet is refused here with a ValueError, never ignored.
`resolve` fills in the defaults of a model's generation_config; `Request` is what the scheduler receives.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from funcllm.launch.plan import MAX_STOP_IDS

Ints = npt.NDArray[np.int32]
RequestId = int | str
FinishReason = Literal["stop", "length", "abort", "error"]

MAX_TOP_K = MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPERATURE = float(np.finfo(np.float32).max)

_NEUTRAL_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_NOT_SUPPORTED_YET: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose and when to stop, under vLLM's names. None: what the model's generation_config says.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. seed None: another one for every request.
    max_tokens None: as many as the model's length allows. extra_args: values of the model's extras, by name.
    cache_salt: requests with different salts share no prefix. Raises ValueError for every value it cannot honour.
    """

    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: Any = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NOT_SUPPORTED_YET.items():
            _refuse_unsupported(name, getattr(self, name), neutral)
        rule = f"a number of at least 0 and at most {MAX_TEMPERATURE:.2g}; 0 is greedy"
        _check_float("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE, rule=rule)
        _check_int("top_k", self.top_k, low=-1, rule="an integer of at least 1, or 0 or -1 for off")
        _check_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True, rule="above 0 and at most 1; 1 is off")
        _check_float("min_p", self.min_p, low=0.0, high=1.0, rule="between 0 and 1; 0 is off")
        _check_int("seed", self.seed, low=-(2**63), high=2**63 - 1, rule="a 64-bit integer, or None")
        _check_int("max_tokens", self.max_tokens, low=1, rule="an integer of at least 1, or None for no bound")
        _check_int("min_tokens", self.min_tokens, low=0, optional=False, rule="an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            _check_bool(name, getattr(self, name))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={list(self.stop)} needs text; leave detokenize on, or use stop_token_ids")
        _check_extra_args(self.extra_args)
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt={self.cache_salt!r} must be a string, or None")


@dataclass(frozen=True, kw_only=True)
class ResolvedSampling:
    """Sampling parameters with nothing left open. The device knows `stop_ids`, the host checks `host_stop_ids`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # at most MAX_STOP_IDS, EOS first
    host_stop_ids: frozenset[int] = frozenset()

    @property
    def narrows(self) -> bool:
        """Whether the choice of a token is narrowed by top-k, top-p or min-p; a greedy choice never is."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def stops_at(self, token_id: int) -> bool:
        return token_id in self.stop_ids or token_id in self.host_stop_ids


def resolve(
    params: SamplingParams,
    defaults: Mapping[str, Any],
    eos_ids: Sequence[int],
    *,
    seed: int | None = None,
) -> ResolvedSampling:
    """Fills in what `params` leaves open: from `defaults` (a generation_config), else neutral values.

    seed: for a request that gives none; drawn at random when this is None, too. Raises ValueError when stop ids beyond
    the first MAX_STOP_IDS, which only the host checks, meet min_tokens, under which they must not be sampled at all.
    """
    values: dict[str, Any] = {
        name: _choose(getattr(params, name), defaults.get(name), neutral) for name, neutral in _NEUTRAL_DEFAULTS.items()
    }
    SamplingParams(**values)  # the defaults obey the same rules
    eos_ids = [] if params.ignore_eos else [i for i in eos_ids if 0 <= i <= MAX_TOKEN_ID]  # others are no token's
    stop_ids = tuple(dict.fromkeys([*eos_ids, *(params.stop_token_ids or ())]))
    if len(stop_ids) > MAX_STOP_IDS and params.min_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} with {len(stop_ids)} stop ids (EOS included) is not supported yet; "
            f"use at most {MAX_STOP_IDS} stop ids, or min_tokens=0"
        )
    chosen_seed = _choose(params.seed, seed, None)
    return ResolvedSampling(
        temperature=float(values["temperature"]),
        top_k=min(max(int(values["top_k"]), 0), MAX_TOP_K),
        top_p=float(values["top_p"]),
        min_p=float(values["min_p"]),
        seed=secrets.randbits(63) if chosen_seed is None else int(chosen_seed),
        max_tokens=None if params.max_tokens is None else int(params.max_tokens),
        min_tokens=int(params.min_tokens),
        stop_ids=stop_ids[:MAX_STOP_IDS],
        host_stop_ids=frozenset(stop_ids[MAX_STOP_IDS:]),
    )


def ignored_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config asks of sampling that is not supported yet, for a warning at start-up."""
    return {
        name: defaults[name]
        for name, neutral in _NOT_SUPPORTED_YET.items()
        if name in defaults and name != "n" and not _is_one_of(defaults[name], neutral)
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt on its way through the scheduler.

    tag: only requests with equal tags share prefixes (`prefix_tag`); extras: the values of the model's extras as raw
    bytes, each padded to 4; needs_host: the host must see each token before the next one is computed; stream: every
    token is an event of its own, else all come with the last one; reads_cache: whether a prefix hit may be used.
    """

    id: RequestId
    prompt_ids: Ints
    sampling: ResolvedSampling
    tag: bytes = b""
    extras: bytes = b""
    needs_host: bool = False
    stream: bool = False
    reads_cache: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", prompt_array(self.prompt_ids))
        if len(self.extras) % 4:
            raise ValueError(f"extras of {len(self.extras)} bytes must be padded to 4 bytes each")


def prompt_array(prompt_ids: Any) -> Ints:
    """The prompt as a read-only int32 array of its own. Raises ValueError for what is no list of token ids."""
    if isinstance(prompt_ids, (list, tuple)) and any(isinstance(x, (bool, float, str)) for x in prompt_ids):
        raise ValueError("a prompt of token ids must hold integers only; pass text as a string")
    try:
        array = np.asarray(prompt_ids)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"a prompt of token ids must be a flat list of integers: {error}") from None
    if array.ndim == 1 and not array.size:
        raise ValueError("the prompt is empty; it needs at least one token")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"a prompt of token ids must be a flat list of integers, not {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"token ids from {array.min()} to {array.max()} are out of range; ids start at 0")
    array = array.astype(np.int32)
    array.flags.writeable = False
    return array


def prefix_tag(parts: Mapping[str, bytes]) -> bytes:
    """One tag of named parts (salt, extras, weights, layers), each with its lengths: no two sets of parts collide."""
    fields = [field for name, value in sorted(parts.items()) for field in (name.encode(), value)]
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def _refuse_unsupported(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if not _is_one_of(value, neutral):
        raise ValueError(f"{name}={value!r} is not supported yet; leave it out, or pass {neutral[0]!r}")


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is among the neutral ones; False is not 0, and True is not 1."""
    if value is None or isinstance(value, bool):
        return value is None and None in neutral
    is_plain = isinstance(value, (int, float, dict, list, tuple))
    return is_plain and any(value == allowed for allowed in neutral if allowed is not None)


def _check_float(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    rule: str,
) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name}={value!r} must be {rule}")


def _check_int(name: str, value: Any, *, low: int, high: int | None = None, optional: bool = True, rule: str) -> None:
    if value is None and optional:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value!r} must be {rule}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    is_list = isinstance(strings, Sequence) and not isinstance(strings, bytes)
    if not is_list or any(not isinstance(string, str) or not string for string in strings):
        raise ValueError(f"stop={stop!r} must be a string or a list of strings, none of them empty")
    return tuple(strings)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    is_list = isinstance(ids, (Sequence, set, frozenset)) and not isinstance(ids, (str, bytes))
    if not is_list or any(not _is_int(token_id) or not 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
        raise ValueError(f"stop_token_ids={ids!r} must be a list of token ids, from 0 to {MAX_TOKEN_ID}")
    return tuple(int(token_id) for token_id in ids)


def _check_extra_args(extra_args: Any) -> None:
    if not isinstance(extra_args, Mapping) or any(not isinstance(name, str) for name in extra_args):
        raise ValueError(f"extra_args={extra_args!r} must be a mapping from names of extras to values")


def _choose(value: Any, default: Any, neutral: Any) -> Any:
    return next((x for x in (value, default) if x is not None), neutral)
