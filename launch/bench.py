"""`funclaunch bench`: the speed workloads, each figure beside the floor that the machine sets.

A workload is plain data; its floor is computed from the bytes and FLOPs that it cannot do without, at the bandwidth and
the peak of this machine (measured by a copy and a matmul, or given). Each job runs twice in one process with other
seeds, so that no prompt is in the prefix cache: both figures are printed, the second counts.
"""

from __future__ import annotations

import json
import math
import platform
import random
import re
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import funcllm
from funcllm.config import ModelConfig, qwen3_config
from funcllm.group import Group
from funcllm.launch.inspect_model import device_named, kv_bytes_per_token
from funcllm.launch.options import build_layers
from funcllm.launch.request import SamplingParams
from funcllm.qwen3 import qwen3
from funcllm.record import Layers
from funcllm.specs import local_shape, nbytes, spec_leaves
from funcllm.weights.hub import resolve

MAX_ID = 10_000  # of the random prompts
_JOB = re.compile(r"(dec|pre|long|steady)([1-9]\d*)|nano|b1|start|host")
_PACKAGES = ("torch", "triton", "flash-attn-4", "transformers", "numpy")


# --- workloads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`count` random requests with lengths in these inclusive ranges, sampled at this temperature.

    steps > 0: the figure is milliseconds a step, the time of the requests minus that of the same number of prompts with
    one output token, divided by steps. steps 0: the whole time, in milliseconds, or in seconds where `in_seconds`.
    is_steady: `count` sequences at any time, evenly spread over their lives; one that ends makes room for a new prompt.
    """

    name: str
    count: int = 1
    prompt_range: tuple[int, int]
    output_range: tuple[int, int]
    temperature: float = 0.0
    steps: int = 0
    in_seconds: bool = False
    is_steady: bool = False

    @property
    def unit(self) -> str:
        return "s" if self.in_seconds else "ms"

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return self.prompt_range[1] + self.output_range[1]


def parse_jobs(names: Iterable[str]) -> list[str]:
    """The names of jobs, checked and once each."""
    jobs = []
    for name in (name.strip() for name in names):
        if not _JOB.fullmatch(name):
            known = "nano, b1, decN, preN, longN, steadyN, start or host"
            raise ValueError(f"there is no job {name!r}; use {known}, such as dec64")
        if name not in jobs:
            jobs.append(name)
    return jobs


def workload(name: str) -> Workload:
    """The workload of a job that generates: nano, b1, decN, preN, longN or steadyN."""
    kind, number = re.fullmatch(r"([a-z]+)(\d*)", name).groups()  # type: ignore[union-attr]
    n = int(number or 0)
    if kind == "nano":
        lengths = (100, 1024)
        return Workload(
            name=name, count=256, prompt_range=lengths, output_range=lengths, temperature=0.6, in_seconds=True
        )
    if kind == "b":
        return Workload(name=name, prompt_range=(128, 128), output_range=(513, 513), steps=512)
    if kind == "dec":
        return Workload(
            name=name, count=n, prompt_range=(512, 512), output_range=(257, 257), temperature=0.6, steps=256
        )
    if kind == "steady":
        return Workload(
            name=name, count=n, prompt_range=(512, 512), output_range=(256, 256), temperature=0.6, is_steady=True
        )
    if kind == "pre":
        return Workload(name=name, prompt_range=(n, n), output_range=(1, 1))
    return Workload(name=name, prompt_range=(n, n), output_range=(129, 129), steps=128)


class Requests(NamedTuple):
    prompts: list[list[int]]
    outputs: list[int]  # how many tokens each shall have


def requests(
    count: int, prompt_range: tuple[int, int], output_range: tuple[int, int], seed: int, max_id: int = MAX_ID
) -> Requests:
    """Random requests: ids 0 to max_id, lengths uniform in inclusive ranges; first all prompts, then all outputs."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, max_id) for _ in range(rng.randint(*prompt_range))] for _ in range(count)]
    return Requests(prompts, [rng.randint(*output_range) for _ in range(count)])


