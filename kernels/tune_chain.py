"""Chooses the small-batch matrix kernels of a model inside a chain that imitates its decode step, on this GPU.

    python -m funcllm.kernels.tune_chain 0.6B [--rows 2,1] [--json FILE] [--seconds 55]

A chain is every decoder layer of the model, each with weights and a cache of its own, so that nothing stays in the L2
cache, and the head: products, q/k-norm + rope + cache write, attention over 512 keys, captured in one CUDA graph. The
products of a place (qkv, o, gate_up, down, head) are all done in the same way: by a configuration of triton_gemv.py, or
by the matrix library with the fused norm and activation kernels around it. Place after place, all that could be used
there is timed with the rest of the chain as it is best so far; then the fastest few once more, with variations. The
second batch size begins with what was fastest at the first.

It prints microseconds a layer: of the library everywhere, of what is in use now (gemv_config.py), and of the best; what
is best at each place, with its microseconds alone; and lines for gemv_config.MEASURED.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcllm.kernels import fused, gemv, reference
from funcllm.kernels.bundle import Kernels, fast_kernels
from funcllm.kernels.gemv_config import GemvConfig, choose_config
from funcllm.kernels.tune_gemv import (
    Case,
    entry,
    microseconds,
    persistent,
    relative_error,
    spelled,
    streaming,
    tensor_cores,
)

_EPS = 1e-6
_KEYS = 512
_TABLE_KEYS = 4096  # that a block table has room for
_BLOCK_SIZE = 32
_AGAIN = 4  # of the fastest ways of a place, in the second round
_VARIED = 2  # of them also with variations
_NEAR = 8  # of the fastest at one batch size, for the next
_ORDER = ("gate_up", "qkv", "down", "o", "head")  # of the search: the largest weights of a layer first
_MAX_ERROR = 1e-2

Way = GemvConfig | None
"""How the products of a place are done; None: by the matrix library."""

Ways = Mapping[str, Way]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model that its decode step depends on."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    vocabulary: int = 151936

    @property
    def places(self) -> dict[str, Case]:
        """The products of a layer, and the head."""
        widths = self.heads * self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": Case(name="qkv", out_features=widths[1], size=self.hidden, norm=True),
            "o": Case(name="o", out_features=self.hidden, size=widths[0]),
            "gate_up": Case(name="gate_up", out_features=self.ffn, size=self.hidden, norm=True, silu=True),
            "down": Case(name="down", out_features=self.hidden, size=self.ffn),
            "head": Case(name="head", out_features=self.vocabulary, size=self.hidden, norm=True, wide=True),
        }

    def products(self) -> dict[str, tuple[int, int, bool]]:
        """(outputs, inputs, silu) of the product at each place of a layer."""
        cases = self.places.items()
        return {name: (case.out_features, case.size, case.silu) for name, case in cases if name != "head"}


SIZES = {
    size.name: size
    for size in (
        Size(name="0.6B", layers=28, hidden=1024, heads=16, kv_heads=8, ffn=3072),
        Size(name="1.7B", layers=28, hidden=2048, heads=16, kv_heads=8, ffn=6144),
        Size(name="4B", layers=36, hidden=2560, heads=32, kv_heads=8, ffn=9728),
        Size(name="8B", layers=36, hidden=4096, heads=32, kv_heads=8, ffn=12288),
    )
}


# --- ways ------------------------------------------------------------------------------------------------------------


def ways(case: Case, rows: int) -> list[Way]:
    """What is worth timing at a place: what is in use first, then the library, then every kernel at a few cuts, each
    with an early and a late release of its successor.
    """
    whole_rows = [config for config in streaming(case, rows) if config.block_k == 0]
    middle = sorted(whole_rows, key=lambda config: abs(config.block_n - 4) + abs(config.num_warps - 4))
    cuts = [*persistent(case, rows), *middle[:2], *list(tensor_cores(case))[:3]]
    found: list[Way] = [choose_config(rows, case.out_features, case.size, case.silu, case.norm), None]
    for cut in cuts:
        found += [replace(cut, release="early"), replace(cut, release="late")]
    return list(dict.fromkeys(found))


def variations(way: Way) -> list[Way]:
    """The same cut outside of the chain of early starts, and, where a program does not load its whole share before it
    waits, with weights brought to the L2 cache meanwhile.
    """
    if way is None:
        return []
    found: list[Way] = [replace(way, early_start=False, release="never")]
    if way.tensor_cores or way.programs_per_sm:
        found.append(replace(way, early_start=True, release="late", prefetch=4 if way.tensor_cores else 2))
    return found


def in_use(size: Size, rows: int) -> dict[str, Way]:
    """What gemv_config.py chooses for each place."""
    cases = size.places.items()
    return {name: choose_config(rows, case.out_features, case.size, case.silu, case.norm) for name, case in cases}


# --- the chain -------------------------------------------------------------------------------------------------------


class LayerTensors(NamedTuple):
    """Weights and caches of a layer."""

    qkv_od: Tensor
    o_do: Tensor
    gate_up_fd: Tensor
    down_df: Tensor
    input_norm_d: Tensor
    mid_norm_d: Tensor
    q_norm_h: Tensor
    k_norm_h: Tensor
    k_cache_pskh: Tensor
    v_cache_pskh: Tensor


class ChainTensors(NamedTuple):
    """All that a chain reads."""

    layers: list[LayerTensors]
    head_vd: Tensor
    final_norm_d: Tensor
    x_td: Tensor
    cos_th: Tensor
    sin_th: Tensor
    slots_t: Tensor
    block_table_tm: Tensor
    kv_lens_t: Tensor


def chain_tensors(size: Size, rows: int, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> ChainTensors:
    """Random tensors: outputs of every product are about as large as its inputs."""
    generator = torch.Generator(device=device).manual_seed(0)
    random = functools.partial(_normal, generator=generator, device=device, dtype=dtype)
    blocks, cases = _KEYS // _BLOCK_SIZE, size.places
    weights = {name: (case.weight_rows, case.size) for name, case in cases.items()}
    cache = (1 + rows * blocks, _BLOCK_SIZE, size.kv_heads, size.head_dim)
    layers = [
        LayerTensors(
            *(random(*weights[name], std=weights[name][1] ** -0.5) for name in ("qkv", "o", "gate_up", "down")),
            *(random(size.hidden) for _ in range(2)),
            *(random(size.head_dim) for _ in range(2)),
            *(random(*cache) for _ in range(2)),
        )
        for _ in range(size.layers)
    ]
    table = torch.zeros(rows, _TABLE_KEYS // _BLOCK_SIZE, dtype=torch.int32, device=device)
    table[:, :blocks] = 1 + torch.arange(rows * blocks, device=device).view(rows, blocks)
    angles = torch.linspace(0, 3, rows * size.head_dim // 2, device=device).view(rows, -1)
    return ChainTensors(
        layers,
        random(*weights["head"], std=size.hidden**-0.5),
        random(size.hidden),
        random(rows, size.hidden),
        angles.cos(),
        angles.sin(),
        (table[:, blocks - 1].long() + 1) * _BLOCK_SIZE - 1,
        table,
        torch.full((rows,), _KEYS, dtype=torch.int32, device=device),
    )


def chain(tensors: ChainTensors, size: Size, ways: Ways, kernels: Kernels, *, pdl: bool, head: bool = True) -> Tensor:
    """The logits [t, v] in fp32; without the head the last layer's update [t, d]."""
    x_td, update_td = tensors.x_td, torch.zeros_like(tensors.x_td)
    split = [size.heads, size.kv_heads, size.kv_heads]
    product = functools.partial(_product, pdl=pdl)
    normed_product = functools.partial(_normed_product, pdl=pdl)
    for layer in tensors.layers:
        x_td, qkv = normed_product(x_td, update_td, layer.input_norm_d, layer.qkv_od, ways["qkv"])
        q_tnh, k_tkh, v_tkh = qkv.unflatten(1, (sum(split), size.head_dim)).split(split, dim=1)
        q_tnh, k_cache, v_cache = kernels.qk_norm_rope_write(
            q_tnh,
            k_tkh,
            v_tkh,
            layer.q_norm_h,
            layer.k_norm_h,
            _EPS,
            tensors.cos_th,
            tensors.sin_th,
            layer.k_cache_pskh,
            layer.v_cache_pskh,
            tensors.slots_t,
        )
        decode = (tensors.block_table_tm, tensors.kv_lens_t)
        heads_tnh = kernels.attend(q_tnh, k_cache, v_cache, decode, (), scale=size.head_dim**-0.5)
        update_td = product(heads_tnh.flatten(1), layer.o_do, ways["o"])
        x_td, hidden_tf = normed_product(
            x_td, update_td, layer.mid_norm_d, layer.gate_up_fd, ways["gate_up"], silu=True
        )
        update_td = product(hidden_tf, layer.down_df, ways["down"])
    if not head:
        return update_td
    _, logits_tv = normed_product(x_td, update_td, tensors.final_norm_d, tensors.head_vd, ways["head"], wide=True)
    return logits_tv


