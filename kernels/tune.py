"""Times attention configurations on a GPU: `python -m funcllm.kernels.tune decode --json decode.json`.

Each configuration runs in a CUDA graph of several launches over different blocks, so that no launch finds its keys in
the L2 cache, and its error against the reference is checked. The table gives microseconds a launch and TB/s of keys and
values (decode) or TFLOP/s (prefill).

`decode --variants` compares how a decode launch starts and combines its splits, in a graph that imitates the layers of
a model: each is the q/k norm, rotation and cache write of triton_fused.py, then attention over other blocks. The table
gives microseconds a layer, those that attention adds to a chain without it, TB/s by the latter, and whether the chain's
output has the bits of two full launches. All shapes take one to two minutes, most of which is compiling.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcllm.kernels import reference
from funcllm.kernels.attention_decode import (
    DecodeConfig,
    choose_config,
    choose_splits,
    decode_attention,
    device_size,
)
from funcllm.kernels.attention_prefill import (
    PrefillConfig,
    choose_prefill_config,
    flash_prefill,
    flash_refusal,
    prefill_attention,
)

CYCLE_BYTES = 256 << 20  # of keys and values that the launches of one graph go through
MAX_ERROR = 1e-2  # relative, in bfloat16
LAYERS = 2 * 28  # of the chain that variants are compared in; the keys of two models outgrow the L2 cache


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A launch to time. decode: `batch` rows of `context` keys (ragged: evenly from a tenth of it to it). prefill:
    `batch` chunks of `queries` tokens, the last of `context` keys each. trash: of the rows, the last, have one key."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 128
    ragged: bool = False
    queries: int = 1
    trash: int = 0

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each row."""
        if not self.ragged:
            return [self.context] * (self.batch - self.trash) + [1] * self.trash
        least = self.context // 10
        return [least + (self.context - least) * (i * 7919 % self.batch) // self.batch for i in range(self.batch)]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a decode launch reads."""
        return sum(self.kv_lens) * self.kv_heads * self.head_dim * 4

    @property
    def flops(self) -> float:
        """Floating point operations of a causal prefill launch."""
        pairs = self.queries * self.context - self.queries * (self.queries - 1) / 2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs

    def __str__(self) -> str:
        kind = "ragged" if self.ragged else "even"
        size = f"{self.batch}x{self.context}" + (f" q{self.queries}" if self.queries > 1 else f" {kind}")
        size += f" {self.trash} trash" if self.trash else ""
        return f"{size} heads {self.heads}/{self.kv_heads}x{self.head_dim} block {self.block_size}"


DECODE_SHAPES = (
    Shape(batch=131, context=903),
    Shape(batch=131, context=903, heads=16),
    Shape(batch=131, context=903, block_size=32),
    Shape(batch=256, context=1600, heads=16, ragged=True),
    Shape(batch=131, context=1600, ragged=True),
    Shape(batch=64, context=1000),
    Shape(batch=8, context=16384),
    Shape(batch=1, context=1024),
    Shape(batch=1, context=1024, heads=16),
    Shape(batch=1, context=32768),
)
_ROWS = ((1, 640, 0), (1, 1024, 0), (2, 1024, 1), (1, 4096, 0), (1, 32768, 0), (8, 16384, 0), (64, 640, 0))
VARIANT_SHAPES = tuple(
    Shape(batch=batch, context=context, heads=heads, block_size=32, trash=trash)
    for heads in (16, 32)
    for batch, context, trash in (*_ROWS, (128, 640, 0), (131, 903, 0))
)
VARIANTS: tuple[dict[str, bool], ...] = (
    {},
    {"one_launch": True},
    {"early": True},
    {"early": True, "one_launch": True},
    {"early": True, "prefetch": True},
    {"early": True, "prefetch": True, "one_launch": True},
)
PREFILL_SHAPES = (
    Shape(batch=1, context=8192, queries=8192),
    Shape(batch=1, context=32768, queries=8192),
    Shape(batch=16, context=512, queries=512),
    Shape(batch=64, context=1024, queries=16),
)


class Case(NamedTuple):
    """Tensors of a shape. tables: one block table a launch of the graph, over different blocks."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: list[Tensor]
    kv_lens: Tensor
    starts: Tensor
    expected: Tensor


class Chain(NamedTuple):
    """What the layers of a chain share: tensors of the q/k norm, rotation and cache write, and counters."""

    k: Tensor
    v: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor
    slots: list[Tensor]  # of the newest keys, by table
    counters: Tensor


class Result(NamedTuple):
    """One timed configuration."""

    shape: Shape
    config: Any
    microseconds: float
    rate: float  # TB/s or TFLOP/s
    error: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Times what the command line asks for and prints a table; the best of each shape comes last."""
    parser = argparse.ArgumentParser(prog="python -m funcllm.kernels.tune", description=__doc__)
    parser.add_argument("kind", choices=("decode", "prefill"))
    parser.add_argument("--shape", action="append", help="batch x context [x heads x kv_heads x head_dim], repeatable")
    parser.add_argument("--queries", type=int, default=512, help="tokens a chunk for --shape with prefill")
    parser.add_argument("--block-size", type=int, default=128, help="for --shape")
    parser.add_argument("--ragged", action="store_true", help="for --shape")
    parser.add_argument("--chosen", action="store_true", help="time only the configuration that serving would choose")
    parser.add_argument("--variants", action="store_true", help="decode: compare starts and ways of combining splits")
    parser.add_argument("--json", type=Path, help="write all results here")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tune needs a CUDA GPU, and torch finds none")
    shapes = [parsed(text, options) for text in options.shape or ()]
    if options.variants and options.kind != "decode":
        raise SystemExit("--variants is about decode; use: decode --variants")
    default_shapes = VARIANT_SHAPES if options.variants else DECODE_SHAPES
    shapes = shapes or list(default_shapes if options.kind == "decode" else PREFILL_SHAPES)
    tune = tune_variants if options.variants else tune_decode if options.kind == "decode" else tune_prefill
    results = []
    for shape in shapes:
        print(f"\n{shape}", flush=True)
        results += tune(shape, options.chosen)
    print("\nbest")
    for shape in shapes:
        print(line(min((r for r in results if r.shape == shape), key=lambda r: r.microseconds)), "|", shape)
    if options.json:
        options.json.write_text(json.dumps([record(result) for result in results], indent=1))


def tune_decode(shape: Shape, chosen_only: bool = False) -> list[Result]:
    """Times decode configurations of a shape: first the tile's shape, then splits for the three fastest."""
    case = make_case(shape)
    num_sms, shared = device_size(case.q.device)
    max_len = case.tables[0].shape[1] * shape.block_size
    chosen = choose_config(shape.batch, shape.kv_heads, shape.head_dim, max_len, 2, num_sms, shared)
    results = list(timed(shape, case, [chosen], decode_call, shape.kv_bytes / 1e6))
    if chosen_only:
        return results
    tiles = [
        replace(chosen, tile=tile, num_warps=warps, num_stages=stages)
        for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7, 9, 11))
        if tile * shape.head_dim * 4 * (stages - 1) // 2 < shared
    ]
    results += timed(shape, case, tiles, decode_call, shape.kv_bytes / 1e6)
    best = sorted(results, key=lambda r: r.microseconds)[:3]
    near = choose_splits(shape.batch, shape.kv_heads, max_len, 64, num_sms)
    counts = sorted({1, 2, 3, 4, 6, 8, 12, 16, near} if near <= 4 else {near * i // 8 for i in (2, 4, 6, 7, 8, 12, 16)})
    splits = [
        replace(r.config, splits=count, min_tiles=least, pdl=pdl)
        for r, count, least, pdl in itertools.product(best, counts, (1, 4, 8, 16), (False, True))
        if count > 1 or (least == 1 and not pdl)
    ]
    return [*results, *timed(shape, case, splits, decode_call, shape.kv_bytes / 1e6)]


def tune_variants(shape: Shape, chosen_only: bool = False) -> list[Result]:
    """Times VARIANTS of the chosen configuration of a shape in a chain of layers, and where it has many splits of half
    as many and of longer ones, too."""
    case = make_case(shape)
    chain = make_chain(shape, case)
    num_sms, shared = device_size(case.q.device)
    max_len = case.tables[0].shape[1] * shape.block_size
    chosen = choose_config(shape.batch, shape.kv_heads, shape.head_dim, max_len, 2, num_sms, shared)
    cuts = [replace(chosen, pdl=starts_early(case.q.device))]
    if not chosen_only and chosen.splits > 4:
        cuts += [replace(cuts[0], splits=chosen.splits // 2)]
        cuts += [replace(cuts[0], min_tiles=tiles) for tiles in (2, 4) if 2 * tiles * chosen.tile <= shape.context]
    without, _ = chain_time(shape, case, chain, None)
    print(f"  {without:9.2f} us a layer without attention", flush=True)
    expected = expected_output(shape, case.q, case.k_cache, case.v_cache, case.tables[0], case.kv_lens)
    case = case._replace(expected=expected)
    return [result for cut in cuts for result in timed_variants(shape, case, chain, cut, without)]


def timed_variants(shape: Shape, case: Case, chain: Chain, cut: DecodeConfig, without: float) -> Iterable[Result]:
    """Times the VARIANTS that a configuration can have and prints each as it comes. without: microseconds of a layer
    without attention."""
    configs = [replace(cut, **variant) for variant in VARIANTS]
    configs = [c for c in configs if (c.splits > 1 or not c.one_launch) and (c.pdl or not c.early)]
    first: Tensor | None = None
    for config in configs:
        try:
            microseconds, out = chain_time(shape, case, chain, config)
            launched = decode_call(shape, case, config, case.tables[0], chain.counters)
        except Exception as fault:  # out of resources, or what this Triton cannot compile
            print(f"  left out ({type(fault).__name__}: {str(fault)[:80]}): {config}", flush=True)
            continue
        first = out if first is None else first
        added = max(microseconds - without, 1e-3)
        result = Result(
            shape, config, microseconds, shape.kv_bytes / 1e6 / added, error_of(shape, launched, case.expected)
        )
        same = "same bits" if torch.equal(out, first) else "OTHER BITS"
        left = "  COUNTERS LEFT" if chain.counters.any() else ""
        print(f"{line(result)}  adds {added:.2f} us, {same}{left}", flush=True)
        yield result


def tune_prefill(shape: Shape, chosen_only: bool = False) -> list[Result]:
    """Times prefill configurations of a shape, and flash-attn-4 where it can run."""
    case = make_case(shape)
    shared = device_size(case.q.device)[1]
    configs: list[Any] = [choose_prefill_config(shape.head_dim, 2, shared)]
    if not flash_refusal(case.q.device, shape.head_dim, case.q.dtype):
        configs.append("flash-attn-4")
    if not chosen_only:
        configs += [
            PrefillConfig(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
            for rows, tile, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (3, 5, 7))
            if (rows + tile * (stages - 1)) * shape.head_dim * 2 < shared
        ]
    return list(timed(shape, case, configs, prefill_call, shape.flops / 1e6))


def make_case(shape: Shape, device: str = "cuda") -> Case:
    """Random queries and caches, with as many block tables as it takes to keep launches out of the L2 cache."""
    dtype = torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    width = -(-shape.context // shape.block_size)
    copies = max(2, min(64, -(-CYCLE_BYTES // max(1, shape.kv_bytes))))
    num_blocks = 1 + copies * shape.batch * width
    size = (num_blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    k_cache, v_cache = (torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    order = 1 + torch.randperm(num_blocks - 1, device=device, generator=generator).int()
    tables = list(order.view(copies, shape.batch, width))
    num_tokens = shape.batch * shape.queries
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device, dtype=dtype, generator=generator)
    kv_lens = torch.tensor(shape.kv_lens, dtype=torch.int32, device=device)
    starts = torch.arange(0, num_tokens + 1, shape.queries, dtype=torch.int32, device=device)
    expected = expected_output(shape, q, k_cache, v_cache, tables[0], kv_lens)
    return Case(q, k_cache, v_cache, tables, kv_lens, starts, expected)


def expected_output(
    shape: Shape, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, kv_lens: Tensor
) -> Tensor:
    """The reference's output for the last queries of the first rows, as many as it can do in a moment."""
    rows, last = min(shape.batch, 8), min(shape.queries, 16)
    tokens = q.unflatten(0, (shape.batch, shape.queries))[:rows, -last:].flatten(0, 1)
    starts = torch.arange(0, rows * last + 1, last, device=q.device).int()
    chunks = (table[:rows], kv_lens[:rows], starts, starts[:1].expand(last))
    return reference.attend(tokens, k_cache, v_cache, (), chunks, scale=shape.head_dim**-0.5)


def make_chain(shape: Shape, case: Case) -> Chain:
    """Random keys and values to write in each layer, angles, and the slots of each row's newest key."""
    device, dtype = case.q.device, case.q.dtype
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    angle = torch.rand(shape.batch, shape.head_dim // 2, device=device, generator=generator)
    newest = (case.kv_lens - 1).long()[:, None]
    slots = [
        (table.long().gather(1, newest // shape.block_size) * shape.block_size + newest % shape.block_size).flatten()
        for table in case.tables
    ]
    counters = torch.zeros(shape.batch, shape.kv_heads, dtype=torch.int32, device=device)
    return Chain(
        k, v, torch.ones(shape.head_dim, dtype=dtype, device=device), angle.cos(), angle.sin(), slots, counters
    )


def run_chain(shape: Shape, case: Case, chain: Chain, config: DecodeConfig | None) -> Tensor:
    """The output of LAYERS layers, each over the next block table; config: of attention, None: without it.

    The first kernel is launched in full, so that attention may read older keys before it waits.
    """
    from funcllm.kernels.triton_fused import qk_norm_rope_write

    x = case.q * 1
    for layer in range(LAYERS):
        copy = layer % len(case.tables)
        written = (chain.k, chain.v, chain.norm, chain.norm, 1e-6, chain.cos, chain.sin, case.k_cache, case.v_cache)
        x = qk_norm_rope_write(x, *written, chain.slots[copy], pdl=starts_early(x.device))
        if config is not None:
            x = decode_call(shape, case._replace(q=x), config, case.tables[copy], chain.counters)
    return x


def chain_time(shape: Shape, case: Case, chain: Chain, config: DecodeConfig | None) -> tuple[float, Tensor]:
    """(median microseconds of one layer in a captured chain, the chain's output)."""
    outputs: list[Tensor] = []

    def call(_: Tensor) -> Tensor:
        outputs.append(run_chain(shape, case, chain, config))
        return outputs[-1]

    return graph_time(call, case.tables[:1]) / LAYERS, outputs[-1].clone()


def starts_early(device: torch.device) -> bool:
    """Whether kernels can start by programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def decode_call(shape: Shape, case: Case, config: Any, table: Tensor, counters: Tensor | None = None) -> Tensor:
    """One decode launch."""
    out = torch.empty_like(case.q)
    caches = (case.k_cache, case.v_cache, table, case.kv_lens)
    scale = shape.head_dim**-0.5
    return decode_attention(case.q, *caches, out, scale=scale, counters_bk=counters, config=config)


def prefill_call(shape: Shape, case: Case, config: Any, table: Tensor) -> Tensor:
    """One prefill launch."""
    out = torch.empty_like(case.q)
    caches = (case.q, case.k_cache, case.v_cache, table, case.kv_lens, case.starts)
    scale = shape.head_dim**-0.5
    if isinstance(config, PrefillConfig):
        return prefill_attention(*caches, out, scale=scale, config=config)
    return flash_prefill(*caches, shape.queries, out, scale=scale)


def timed(
    shape: Shape, case: Case, configs: Iterable[Any], call: Callable[..., Tensor], work: float
) -> Iterable[Result]:
    """Times each configuration and prints it as it comes; one that does not fit the GPU is left out. work: in millions
    of bytes or operations a launch."""
    for config in configs:
        try:
            out = call(shape, case, config, case.tables[0])
            measure = loop_time if isinstance(config, str) else graph_time
            microseconds = measure(lambda table: call(shape, case, config, table), case.tables)  # noqa: B023
        except Exception as error:  # out of resources, or what this Triton cannot compile
            print(f"  left out ({type(error).__name__}: {str(error)[:80]}): {config}", flush=True)
            continue
        result = Result(shape, config, microseconds, work / microseconds, error_of(shape, out, case.expected))
        print(line(result), flush=True)
        yield result


def graph_time(call: Callable[[Tensor], Tensor], tables: Sequence[Tensor], repeats: int = 9) -> float:
    """Median microseconds of one call, from replays of a CUDA graph that calls once a table."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(tables[0])
        with torch.cuda.graph(graph, stream=stream):
            for table in tables:
                call(table)
    return median_time(graph.replay, repeats) / len(tables)


def loop_time(call: Callable[[Tensor], Tensor], tables: Sequence[Tensor], repeats: int = 9) -> float:
    """Median microseconds of one call outside a graph, the host's share included."""

    def every() -> None:
        for table in tables:
            call(table)

    return median_time(every, repeats) / len(tables)


def median_time(run: Callable[[], None], repeats: int) -> float:
    """Median microseconds of a run on the current stream, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


def error_of(shape: Shape, out: Tensor, expected: Tensor) -> float:
    """Relative root mean square error of the tokens that the reference did."""
    rows, last = min(shape.batch, 8), min(shape.queries, 16)
    actual = out.unflatten(0, (shape.batch, shape.queries))[:rows, -last:].flatten(0, 1).float()
    return float((actual - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt())


def line(result: Result) -> str:
    """A result as a line of the table, with a remark where its error is too large."""
    fields = asdict(result.config) if hasattr(result.config, "__dataclass_fields__") else {"by": result.config}
    settings = " ".join(f"{name}={value}" for name, value in fields.items())
    remark = "  WRONG" if not result.error <= MAX_ERROR else ""
    return f"  {result.microseconds:9.2f} us {result.rate:8.2f}  error {result.error:.1e}  {settings}{remark}"


def record(result: Result) -> dict[str, Any]:
    """A result as plain values."""
    config = asdict(result.config) if hasattr(result.config, "__dataclass_fields__") else result.config
    return {**result._asdict(), "shape": asdict(result.shape), "config": config}


def parsed(text: str, options: argparse.Namespace) -> Shape:
    """A shape from the command line's batch x context [x heads x kv_heads x head_dim]."""
    numbers = [int(part) for part in text.split("x")]
    if len(numbers) not in (2, 5):
        raise SystemExit(f"--shape {text} has {len(numbers)} numbers; use BATCHxCONTEXT or BATCHxCONTEXTxHEADSxKVxDIM")
    names = ("batch", "context", "heads", "kv_heads", "head_dim")
    queries = min(options.queries, numbers[1]) if options.kind == "prefill" else 1
    fields: dict[str, Any] = dict(zip(names, numbers))
    return Shape(**fields, block_size=options.block_size, ragged=options.ragged, queries=queries)


if __name__ == "__main__":
    main()
