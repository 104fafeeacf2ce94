"""The only torch.compile and the only CUDA graph.

A compilation unit is the embedding, one decoder layer, or head and sampler; weights, cache and inputs are its
arguments, so that every layer with the same functions runs one compiled function. Token and row counts are dynamic,
everything else is static: a unit has one variant for each batch class (pure decode or mixed, filtered or not). A step
is captured whole, one graph a shape. A unit whose work is all done by kernels is not compiled: nothing is left to fuse.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcllm.types import Angles, LayerCache, StepInputs, Stream

OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # the norm reads the rounded sum, compiled or not
    "triton.cudagraphs": False,
    "size_asserts": False,
}


def compile_unit(unit: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The unit, compiled at its first call of each batch class.

    In that call, counts that differ in meaning (tokens, decode rows, chunk rows, span) must differ in value, or the
    compiler takes them for one. A step of a single token is a class of its own, as the compiler takes 1 for a constant.
    Each unit gets a code object of its own: functions that share one share its compiled variants, and on torch 2.11 run
    each other's.
    """

    def call(*args: Any) -> Any:
        return unit(*args)

    own = types.FunctionType(
        call.__code__.replace(co_name=f"{name}_unit"), call.__globals__, f"{name}_unit", None, call.__closure__
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=False, options=dict(OPTIONS))
    seen: set[tuple[Any, ...]] = set()

    def run(*args: Any) -> Any:
        batch_class = _batch_class(args)
        if batch_class not in seen:
            seen.add(batch_class)
            for tensor in _counted_tensors(args):
                if tensor.shape[0] > 1:
                    torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(*args)

    return run


class Graph:
    """A captured call without arguments and results: it reads and writes tensors that outlive it.

    `run` must have run before, uncaptured and with the same shapes: what is compiled, loaded or allocated at a first
    call cannot be captured. Unlike torch.cuda.graph, a capture here neither collects garbage nor empties the
    allocator's cache, which would cost more than the capture itself.
    """

    def __init__(self, run: Callable[[], Any], pool: Any, stream: torch.cuda.Stream) -> None:
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), _no_collection():
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(Exception):  # the capture is broken, and says so once more
                    self.graph.capture_end()
                raise
            self.graph.capture_end()

    def replay(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected in here: what it frees might not be freed during a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def num_compiled() -> int:
    """How many graphs have been compiled in this process; it must not grow after the warm-up."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def _batch_class(args: tuple[Any, ...]) -> tuple[Any, ...]:
    inputs = next(arg for arg in args if isinstance(arg, StepInputs))
    stream = next((arg for arg in args if isinstance(arg, Stream)), None)
    return (
        inputs.token_ids_t.shape[0] == 1,
        bool(inputs.decode),
        bool(inputs.chunks),
        bool(inputs.sampling and inputs.sampling.filters),
        stream is not None and isinstance(stream.update_td, Tensor),
    )


def _counted_tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors whose axis 0 is a count of tokens, rows or blocks."""
    tensors: list[Any] = []
    for arg in args:
        if isinstance(arg, (Stream, Angles, LayerCache)):
            tensors += arg
        elif isinstance(arg, StepInputs):
            plain = arg._replace(decode=(), chunks=(), sampling=(), extras={})
            tensors += [*plain, *arg.decode, *arg.chunks]
            if arg.sampling:
                tensors += [*arg.sampling[:3], *arg.sampling.filters, arg.sampling.noise_keys_l2]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]
