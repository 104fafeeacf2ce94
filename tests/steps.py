"""Driving the pure model by hand in tests: random models beside transformers', and whole requests step by step."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcllm.config import ModelConfig
from funcllm.group import SINGLE, Group, run_threads
from funcllm.kernels.bundle import FAST
from funcllm.qwen3 import param_specs, qwen3
from funcllm.record import Layers
from funcllm.specs import init_params
from funcllm.state import Admissions, advance, apply_edits, init_state, inputs_of
from funcllm.types import MAX_STOP_IDS, Model, Params, SamplingState, SequenceState, StepOutputs
from funcllm.weights.load import load_params
from tests.tiny import tiny_folder


def random_ids(length: int, vocab_size: int = 199, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@functools.lru_cache(maxsize=1)
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


class Pair:
    """One random model twice: transformers' module, and our config and parameters read from its folder."""

    def __init__(self, architecture: str = "Qwen3ForCausalLM", **overrides: Any) -> None:
        key = repr((architecture, sorted(overrides.items())))
        self.theirs, self.config, self.folder = _made(key, architecture, overrides)

    def params(self, group: Group = SINGLE, layers: Layers = Layers()) -> Params:
        return load_params(self.folder, param_specs(self.config, layers, group), group, progress=False)

    def their_logits(self, token_ids_t: Tensor) -> Tensor:
        with torch.no_grad():
            return self.theirs(token_ids_t[None]).logits[0]

    def their_greedy(self, token_ids_t: Tensor, count: int) -> list[int]:
        ids = token_ids_t[None]
        with torch.no_grad():
            out = self.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, ids.shape[1] :].tolist()


_PAIRS: dict[str, tuple[Any, ModelConfig, Path]] = {}


def _made(key: str, architecture: str, overrides: dict[str, Any]) -> tuple[Any, ModelConfig, Path]:
    if key not in _PAIRS:
        folder = Path(_folders().name) / str(len(_PAIRS))
        theirs = tiny_folder(folder, architecture, **overrides)
        _PAIRS[key] = (theirs, ModelConfig.from_pretrained(folder), folder)
    return _PAIRS[key]


def random_params(config: ModelConfig, layers: Layers = Layers(), group: Group = SINGLE, seed: int = 0) -> Params:
    return init_params(param_specs(config, layers, group), group, seed=seed, std=0.25)