# --- floors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a token costs on one rank, at the least."""

    weight_bytes: int  # read by every step: all but an embedding that is not the head, too
    kv_bytes: int  # of one token, over all layers
    linear_flops: int  # of one token through the layers
    head_flops: int  # of one row through the head
    pair_flops: int  # of one query with one key, over all layers


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine can do: bytes a second, FLOPs a second, and where the figures come from."""

    bandwidth: float
    flops: float
    source: str

    def seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bandwidth, flops / self.flops)


def costs_of(config: ModelConfig, layers: Layers, tp: int, dtype: torch.dtype) -> Costs:
    """The costs of rank 0. Counts the matrices of the specs in use, and the default attention."""
    group = Group(0, tp)
    model = qwen3(config, layers, group)
    specs = model.specs
    embed_bytes = nbytes(specs.embed_tokens, group, dtype) if specs.lm_head != () else 0
    head = specs.lm_head if specs.lm_head != () else specs.embed_tokens
    return Costs(
        weight_bytes=nbytes(specs, group, dtype) - embed_bytes,
        kv_bytes=kv_bytes_per_token(model, dtype),
        linear_flops=2 * _matrix_elements(specs.layers, group),
        head_flops=2 * _matrix_elements(head, group),
        pair_flops=4 * config.num_heads // tp * config.head_dim * config.num_layers,
    )


def prefill_floor(prompt_lens: Sequence[int], costs: Costs, limits: Limits) -> float:
    """Seconds to the first token of every prompt: weights read once, causal attention, one row each to the head."""
    tokens, pairs = sum(prompt_lens), sum(n * (n + 1) // 2 for n in prompt_lens)
    flops = costs.linear_flops * tokens + costs.pair_flops * pairs + costs.head_flops * len(prompt_lens)
    return limits.seconds(costs.weight_bytes + costs.kv_bytes * tokens, flops)


def decode_floor(prompt_lens: Sequence[int], steps: Sequence[int], costs: Costs, limits: Limits) -> float:
    """Seconds for so many decode steps of each sequence, all at once: the weights once a step, each key once."""
    pairs = sum(length * n + n * (n + 1) // 2 for length, n in zip(prompt_lens, steps))
    tokens = sum(steps)
    flops = (costs.linear_flops + costs.head_flops) * tokens + costs.pair_flops * pairs
    return limits.seconds(costs.weight_bytes * max(steps) + costs.kv_bytes * pairs, flops)


def floor_of(work: Workload, drawn: Requests, costs: Costs, limits: Limits) -> float:
    """The floor of a workload, in its unit."""
    lens = [len(prompt) for prompt in drawn.prompts]
    if work.is_steady:  # of a step: every sequence decodes, and its share of the prompts is computed
        steps = work.output_range[1]
        prompt_flops = prefill_floor(lens, replace(costs, weight_bytes=0, kv_bytes=0), limits)
        return 1e3 * (decode_floor(lens, [steps] * len(lens), costs, limits) + prompt_flops) / steps
    if work.steps:
        return 1e3 * decode_floor(lens, [work.steps] * len(lens), costs, limits) / work.steps
    seconds = prefill_floor(lens, costs, limits)
    if max(drawn.outputs) > 1:
        seconds += decode_floor(lens, [n - 1 for n in drawn.outputs], costs, limits)
    return seconds if work.in_seconds else 1e3 * seconds


def measure_limits(
    device: torch.device, dtype: torch.dtype, *, bandwidth: float | None = None, flops: float | None = None
) -> Limits:
    """The machine's limits: measured, but for those given (TB/s, TFLOP/s). The copy counts what it reads and writes."""
    on_gpu = device.type == "cuda"
    sources = []
    if bandwidth is None:
        size = (1 << 30) if on_gpu else (1 << 26)
        source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        target = torch.empty_like(source)
        bandwidth = 2 * size / _seconds(lambda: target.copy_(source), device) / 1e12
        sources.append("bandwidth by a copy")
        del source, target
    if flops is None:
        size = 8192 if on_gpu else 768
        a = torch.randn(size, size, device=device, dtype=dtype)
        b = torch.randn(size, size, device=device, dtype=dtype)
        flops = 2 * size**3 / _seconds(lambda: a @ b, device) / 1e12
        sources.append("FLOPs by a matmul")
        del a, b
    if on_gpu:
        torch.cuda.empty_cache()
    measured = " and ".join(sources)
    return Limits(
        bandwidth=bandwidth * 1e12, flops=flops * 1e12, source=f"measured: {measured}" if sources else "given"
    )


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Seconds of one run, warm: the best of three averages."""
    on_gpu = device.type == "cuda"
    for _ in range(3):
        run()
    best = math.inf
    for _ in range(3):
        if on_gpu:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        if on_gpu:
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def _matrix_elements(specs: Any, group: Group) -> int:
    shapes = [local_shape(spec, group) for spec in spec_leaves(specs)]
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the command line asks for. engine: keywords of Engine; layer_texts: its `--layer` options as written."""

    jobs: tuple[str, ...]
    model: str | None = None
    size: str | None = None
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    layer_texts: tuple[str, ...] = ()
    bandwidth: float | None = None
    flops: float | None = None
    json_file: str | None = None
    profile: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table. floor None: no physical limit is known. details: whatever else a job tells."""

    job: str
    unit: str
    first: float
    second: float
    floor: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """How much of the limit is reached: 1 is the floor itself."""
        return None if self.floor is None else self.floor / self.second


def run_bench(options: BenchOptions) -> list[Result]:
    """Runs the jobs, prints figures and surroundings to stdout, and writes them where asked."""
    jobs = parse_jobs(options.jobs)
    config = qwen3_config(options.size) if options.size else ModelConfig.from_pretrained(resolve(options.model))
    works = [workload(name) for name in jobs if name not in ("start", "host")]
    for work in works:
        _check_fits(work, config, options.engine.get("max_model_len"))
    _check_writable(options)
    results: dict[str, list[Result]] = {}
    if "start" in jobs:
        results["start"] = [run_start(options)]
    if "host" in jobs:
        results["host"] = run_host()
    surroundings = _versions()
    if works or options.profile:
        surroundings |= _run_works(options, config, works, results)
    ordered = [result for name in jobs for result in results[name]]
    _report(options, surroundings, ordered)
    return ordered


def _run_works(
    options: BenchOptions, config: ModelConfig, works: list[Workload], results: dict[str, list[Result]]
) -> dict[str, Any]:
    """Runs what needs an engine; what there is to say about the engine."""
    from funcllm.launch.engine import Engine

    device = device_named(options.engine.get("device"))
    limits = measure_limits(device, _dtype_of(options, device), bandwidth=options.bandwidth, flops=options.flops)
    with Engine(**_engine_arguments(options, config, works)) as engine:
        engine.settle()
        costs = costs_of(config, engine.layers, options.engine.get("tp", 1), engine.options.dtype)
        for work in works:
            results[work.name] = [run_work(engine, work, costs, limits, options.seed)]
            print(result_table(results[work.name]).splitlines()[-1], file=sys.stderr, flush=True)
        if options.profile:
            _profile(engine, works, costs, limits, Path(options.profile))
        described = engine.describe()
    return {
        **described,
        "model": options.size or str(resolve(options.model)),
        "limits": f"{limits.bandwidth / 1e12:.3g} TB/s, {limits.flops / 1e12:.4g} TFLOP/s ({limits.source})",
    }


def run_work(engine: Any, work: Workload, costs: Costs, limits: Limits, seed: int = 0) -> Result:
    """One job on an open engine, twice with other seeds."""
    if work.is_steady:
        return run_steady(engine, work, costs, limits, seed)
    max_id = min(MAX_ID, engine.config.vocab_size - 1)
    figures, drawn, seconds = [], Requests([], []), 0.0
    for run in range(2):
        drawn = requests(work.count, work.prompt_range, work.output_range, first_seed(work, seed) + 2 * run, max_id)
        seconds = time_requests(engine, drawn, work.temperature)
        if work.steps:
            short = requests(work.count, work.prompt_range, (1, 1), first_seed(work, seed) + 2 * run + 1, max_id)
            figures.append(1e3 * (seconds - time_requests(engine, short, work.temperature)) / work.steps)
        else:
            figures.append(seconds if work.in_seconds else 1e3 * seconds)
    details = {"tokens_per_second": round(sum(drawn.outputs) / seconds, 1)} if work.in_seconds else {}
    return Result(
        job=work.name,
        unit=work.unit,
        first=figures[0],
        second=figures[1],
        floor=floor_of(work, drawn, costs, limits),
        details=details,
    )


def first_seed(work: Workload, seed: int) -> int:
    """The first of the four seeds of a job; other jobs of an engine have others, so that none finds another's prompts
    in the prefix cache. The job nano takes its seeds from 0 on, as it does in the benchmarks that share it.
    """
    return 4 * seed + (0 if work.name == "nano" else zlib.crc32(work.name.encode()) << 8)


def run_steady(engine: Any, work: Workload, costs: Costs, limits: Limits, seed: int = 0) -> Result:
    """Milliseconds a token of a sequence under steady arrivals, twice, and the longest that one waited for a token."""
    max_id = min(MAX_ID, engine.config.vocab_size - 1)
    figures, gaps, drawn = [], [0.0], Requests([], [])
    for run in range(2):
        drawn = requests(4 * work.count, work.prompt_range, work.output_range, first_seed(work, seed) + run, max_id)
        gaps = steady_gaps(engine, drawn, work.count, work.temperature)
        figures.append(1e3 * sum(gaps) / (2 * work.output_range[1]))
    tokens = 2 * work.count * work.output_range[1]
    floor = floor_of(work, Requests(drawn.prompts[: work.count], []), costs, limits)
    details = {"tokens_per_second": round(tokens / sum(gaps), 1), "longest_gap_ms": round(1e3 * max(gaps), 3)}
    return Result(job=work.name, unit="ms", first=figures[0], second=figures[1], floor=floor, details=details)


def steady_gaps(engine: Any, drawn: Requests, count: int, temperature: float) -> list[float]:
    """Seconds between the ends of steps while `count` sequences run: from the end of request number `count` to that of
    number 3 `count`. The first ones have shorter outputs, so that requests end, and prompts come, at even distances.
    """
    waiting = deque(zip(drawn.prompts, drawn.outputs))
    running: set[int] = set()

    def submit(share: float = 1.0) -> None:
        prompt, n = waiting.popleft()
        running.add(engine.submit(prompt, _fixed_length(max(1, int(n * share)), temperature)))

    for i in range(count):
        submit((i + 1) / count)
    ended, gaps, last = 0, list[float](), 0.0
    while ended < 3 * count:
        finished = engine.step()
        now = time.perf_counter()
        if ended >= count:
            gaps.append(now - last)
        last = now
        for request_id in finished:
            output = engine.output(request_id)
            if output.error:
                raise RuntimeError(f"a request failed: {output.error}")
            running.discard(request_id)
            ended += 1
            if waiting:
                submit()
    for request_id in running:
        engine.abort(request_id)
        engine.output(request_id)
    return gaps


def _fixed_length(max_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


def time_requests(engine: Any, drawn: Requests, temperature: float) -> float:
    """Seconds until every token of the requests is read. EOS is ignored and nothing is decoded to text."""
    sampling = [_fixed_length(n, temperature) for n in drawn.outputs]
    started = time.perf_counter()
    outputs = engine.generate(drawn.prompts, sampling)
    seconds = time.perf_counter() - started
    for output, wanted in zip(outputs, drawn.outputs):
        if len(output.token_ids) != wanted:
            raise RuntimeError(
                f"a request gave {len(output.token_ids)} of {wanted} tokens: {output.error or 'cut short'}"
            )
    return seconds


def run_host(steps: int = 200) -> list[Result]:
    """The host's work on a decode step, over a null model."""
    from funcllm.launch.null import measure_host

    results = []
    for rows in (1, 256):
        first, second = (measure_host(rows, steps) for _ in range(2))
        details = {"plan": second.plan, "pack": second.pack, "commit": second.commit}
        results.append(Result(job=f"host{rows}", unit="ms", first=first.total, second=second.total, details=details))
    return results