def _product(x_td: Tensor, weight_od: Tensor, way: Way, *, pdl: bool) -> Tensor:
    if way is None:
        return torch.nn.functional.linear(x_td, weight_od)
    return gemv.small_linear(x_td, weight_od, config=way, pdl=pdl)


def _normed_product(
    x_td: Tensor,
    update_td: Tensor,
    norm_weight_d: Tensor,
    weight_od: Tensor,
    way: Way,
    *,
    silu: bool = False,
    wide: bool = False,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """(x + update, the product of its norm)."""
    if way is not None:
        return gemv.add_norm_small_linear(
            x_td, update_td, norm_weight_d, _EPS, weight_od, silu=silu, wide=wide, config=way, pdl=pdl
        )
    total_td, normed_td = fused.add_rms_norm(x_td, update_td, norm_weight_d, _EPS)
    if wide:
        return total_td, fused.head_logits(normed_td, weight_od)
    y_to = torch.nn.functional.linear(normed_td, weight_od)
    return total_td, fused.silu_mul(y_to) if silu else y_to


def _normal(*shape: int, std: float = 1.0, **options: Any) -> Tensor:
    generator = options.pop("generator")
    return torch.empty(*shape, **options).normal_(0.0, std, generator=generator)


# --- the search ------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """What a whole chain took with one place done in some way."""

    place: str
    way: Way
    microseconds: float


def search(
    time_of: Callable[[Ways], float],
    candidates: Mapping[str, Sequence[Way]],
    start: Ways,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Way], list[Trial]]:
    """(the best way of each place, what was timed): one place after the other, the others as they are best so far.

    A way that cannot run takes infinitely long and is never best. No trial is begun once `is_over()`.
    """
    best, trials = dict(start), list[Trial]()
    for place, found in candidates.items():
        timed: list[Trial] = []
        for way in found:
            if is_over():
                break
            timed.append(Trial(place, way, time_of({**best, place: way})))
        trials += timed
        fastest = min(timed, key=lambda trial: trial.microseconds, default=None)
        if fastest is not None and fastest.microseconds < float("inf"):
            best[place] = fastest.way
    return best, trials


