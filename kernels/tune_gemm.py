"""Measures products of 16 to 256 rows inside a chain of decoder layers on this machine's GPU.

    python -m funcllm.kernels.tune_gemm 0.6B [--rows 16,64,128,256] [--json FILE] [--seconds 80] [--workers 12]

A chain is every decoder layer of the model with weights of its own, so that none is found in the L2 cache, captured in
one CUDA graph: add + norm, qkv, q/k norm + rope + cache write (its output stands for that of attention), o, add + norm,
gate_up with its activation, down. The products of a place are all done in the same way: by the matmul library, with the
activation's kernel behind gate_up, or by a configuration of gemm_config.py. Place after place every way is timed with
the rest of the chain as it is best so far, then the fastest few with variations; in the end each place goes back to the
library unless that costs time. Kernels are compiled by worker processes before anything is timed, and a configuration
is checked against fp64 before it is.

It prints microseconds a layer: of the library everywhere, of the best, and of the best with the library at one place;
the winner of each place; and lines for gemm_config.MEASURED.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcllm.kernels import fused, gemm, reference
from funcllm.kernels.gemm_config import (
    LARGE_ELEMENTS,
    MAX_ROWS,
    SHARED_SM90,
    GemmConfig,
    choose_config,
    cost,
    cuts,
    padded_rows,
    pieces_of,
    shared_bytes,
    tiles_of,
)
from funcllm.kernels.tune_chain import SIZES, Size
from funcllm.kernels.tune_gemv import BYTES_PER_MICROSECOND

_EPS = 1e-6
_MAX_ERROR = 1e-2
_SHARED = SHARED_SM90 - 8192
_TILED = 4  # cuts with parts that are timed in any case
_FAR = 1.3  # times the least cost: other cuts that are timed, too
_VARIED = 2  # of the fastest ways of a place, tried with variations
_WORTH = 0.02  # microseconds a layer that a way must save to be kept

Way = GemmConfig | None
"""How the products of a place are done; None: by the matmul library."""

Ways = Mapping[str, Way]


PLACES = ("gate_up", "qkv", "down", "o")  # in the order of the search: the largest weights first


# --- configurations --------------------------------------------------------------------------------------------------


def candidates(rows: int, out_features: int, in_features: int, silu: bool) -> list[GemmConfig]:
    """The configurations worth timing, the one chosen from sizes first.

    Tiles of many parts for large weights and for many rows, the kernels that keep weights ahead for the others.
    """
    is_large = out_features * in_features * (2 if silu else 1) > LARGE_ELEMENTS
    found = [choose_config(rows, out_features, in_features, silu)]
    if rows <= 128 and not (is_large and rows > 32):
        found += _ahead_cuts(rows, out_features, in_features, silu)
    if is_large or rows > 64:
        found += _tiled_cuts(rows, out_features, in_features, silu)
    return list(dict.fromkeys(found))


def _tiled_cuts(rows: int, out_features: int, in_features: int, silu: bool) -> Iterator[GemmConfig]:
    """The cuts of least cost, and some of them with pieces of twice the columns."""
    best = cuts(rows, out_features, in_features, silu)
    costs = [cost(rows, out_features, in_features, silu, config) for config in best]
    best = [config for i, config in enumerate(best) if i < _TILED or costs[i] <= _FAR * costs[0]]
    yield from best
    for config in best:
        if config.num_stages >= 4:
            yield replace(config, block_k=128, num_stages=config.num_stages // 2, prefetch=2)


def _ahead_cuts(rows: int, out_features: int, in_features: int, silu: bool) -> Iterator[GemmConfig]:
    padded = padded_rows(rows)
    for block_n, num_warps in ((64, 4), (128, 8)):
        tiles = tiles_of(out_features, silu, GemmConfig(block_n=block_n))
        for splits in (1, 2, 3, 4, 6, 8, 12):
            is_even = in_features % (128 * splits) == 0 and in_features // splits >= 256
            if not is_even or not 32 <= tiles * splits <= (400 if splits == 1 else 160):
                continue
            block_k = 128 if padded <= 64 else 64
            config = GemmConfig(block_n=block_n, block_k=block_k, num_warps=num_warps, splits=splits)
            yield from _depths(padded, in_features, replace(config, x_ahead=3 if padded <= 64 else 2))
            yield from _rings(padded, in_features, replace(config, rings=True))


def _depths(padded: int, in_features: int, config: GemmConfig) -> Iterator[GemmConfig]:
    """All pieces ahead where they fit; else as many as fit, and with two programs a multiprocessor, and a loop."""
    pieces = pieces_of(in_features, config)
    whole = replace(config, ahead=pieces)
    if shared_bytes(padded, whole, in_features) <= _SHARED:
        yield whole
        return
    looped = [replace(config, ahead=n, prefetch=2) for n in range(1, pieces)]
    for limit in (_SHARED, _SHARED // 2):
        yield from [c for c in looped if shared_bytes(padded, c, in_features) <= limit][-1:]


def _rings(padded: int, in_features: int, config: GemmConfig) -> Iterator[GemmConfig]:
    """As much of the weight ahead as leaves room for four pieces of x, and then as much of x as fits."""
    pieces = pieces_of(in_features, config)
    for limit in (_SHARED, _SHARED // 2):
        depths = [replace(config, ahead=n, x_ahead=min(4, n)) for n in range(min(2, pieces), pieces + 1)]
        fitting = [c for c in depths if shared_bytes(padded, c, in_features) <= limit]
        if fitting:
            longer = [replace(fitting[-1], x_ahead=n) for n in range(fitting[-1].x_ahead, fitting[-1].ahead + 1)]
            yield [c for c in longer if shared_bytes(padded, c, in_features) <= limit][-1]
        if fitting and fitting[-1].ahead == pieces:
            return


def variations(rows: int, in_features: int, config: GemmConfig) -> list[GemmConfig]:
    """A configuration with one thing changed."""
    if config.parts:
        changed = [
            replace(config, release="late"),
            replace(config, prefetch=0),
            replace(config, prefetch=4 * config.prefetch),
            replace(config, num_stages=config.num_stages - 1),
        ]
        return [c for c in dict.fromkeys(changed) if c != config and c.num_stages > 1]
    changed = [
        replace(config, rotate=True),
        replace(config, release="late"),
        replace(config, x_ahead=max(1, config.x_ahead - 1)),
        replace(config, x_ahead=config.x_ahead + 1),
        replace(config, ahead=config.ahead - 1),
        replace(config, fence=not config.rings),
        replace(config, early_start=False),
        replace(config, num_stages=config.num_stages + 1),
    ]
    if config.block_k == 64:
        changed.append(replace(config, block_k=128, ahead=-(-config.ahead // 2), x_ahead=-(-config.x_ahead // 2)))
    if config.block_k == 128:
        changed.append(replace(config, block_k=64, ahead=2 * config.ahead, x_ahead=2 * config.x_ahead))
    return [c for c in dict.fromkeys(changed) if c != config and _is_useful(rows, in_features, c)]


def _is_useful(rows: int, in_features: int, config: GemmConfig) -> bool:
    """Whether a configuration is legal, and not another spelling of a simpler one."""
    pieces, least = pieces_of(in_features, config), GemmConfig().num_stages
    if config.ahead > pieces or config.x_ahead > config.ahead or (config.rings and config.x_ahead < min(2, pieces)):
        return False
    if config.num_stages != least and (config.rings or config.ahead == pieces):
        return False
    if not config.rings and not config.fence:
        return False
    return shared_bytes(rows, config, in_features) <= _SHARED


def first_jobs(size: Size, counts: Sequence[int]) -> list[tuple[str, int, GemmConfig]]:
    """(place, rows, configuration) of all that is timed without variations."""
    return [
        (place, rows, config)
        for rows in counts
        if rows <= MAX_ROWS
        for place in PLACES
        for config in candidates(rows, *size.products()[place])
    ]


# --- the chain -------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """The weights of a layer by place, and of its norms."""

    products: dict[str, Tensor]
    norm_d: Tensor
    head_norm_h: Tensor


class Chain(NamedTuple):
    """All tensors of a chain of one number of rows."""

    layers: tuple[Layer, ...]
    x_td: Tensor
    update_td: Tensor
    angles: tuple[Tensor, Tensor]
    caches: tuple[Tensor, Tensor]
    slots_t: Tensor
    counters_p: Tensor


def make_layers(size: Size, count: int, device: str = "cuda") -> tuple[Layer, ...]:
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    def layer() -> Layer:
        products = {
            place: random(outputs * (2 if silu else 1), inputs) / inputs**0.5
            for place, (outputs, inputs, silu) in size.products().items()
        }
        return Layer(products, random(size.hidden), random(size.head_dim))

    return tuple(layer() for _ in range(count))


def make_chain(size: Size, layers: tuple[Layer, ...], rows: int) -> Chain:
    device = layers[0].norm_d.device
    generator = torch.Generator(device=device).manual_seed(rows)
    random = functools.partial(torch.randn, generator=generator, device=device)
    angle_th = random(rows, size.head_dim // 2)
    cache = (rows + 1, 16, size.kv_heads, size.head_dim)
    return Chain(
        layers=layers,
        x_td=random(rows, size.hidden).bfloat16(),
        update_td=random(rows, size.hidden).bfloat16(),
        angles=(angle_th.cos(), angle_th.sin()),
        caches=(random(cache).bfloat16(), random(cache).bfloat16()),
        slots_t=torch.arange(rows, device=device) * 16 + 16,
        counters_p=gemm.counters(device),
    )


def product(chain: Chain, way: Way, x_td: Tensor, weight_od: Tensor, silu: bool, pdl: bool) -> Tensor:
    """One product in its way."""
    if way is not None:
        return gemm.ahead_linear(x_td, weight_od, silu=silu, counters_p=chain.counters_p, config=way, pdl=pdl)
    y = torch.nn.functional.linear(x_td, weight_od)
    return fused.silu_mul(y, pdl=pdl) if silu else y


def run(size: Size, chain: Chain, ways: Ways, pdl: bool = True) -> Tensor:
    """The stream behind all layers."""
    x_td, update_td = chain.x_td, chain.update_td
    counts = [size.heads, size.kv_heads, size.kv_heads]
    for layer in chain.layers:

        def at(place: str, x: Tensor, layer: Layer = layer) -> Tensor:
            return product(chain, ways[place], x, layer.products[place], place == "gate_up", pdl)

        x_td, normed_td = fused.add_rms_norm(x_td, update_td, layer.norm_d, _EPS, pdl=pdl)
        q, k, v = at("qkv", normed_td).unflatten(-1, (sum(counts), size.head_dim)).split(counts, dim=1)
        norms = (layer.head_norm_h, layer.head_norm_h)
        heads, *_ = fused.qk_norm_rope_write(
            q, k, v, *norms, _EPS, *chain.angles, *chain.caches, chain.slots_t, pdl=pdl
        )  # fmt: skip
        update_td = at("o", heads.flatten(1))
        x_td, normed_td = fused.add_rms_norm(x_td, update_td, layer.norm_d, _EPS, pdl=pdl)
        update_td = at("down", at("gate_up", normed_td))
    return x_td + update_td


def microseconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Of a replay of the call's CUDA graph: the median."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def fault(size: Size, chain: Chain, place: str, config: GemmConfig) -> str:
    """Why a configuration cannot be used at a place: what it raised, or how far it is off; '' where it is good."""
    _, inputs, silu = size.products()[place]
    generator = torch.Generator(device=chain.x_td.device).manual_seed(1)
    x_td = torch.randn(chain.x_td.shape[0], inputs, generator=generator, device=chain.x_td.device).bfloat16()
    weight = chain.layers[0].products[place]
    try:
        expected = (x_td.double() @ weight.double().T).bfloat16()
        expected = reference.silu_mul(expected) if silu else expected
        y = product(chain, config, x_td, weight, silu, True)
        again = product(chain, config, x_td, weight, silu, False)
        error = ((y.double() - expected.double()).norm() / expected.double().norm()).item()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:200]
    if not error < _MAX_ERROR:
        return f"relative error {error:.2e}"
    return "" if torch.equal(y, again) else "the early start changes the result"


# --- the search ------------------------------------------------------------------------------------------------------


def search(
    options: Callable[[str], Sequence[GemmConfig]],
    varied: Callable[[str, Sequence[GemmConfig]], Sequence[GemmConfig]],
    timed: Callable[[Ways], float],
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Way], float, dict[str, list[tuple[float, GemmConfig]]]]:
    """(the best ways, their time, what was timed at each place, fastest first), place by place from the library.

    options(place): what may be used there; varied(place, configs): the same with variations.
    """
    best: dict[str, Way] = dict.fromkeys(PLACES)
    least = timed(best)
    spent: dict[str, list[tuple[float, GemmConfig]]] = {place: [] for place in PLACES}
    for place in PLACES:
        for config in () if is_late() else options(place):
            spent[place].append((timed({**best, place: config}), config))
        spent[place].sort(key=lambda pair: pair[0])
        fastest = [config for _, config in spent[place][:_VARIED]]
        for config in () if is_late() else varied(place, fastest):
            spent[place].append((timed({**best, place: config}), config))
        spent[place].sort(key=lambda pair: pair[0])
        if spent[place] and spent[place][0][0] < least:
            least, best[place] = spent[place][0]
    for place in PLACES:
        without = timed({**best, place: None})
        if best[place] is not None and without <= least + _WORTH:
            best[place], least = None, without
    return best, least, spent


def tune(size: Size, layers: tuple[Layer, ...], rows: int, pool: Pool, is_late: Callable[[], bool]) -> dict[str, Any]:
    """The row of a number of rows: microseconds a layer, winners, and everything that was timed."""
    chain = make_chain(size, layers, rows)

    def timed(ways: Ways) -> float:
        return microseconds(functools.partial(run, size, chain, ways)) / len(layers)

    floor = sum(weight.numel() * 2 for weight in layers[0].products.values()) / BYTES_PER_MICROSECOND
    library: Ways = dict.fromkeys(PLACES)
    row: dict[str, Any] = {"size": size.name, "rows": rows, "floor": floor, "library": timed(library)}
    if rows > MAX_ROWS:
        return row
    products = size.products()
    failed: dict[str, str] = {}

    def good(place: str, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
        problems = dict(zip(configs, pool.faults([(place, rows, config) for config in configs])))
        failed.update({f"{place}: {spelled(config)}": text for config, text in problems.items() if text})
        return [config for config, text in problems.items() if not text]

    def options(place: str) -> list[GemmConfig]:
        return good(place, candidates(rows, *products[place]))

    def varied(place: str, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
        others = [other for config in configs for other in variations(rows, products[place][1], config)]
        return good(place, list(dict.fromkeys(others)))

    best, least, spent = search(options, varied, timed, is_late)
    row |= {"best": least, "failed": failed, "late": is_late()}
    row["places"] = {
        place: {
            "way": None if best[place] is None else spelled(best[place]),
            "library": timed({**best, place: None}),
            "alone": timed({**library, place: best[place]}),
            "all": [[round(time, 3), spelled(config)] for time, config in spent[place]],
        }
        for place in PLACES
    }
    row["measured"] = [
        f"({padded_rows(rows)}, {', '.join(map(str, products[place]))}): {spelled(way)},"
        for place, way in best.items()
        if way is not None
    ]
    row["equal"] = torch.equal(run(size, chain, best, True), run(size, chain, best, False))
    return row


def spelled(config: GemmConfig | None) -> str:
    """The configuration as an expression, without what is as by default."""
    if config is None:
        return "library"
    changed = [f for f in fields(config) if getattr(config, f.name) != f.default]
    return f"GemmConfig({', '.join(f'{f.name}={getattr(config, f.name)!r}' for f in changed)})"


# --- compiling ahead -------------------------------------------------------------------------------------------------


class Pool:
    """Worker processes that compile and check configurations, so that the timing process loads good ones only."""

    def __init__(self, size: Size, workers: int) -> None:
        self.size = size
        self.executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    def faults(self, jobs: Sequence[tuple[str, int, GemmConfig]]) -> list[str]:
        """Of each (place, rows, configuration) why it cannot be used, or ''. All lie in Triton's cache afterwards."""
        return list(self.executor.map(_fault, [(self.size.name, *job) for job in jobs]))