# --- start -----------------------------------------------------------------------------------------------------------


def run_start(options: BenchOptions) -> Result:
    """Seconds from starting a process to its first token, twice: the second finds caches filled.

    The details are those of the second; those in seconds add up to its figure.
    """
    payload = {
        "model": options.model,
        "size": options.size,
        "seed": options.seed,
        "layer_texts": options.layer_texts,
        "engine": {name: value for name, value in options.engine.items() if name != "layers"},
    }
    figures: list[float] = []
    details: dict[str, Any] = {}
    device = options.engine.get("device")
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-m", "funcllm.launch.early", "funcllm.launch.bench:start_main", device or ""],
            input=json.dumps({**payload, "started": time.time()}),
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
            raise RuntimeError(f"the job start failed in its process: {lines[-1]}")
        details = json.loads(child.stdout.splitlines()[-1])
        figures.append(details.pop("start"))
    return Result(job="start", unit="s", first=figures[0], second=figures[1], details=details)


def start_once(payload: dict[str, Any]) -> dict[str, Any]:
    """The child's part of `start`: the figure, its parts in seconds, and what prefill is to run."""
    from funcllm.launch.engine import Engine

    imports, imported = time.time() - payload["started"], time.perf_counter()
    options = BenchOptions(
        jobs=("start",),
        model=payload["model"],
        size=payload["size"],
        seed=payload["seed"],
        engine={**payload["engine"], "layers": build_layers(payload["layer_texts"])},
    )
    config = qwen3_config(options.size) if options.size else ModelConfig.from_pretrained(resolve(options.model))
    work = Workload(name="start", prompt_range=(128, 128), output_range=(1, 1))
    with Engine(**_engine_arguments(options, config, [work])) as engine:
        opened = time.perf_counter()
        max_id = min(MAX_ID, config.vocab_size - 1)
        time_requests(engine, requests(1, (128, 128), (1, 1), 0, max_id), 0.0)
        first_token = time.perf_counter()
        prefill, timings = engine.describe()["prefill"], dict(engine.timings)
    engine_seconds = timings.pop("start")
    return {
        "start": imports + first_token - imported,
        "interpreter and imports": imports,
        "arguments": opened - imported - engine_seconds,
        **timings,
        "first step": first_token - opened,
        "prefill at the first token": prefill,
    }