def fastest(trials: Iterable[Trial], place: str, count: int) -> list[Trial]:
    """The fastest trials of a place, one a way."""
    found: dict[Way, Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.microseconds):
        if trial.place == place and trial.microseconds < float("inf"):
            found.setdefault(trial.way, trial)
    return list(found.values())[:count]


def second_round(trials: Sequence[Trial], best: Ways) -> dict[str, list[Way]]:
    """For each place the best way, the fastest few, and variations of the very fastest."""
    found = {}
    for place in best:
        ahead = [trial.way for trial in fastest(trials, place, _AGAIN)]
        varied = [way for way in ahead[:_VARIED] for way in variations(way)]
        found[place] = list(dict.fromkeys([best[place], *ahead, *varied]))
    return found


def is_right(case: Case, tensors: ChainTensors, way: Way) -> bool:
    """Whether a product of the first layer, or the head, is what the references give in fp64."""
    layer = tensors.layers[0]
    weights = {"qkv": layer.qkv_od, "o": layer.o_do, "gate_up": layer.gate_up_fd, "down": layer.down_df}
    weight_od = weights.get(case.name, tensors.head_vd)
    x = _normal(tensors.x_td.shape[0], case.size, generator=None, device=weight_od.device, dtype=weight_od.dtype)
    norm_weight_d = tensors.final_norm_d
    if not case.norm:
        return relative_error(_product(x, weight_od, way, pdl=False), x.double() @ weight_od.double().T) < _MAX_ERROR
    total, expected = reference.add_rms_norm(x, x.flip(0), norm_weight_d, _EPS)
    expected = expected.double() @ weight_od.double().T
    if case.silu:
        expected = reference.silu_mul(expected.to(x.dtype)).double()
    found, y = _normed_product(x, x.flip(0), norm_weight_d, weight_od, way, silu=case.silu, wide=case.wide, pdl=False)
    return torch.equal(found, total) and relative_error(y, expected) < _MAX_ERROR