def _fault(job: tuple[str, str, int, GemmConfig]) -> str:
    name, place, rows, config = job
    return fault(SIZES[name], _alone(name, rows), place, config)


@functools.cache
def _alone(name: str, rows: int) -> Chain:
    return make_chain(SIZES[name], make_layers(SIZES[name], 1), rows)


# --- the program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m funcllm.kernels.tune_gemm", description=__doc__)
    parser.add_argument("size", choices=SIZES, help="the model whose layers make the chain")
    parser.add_argument("--rows", default="16,64,128", help="batch sizes, of which those above 256 show the library")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--seconds", type=float, default=80.0, help="try no further way after this many seconds")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="compiling processes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune_gemm needs a CUDA GPU; none is visible to torch", file=sys.stderr)
        return 2
    begun, size = time.monotonic(), SIZES[options.size]
    counts = [int(part) for part in options.rows.split(",") if part]
    pool = Pool(size, options.workers)
    pool.faults(first_jobs(size, counts))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled after {time.monotonic() - begun:.0f} s")
    layers = make_layers(size, size.layers)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for index, rows in enumerate(counts):
        compiled = time.monotonic() - begun
        until = begun + compiled + (options.seconds - compiled) / (len(counts) - index)
        row = tune(size, layers, rows, pool, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        report["rows"].append(row)
        print("\n".join(lines(row)), flush=True)
    report["seconds"] = time.monotonic() - begun
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row for people: microseconds a layer, and what is best at each place."""
    found = [f"{row['size']}, {row['rows']} rows: library {row['library']:.2f} us a layer, floor {row['floor']:.2f}"]
    if "best" not in row:
        return found
    found[0] += f", best {row['best']:.2f}" + ("; stopped early" if row["late"] else "")
    found[0] += "" if row["equal"] else "; EARLY START DIFFERS"
    for place, figures in row["places"].items():
        way = figures["way"] or "library"
        found.append(f"  {place:<8} library here {figures['library']:.2f}, only here {figures['alone']:.2f}  {way}")
    found += [f"  failed: {name}: {problem}" for name, problem in row["failed"].items()]
    return found + [f"    {line}" for line in row["measured"]]


if __name__ == "__main__":
    sys.exit(main())
