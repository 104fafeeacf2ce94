"""Measures the small-batch matrix kernels and the elementwise kernels on this machine's GPU, each alone.

    python -m funcllm.kernels.tune_gemv [--json FILE] [--rows 1,2,4,8] [--seconds 90] [--workers 12] [--inductor]

Every figure is microseconds a launch inside a CUDA graph, the median of several replays. Weights are cycled through
enough copies that none is found in the L2 cache; activations stay there, as in a decode step. Each configuration is
checked against fp64 first. Kernels are compiled by worker processes into Triton's cache before anything is timed.

What is fastest alone need not be so between its neighbours in a decode step: tune_chain.py measures that.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from funcllm.kernels import fused, reference, triton_gemv, triton_sampler
from funcllm.kernels.gemv_config import GemvConfig, choose_config, next_power_of_2, unpacked

BYTES_PER_MICROSECOND = 4.26e6  # what a device-to-device copy reaches on an H200
_COLD_BYTES = 256 << 20  # of weights between two uses of the same copy
_SHARED_BYTES = 227 << 10
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A matrix product of a model, with what is fused to it. out_features counts outputs after silu * up."""

    name: str
    out_features: int
    size: int
    norm: bool = False
    silu: bool = False
    residual: bool = False
    wide: bool = False

    @property
    def weight_rows(self) -> int:
        return self.out_features * (2 if self.silu else 1)

    @property
    def floor(self) -> float:
        """Microseconds that reading the weight takes."""
        return self.weight_rows * self.size * 2 / BYTES_PER_MICROSECOND


CASES = (
    Case(name="0.6B qkv", out_features=4096, size=1024, norm=True),
    Case(name="0.6B o", out_features=1024, size=2048, residual=True),
    Case(name="0.6B gate_up", out_features=3072, size=1024, norm=True, silu=True),
    Case(name="0.6B down", out_features=1024, size=3072, residual=True),
    Case(name="0.6B head", out_features=151936, size=1024, wide=True),
    Case(name="1.7B qkv", out_features=4096, size=2048, norm=True),
    Case(name="1.7B o", out_features=2048, size=2048, residual=True),
    Case(name="1.7B gate_up", out_features=6144, size=2048, norm=True, silu=True),
    Case(name="1.7B down", out_features=2048, size=6144, residual=True),
    Case(name="8B qkv", out_features=6144, size=4096, norm=True),
    Case(name="8B o", out_features=4096, size=4096, residual=True),
    Case(name="8B gate_up", out_features=12288, size=4096, norm=True, silu=True),
    Case(name="8B down", out_features=4096, size=12288, residual=True),
    Case(name="4B qkv", out_features=6144, size=2560, norm=True),
    Case(name="4B o", out_features=2560, size=4096, residual=True),
    Case(name="4B gate_up", out_features=9728, size=2560, norm=True, silu=True),
    Case(name="4B down", out_features=2560, size=9728, residual=True),
)


# --- configurations --------------------------------------------------------------------------------------------------


def candidates(case: Case, rows: int) -> list[GemvConfig]:
    """The configurations worth timing: first the one chosen from sizes, then all kernels at several cuts."""
    found = [choose_config(rows, case.out_features, case.size, case.silu, case.norm)]
    if rows <= (8 if case.out_features <= 2560 and not case.silu else 4):
        found += streaming(case, rows)
    found += persistent(case, rows)
    return list(dict.fromkeys([*found, *tensor_cores(case)]))


_PERSISTENT_CUTS = ((16, 32, 8, 1), (16, 32, 8, 2), (16, 32, 16, 1), (16, 64, 4, 1), (16, 64, 8, 1), (8, 32, 16, 1))
"""Columns of x and elements of a group a thread, warps a multiprocessor, groups ahead. The more columns, the fewer sums
to exchange; the fewer warps, the fewer programs that read x; the product of the last three is in flight."""
_PERSISTENT_VALUES = 96  # of x and the weight that a thread may hold, in registers of 32 bits


