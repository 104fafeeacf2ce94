"""The engine: a model on all its ranks, a scheduler and a loop, behind one Python object.

Owns the requests of its caller from submission to output. Everything below is functions or has one owner: `ranks` the
processes, `runner` one rank's tensors, `scheduler` rows and blocks, `loop` the steps under way. One thread drives it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm.config import ModelConfig, validate_tp
from funcllm.launch.buckets import make_buckets
from funcllm.launch.errors import EngineError
from funcllm.launch.graphs import host_bound_tokens
from funcllm.launch.loop import Loop
from funcllm.launch.plan import Ints, Plan
from funcllm.launch.progress import GenerateProgress
from funcllm.launch.ranks import Ranks, start_ranks
from funcllm.launch.request import Request, SamplingParams, ignored_defaults, prefix_tag, resolve
from funcllm.launch.ring import Handle, Outputs
from funcllm.launch.runner import Runner, RunnerMethod, RunOptions, build_runtime
from funcllm.launch.scheduler import Event, Scheduler
from funcllm.launch.text import Decode, TextStream, text_of
from funcllm.launch.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, wrap_tokenizer
from funcllm.qwen3 import qwen3
from funcllm.record import Layers
from funcllm.sampling import sample
from funcllm.specs import local_shape, map_specs, named, spec_leaves, whole
from funcllm.types import Component, Extra, Model, PyTree
from funcllm.weights.hub import resolve as resolve_model

log = logging.getLogger("funcllm")

Prompt = str | Sequence[int]

_UPDATE_LAYERS: Callable[..., Any] = RunnerMethod("update_layers")
_UPDATE_PARAMS: Callable[..., Any] = RunnerMethod("update_params")
_MAX_NUM_SEQS = 1 << 16
_UPDATE_BYTES = 256 << 20  # of weights sent to the ranks at a time


class Delta(NamedTuple):
    """What a stream gives: new text and ids, and at the end why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class Output:
    """What became of a prompt. finish_reason: "stop", "length", "abort", or "error" with `error` saying why.

    token_ids holds the stop id that ended it; the text leaves special tokens out. cached_tokens: of the prompt, found
    in the prefix cache. weight_version: in force when it ended. captured: site -> [token, ...], what captured sites saw
    at the token before each generated one; empty for a request that ran while `update_layers` changed the captures. At
    tp > 1 it is what rank 0 saw: its share of heads, of mlp.hidden and of the columns of logits.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    cached_tokens: int = 0
    error: str | None = None
    weight_version: int = 0
    captured: dict[str, Tensor] = field(default_factory=dict)


class Engine:
    """Generates text with a model at any tensor-parallel size. A context manager; close it when done.

    model: a Hugging Face folder, a Hub id, or None for the bundled demo. Or in memory: `config` with `params` (the tree
    of `param_specs(config)`) or with random_weights=True, and `tokenizer` (ours or a transformers one) if text is
    wanted. device: "cpu" or "cuda" (default: cuda where there is one). dtype: default float32 on CPU; on GPU the
    checkpoint's, bfloat16 where that is float32 or unknown. layers: the functions in use. eager: neither compile nor
    fuse. compile, graphs, fusion: single stages (default: all on GPU; on CPU fusion alone). compile: torch.compile for
    what no kernel does, such as replaced functions; graphs=False runs the same kernels uncaptured. kv_blocks: the size
    of the KV pool, 0 or None: by memory. depth: steps launched ahead of the one that is read. Raises ValueError for
    what cannot be served, EngineError when a rank fails.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tp: int = 1,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        layers: Layers = Layers(),
        eager: bool = False,
        compile: bool | None = None,
        graphs: bool = True,
        fusion: bool = True,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        kv_blocks: int | None = None,
        block_size: int | None = None,
        gpu_memory_fraction: float = 0.9,
        depth: int = 1,
        prefix_caching: bool = True,
        seed: int | None = None,
        params: PyTree | None = None,
        config: ModelConfig | None = None,
        tokenizer: Any = None,
        random_weights: bool = False,
        builder: Callable[..., Model] = qwen3,
        progress: bool = False,
        exit_on_death: bool = False,
        debug: bool = False,
    ) -> None:
        started = time.perf_counter()
        self._closed = False
        _check_integers(tp=tp, max_model_len=max_model_len, max_num_seqs=max_num_seqs, kv_blocks=kv_blocks, seed=seed)
        _check_integers(max_num_batched_tokens=max_num_batched_tokens, block_size=block_size, depth=depth)
        _check_layers(layers)
        device = device_named(device)
        on_gpu = device.type == "cuda"
        folder: Path | None = None
        if config is None:
            folder = resolve_model(model)
            config = ModelConfig.from_pretrained(folder)
        elif params is None and not random_weights:
            raise ValueError("config= alone has no weights; give params= too, or random_weights=True, or model=")
        self.config = config
        validate_tp(self.config, tp)
        self.tokenizer = _tokenizer(tokenizer, folder)
        self.layers = layers
        self._single = builder(self.config, layers)
        chosen = _dtype(dtype, self.config, on_gpu)
        configured = time.perf_counter()
        block_size = block_size or _block_size(on_gpu, self.config, chosen)
        looked = time.perf_counter()
        max_model_len = _max_model_len(max_model_len, self.config)
        max_num_batched_tokens = max_num_batched_tokens or (8192 if on_gpu else 1024)
        _check_positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size)
        if max_num_seqs > _MAX_NUM_SEQS:
            raise ValueError(f"max_num_seqs={max_num_seqs} must be at most {_MAX_NUM_SEQS}")
        self.notes: list[str] = []
        if max_num_batched_tokens < max_num_seqs:
            self._note(
                f"max_num_batched_tokens={max_num_batched_tokens} is raised to {max_num_seqs}: each of max_num_seqs "
                "sequences needs a token in every step; lower max_num_seqs for smaller steps"
            )
            max_num_batched_tokens = max_num_seqs
        graphs = graphs and not eager and on_gpu
        captured_tokens = min(host_bound_tokens(self.config, tp), max_num_batched_tokens) if graphs else 0
        self.options = RunOptions(
            config=self.config,
            source=self._source(None if random_weights else folder, params, seed or 0),
            dtype=chosen,
            layers=layers,
            builder=builder,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            buckets=make_buckets(max_num_seqs, captured_tokens=captured_tokens),
            block_size=block_size,
            kv_blocks=kv_blocks or 0,
            gpu_memory_fraction=gpu_memory_fraction,
            depth=depth,
            compile=not eager and (on_gpu if compile is None else compile),
            graphs=graphs,
            fusion=fusion and not eager,
            progress=progress,
        )
        starting = time.perf_counter()
        self._ranks: Ranks = start_ranks(tp, build_runtime, self.options, device=device, exit_on_death=exit_on_death)
        built = time.perf_counter()
        try:
            self._set_up(prefix_caching=prefix_caching, seed=seed, debug=debug)
        except BaseException:
            self.close()
            raise
        ended, timings = time.perf_counter(), self._runner.timings
        self.timings = {
            "configuration": configured - started + starting - looked,
            "look at the device": looked - configured,
            "ranks": built - starting - sum(timings.values()),
            **timings,
            "scheduler": ended - built,
            "start": ended - started,
        }

    def _set_up(self, *, prefix_caching: bool, seed: int | None, debug: bool) -> None:
        """What rank 0 alone has, once all ranks are built."""
        options = self.options
        self.num_blocks, self.block_size = self._runner.num_blocks, options.block_size
        prefix_caching = prefix_caching and self._can_cache_prefixes()
        self._scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            table_width=options.table_width,
            buckets=options.buckets,
            prefix_caching=prefix_caching,
            vocab_size=self.config.vocab_size,
            check=debug,
        )
        if self._scheduler.length_limit < options.max_model_len:
            self.notes.append(f"sequences end at {self._scheduler.length_limit} tokens, where the KV pool is full")
        for name, value in ignored_defaults(_defaults(self.config)).items():
            self._note(f"generation_config's {name}={value} is not supported yet and has no effect")
        self._executor = _Executor(self._ranks, self._scheduler)
        self._keep_changed_extras()
        self._loop = Loop(self._scheduler, self._executor, depth=options.depth)
        self._seed = seed
        self._ids = iter(range(1 << 62))
        self._requests: dict[int, _Progress] = {}
        self._just_ended: list[int] = []
        self._layers_version = self.weight_version = 0

    # --- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Outputs in the order of the prompts. A prompt is a string or a list of token ids.

        sampling: one for all, or one for each; default: the model's own, 16 tokens. A single prompt that cannot be
        served raises ValueError; in a list it fails alone, as an Output with `error`. Raises EngineError when a step
        or a rank fails. After that, and after an interrupt in the middle of a step, the engine takes no more.
        """
        batch, is_single = _batch(prompts)
        params = _sampling_list(sampling, len(batch))
        results: dict[int, Output] = {}
        pending: dict[int, int] = {}
        others: list[int] = []  # requests submitted elsewhere, which the next `step` tells of
        try:
            for index, (prompt, one) in enumerate(zip(batch, params)):
                try:
                    pending[self.submit(prompt, one)] = index
                except ValueError as error:
                    if is_single:
                        raise
                    results[index] = _refused(index, prompt, str(error))
            with GenerateProgress(len(pending), self._scheduler.stats, enabled=progress) as bar:
                while pending:
                    for request_id in self._step():
                        if request_id not in pending:
                            others.append(request_id)
                            continue
                        index = pending.pop(request_id)
                        results[index] = self._take(request_id, index)
                    bar.update(len(pending))
        finally:
            for request_id in pending:
                self.abort(request_id)
                self._forget(request_id)
            self._just_ended[:] = [*(i for i in self._just_ended if i not in pending), *others]
        return [results[index] for index in range(len(batch))]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Yields the text of one prompt as it comes; the pieces joined are the text that `generate` gives.

        The request is submitted at once, so ValueError comes from the call itself. Closing the iterator aborts it.
        Requests submitted elsewhere go on meanwhile.
        """
        request_id = self.submit(prompt, sampling, stream=True)
        deltas = self._deltas(request_id)
        next(deltas)  # into its try block: closing an iterator that was never read ends the request, too
        return deltas

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None, *, stream: bool = False) -> int:
        """Queues a prompt and returns the request's id; `step` moves it on, `outputs` and `abort` take the id.

        Raises ValueError when it can never be served.
        """
        self._check_open()
        params = sampling if sampling is not None else SamplingParams()
        token_ids = self._encode(prompt)
        request_id = next(self._ids)
        detokenize = params.detokenize and self.tokenizer is not None
        if params.stop and not detokenize:
            raise ValueError(f"stop={list(params.stop)} needs a tokenizer; give Engine one, or use stop_token_ids")
        resolved = resolve(params, _defaults(self.config), self._eos_ids(), seed=self._next_seed(params))
        extras = pack_extras(self.layers.extras, params.extra_args)
        request = Request(
            id=request_id,
            prompt_ids=token_ids,
            sampling=resolved,
            tag=self._tag(params, extras),
            extras=b"".join(extras.values()),
            stream=stream or bool(params.stop),
        )
        self._loop.submit(request)
        decode = self._decoder(params) if detokenize else lambda ids: ""
        text = None
        if request.stream:
            text = TextStream(
                decode,
                params.stop or (),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._executor.captured[request_id] = []
        self._requests[request_id] = _Progress(prompt if isinstance(prompt, str) else None, request, decode, text)
        return request_id

    def step(self) -> list[int]:
        """Moves every request on by one step; the ids of those that have ended, for `output`."""
        self._check_open()
        return self._step()

    def output(self, request_id: int, index: int = 0) -> Output:
        """The output of a request that has ended, once. Raises ValueError for any other."""
        progress = self._requests.get(request_id)
        if progress is None:
            raise ValueError(f"there is no request {request_id}; ids come from submit, and an output is given once")
        if progress.finish_reason is None:
            raise ValueError(f"request {request_id} has not ended; call step until it tells of it, or abort it")
        return self._take(request_id, index)

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is, at once. Aborting it again, or an unknown one, does nothing."""
        event = self._loop.abort(request_id)
        if event is not None:
            self._apply(event)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return self._loop.has_work or bool(self._just_ended)

    # --- research --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model of rank 0, as functions."""
        return self._runner.model

    @property
    def specs(self) -> PyTree:
        """The Spec tree of rank 0."""
        return self._runner.model.specs

    @property
    def params(self) -> PyTree:
        """The parameters of rank 0: the tensors in use, not a copy."""
        return self._runner.params

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """fn(rank, *args) on every rank, between steps; the results by rank. rank: `Rank(params, cache, state, model,
        group)`. Steps under way are read first.
        """
        self._check_open()
        self._drain()
        return self._ranks.call(fn, *args)

    def update_layers(self, layers: Layers) -> None:
        """Puts another record of functions in force. Requests go on with it; KV made with the old one is not reused.

        Raises ValueError where the record needs other parameters, caches or extras than the engine was started with;
        the old record stays in force then.
        """
        _check_layers(layers)
        single = self.options.builder(self.config, layers)
        self._check_open()
        self._drain()
        self._ranks.call(_UPDATE_LAYERS, layers)
        if layers.captures != self.layers.captures:
            self._drop_captures()
        self.layers, self._single = layers, single
        self._keep_changed_extras()
        self._layers_version += 1
        self._scheduler.reset_prefix_cache()

    def update_params(
        self,
        source: PyTree | str | Path | Iterable[tuple[str, Tensor]],
        in_flight: Literal["keep", "recompute"] = "keep",
    ) -> int:
        """Puts other weights in force without a new start, and returns their version.

        source: a tree of whole parameters, a folder, a mapping from checkpoint names to whole tensors, or an iterator
        of such pairs. in_flight: what running requests do with the keys and values they have: "keep" goes on with them,
        "recompute" makes them anew.
        Raises ValueError for names and shapes that do not fit; weights written before the fault stay.
        """
        if in_flight not in ("keep", "recompute"):
            raise ValueError(f"in_flight={in_flight!r} must be 'keep' or 'recompute'")
        self._check_open()
        self._drain()
        try:
            if isinstance(source, (str, Path)):
                self._ranks.call(_UPDATE_PARAMS, resolve_model(source))
            else:
                self._send_params(source)
        finally:  # after a fault, too: some weights may be new
            self.weight_version += 1
            self._scheduler.reset_prefix_cache()
        if in_flight == "recompute":
            self._scheduler.preempt_all()
        return self.weight_version

    def describe(self) -> dict[str, Any]:
        """What runs, for a benchmark's record: kernels, stages, buckets, KV pool, fallbacks, seconds of the start.

        timings: the parts of "start", which they add up to. Beside them run, on threads of their own, the CUDA context
        (on the command line, during the imports) and the import of flash-attn-4, which `settle` waits for.
        """
        options, kernels = self.options, self._runner.kernels
        return {
            "tp": self._ranks.tp,
            "device": str(self._ranks.device),
            "dtype": str(options.dtype).removeprefix("torch."),
            "prefill": self._runner.prefill,
            "decode": kernels.decode,
            "fused": sorted(kernels.fused),
            "compile": options.compile,
            "graphs": self._runner.num_graphs,
            "compiled": self._runner.num_compiled,
            "buckets": list(options.buckets.decode),
            "captured_tokens": options.buckets.captured_tokens,
            "block_size": self.block_size,
            "kv_blocks": self.num_blocks,
            "depth": options.depth,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "notes": self.notes + self._runner.notes,
            "timings": {name: round(seconds, 3) for name, seconds in self.timings.items()},
        }

    def settle(self) -> None:
        """Waits for what the start has put off: flash-attn-4, which else is waited for by the first step that needs it.

        Its import takes seconds, on a thread that competes with the steps for Python: settle before steps are timed.
        """
        self._check_open()
        self._ranks.call(RunnerMethod("settle"))

    # --- end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all ranks and frees their memory. May be called more than once."""
        if not self._closed:
            self._closed = True
            ranks = getattr(self, "_ranks", None)
            if ranks is not None:
                ranks.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _runner(self) -> Runner:
        self._check_not_closed()
        return self._ranks.runtime  # type: ignore[return-value]

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; open a new one")

    def _check_open(self) -> None:
        self._check_not_closed()
        loop: Loop | None = getattr(self, "_loop", None)
        if loop is not None and loop.failure is not None:
            raise EngineError(f"a step failed before ({_named(loop.failure)}); open a new engine") from loop.failure

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning(text)

    def _source(self, folder: Path | None, params: PyTree | None, seed: int) -> Path | dict[str, Tensor] | int:
        if params is not None:
            return self._named(params)
        return folder if folder is not None else seed

    def _can_cache_prefixes(self) -> bool:
        records = [self.layers.of(i) for i in range(self.config.num_layers)]
        owners = {fn for record in records for fn in (record.block, record.attention) if isinstance(fn, Component)}
        if any(not fn.paged for fn in owners):
            self._note("the prefix cache is off: a layer's own cache goes by sequence, not by block (paged=False)")
            return False
        return True

    def _encode(self, prompt: Prompt) -> Ints:
        if isinstance(prompt, (np.ndarray, list, tuple)):
            return prompt  # type: ignore[return-value]
        if isinstance(prompt, Tensor):
            return prompt.numpy(force=True)
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}")
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; give Engine one, or pass token ids")
        token_ids = self.tokenizer.encode(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        return np.asarray(token_ids, np.int32)

    def _decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        assert self.tokenizer is not None, "only what has a tokenizer is decoded"
        return self.tokenizer.decoder(params.skip_special_tokens)

    def _eos_ids(self) -> tuple[int, ...]:
        if self.config.eos_token_ids:
            return self.config.eos_token_ids
        return self.tokenizer.eos_ids if self.tokenizer is not None else ()

    def _next_seed(self, params: SamplingParams) -> int | None:
        if self._seed is None or params.seed is not None:
            return None
        self._seed = (self._seed + 1) % (1 << 63)
        return self._seed

    def _tag(self, params: SamplingParams, extras: Mapping[str, bytes]) -> bytes:
        changed = {
            f"extra {extra.name}": extras[extra.name]
            for extra in self.layers.extras
            if extra.affects_kv and extras[extra.name] != _extra_bytes(extra, {})
        }
        salt = {} if params.cache_salt is None else {"salt": params.cache_salt.encode("utf-8", "surrogatepass")}
        versions = {"layers": str(self._layers_version).encode(), "weights": str(self.weight_version).encode()}
        return prefix_tag({**changed, **salt, **versions})

    def _step(self) -> list[int]:
        try:
            events = self._loop.step()
        except EngineError:
            raise
        except Exception as error:  # what failed left nothing that could be told apart
            raise EngineError(f"a step failed ({_named(self._loop.failure or error)}); open a new engine") from error
        self._apply_all(events)
        ended = list(self._just_ended)
        self._just_ended.clear()
        return ended

    def _drain(self) -> None:
        """Reads every step under way; what ends thereby is told by the next `step`."""
        self._apply_all(self._loop.drain())

    def _apply_all(self, events: list[Event]) -> None:
        for event in events:
            self._apply(event)
        failure = self._loop.failure
        if isinstance(failure, EngineError):
            raise failure
        if failure is not None:
            raise EngineError(f"a step failed ({_named(failure)}); open a new engine") from failure

    def _apply(self, event: Event) -> None:
        request_id = cast(int, event.request_id)
        progress = self._requests.get(request_id)
        if progress is None or progress.finish_reason is not None:
            return
        token_ids = event.token_ids.tolist()
        progress.token_ids += token_ids
        progress.cached_tokens = max(progress.cached_tokens, event.cached_tokens)
        reason, text = event.finish_reason, progress.text
        if text is not None:
            progress.pieces.append(text.push(token_ids))
            if text.stopped is not None and reason != "error":
                del progress.token_ids[text.num_tokens :]
                if reason is None:
                    self._scheduler.finish(event.request_id, "stop")
                reason = "stop"
            if reason is not None:
                progress.pieces.append(text.finish())
        if reason is not None:
            progress.finish_reason, progress.error = reason, event.error or None
            progress.weight_version = self.weight_version
            self._just_ended.append(request_id)

    def _take(self, request_id: int, index: int) -> Output:
        progress = self._requests.pop(request_id)
        if request_id in self._just_ended:
            self._just_ended.remove(request_id)
        captured = self._executor.captured.pop(request_id, [])[: len(progress.token_ids)]
        names = captured[0] if captured else {}
        return Output(
            index=index,
            prompt=progress.prompt,
            prompt_token_ids=progress.request.prompt_ids.tolist(),
            text=progress.whole_text(),
            token_ids=progress.token_ids,
            finish_reason=progress.finish_reason or "abort",
            cached_tokens=progress.cached_tokens,
            error=progress.error,
            weight_version=progress.weight_version,
            captured={name: torch.stack([values[name] for values in captured]) for name in names},
        )

    def _keep_changed_extras(self) -> None:
        """Lets a preempted request keep the extras that a swapped sampler has changed; the usual one changes none."""
        may_change = bool(self.layers.extras) and self.layers.sample is not sample
        extras_of = functools.partial(_extras_of_row, self._runner, self.layers.extras)
        self._scheduler.extras_of = extras_of if may_change else None

    def _forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        self._executor.captured.pop(request_id, None)

    def _drop_captures(self) -> None:
        """Forgets what was captured of requests that run, and captures no more of them: the sites are others now."""
        running = self._scheduler.request_ids(np.arange(1, self.options.max_num_seqs + 1, dtype=np.int32))
        started = [request_id for request_id, records in self._executor.captured.items() if records]
        for request_id in {*running, *started}:
            if request_id in self._requests and self._requests[request_id].finish_reason is None:
                self._executor.captured.pop(request_id, None)

    def _deltas(self, request_id: int) -> Iterator[Delta]:
        progress = self._requests[request_id]
        sent_pieces = sent_ids = 0
        try:
            yield Delta("", [], None)
            has_ended = False
            while not has_ended:
                has_ended = progress.finish_reason is not None  # others step the engine, too
                text = "".join(progress.pieces[sent_pieces:])
                token_ids = progress.token_ids[sent_ids:]
                sent_pieces, sent_ids = len(progress.pieces), max(sent_ids, len(progress.token_ids))
                if text or token_ids or has_ended:
                    yield Delta(text, token_ids, progress.finish_reason if has_ended else None)
                if not has_ended and progress.finish_reason is None:
                    self._check_open()
                    self._just_ended += [i for i in self._step() if i != request_id]
            if progress.finish_reason == "error":
                raise EngineError(progress.error or "the request failed")
        finally:
            if not self._closed:
                self.abort(request_id)
            self._just_ended[:] = [i for i in self._just_ended if i != request_id]
            self._forget(request_id)

    def _named(self, params: PyTree) -> dict[str, Tensor]:
        """A tree of whole parameters by checkpoint names."""
        specs = whole(self._single.specs)
        leaves, structure = pytree.tree_flatten(params)
        if structure != pytree.tree_structure(map_specs(lambda spec: 0, specs)):
            raise ValueError("the parameters are no tree of the model's shape; see init_params(param_specs(config))")
        for spec, leaf in zip(spec_leaves(specs), leaves):
            shape = list(local_shape(spec))
            if not isinstance(leaf, Tensor) or list(leaf.shape) != shape:
                given = f"has shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"is {leaf!r}"
                raise ValueError(f"{spec.parts[0].name} {given}; the model needs {shape}")
        return named(params, specs)

    def _send_params(self, source: PyTree | Iterable[tuple[str, Tensor]]) -> None:
        items: Iterable[tuple[str, Tensor]]
        if isinstance(source, Mapping):
            items = source.items()
        else:
            items = source if isinstance(source, (Iterator, list)) else self._named(source).items()
        written: set[str] = set()
        for batch in _batches(map(_checked, items), _UPDATE_BYTES):
            written |= self._ranks.call(_UPDATE_PARAMS, dict(batch), True)[0]
        missing = cast(Runner, self._ranks.runtime).part_names - written
        if missing:
            raise ValueError(
                f"{len(missing)} parameters got no new value, the first is {min(missing)!r}; give the whole model"
            )


def generate(
    model: str | Path | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    tp: int = 1,
    layers: Layers = Layers(),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **sampling: Any,
) -> list[Output]:
    """The outputs of some prompts, in one call: starts an engine, generates, closes it. sampling: `SamplingParams`."""
    params = SamplingParams(**sampling)
    with Engine(model, tp=tp, layers=layers, device=device, dtype=dtype) as engine:
        return engine.generate(prompts, params)


def pack_extras(extras: Sequence[Extra], values: Mapping[str, Any]) -> dict[str, bytes]:
    """The raw bytes of one request's extras by name, in their order, each padded to 4. Raises ValueError for values
    that are not declared or have another shape.
    """
    unknown = sorted(set(values) - {extra.name for extra in extras})
    if unknown:
        known = ", ".join(extra.name for extra in extras) or "none is declared; use Layers().extra(name, ...)"
        raise ValueError(f"extra_args has {unknown[0]!r}, which no function of the engine reads; known: {known}")
    return {extra.name: _extra_bytes(extra, values) for extra in extras}


def _extras_of_row(runner: Runner, extras: Sequence[Extra], row: int) -> bytes:
    values = {name: value[row].cpu() for name, value in runner.state.extras.items()}
    return b"".join(pack_extras(extras, values).values())


def _extra_bytes(extra: Extra, values: Mapping[str, Any]) -> bytes:
    given = values.get(extra.name, extra.default)
    try:
        value = torch.as_tensor(given, dtype=extra.dtype).cpu()
        value = value.expand(extra.shape).contiguous()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"extra {extra.name!r} must have shape {list(extra.shape)} ({error})") from None
    raw = bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
    return raw + bytes(-len(raw) % 4)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(eq=False)