def start_main(arguments: list[str]) -> None:
    """The child itself: what it is told comes by stdin, what it tells goes to stdout, each as JSON."""
    print(json.dumps(start_once(json.load(sys.stdin))))


# --- profile ---------------------------------------------------------------------------------------------------------


class KernelRow(NamedTuple):
    name: str
    calls: int
    microseconds: float


def _profile(engine: Any, works: list[Workload], costs: Costs, limits: Limits, folder: Path) -> None:
    """Writes trace.json and kernels.txt of one decode step of the first job that decodes, and prints the table."""
    work = next((work for work in works if work.steps), workload("b1"))
    max_id = min(MAX_ID, engine.config.vocab_size - 1)
    drawn = requests(work.count, work.prompt_range, (64, 64), 10_001, max_id)
    ids = [
        engine.submit(prompt, SamplingParams(temperature=work.temperature, top_k=0, top_p=1.0, min_p=0.0,
                                             max_tokens=64, ignore_eos=True, detokenize=False))
        for prompt in drawn.prompts
    ]  # fmt: skip
    prefill_steps = sum(map(len, drawn.prompts)) // engine.options.max_num_batched_tokens + 2
    for _ in range(prefill_steps + 8):
        engine.step()
    folder.mkdir(parents=True, exist_ok=True)
    with _recording() as warm_up:
        engine.step()
    del warm_up
    with _recording() as recorded:
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
    recorded.export_chrome_trace(str(folder / "trace.json"))
    context = sum(map(len, drawn.prompts)) + len(drawn.prompts) * (8 + 2)
    text = kernel_table(kernel_rows(recorded), costs.weight_bytes, costs.kv_bytes * context, limits)
    text += f"from the first kernel's start to the last one's end: {device_span(recorded):.1f} us\n"
    (folder / "kernels.txt").write_text(text, encoding="utf-8")
    print(f"one decode step of {work.name}; the trace is {folder / 'trace.json'}\n{text}")