def persistent(case: Case, rows: int) -> Iterator[GemvConfig]:
    """Persistent streaming, up to 4 rows: what fits in registers."""
    width, planes = next_power_of_2(case.size), 2 if case.silu else 1
    if rows > 4 or width < 256:
        return
    for columns, share, warps, num_stages in _PERSISTENT_CUTS:
        num_warps = max(1, min(16, width // (32 * columns)))
        block_n, rest = divmod(32 * num_warps * share, width * planes)
        held = share * (1 + num_stages) // 2 + rows * case.size // (32 * num_warps)
        if rest or not block_n or held > _PERSISTENT_VALUES or (num_warps == 16 and share > 32 and rows > 1):
            continue
        programs = max(1, warps // num_warps)
        yield GemvConfig(
            block_n=block_n, num_warps=num_warps, num_stages=num_stages, programs_per_sm=programs, release="late"
        )


def streaming(case: Case, rows: int) -> Iterator[GemvConfig]:
    """Streaming, whole rows or pieces of them."""
    width, planes = next_power_of_2(case.size), 2 if case.silu else 1
    for block_n in (1, 2, 4, 8, 16):
        for num_warps in (2, 4, 8, 16):
            share = width * block_n * planes / (32 * num_warps)
            if 256 * num_warps <= width and 16 <= share <= (64 if rows == 1 else 32):
                yield GemvConfig(block_n=block_n, num_warps=num_warps)
    if rows == 1 and case.size >= 2048:
        yield GemvConfig(block_n=4, num_warps=4, block_k=1024, num_stages=4)
        yield GemvConfig(block_n=8 if not case.silu else 4, num_warps=4, block_k=1024, num_stages=3)


def tensor_cores(case: Case) -> Iterator[GemvConfig]:
    """Tensor cores: tiles that fit in shared memory."""
    for block_n, num_warps, block_k, num_stages in (
        (16, 2, 256, 4),
        (16, 4, 512, 3),
        (32, 4, 128, 6),
        (32, 4, 256, 4),
        (64, 4, 128, 5),
        (64, 8, 256, 3),
    ):
        shared = (block_n * (2 if case.silu else 1) + 16) * block_k * 2 * num_stages
        if shared <= _SHARED_BYTES and block_k <= case.size:
            yield GemvConfig(
                block_n=block_n, num_warps=num_warps, block_k=block_k, num_stages=num_stages, tensor_cores=True
            )


# --- running one case ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The tensors of a case: as many weights as keep them cold, and everything that may be fused."""

    x_td: Tensor
    weights: tuple[Tensor, ...]
    norm_weight_d: Tensor
    residual_to: Tensor


def operands(case: Case, rows: int, copies: int) -> Operands:
    generator = torch.Generator(device="cuda").manual_seed(0)
    random = functools.partial(torch.randn, generator=generator, device="cuda")
    weight = (random(case.weight_rows, case.size) / case.size**0.5).bfloat16()
    return Operands(
        x_td=random(rows, case.size).bfloat16(),
        weights=(weight, *(weight.clone() for _ in range(copies - 1))),
        norm_weight_d=random(case.size).bfloat16(),
        residual_to=random(rows, case.out_features).bfloat16(),
    )


def cold_copies(case: Case) -> int:
    return max(2, -(-_COLD_BYTES // (case.weight_rows * case.size * 2)))


def launch(case: Case, given: Operands, weight: Tensor, config: GemvConfig, pdl: bool) -> Tensor:
    y, _ = triton_gemv.gemv(
        given.x_td,
        weight,
        norm_weight_d=given.norm_weight_d if case.norm else None,
        eps=_EPS,
        residual_to=given.residual_to if case.residual else None,
        silu=case.silu,
        wide=case.wide,
        config=config,
        pdl=pdl,
    )
    return y


def composed(case: Case, given: Operands) -> Tensor:
    """The case in fp64 between the roundings of the composition."""
    x = reference.rms_norm(given.x_td, given.norm_weight_d, _EPS) if case.norm else given.x_td
    y = x.double() @ given.weights[0].double().T
    if case.wide:
        return y
    y = y.bfloat16()
    if case.silu:
        y = reference.silu_mul(y)
    return (given.residual_to.float() + y.float()).bfloat16() if case.residual else y


def relative_error(y: Tensor, expected: Tensor) -> float:
    """RMSE over the RMS of the expected values."""
    return ((y.double() - expected.double()).square().mean().sqrt() / expected.double().square().mean().sqrt()).item()


def microseconds(calls: Sequence[Callable[[], Any]], repeats: int = 5, at_least: int = 24) -> float:
    """Of one call, when the calls run one after the other inside a CUDA graph: the median over replays."""
    rounds = max(1, -(-at_least // len(calls)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return statistics.median(times)


def measure(case: Case, rows: int) -> dict[str, Any]:
    """The row of a case: cuBLAS, the configuration chosen from sizes, the best one, and that with PDL."""
    given = operands(case, rows, cold_copies(case))
    expected = composed(case, given)
    cublas = microseconds([functools.partial(torch.nn.functional.linear, given.x_td, w) for w in given.weights])
    timed: list[tuple[float, GemvConfig]] = []
    failures: dict[str, str] = {}
    for config in candidates(case, rows):
        try:
            error = relative_error(launch(case, given, given.weights[0], config, False), expected)
            if not error < (1e-5 if case.wide else 1e-2):
                failures[str(config)] = f"relative error {error:.2e}"
                continue
            calls = [functools.partial(launch, case, given, w, config, False) for w in given.weights]
            timed.append((microseconds(calls), config))
        except Exception as problem:
            failures[str(config)] = f"{type(problem).__name__}: {problem}"[:200]
    row: dict[str, Any] = {"case": case.name, "rows": rows, "floor": case.floor, "cublas": cublas, "failed": failures}
    if not timed:
        return row
    timed.sort(key=lambda pair: pair[0])
    best, config = timed[0]
    chosen = choose_config(rows, case.out_features, case.size, case.silu, case.norm)
    row |= {"best": best, "config": config.packed(), "share": case.floor / best}
    row["chosen"] = next((spent for spent, other in timed if other == chosen), None)
    row["all"] = [[round(spent, 3), other.packed()] for spent, other in timed]
    if torch.cuda.get_device_capability() >= (9, 0):
        row |= _with_pdl(case, given, config)
    return row


def _with_pdl(case: Case, given: Operands, config: GemvConfig) -> dict[str, Any]:
    try:
        same = torch.equal(
            launch(case, given, given.weights[0], config, True), launch(case, given, given.weights[0], config, False)
        )
        calls = [functools.partial(launch, case, given, w, config, True) for w in given.weights]
        return {"pdl": microseconds(calls), "pdl_equal": same}
    except Exception as problem:
        return {"pdl_failed": f"{type(problem).__name__}: {problem}"[:200]}


# --- elementwise kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that the elementwise kernels see."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    vocabulary: int = 151936


SHAPES = (
    Shape(name="0.6B", hidden=1024, heads=16, kv_heads=8, ffn=3072),
    Shape(name="8B", hidden=4096, heads=32, kv_heads=8, ffn=12288),
)


def elementwise(shape: Shape, batch: int, inductor: bool) -> Iterator[dict[str, Any]]:
    """One row a kernel: microseconds, and what its bytes would take from memory (activations come from cache)."""
    random = functools.partial(torch.randn, device="cuda")
    x, update = random(batch, shape.hidden).bfloat16(), random(batch, shape.hidden).bfloat16()
    weight, gate_up = random(shape.hidden).bfloat16(), random(batch, 2 * shape.ffn).bfloat16()
    logits = [random(batch, shape.vocabulary) for _ in range(2 if batch >= 16 else 1)]
    keys = torch.randint(0, 2**32, (batch, 2), device="cuda")
    heats = {name: torch.full((batch,), heat, device="cuda") for name, heat in (("0", 0.0), ("0.6", 0.6), ("1", 1.0))}
    q, k, v = _packed_heads(shape, batch)
    head_weight = random(shape.head_dim).bfloat16()
    cos, sin = (random(batch, shape.head_dim // 2) for _ in range(2))
    caches = [torch.zeros(batch + 1, 16, shape.kv_heads, shape.head_dim, device="cuda").bfloat16() for _ in range(2)]
    slots = torch.randperm(batch * 16, device="cuda")[:batch] + 16
    rope = (q, k, v, head_weight, head_weight, _EPS, cos, sin, *caches, slots)
    jobs: list[tuple[str, Any, Any, list[tuple[Any, ...]], int]] = [
        ("rms_norm", fused.rms_norm, reference.rms_norm, [(x, weight, _EPS)], 4 * x.numel()),
        ("add_rms_norm", fused.add_rms_norm, reference.add_rms_norm, [(x, update, weight, _EPS)], 8 * x.numel()),
        ("silu_mul", fused.silu_mul, reference.silu_mul, [(gate_up,)], 3 * gate_up.numel()),
        ("qk_norm_rope_write", fused.qk_norm_rope_write, None, [rope], 4 * (q.numel() + 2 * k.numel())),
    ]
    for name, heat in heats.items():
        calls = [(rows, heat, keys, (), 0, shape.vocabulary) for rows in logits]
        jobs.append((f"pick T={name}", fused.pick, reference.pick, calls, 4 * logits[0].numel()))
    for name, kernel, twin, arguments, size in jobs:
        row = {"kernel": name, "shape": shape.name, "batch": batch, "floor": size / BYTES_PER_MICROSECOND}
        row["time"] = microseconds([functools.partial(kernel, *args) for args in arguments])
        if inductor and twin is not None:
            fast = torch.compile(twin, fullgraph=True, dynamic=False)
            row["inductor"] = microseconds([functools.partial(fast, *args) for args in arguments])
        if name.startswith("pick"):
            ours, theirs = kernel(*arguments[0]), reference.pick(*arguments[0])
            row["equal"] = torch.equal(reference.token_of(ours), reference.token_of(theirs))
        yield row


def _packed_heads(shape: Shape, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    total = shape.heads + 2 * shape.kv_heads
    packed = torch.randn(batch, total * shape.head_dim, device="cuda").bfloat16().unflatten(-1, (total, shape.head_dim))
    q, k, v = packed.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    return q, k, v


def noise_is_exact() -> bool:
    """Whether the kernel's noise bits are the reference's, over the whole vocabulary."""
    keys = reference.noise_keys(torch.arange(4, device="cuda") * 12345, torch.arange(4, device="cuda"))
    ids = torch.arange(151936, device="cuda")
    return torch.equal(triton_sampler.noise_bits(keys, 0, 151936), reference.noise_bits(keys, ids))


# --- compiling ahead -------------------------------------------------------------------------------------------------


def compile_ahead(jobs: Sequence[tuple[Case, int]], workers: int) -> None:
    """Fills Triton's cache from several processes, so that the timing process only loads."""
    context = multiprocessing.get_context("spawn")
    parts = [list(jobs[i::workers]) for i in range(min(workers, len(jobs)))]
    processes = [context.Process(target=_compile, args=(part,)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compile(jobs: Sequence[tuple[Case, int]]) -> None:
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    for case, rows in jobs:
        given = operands(case, rows, 1)
        for config in candidates(case, rows):
            try:
                launch(case, given, given.weights[0], config, False)
                if pdl and config == choose_config(rows, case.out_features, case.size, case.silu, case.norm):
                    launch(case, given, given.weights[0], config, True)
            except Exception:
                continue  # the timing process meets the same failure and reports it
    torch.cuda.synchronize()


# --- the program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m funcllm.kernels.tune_gemv", description=__doc__)
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--rows", default="1,2,4,8", help="batch sizes of the matrix kernels")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--batches", default="1,16,64,256", help="batch sizes of the elementwise kernels")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no further case after this many seconds")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="compiling processes")
    parser.add_argument("--inductor", action="store_true", help="also time the references compiled by Inductor")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune_gemv needs a CUDA GPU; none is visible to torch", file=sys.stderr)
        return 2
    begun = time.monotonic()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "gemv": [],
        "elementwise": [],
        "noise_exact": noise_is_exact(),
    }
    print(f"{report['gpu']}, torch {report['torch']}; noise bits exact: {report['noise_exact']}", flush=True)
    print(f"{'kernel':<20}{'shape':>6}{'batch':>7}{'us':>9}{'floor':>9}{'inductor':>10}  equal", flush=True)
    for shape in SHAPES:
        for batch in _integers(options.batches):
            for row in elementwise(shape, batch, options.inductor):
                report["elementwise"].append(row)
                print(_elementwise_line(row), flush=True)
    jobs = [(case, rows) for rows in _integers(options.rows) for case in CASES if options.cases in case.name]
    compile_ahead(jobs, options.workers)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{'case':<14}{'rows':>5}{'floor':>8}{'cublas':>8}{'chosen':>8}{'best':>8}{'pdl':>8}{'share':>7}  config")
    for case, rows in jobs:
        if time.monotonic() - begun > options.seconds:
            print(f"stopped after {options.seconds:.0f} s; --seconds raises the limit")
            break
        row = measure(case, rows)
        report["gemv"].append(row)
        print(_gemv_line(row), flush=True)
        torch.cuda.empty_cache()
    report["seconds"] = time.monotonic() - begun
    _print_table(report["gemv"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The entries that gemv_config.MEASURED should have: where the best beats the rule by more than 3 %."""
    cases = {case.name: case for case in CASES}
    for row in rows:
        if "best" in row and (row["chosen"] is None or row["best"] < 0.97 * row["chosen"]):
            case = cases[row["case"]]
            print(entry(case, row["rows"], unpacked(row["config"])))


def entry(case: Case, rows: int, config: GemvConfig) -> str:
    """A line for gemv_config.MEASURED."""
    return f"    ({rows}, {case.out_features}, {case.size}, {case.silu}): {spelled(config)},"


def spelled(config: GemvConfig) -> str:
    """A configuration as Python that makes it, without what is as by default."""
    given = [(field.name, getattr(config, field.name)) for field in fields(config)]
    default = {field.name: field.default for field in fields(config)}
    text = ", ".join(f"{name}={_quoted(value)}" for name, value in given if value != default[name])
    return f"GemvConfig({text})"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _cell(value: float | None, width: int = 8) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"


def _elementwise_line(row: dict[str, Any]) -> str:
    figures = _cell(row["time"], 9) + _cell(row["floor"], 9) + _cell(row.get("inductor"), 10)
    return f"{row['kernel']:<20}{row['shape']:>6}{row['batch']:>7}{figures}  {row.get('equal', '')}"


def _gemv_line(row: dict[str, Any]) -> str:
    figures = "".join(_cell(row.get(name)) for name in ("floor", "cublas", "chosen", "best", "pdl"))
    notes = f"  {row['config']}" if "config" in row else ""
    notes += "" if row.get("pdl_equal", True) else "  PDL DIFFERS"
    notes += f"  {row['pdl_failed']}" if "pdl_failed" in row else ""
    notes += f"  failed: {row['failed']}" if row["failed"] else ""
    return f"{row['case']:<14}{row['rows']:>5}{figures}{_cell(row.get('share'), 7)}{notes}"


if __name__ == "__main__":
    sys.exit(main())