class _Progress:
    """A request as its caller sees it. text: where it is wanted as it comes, else the whole is decoded at the end."""

    prompt: str | None
    request: Request
    decode: Decode
    text: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    weight_version: int = 0

    def whole_text(self) -> str:
        return "".join(self.pieces) if self.text is not None else text_of(self.decode, self.token_ids)


class _Launched(NamedTuple):
    handle: Handle
    plan: Plan
    request_ids: list[Any]


class _Executor:
    """The loop's hands: plans go to all ranks; outputs come from rank 0. Keeps what sites captured, by request."""

    def __init__(self, ranks: Ranks, scheduler: Scheduler) -> None:
        self.captured: dict[Any, list[dict[str, Tensor]]] = {}
        self._ranks, self._scheduler = ranks, scheduler

    def launch(self, words: Ints, plan: Plan, /) -> _Launched:
        request_ids = self._scheduler.request_ids(plan.rows) if self._captures else []
        return _Launched(self._ranks.execute(words), plan, request_ids)

    def read(self, launched: _Launched, /) -> tuple[Ints, Ints, Ints]:
        outputs = self._wait(launched.handle)
        if outputs.captured:
            self._keep(launched, outputs)
        return outputs.token_ids, outputs.counts, outputs.alive

    @property
    def _captures(self) -> bool:
        return bool(self._ranks.runtime.model.layers.captures)  # type: ignore[attr-defined]

    def _wait(self, handle: Handle) -> Outputs:
        if self._ranks.tp > 1:
            while not handle.ready():
                self._ranks.check()
        return handle.read()

    def _keep(self, launched: _Launched, outputs: Outputs) -> None:
        for request_id, place in zip(launched.request_ids, launched.plan.output_index.tolist()):
            records = self.captured.get(request_id)
            if records is not None and outputs.counts[place]:
                values = {name: value[place].clone() for name, value in outputs.captured.items()}
                records.append(values)