class _recording:
    """torch.profiler around one step, on an idle device before and after it."""

    def __enter__(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        return self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(*error)


def kernel_rows(recorded: Any) -> list[KernelRow]:
    """The kernels of a profile by the time they take; on a machine without a GPU, the operators."""
    from torch.autograd import DeviceType

    events = list(recorded.events())
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    totals: dict[str, list[float]] = {}
    for event in on_device or events:
        microseconds = event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
        row = totals.setdefault(event.name, [0, 0.0])
        row[0] += 1
        row[1] += microseconds
    rows = [KernelRow(name, int(calls), microseconds) for name, (calls, microseconds) in totals.items()]
    return sorted(rows, key=lambda row: -row.microseconds)


def device_span(recorded: Any) -> float:
    """Microseconds from the first start to the last end of what a profile holds; less busy time, it is the gaps."""
    from torch.autograd import DeviceType

    events = list(recorded.events())
    ranges = [event.time_range for event in events if event.device_type == DeviceType.CUDA]
    ranges = ranges or [event.time_range for event in events]
    return max(r.end for r in ranges) - min(r.start for r in ranges)


_GROUPS = (  # what a kernel does, by its name; the first that fits
    ("attention", re.compile(r"(decode|combine|prefill)_kernel|flash|fmha|funcllm::attend", re.I)),
    (
        "matmul",
        re.compile(
            r"gemm|gemv|nvjet|cutlass|matmul|splitk|aten::(mm|addmm|bmm|linear)|_stream_kernel|_tensor_core", re.I
        ),
    ),
    ("all-reduce", re.compile(r"nccl|all_?reduce|symm_mem", re.I)),
)


def kernel_table(rows: Sequence[KernelRow], weight_bytes: int, kv_bytes: int, limits: Limits) -> str:
    """Calls, microseconds and share of each kernel; then of each kind, with the bytes it reads where they are known."""
    total = sum(row.microseconds for row in rows) or 1.0
    lines = [f"{'calls':>6} {'us':>10} {'share':>6}  kernel"]
    for row in rows:
        lines.append(f"{row.calls:6d} {row.microseconds:10.1f} {row.microseconds / total:6.1%}  {row.name[:160]}")
    lines += ["", f"{'calls':>6} {'us':>10} {'share':>6} {'GB':>8} {'of limit':>8}  kind"]
    known = {"attention": kv_bytes, "matmul": weight_bytes}
    grouped: dict[str, list[KernelRow]] = {}
    for row in rows:
        kind = next((kind for kind, pattern in _GROUPS if pattern.search(row.name)), "other")
        grouped.setdefault(kind, []).append(row)
    for kind, members in sorted(grouped.items(), key=lambda item: -sum(row.microseconds for row in item[1])):
        calls, microseconds = sum(row.calls for row in members), sum(row.microseconds for row in members)
        size = known.get(kind)
        bytes_read = f"{'-':>8} {'-':>8}"
        if size is not None and microseconds:
            bytes_read = f"{size / 1e9:8.3f} {size / limits.bandwidth * 1e6 / microseconds:8.1%}"
        lines.append(f"{calls:6d} {microseconds:10.1f} {microseconds / total:6.1%} {bytes_read}  {kind}")
    lines.append(f"{sum(row.calls for row in rows):6d} {total:10.1f} {'':6} {'':8} {'':8}  all")
    return "\n".join(lines) + "\n"


# --- surroundings ----------------------------------------------------------------------------------------------------


def _engine_arguments(options: BenchOptions, config: ModelConfig, works: Sequence[Workload]) -> dict[str, Any]:
    """Keywords of Engine: sequences and rows as the workloads need them, unless the command line says otherwise."""
    works = works or [workload("b1")]
    longest = -(-max(work.longest for work in works) // 128) * 128
    arguments = dict(options.engine)
    arguments["max_model_len"] = arguments.get("max_model_len") or min(longest, config.max_position_embeddings)
    arguments["max_num_seqs"] = arguments.get("max_num_seqs") or max(work.count for work in works)
    arguments["seed"] = options.seed
    if options.size:
        return {**arguments, "config": config, "random_weights": True}
    return {**arguments, "model": options.model}


def _check_fits(work: Workload, config: ModelConfig, max_model_len: int | None) -> None:
    limit = max_model_len or config.max_position_embeddings
    if work.longest > limit:
        raise ValueError(
            f"the job {work.name} has sequences of {work.longest} tokens, and the model holds {limit}; "
            "use a smaller N, or another model"
        )


def _check_writable(options: BenchOptions) -> None:
    if options.json_file and not Path(options.json_file).absolute().parent.is_dir():
        raise ValueError(f"--json {options.json_file}: there is no such folder; make it first")
    if options.profile and Path(options.profile).is_file():
        raise ValueError(f"--profile {options.profile} is a file; name a folder")


def _dtype_of(options: BenchOptions, device: torch.device) -> torch.dtype:
    named = options.engine.get("dtype")
    if named not in (None, "auto"):
        return getattr(torch, named)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _versions() -> dict[str, Any]:
    versions = {"funcllm": funcllm.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    hardware = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        versions["cuda"] = str(torch.version.cuda)
    return {"hardware": hardware, "versions": versions}


def _report(options: BenchOptions, surroundings: dict[str, Any], results: Sequence[Result]) -> None:
    for name, value in surroundings.items():
        print(f"{name}: {_inline(value)}")
    print(result_table(results), end="")
    if options.json_file:
        with open(options.json_file, "a", encoding="utf-8") as file:
            for result in results:
                file.write(json.dumps({**_as_json(result), **surroundings}, default=str) + "\n")


def result_table(results: Sequence[Result]) -> str:
    """The figures as text: both runs, the floor, the share of the limit that the second reaches."""
    lines = [f"{'job':<12} {'first':>10} {'second':>10} {'':<2} {'floor':>10} {'of limit':>8}  details"]
    for result in results:
        floor = "-" if result.floor is None else f"{result.floor:.3f}"
        share = "-" if result.share is None else f"{result.share:.1%}"
        figures = f"{result.first:10.3f} {result.second:10.3f} {result.unit:<2} {floor:>10} {share:>8}"
        lines.append(f"{result.job:<12} {figures}  {_inline(result.details)}".rstrip())
    return "\n".join(lines) + "\n"


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "job": result.job,
        "unit": result.unit,
        "first": result.first,
        "second": result.second,
        "floor": result.floor,
        "share_of_limit": result.share,
        **result.details,
    }


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