def alone(case: Case, tensors: ChainTensors, way: Way, pdl: bool) -> float:
    """Microseconds of a place's product, one after the other through all layers, nothing between."""
    names = {"qkv": "qkv_od", "o": "o_do", "gate_up": "gate_up_fd", "down": "down_df"}
    x = torch.randn(tensors.x_td.shape[0], case.size, device=tensors.x_td.device).to(tensors.x_td.dtype)
    if case.name not in names:
        weights = [tensors.head_vd]
    else:
        weights = [getattr(layer, names[case.name]) for layer in tensors.layers]
    if not case.norm:
        return microseconds([functools.partial(_product, x, weight, way, pdl=pdl) for weight in weights])
    options = {"silu": case.silu, "wide": case.wide, "pdl": pdl}
    norm_weight = tensors.final_norm_d
    return microseconds([functools.partial(_normed_product, x, x, norm_weight, w, way, **options) for w in weights])


# --- compiling ahead -------------------------------------------------------------------------------------------------


def compile_ahead(pool: ProcessPoolExecutor, jobs: Iterable[tuple[Case, int, Way]]) -> None:
    """Fills Triton's cache from the pool's processes, so that the timing process only loads."""
    list(pool.map(_compile, [job for job in jobs if job[2] is not None]))


def _compile(job: tuple[Case, int, Way]) -> None:
    case, rows, way = job
    empty = functools.partial(torch.zeros, device="cuda", dtype=torch.bfloat16)
    x, weight = empty(rows, case.size), empty(case.weight_rows, case.size)
    try:
        if case.norm:
            _normed_product(x, x, empty(case.size), weight, way, silu=case.silu, wide=case.wide, pdl=True)
        else:
            _product(x, weight, way, pdl=True)
        torch.cuda.synchronize()
    except Exception:
        return  # the timing process meets the same failure and reports it


# --- the program -----------------------------------------------------------------------------------------------------


def tune(
    size: Size, rows: int, pool: ProcessPoolExecutor, limit: float, near: Mapping[str, Sequence[Way]] | None = None
) -> tuple[dict[str, Any], dict[str, list[Way]]]:
    """(the report of a size and batch size, the fastest ways of each place). limit: a time (monotonic) after which no
    trial is begun. near: ways to begin with instead of all.
    """
    cases, used = size.places, in_use(size, rows)
    tensors = chain_tensors(size, rows)
    kernels = fast_kernels(torch.device("cuda"), size.head_dim, torch.bfloat16, _BLOCK_SIZE)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    failed: dict[str, str] = {}
    right: dict[tuple[str, Way], bool] = {}

    def time_of(ways: Ways, head: bool = True) -> float:
        if not all(right.get((place, way), True) for place, way in ways.items()):
            return float("inf")
        try:
            call = functools.partial(chain, tensors, size, ways, kernels, pdl=pdl, head=head)
            return microseconds([call], repeats=7, at_least=1)
        except Exception as problem:
            failed[str(ways)] = f"{type(problem).__name__}: {problem}"[:200]
            return float("inf")

    def checked(candidates: Mapping[str, Sequence[Way]]) -> Mapping[str, Sequence[Way]]:
        new = [(place, way) for place, found in candidates.items() for way in found if (place, way) not in right]
        compile_ahead(pool, [(cases[place], rows, way) for place, way in new])
        right.update({(place, way): _passes(cases[place], tensors, way, failed) for place, way in new})
        return candidates

    first = {
        place: list(dict.fromkeys([used[place], None, *near[place]])) if near else ways(cases[place], rows)
        for place in _ORDER
    }
    best, trials = search(time_of, checked(first), used, lambda: time.monotonic() > limit)
    again = {place: second_round(trials, best)[place] for place in _ORDER}
    best, more = search(time_of, checked(again), best, lambda: time.monotonic() > limit)
    trials += more
    report: dict[str, Any] = {"size": size.name, "rows": rows, "layers": size.layers, "failed": failed}
    report["floor"] = sum(case.floor for place, case in cases.items() if place != "head")
    library: dict[str, Way] = dict.fromkeys(cases)
    for name, chosen in (("library", library), ("in_use", used), ("best", best)):
        body = time_of(chosen, head=False)
        report[name] = {"layer": body / size.layers, "head": time_of(chosen) - body}
    plain = chain(tensors, size, best, kernels, pdl=False)
    report["pdl_equal"] = torch.equal(chain(tensors, size, best, kernels, pdl=pdl), plain)
    report["error"] = relative_error(plain, chain(tensors, size, library, kernels, pdl=False))
    report["places"] = {}
    for place, way in best.items():
        times = {"alone": alone(cases[place], tensors, way, False), "alone_pdl": alone(cases[place], tensors, way, pdl)}
        times |= {"library": alone(cases[place], tensors, None, False), "floor": cases[place].floor}
        report["places"][place] = {"way": _record(way), **times}
    report["trials"] = [(trial.place, _record(trial.way), trial.microseconds) for trial in trials]
    report["fastest"] = {
        place: [(_record(trial.way), trial.microseconds / size.layers) for trial in fastest(trials, place, 5)]
        for place in best
    }
    report["entries"] = [
        entry(cases[place], rows, way) if way is not None else f"    # {rows} rows, {place}: the matrix library"
        for place, way in best.items()
    ]
    return report, {place: [trial.way for trial in fastest(trials, place, _NEAR)] for place in best}