def device_named(name: str | torch.device | None) -> torch.device:
    """The device of a name, by default a GPU where there is one. Raises ValueError for what is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(name)!r} must be cpu or cuda, or cuda:N for one GPU")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= visible:
        raise ValueError(
            f"device={str(name)!r}, and torch sees {visible} GPUs; use cpu or another number, or see funclaunch doctor"
        )
    return device


def _dtype(dtype: str | torch.dtype | None, config: ModelConfig, on_gpu: bool) -> torch.dtype:
    if dtype is not None and dtype != "auto":
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        chosen = getattr(torch, short.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
        if chosen not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype={dtype!r} must be auto, float32, bfloat16 or float16")
        return chosen
    if not on_gpu:
        return torch.float32
    return torch.bfloat16 if config.dtype in (None, torch.float32) else config.dtype


def _block_size(on_gpu: bool, config: ModelConfig, dtype: torch.dtype) -> int:
    if not on_gpu:
        return 16
    from funcllm.kernels.bundle import has_flash

    device = torch.device("cuda", torch.cuda.current_device())
    return 128 if config.head_dim == 128 and has_flash(device, config.head_dim, dtype) else 32


def _max_model_len(wanted: int | None, config: ModelConfig) -> int:
    if wanted is None:
        return config.max_position_embeddings
    if not 2 <= wanted <= config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={wanted} must be from 2 to the model's max_position_embeddings, "
            f"{config.max_position_embeddings}"
        )
    return wanted


def _check_integers(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
            raise ValueError(f"{name}={value!r} must be an integer")


def _check_layers(layers: Any) -> None:
    if not isinstance(layers, Layers):
        raise ValueError(f"layers={layers!r} must be a record of functions, such as Layers(mlp=my_mlp)")


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def _tokenizer(given: Any, folder: Path | None) -> Tokenizer | None:
    if given is not None:
        return given if isinstance(given, Tokenizer) else wrap_tokenizer(given)
    return load_tokenizer(folder) if folder is not None and has_tokenizer(folder) else None


def _defaults(config: ModelConfig) -> dict[str, Any]:
    """The sampling that generation_config recommends; greedy where it says do_sample=false."""
    defaults = {name: value for name, value in asdict(config.generation).items() if value is not None}
    if defaults.pop("do_sample", None) is False:
        defaults["temperature"] = 0.0
    return defaults


def _batch(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Tensor):
        prompts = prompts.numpy(force=True)
    is_scalar = isinstance(prompts, np.ndarray) and not prompts.ndim
    if is_scalar or not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        raise ValueError(
            f"prompts must be a string, a list of token ids or a list of such, not {type(prompts).__name__}"
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items], True
    return items, False


def _sampling_list(sampling: Any, count: int) -> list[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    params = list(sampling) if isinstance(sampling, Sequence) else [sampling]
    wrong = [one for one in params if one is not None and not isinstance(one, SamplingParams)]
    if wrong:
        raise ValueError(f"sampling must be SamplingParams or a list of them, not {type(wrong[0]).__name__}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each")
    return params


def _refused(index: int, prompt: Prompt, error: str) -> Output:
    is_list = isinstance(prompt, (list, tuple, np.ndarray))
    token_ids = [int(x) for x in prompt if isinstance(x, (int, np.integer))] if is_list else []
    return Output(
        index=index,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=token_ids,
        text="",
        token_ids=[],
        finish_reason="error",
        error=error,
    )


def _checked(item: Any) -> tuple[str, Tensor]:
    is_pair = isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)
    if not is_pair or not isinstance(item[1], Tensor):
        what = f"{item[0]!r} with a {type(item[1]).__name__}" if is_pair else f"a {type(item).__name__}"
        raise ValueError(f"new weights are pairs of a checkpoint's name and a tensor, and one is {what}")
    return item[0], item[1]


def _batches(items: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    batch: list[tuple[str, Tensor]] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += item[1].nbytes
        if filled >= size:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


__all__ = ["Delta", "Engine", "Output", "generate", "pack_extras"]
