"""Which shapes of step have a CUDA graph, and when one gets its own.

A shape is captured behind a step of that shape that ran uncaptured: its kernels are loaded by then, and the step's
outputs do not wait for the capture. What decides comes in the plan, so every rank captures the same shapes at the same
steps. Decode shapes are captured at their first step. Mixed shapes are many: one is captured at its second step, or at
its first where it is one prompt alone, whose latency counts and for which nobody waits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from funcllm.config import ModelConfig
from funcllm.launch.plan import PackedPlan

log = logging.getLogger("funcllm")

HOST_BOUND_FLOPS = 7e11  # of a layer: with less, a GPU computes it sooner than the host launches it, in 1.2 ms
MAX_MIXED = 128  # graphs of mixed steps that are kept; the one unused for longest goes first
_MAX_SEEN = 4096  # shapes whose first step is remembered


class StepKey(NamedTuple):
    """Every number of a plan that is baked into a step's launches."""

    decode_bucket: int
    chunk_bucket: int = 0
    token_bucket: int = 0
    span: int = 0
    filtered: bool = False

    @property
    def is_mixed(self) -> bool:
        return self.chunk_bucket > 0

    @property
    def chunk_tokens(self) -> int:
        """Of prompts, with padding."""
        return self.token_bucket - self.decode_bucket


def decode_key(rows: int, *, filtered: bool = False) -> StepKey:
    """The shape of a step of so many decode rows."""
    return StepKey(rows, token_bucket=rows, filtered=filtered)


def host_bound_tokens(config: ModelConfig, tp: int) -> int:
    """Up to how many tokens of prompts a step is worth capturing: beyond, the GPU is busy longer than the host."""
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    elements = attention + 3 * config.hidden_size * config.intermediate_size
    return int(HOST_BOUND_FLOPS * tp / (2 * elements))


def key_of(plan: PackedPlan) -> StepKey:
    """The shape of a plan's step."""
    return StepKey(plan.decode_bucket, plan.chunk_bucket, plan.token_bucket, plan.span, plan.filtered)


class Replayable(Protocol):
    def replay(self) -> None: ...


class StepGraphs:
    """The graphs of one rank by shape.

    capture(key): captures the step; raises where that fails. agree(ok): whether all ranks say ok. captured_tokens: up
    to how many tokens of prompts a mixed step is captured. `notes` tell why shapes are not captured any more.
    """

    def __init__(
        self, capture: Callable[[StepKey], Replayable], agree: Callable[[bool], bool], *, captured_tokens: int
    ) -> None:
        self._capture, self._agree = capture, agree
        self._captured_tokens = captured_tokens
        self._mixed_limit = captured_tokens  # 0 once such a capture failed
        self._decode: dict[StepKey, Replayable] = {}
        self._mixed: OrderedDict[StepKey, Replayable] = OrderedDict()
        self._seen: OrderedDict[StepKey, None] = OrderedDict()
        self._is_on = True
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self._decode) + len(self._mixed)

    def replay(self, key: StepKey) -> bool:
        """Launches the graph of this shape; False where it has none."""
        graph = (self._mixed if key.is_mixed else self._decode).get(key)
        if graph is None:
            return False
        if key.is_mixed:
            self._mixed.move_to_end(key)
        graph.replay()
        return True

    def ran(self, key: StepKey, *, alone: bool) -> None:
        """Captures the shape of the uncaptured step just launched, if it is due. alone: it was one prompt alone."""
        if self.wants(key) and (not key.is_mixed or alone or self._has_been_seen(key)):
            self.add(key)

    def wants(self, key: StepKey) -> bool:
        """Whether this shape is one that gets a graph."""
        return self._is_on and (not key.is_mixed or key.chunk_tokens <= self._mixed_limit)

    def add(self, key: StepKey) -> None:
        """Captures a shape that has run; where that fails on any rank, every rank goes on without such graphs."""
        reason, graph = "another rank failed", None
        try:
            graph = self._capture(key)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        agreed = self._agree(graph is not None)
        if graph is None or not agreed:
            self._give_up(key, reason)
            return
        (self._mixed if key.is_mixed else self._decode)[key] = graph
        if len(self._mixed) > MAX_MIXED:
            self._mixed.popitem(last=False)

    def clear(self) -> None:
        """Drops all graphs and what is known of failures: the steps are to be captured anew."""
        self._is_on, self._mixed_limit = True, self._captured_tokens
        self._decode.clear()
        self._mixed.clear()
        self._seen.clear()

    def _has_been_seen(self, key: StepKey) -> bool:
        seen = key in self._seen
        self._seen[key] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return seen

    def _give_up(self, key: StepKey, reason: str) -> None:
        if key.is_mixed:
            self._mixed_limit = 0
            self._mixed.clear()
            what = f"no CUDA graphs of steps with prompts: {key.token_bucket} tokens failed to capture"
        else:
            self.clear()
            self._is_on = False
            what = f"no CUDA graphs, steps run uncaptured: bucket {key.decode_bucket} failed to capture"
        self.notes.append(f"{what} ({reason})")
        log.warning(self.notes[-1])
