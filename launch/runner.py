"""The runtime of one rank: it owns this rank's parameters, cache, state, output ring and captured graphs.

It receives packed plans and applies each in the same way on every rank: one copy of the plan to the device, edits of
the state, then the step. It decides nothing: what varies comes in the plan. `execute` launches and returns a handle;
the step's outputs are read later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm.compile import Graph, compile_unit, num_compiled
from funcllm.config import ModelConfig
from funcllm.group import Group, all_reduce
from funcllm.kernels.bundle import Kernels, fast_kernels, flash_fault, import_flash_ahead, without_flash
from funcllm.kernels.fast import copy_slots
from funcllm.kernels.ops import FLASH, FLASH_TOKENS
from funcllm.launch import memory
from funcllm.launch.buckets import MIN_ROWS, Buckets
from funcllm.launch.graphs import StepGraphs, StepKey, decode_key, key_of
from funcllm.launch.plan import HEADER, Ints, PackedPlan, Plan, admission_column, pack, unpack
from funcllm.launch.ring import Handle, OutputRing, PlanRing, outputs_now
from funcllm.qwen3 import qwen3
from funcllm.record import Layers
from funcllm.specs import init_params, map_specs, nbytes, spec_leaves
from funcllm.state import Admissions, advance, apply_edits, init_state, inputs_of
from funcllm.types import (
    MAX_STOP_IDS,
    KVCache,
    LayerCache,
    Model,
    Params,
    SamplingState,
    SequenceState,
    StepOutputs,
)
from funcllm.weights.load import layer_sources, load_params, refill

log = logging.getLogger("funcllm")

_TINY_BLOCKS = 3
_WARM_ROWS = (1, 6, 24)  # one of each batch class but that of the largest; all the counts here differ
_WARM_MIXED = StepKey(decode_bucket=4, chunk_bucket=8, token_bucket=48, span=32)
_STATE_SHARE = 0.25  # of a device, that the sequences' token ids and block tables may take
_LONG_LOAD = 8 << 30  # bytes of weights in files that take longer to load than flash-attn-4 to import
_PLAN_WORDS = 1 << 18  # of the static plan buffer; a larger plan takes a slower way


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every rank must know to build its runtime; sent to the workers as it is.

    source: a Hugging Face folder, whole tensors by their checkpoint names, or a seed for random weights. kv_blocks: 0
    sizes the cache by memory. compile, graphs, fusion: see `Engine`.
    """

    config: ModelConfig
    source: Path | Mapping[str, Tensor] | int
    dtype: torch.dtype
    layers: Layers = field(default_factory=Layers)
    builder: Callable[..., Model] = qwen3
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: Buckets
    block_size: int
    kv_blocks: int = 0
    gpu_memory_fraction: float = 0.9
    depth: int = 1
    compile: bool = False
    graphs: bool = False
    fusion: bool = True
    progress: bool = False

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class RunnerMethod:
    """A method of the Runner that `Engine` calls on every rank, in place of a function."""

    name: str

    def __call__(self, runner: Runner, *args: Any) -> Any:
        return getattr(runner, self.name)(*args)


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """The mode that everything runs in, whatever the caller's: no gradients, and no inference mode, whose tensors could
    neither be trained on nor be written to later.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class Rank(NamedTuple):
    """What `Engine.call` hands to a function on every rank."""

    params: Params
    cache: KVCache
    state: SequenceState
    model: Model
    group: Group


def build_runtime(group: Group, device: torch.device, options: RunOptions) -> Runner:
    """The factory that `start_ranks` runs on every rank."""
    return Runner(group, device, options)


class Runner:
    """See the module. `num_blocks`, `timings` (seconds) and `notes` tell rank 0 what came of the start.

    flash-attn-4 takes seconds to import. So the start and the first step go without it, and a thread imports it behind
    them. It is put in force, on all ranks alike, before the first step that asks for it, a fact of the step's shape.
    """

    def __init__(self, group: Group, device: torch.device, options: RunOptions) -> None:
        self.group, self.device, self.options = group, device, options
        self.on_gpu = device.type == "cuda"
        self._notes: list[str] = []
        self.timings: dict[str, float] = {}
        self._steps = self._executed = 0
        self._flash: Kernels | None = None  # the kernels with flash-attn-4, until they are put in force or fail
        self._flash_import: threading.Thread | None = None
        self._uncompiled: set[str] = set()  # units that are to be compiled, but once only, with flash-attn-4
        self._graphs = StepGraphs(self._captured_step, self._agree, captured_tokens=options.buckets.captured_tokens)
        with serving():
            with self._timed("context"):  # of a GPU, where nothing has made it yet
                torch.zeros(1, device=device)
            with self._timed("kernels"):
                self.kernels = self._choose_kernels()
                self.model = self._build_model(options.layers)
            with self._timed("load"):
                self.params = self._load()
            with self._timed("allocate"):
                self._allocate()
                self.cache = self._new_cache(_TINY_BLOCKS)
            with self._timed("warm up"):
                peak = self._warm_up()
            with self._timed("size the cache"):
                self.num_blocks = self._size_cache(peak)
                self.cache = self._new_cache(self.num_blocks)
            with self._timed("capture"):
                self._capture(self._largest_keys())

    # --- what rank 0 asks for --------------------------------------------------------------------------------------

    @serving()
    def execute(self, words: Ints) -> Handle:
        """Launches one packed plan; the handle's `read` waits for its outputs."""
        plan = unpack(words)
        key = key_of(plan)
        self._executed += 1
        if self._executed == self.options.depth + 2:  # the first step has been read: nobody waits for a first token
            self._import_flash()
        if _is_for_flash(key):
            self.settle()
        device_words = self._to_device(words)
        self._edit(plan, device_words)
        outputs = None if self._graphs.replay(key) else self._run(key, device_words)
        if outputs is not None and not self.on_gpu:
            return outputs_now(outputs)
        handle = self._ring.collect(plan.decode_bucket + plan.chunk_bucket)
        if outputs is not None and self.options.graphs:
            self._graphs.ran(key, alone=plan.num_decode == 0 and plan.num_chunks == 1)
        return handle

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """fn(rank, *args), between steps."""
        if isinstance(fn, RunnerMethod):
            return fn(self, *args)
        return fn(Rank(self.params, self.cache, self.state, self.model, self.group), *args)

    def close(self) -> None:
        """Frees what this rank holds on the device."""
        self._graphs.clear()
        for name in ("params", "cache", "state", "model", "_ring", "_device_words"):
            self.__dict__.pop(name, None)
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    @serving()
    def update_layers(self, layers: Layers) -> None:
        """Puts another record of functions in force: parameters and cache stay, graphs are captured anew.

        Raises ValueError where the record needs other parameters, caches or extras than the engine has. Where its
        functions raise, the old record stays in force.
        """
        old, model = self.model, self._build_model(layers)
        same_caches = self._cache_key(model) == self._cache_key(old)
        if not _same_specs(model.specs, old.specs) or not same_caches or layers.extras != old.layers.extras:
            raise ValueError(
                "the new Layers need other parameters, caches or extras than the engine was started with; "
                "start a new Engine"
            )
        try:
            self._put_in_force(model)
        except Exception:
            self._put_in_force(old if old.kernels is self.kernels else self._build_model(old.layers))
            raise

    def _put_in_force(self, model: Model) -> None:
        self._graphs.clear()
        self.model = model
        self._new_ring()
        self._warm_up()
        self._capture(self._largest_keys())

    def _cache_key(self, model: Model) -> Any:
        """Structure, shapes and dtypes of a model's cache, with unlike numbers of blocks and rows."""
        options = self.options
        rows = options.max_num_seqs + 1
        cache = model.init_cache(rows + 1, options.block_size, rows, "meta", options.dtype)
        leaves, structure = pytree.tree_flatten(cache)
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    @serving()
    def update_params(self, source: Any, partial: bool = False) -> set[str]:
        """Writes other weights into the parameters in place, see `refill`; captured graphs go on with them."""
        return refill(self.params, self.model.specs, source, self.group, partial=partial)

    @property
    def part_names(self) -> set[str]:
        """The checkpoint names of this rank's parameters."""
        return {part.name for spec in spec_leaves(self.model.specs) for part in spec.parts}

    @property
    def notes(self) -> list[str]:
        """What runs otherwise than asked, and why."""
        return [*self._notes, *self._graphs.notes]

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_compiled(self) -> int:
        return num_compiled() if "torch._dynamo" in sys.modules else 0

    @property
    def prefill(self) -> str:
        """The prefill back end in force, and the one to come."""
        if self._flash is not None:
            return f"{self.kernels.prefill}; {FLASH} from the first step of {FLASH_TOKENS} prompt tokens on"
        return (
            f"{FLASH} for {FLASH_TOKENS} prompt tokens and more"
            if self.kernels.prefill == FLASH
            else self.kernels.prefill
        )

    @serving()
    def settle(self) -> None:
        """Puts flash-attn-4 in force where it is there and every rank can use it; else notes why not.

        Waits for its import. Called on every rank before the same step, it changes results from that step on only: the
        shapes that have run do not ask for it.
        """
        if self._flash is None:
            return
        self._take_flash()
        self._capture([key for key in self._largest_keys() if _is_for_flash(key)])

    # --- start -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.on_gpu:
            torch.cuda.synchronize()
        self.timings[name] = time.perf_counter() - start

    def _choose_kernels(self) -> Kernels:
        """The kernels to start with: without flash-attn-4, also where it is there on all ranks."""
        options = self.options
        kernels = fast_kernels(self.device, options.config.head_dim, options.dtype, options.block_size)
        if not options.fusion:
            kernels = replace(kernels, fused=frozenset(), decode_inputs=None, advance=None)
        is_there = kernels.prefill == FLASH
        if self._agree(is_there):
            self._flash = kernels
        return without_flash(kernels) if is_there else kernels

    def _import_flash(self) -> None:
        if self._flash is not None and self._flash_import is None:
            self._flash_import = import_flash_ahead()

    def _take_flash(self) -> None:
        """Builds the model with flash-attn-4, unless it fails on any rank."""
        kernels, self._flash = self._flash, None
        assert kernels is not None
        if self._flash_import is not None:
            self._flash_import.join()
        options = self.options
        reason = flash_fault(kernels, self.device, options.config.head_dim, options.dtype, options.block_size)
        if not self._agree(not reason):
            self._notes.append(f"prefill: Triton, since flash-attn-4 cannot be used ({reason or 'on another rank'})")
            log.warning(self._notes[-1])
            return
        self.kernels = kernels
        self.model = self._build_model(self.model.layers)

    def _build_model(self, layers: Layers) -> Model:
        """The model with these functions. While flash-attn-4 is to come, units are left as they are and remembered."""
        self._uncompiled = set()

        def transform(unit: Callable[..., Any], name: str) -> Callable[..., Any]:
            if not self.options.compile:
                return unit
            if self._flash is None:
                return compile_unit(unit, name)
            self._uncompiled.add(name)
            return unit

        return self.options.builder(self.options.config, layers, self.group, self.kernels, transform)

    def _load(self) -> Params:
        options, specs = self.options, self.model.specs
        if isinstance(options.source, Path) and nbytes(specs, self.group, options.dtype) >= _LONG_LOAD:
            self._import_flash()
        if isinstance(options.source, int):
            return init_params(specs, self.group, seed=options.source, device=self.device, dtype=options.dtype)
        return load_params(
            options.source,
            specs,
            self.group,
            device=self.device,
            dtype=options.dtype,
            config=options.config,
            sources=layer_sources(options.layers, options.config.num_layers),
            progress=options.progress,
        )

    def _allocate(self) -> None:
        options = self.options
        num_rows = options.max_num_seqs + 1
        extras = self.model.layers.extras
        needed = 4 * num_rows * (options.max_model_len + options.table_width)
        total, _ = memory.device_memory(self.device)
        if needed > _STATE_SHARE * total:
            raise ValueError(
                f"the ids of max_num_seqs={options.max_num_seqs} sequences of max_model_len={options.max_model_len} "
                f"take {memory.gib(needed)} of {memory.gib(total)}; lower one of the two"
            )
        self.state = init_state(num_rows, options.max_model_len, options.table_width, extras, self.device)
        if self.on_gpu:
            self._device_words = torch.zeros(_PLAN_WORDS, dtype=torch.int32, device=self.device)
            self._plans = PlanRing(options.depth + 3, _PLAN_WORDS)
            self._capture_stream = torch.cuda.Stream()
            self._new_ring()

    def _new_ring(self) -> None:
        if self.on_gpu:
            buckets = self.options.buckets
            largest = buckets.decode_bucket(buckets.decode[-1], chunk_tokens=1)
            served = largest + buckets.chunk_bucket(self.options.max_num_seqs)
            max_rows = max(served, _WARM_MIXED.decode_bucket + _WARM_MIXED.chunk_bucket)
            self._ring = OutputRing(self.options.depth + 3, max_rows, self.device)

    def _new_cache(self, num_blocks: int) -> KVCache:
        options = self.options
        return self.model.init_cache(
            num_blocks, options.block_size, options.max_num_seqs + 1, self.device, options.dtype
        )

    def _size_cache(self, peak: int) -> int:
        """The number of blocks that every rank can hold beside the activations of a step, `peak` bytes, and graphs."""
        options = self.options
        graph_bytes = self._dry_capture() if self.on_gpu and options.graphs else 0
        per_block, _ = memory.cache_bytes(
            self.model.init_cache, options.block_size, options.max_num_seqs + 1, options.dtype
        )
        self.cache = ()
        return memory.measure_kv_blocks(
            device=self.device,
            weight_bytes=nbytes(self.model.specs, self.group, options.dtype),
            peak_bytes=peak,
            graph_bytes=graph_bytes,
            bytes_per_block=max(1, per_block),
            fraction=options.gpu_memory_fraction,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            block_size=options.block_size,
            group=self.group,
            kv_blocks=options.kv_blocks or None,
        )

    def _warm_up(self) -> int:
        """`_warm_steps`, with flash-attn-4 in force where something is to be compiled."""
        peak = self._warm_steps()
        if not self._uncompiled:
            return peak
        self._take_flash()
        self.model = self._build_model(self.model.layers)  # compiled now, also where flash-attn-4 failed
        return self._warm_steps()

    def _warm_steps(self) -> int:
        """Compiles and loads what the steps run, on a tiny cache, then runs the largest mixed step, all rows trash; the
        bytes of its activations at their peak.

        The first steps have counts that all differ, so that the compiler keeps them apart.
        """
        options, buckets = self.options, self.options.buckets
        if not (options.compile or self.on_gpu):  # what cannot run shall say so now
            self._trash_step(_WARM_MIXED)
        else:
            for filtered in (False, True):
                self._trash_step(_WARM_MIXED._replace(filtered=filtered))
                for rows in {*(min(rows, buckets.decode[-1]) for rows in _WARM_ROWS), buckets.decode[-1]}:
                    self._trash_step(decode_key(rows, filtered=filtered))
        if not self.on_gpu:
            return 0
        for rows in buckets.decode:  # kernels are chosen by size
            self._trash_step(decode_key(rows, filtered=True))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows = buckets.decode_bucket(min(options.max_num_seqs, options.max_num_batched_tokens), chunk_tokens=1)
        tokens = buckets.largest_tokens(options.max_num_batched_tokens)
        longest = max(tokens - rows, 1)
        self._trash_step(StepKey(rows, MIN_ROWS, tokens, buckets.span(longest, longest), filtered=True))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _trash_step(self, key: StepKey) -> None:
        """One uncaptured step whose rows are all the trash row."""
        plan = Plan(
            step=0,
            decode_rows=np.zeros(0, np.int32),
            decode_bucket=key.decode_bucket,
            chunk_bucket=key.chunk_bucket,
            token_bucket=key.token_bucket,
            span=key.span,
            filtered=key.filtered,
        )
        self._run(key, self._to_device(pack(plan)))
        if self.on_gpu:
            self._ring.skip()

    # --- graphs ----------------------------------------------------------------------------------------------------

    def _capture(self, keys: Iterable[StepKey]) -> None:
        """Captures the largest shapes, whose memory the later ones share; those come behind their first steps.

        A shape that asks for flash-attn-4 is captured when that is in force.
        """
        if self.on_gpu and self.options.graphs:
            for key in keys:
                if self._graphs.wants(key) and not (self._flash is not None and _is_for_flash(key)):
                    self._trash_step(key)
                    self._graphs.add(key)

    def _largest_keys(self) -> list[StepKey]:
        buckets = self.options.buckets
        decode = decode_key(buckets.decode[-1])
        if not buckets.captured_tokens:
            return [decode]
        tokens = buckets.captured_tokens
        rows = buckets.decode_bucket(0, chunk_tokens=tokens)
        return [StepKey(rows, MIN_ROWS, rows + tokens, buckets.span(1, tokens)), decode]

    def _captured_step(self, key: StepKey, pool: Any = None) -> Graph:
        """The graph of a step of this shape, which has run before; it reads its rows from the static plan buffer.

        All share one memory pool. It is left behind once no graph lives in it or a capture in it failed: PyTorch does
        not take it again.
        """
        run = functools.partial(self._run, key, self._device_words)
        if len(self._graphs) == 0:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return Graph(run, self._pool if pool is None else pool, self._capture_stream)
        except Exception:
            torch.cuda.synchronize()
            self._pool = torch.cuda.graph_pool_handle()
            raise

    def _agree(self, ok: bool) -> bool:
        """Whether all ranks say ok."""
        return all_reduce(torch.tensor(float(not ok), device=self.device), self.group).item() == 0

    def _dry_capture(self) -> int:
        """Bytes that the graphs of the largest shapes take, captured on the tiny cache and dropped."""
        before, graphs = torch.cuda.memory_reserved(), []
        pool = torch.cuda.graph_pool_handle()
        for key in self._largest_keys():
            self._trash_step(key)
            with contextlib.suppress(Exception):  # told when it is captured in earnest
                graphs.append(self._captured_step(key, pool))
        taken = torch.cuda.memory_reserved() - before
        graphs.clear()
        torch.cuda.empty_cache()
        return max(0, taken)

    # --- one step --------------------------------------------------------------------------------------------------

    def _to_device(self, words: Ints) -> Tensor:
        """The plan on the device; its header and decode rows always lie in the static buffer that graphs read."""
        if not self.on_gpu:
            return torch.from_numpy(words)
        head = words[:_PLAN_WORDS]
        self._plans.copy_to(self._device_words, head, self._steps)
        self._steps += 1
        if len(words) <= _PLAN_WORDS:
            return self._device_words[: len(words)]
        return torch.from_numpy(words).to(self.device)

    def _edit(self, plan: PackedPlan, words: Tensor) -> None:
        copies = plan.part("copies")
        if len(copies):
            self._copy_blocks(copies, words[plan.copies].view(-1, 3))
        admissions: Admissions | tuple[()] = ()
        if plan.admissions.stop > plan.admissions.start:
            admissions = _admissions(plan, words, self.state, self.model.layers)
        appends: Tensor | tuple[()] = ()
        if plan.appends.stop > plan.appends.start:
            appends = words[plan.appends].view(-1, 3)
        self.state = apply_edits(self.state, admissions, appends)

    def _copy_blocks(self, copies: Ints, copies_n3: Tensor) -> None:
        for cache in self.cache:
            if isinstance(cache, LayerCache):
                copy_slots(cache.k_pskh, cache.v_pskh, copies_n3)
                continue
            for leaf in pytree.tree_leaves(cache):
                for source, destination, count in copies:
                    leaf[destination, :count] = leaf[source, :count]

    def _run(self, key: StepKey, words: Tensor) -> StepOutputs:
        """One step of this shape over the rows in a packed plan on the device."""
        start = HEADER + key.decode_bucket
        rows_b, chunks = words[HEADER:start], words[start:]
        chunk_rows_c: Tensor | tuple[()] = chunks[: key.chunk_bucket] if key.is_mixed else ()
        chunk_lens_c: Tensor | tuple[()] = chunks[key.chunk_bucket : 2 * key.chunk_bucket] if key.is_mixed else ()
        inputs = inputs_of(
            self.state,
            rows_b,
            chunk_rows_c,
            chunk_lens_c,
            num_tokens=key.token_bucket,
            block_size=self.options.block_size,
            span=key.span,
            filtered=key.filtered,
            capturing=bool(self.model.layers.captures),
            decode_inputs=self.kernels.decode_inputs,
        )
        outputs, self.cache = self.model.step(self.params, self.cache, inputs)
        advance_rows = self.kernels.advance
        if self.on_gpu and advance_rows is not None:
            self._ring.store_captured(outputs.captured)
            advance_rows = functools.partial(advance_rows, ring=self._ring.rows)
        self.state, outputs = advance(self.state, inputs, outputs, advance_rows=advance_rows)
        if self.on_gpu and advance_rows is None:
            self._ring.store(outputs)
        return outputs