def _passes(case: Case, tensors: ChainTensors, way: Way, failed: dict[str, str]) -> bool:
    try:
        right = is_right(case, tensors, way)
    except Exception as problem:
        failed[f"{case.name} {way}"] = f"{type(problem).__name__}: {problem}"[:200]
        return False
    if not right:
        failed[f"{case.name} {way}"] = "wrong values"
    return right


def _record(way: Way) -> dict[str, Any] | None:
    return None if way is None else asdict(way)


def printed(report: Mapping[str, Any]) -> str:
    """A report as text."""
    head = f"{report['size']}, {report['rows']} rows: us a layer (bytes {report['floor']:.1f}) and head"
    lines = [head]
    for name in ("library", "in_use", "best"):
        lines.append(f"  {name:<10}{report[name]['layer']:8.2f}{report[name]['head']:8.1f}")
    lines.append(f"  bits with early starts equal: {report['pdl_equal']}; error to library {report['error']:.1e}")
    lines.append(
        f"  {'place':<10}{'floor':>8}{'library':>9}{'alone':>8}{'pdl':>8}  best; below, us of the whole chain a layer"
    )
    for place, row in report["places"].items():
        figures = f"{row['floor']:8.2f}{row['library']:9.2f}{row['alone']:8.2f}{row['alone_pdl']:8.2f}"
        lines.append(f"  {place:<10}{figures}  {_named(row['way'])}")
        for way, spent in report["fastest"][place]:
            lines.append(f"  {'':<10}{'':>24}{spent:9.2f}  {_named(way)}")
    failed = [f"  failed: {name}: {problem}" for name, problem in report["failed"].items()]
    return "\n".join([*lines, *failed, *report["entries"]])


def _named(way: Mapping[str, Any] | None) -> str:
    return "matrix library" if way is None else spelled(GemvConfig(**way))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m funcllm.kernels.tune_chain", description=__doc__)
    parser.add_argument("sizes", nargs="+", choices=tuple(SIZES), metavar="SIZE", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--rows", default="2,1", help="batch sizes")
    parser.add_argument("--seconds", type=float, default=55.0, help="of a size, after which no trial is begun")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="compiling processes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune_chain needs a CUDA GPU; none is visible to torch", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    reports = []
    context = multiprocessing.get_context("spawn")
    batches = [int(rows) for rows in options.rows.split(",")]
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool, torch.no_grad():
        for name in options.sizes:
            begun, near = time.monotonic(), None
            for rows in batches:
                report, near = tune(SIZES[name], rows, pool, begun + options.seconds, near)
                reports.append(report)
                torch.cuda.empty_cache()
                print(printed(reports[-1]), flush=True)
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "chains": reports}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