def params_for(config: ModelConfig) -> Callable[[Group, Layers], Params]:
    """The random parameters of each rank, as `generate` wants them."""
    return lambda group, layers: random_params(config, layers, group)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest value; infinite for a NaN or another shape."""
    if ours.shape != theirs.shape or bool(torch.isnan(ours).any()):
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max())


def on_ranks(fn: Callable[[Group], Any], tp: int) -> list[Any]:
    """fn(group) on tp ranks; SINGLE for tp 1."""
    return [fn(SINGLE)] if tp == 1 else run_threads(fn, tp)


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: Sequence[int]
    max_tokens: int = 8
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)


def admissions_of(rows: Sequence[int], requests: Sequence[Request], layers: Layers = Layers()) -> Admissions:
    lengths = [len(request.prompt) for request in requests]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(request, name) for request in requests], dtype=dtype)

    def extra(name: str, shape: tuple[int, ...], dtype: torch.dtype, default: Any) -> Tensor:
        values = [torch.as_tensor(r.extras.get(name, default), dtype=dtype).expand(shape) for r in requests]
        return torch.stack(values)

    i32, f32 = torch.int32, torch.float32
    stops = [[*request.stop_ids, *[-1] * (MAX_STOP_IDS - len(request.stop_ids))] for request in requests]
    return Admissions(
        rows_a=torch.tensor(rows, dtype=i32),
        length_a=torch.tensor(lengths, dtype=i32),
        computed_a=torch.zeros(len(rows), dtype=i32),
        prompt_length_a=torch.tensor(lengths, dtype=i32),
        limit_a=torch.tensor([n + r.max_tokens for n, r in zip(lengths, requests)], dtype=i32),
        sampling=SamplingState(
            temperature_r=column("temperature", f32),
            top_k_r=column("top_k", i32),
            top_p_r=column("top_p", f32),
            min_p_r=column("min_p", f32),
            seed_r=column("seed", torch.int64),
            min_length_r=torch.tensor([n + r.min_tokens for n, r in zip(lengths, requests)], dtype=i32),
            stop_ids_rs=torch.tensor(stops, dtype=i32),
        ),
        token_ids_x=torch.tensor([token for request in requests for token in request.prompt], dtype=i32),
        extras={e.name: extra(e.name, e.shape, e.dtype, e.default) for e in layers.extras},
    )


class Driver:
    """A scheduler of a few lines: every request has its blocks from the start, prompts go in chunks, then decode."""

    def __init__(
        self, model: Model, params: Params, *, block_size: int = 4, capacity: int = 64, num_rows: int = 16
    ) -> None:
        self.model, self.params, self.block_size = model, params, block_size
        self.width = -(-capacity // block_size)
        self.state: SequenceState = init_state(num_rows, capacity, self.width, model.layers.extras)
        dtype = next(leaf.dtype for leaf in torch.utils._pytree.tree_leaves(params) if leaf.is_floating_point())
        self.cache = model.init_cache(1 + num_rows * self.width, block_size, num_rows, "cpu", dtype)

    def admit(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """Rows take these requests; their blocks lie scattered, so that order in the pool means nothing."""
        table = torch.tensor(
            [
                (row, index, 1 + index * (self.state.length_r.shape[0]) + row)
                for row in rows
                for index in range(self.width)
            ]
        )
        apply_edits(self.state, admissions_of(rows, requests, self.model.layers), table.to(torch.int32))

    @torch.no_grad()
    def step(
        self,
        decode: Sequence[int] = (),
        chunks: Sequence[tuple[int, int]] = (),
        *,
        padding: int = 0,
        span: int = 0,
        filtered: bool = False,
        capturing: bool = False,
    ) -> StepOutputs:
        """One step over decode rows and (row, length) chunks; padding: tokens behind the last; span: a larger bound."""
        i32 = torch.int32
        rows = torch.tensor([row for row, _ in chunks], dtype=i32)
        lens = torch.tensor([length for _, length in chunks], dtype=i32)
        inputs = inputs_of(
            self.state,
            torch.tensor(list(decode), dtype=i32),
            rows if chunks else (),
            lens if chunks else (),
            num_tokens=len(decode) + sum(length for _, length in chunks) + (padding if chunks else 0),
            block_size=self.block_size,
            span=max(span, *(length for _, length in chunks)) if chunks else 0,
            filtered=filtered,
            capturing=capturing,
        )
        self.inputs = inputs
        outputs, self.cache = self.model.step(self.params, self.cache, inputs)
        self.state, outputs = advance(self.state, inputs, outputs)
        return outputs

    def run(self, requests: Sequence[Request], *, chunk: int = 5, padding: int = 0) -> list[list[int]]:
        """The tokens that each request samples, all requests in one batch; rows that ended stay in it, dead."""
        rows = list(range(1, len(requests) + 1))
        self.admit(rows, requests)
        filtered = any(r.top_k or r.top_p < 1 or r.min_p or (r.min_tokens and r.stop_ids) for r in requests)
        computed = dict.fromkeys(rows, 0)
        tokens: dict[int, list[int]] = {row: [] for row in rows}
        lengths = {row: len(request.prompt) for row, request in zip(rows, requests)}
        while bool(self.state.alive_r.any()):
            decode = [row for row in rows if computed[row] >= lengths[row]]
            chunks = [(row, min(chunk, lengths[row] - computed[row])) for row in rows if computed[row] < lengths[row]]
            outputs = self.step(decode, chunks, padding=padding, filtered=filtered)
            order = [*decode, *(row for row, _ in chunks)]
            for row, token, count in zip(order, outputs.token_ids_l.tolist(), outputs.count_l.tolist()):
                if count:
                    tokens[row].append(token)
            for row, length in [*((row, 1) for row in decode), *chunks]:
                computed[row] += length
        return [tokens[row] for row in rows]


def generate(
    config: ModelConfig,
    params_of: Callable[[Group, Layers], Params],
    requests: Sequence[Request],
    *,
    tp: int = 1,
    layers: Layers = Layers(),
    kernels: Any = FAST,
    block_size: int = 4,
    chunk: int = 5,
    padding: int = 0,
) -> list[list[int]]:
    """The tokens of requests at a tensor-parallel size; raises AssertionError where ranks disagree."""

    def run(group: Group) -> list[list[int]]:
        driver = Driver(
            qwen3(config, layers, group, kernels),
            params_of(group, layers),
            block_size=block_size,
            capacity=max(len(r.prompt) + r.max_tokens for r in requests) + 1,
            num_rows=len(requests) + 1,
        )
        return driver.run(requests, chunk=chunk, padding=padding)

    results = on_ranks(run, tp)
    assert all(result == results[0] for result in results)
    return results[0]