def _is_for_flash(key: StepKey) -> bool:
    """Whether the prompts of such a step are done by flash-attn-4, where that is in force."""
    return key.is_mixed and key.token_bucket - key.decode_bucket >= FLASH_TOKENS


def _same_specs(first: Any, second: Any) -> bool:
    shapes = [pytree.tree_flatten(map_specs(lambda s: (s.parts, s.stack), specs)) for specs in (first, second)]
    return shapes[0] == shapes[1]


def _admissions(plan: PackedPlan, words: Tensor, state: SequenceState, layers: Layers) -> Admissions:
    """The admissions of a plan as tensors on the device."""
    table_af = words[plan.admissions].view(len(plan.part("admissions")), -1)

    def ints(name: str) -> Tensor:
        return table_af[:, admission_column(name)]

    def floats(name: str) -> Tensor:
        return ints(name).contiguous().view(torch.float32)

    seed, stop = admission_column("seed_low"), admission_column("stop_ids")
    return Admissions(
        rows_a=ints("row"),
        length_a=ints("num_tokens"),
        computed_a=ints("computed"),
        prompt_length_a=ints("prompt_length"),
        limit_a=ints("limit"),
        sampling=SamplingState(
            temperature_r=floats("temperature"),
            top_k_r=ints("top_k"),
            top_p_r=floats("top_p"),
            min_p_r=floats("min_p"),
            seed_r=table_af[:, seed : seed + 2].clone(memory_format=torch.contiguous_format).view(torch.int64)[:, 0],
            min_length_r=ints("min_length"),
            stop_ids_rs=table_af[:, stop : stop + MAX_STOP_IDS],
        ),
        token_ids_x=words[plan.token_ids],
        extras=_extras(words[plan.extras], len(table_af), layers),
    )


def _extras(words: Tensor, count: int, layers: Layers) -> dict[str, Tensor]:
    """The extras of `count` admissions: each request's values in the order of the declarations, padded to words."""
    values, start = {}, 0
    table = words.view(count, -1) if count and words.numel() else words.new_zeros(count, 0)
    for extra in layers.extras:
        size = torch.Size(extra.shape).numel() * extra.dtype.itemsize
        num_words = -(-size // 4)
        raw = table[:, start : start + num_words].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        values[extra.name] = raw[:, :size].contiguous().view(extra.dtype).view(count, *extra.shape)
        start += num_words
    return values
