"""What `funclaunch inspect` shows: a model's facts, how its parameters are cut, what they weigh, which kernels fuse.

Pure functions of the config and the spec tree: nothing is loaded, caches are counted on the meta device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from funcllm import fusion
from funcllm.config import ModelConfig, legal_tp_sizes, parse_dtype, validate_tp
from funcllm.group import Group
from funcllm.kernels.bundle import Kernels, fast_kernels
from funcllm.launch.engine import device_named
from funcllm.launch.memory import cache_bytes
from funcllm.qwen3 import qwen3, whole_inputs
from funcllm.record import FUNCTIONS, Layers
from funcllm.rope import RopeConfig
from funcllm.specs import local_part_shape, nbytes, spec_leaves
from funcllm.types import Component, Context, DecodeRows, Model, StepInputs
from funcllm.weights.load import layer_ranges

_FACTS = (
    "architecture",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "qk_norm",
    "qkv_bias",
    "o_bias",
    "rms_norm_eps",
    "sliding_window",
)


def inspect_model(
    config: ModelConfig,
    *,
    tp: int = 1,
    rank: int = 0,
    layers: Layers = Layers(),
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """All that is shown, as values that JSON takes. dtype: None or "auto" is the config's, else bfloat16.

    Raises ValueError for a tp size that does not divide the model and for a rank that the size does not have.
    """
    validate_tp(config, tp)
    if rank >= tp:
        raise ValueError(f"rank {rank} is not among the ranks 0 to {tp - 1} of tp={tp}; use a smaller --rank")
    chosen = parse_dtype(dtype) or config.dtype or torch.bfloat16
    models = [qwen3(config, layers, Group(r, tp)) for r in range(tp)]
    kernels = fast_kernels(device_named(device), config.head_dim, chosen, 128)
    rows = [row for spec in spec_leaves(models[rank].specs) for row in _parameter_rows(spec, Group(rank, tp), chosen)]
    whole = [part for spec in spec_leaves(qwen3(config, layers).specs) for part in spec.parts]
    return {
        "config": {name: getattr(config, name) for name in _FACTS},
        "rope": _differences(config.rope, RopeConfig()),
        "dtype": _name(chosen),
        "tp": tp,
        "rank": rank,
        "legal_tp_sizes": list(legal_tp_sizes(config)),
        "parameters": rows,
        "num_parameters": sum(math.prod(part.shape) for part in whole),
        "bytes_per_rank": [nbytes(model.specs, Group(r, tp), chosen) for r, model in enumerate(models)],
        "kv_bytes_per_token": kv_bytes_per_token(models[rank], chosen),
        "swapped": swapped(layers, config),
        "kernels": {"prefill": kernels.prefill, "decode": kernels.decode, "why": list(kernels.why)},
        "fusion": fused_blocks(models[rank], kernels),
    }


def kv_bytes_per_token(model: Model, dtype: torch.dtype) -> int:
    """The bytes that a token's keys and values take on one rank, over all layers that page them."""
    per_block, _ = cache_bytes(model.init_cache, 16, 2, dtype)
    return per_block // 16


def swapped(layers: Layers, config: ModelConfig) -> list[dict[str, Any]]:
    """Which functions are not the defaults, and where; edits and captures with them."""
    default = Layers()
    found: dict[tuple[str, str], list[int]] = {}
    for index in range(config.num_layers):
        record = layers.of(index)
        for name in FUNCTIONS:
            if getattr(record, name) is not getattr(default, name):
                found.setdefault((name, _function_name(getattr(record, name))), []).append(index)
    swaps = [{"name": name, "function": fn, "layers": indices} for (name, fn), indices in found.items()]
    edits = [{"name": f"edit {site}", "function": _function_name(fn)} for site, fn in layers.edits]
    return [*swaps, *edits, *({"name": f"capture {site}", "function": ""} for site in layers.captures)]


def fused_blocks(model: Model, kernels: Kernels) -> list[dict[str, Any]]:
    """For each layer the fused blocks in use: in decode steps by their number of rows, in steps with prompts."""
    prompt = whole_inputs(torch.zeros(2, dtype=torch.int32), model.layers, {})
    steps = {"decode": (_decode_inputs(), "decode"), "prefill": (prompt, "mixed")}
    if fusion.small_rows(model.config, model.group, kernels):
        steps = {"small": (_decode_inputs(), "small"), **steps}
    if fusion.ahead_rows(model.config, model.group, kernels):
        steps["ahead"] = (_decode_inputs(), "ahead")
    rows = []
    for index in range(model.config.num_layers):
        record = model.layers.of(index)
        row: dict[str, Any] = {"layer": index}
        for name, (step, batch) in steps.items():
            context = Context(
                config=model.config, group=model.group, kernels=kernels, layer=record, inputs=step, batch=batch
            )
            row[name] = [entry.name for entry in fusion.ENTRIES if fusion.fits(entry, context)]
        rows.append(row)
    return rows


def print_facts(facts: dict[str, Any]) -> None:
    """Tables on stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_facts_table(facts))
    console.print(_parameter_table(facts))
    for rank, size in enumerate(facts["bytes_per_rank"]):
        console.print(f"rank {rank}: {_bytes(size)} of parameters", highlight=False)
    console.print(
        f"attention: prefill {facts['kernels']['prefill']}, decode {facts['kernels']['decode']}", highlight=False
    )
    console.print(f"KV cache: {_bytes(facts['kv_bytes_per_token'])} a token on each rank", highlight=False)
    console.print(f"legal tp sizes: {', '.join(map(str, facts['legal_tp_sizes']))}", highlight=False)
    for line in _swap_lines(facts) + _fusion_lines(facts):
        console.print(line, highlight=False, markup=False)


# --- rows ------------------------------------------------------------------------------------------------------------


def _parameter_rows(spec: Any, group: Group, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    for part in spec.parts:
        local = local_part_shape(part, group)
        yield {
            "name": part.name,
            "shape": list(part.shape),
            "axis": part.axis if part.shards > 1 else None,
            "shards": part.shards if part.axis is not None else 1,
            "local_shape": list(local),
            "bytes": math.prod(local) * (spec.dtype or dtype).itemsize,
        }


def _decode_inputs() -> StepInputs:
    """The shape of a decode step of two rows; its values are never read."""
    ints = torch.zeros(2, dtype=torch.int32)
    return StepInputs(
        token_ids_t=ints,
        positions_t=ints,
        slots_t=ints.long(),
        rows_t=ints,
        rows_b=ints,
        prompt_lens_b=ints,
        query_lens_b=ints,
        logit_tokens_l=ints,
        samples_l=ints.bool(),
        decode=DecodeRows(block_table_bm=ints[:, None], kv_lens_b=ints),
        chunks=(),
        sampling=(),
    )


def _function_name(fn: Any) -> str:
    if isinstance(fn, Component):
        return f"Component({_function_name(fn.apply)})"
    inner = getattr(fn, "func", fn)
    return f"{getattr(inner, '__module__', '')}:{getattr(inner, '__qualname__', repr(inner))}"


def _differences(value: Any, default: Any) -> dict[str, Any]:
    """The type, and the fields of a record that differ from the default's."""
    names = [field.name for field in fields(value)]
    return {
        name: getattr(value, name) for name in names if name == "type" or getattr(value, name) != getattr(default, name)
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- tables ----------------------------------------------------------------------------------------------------------


def _facts_table(facts: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("fact", "value", title="config", title_justify="left")
    rope = ", ".join(f"{name} {value}" for name, value in facts["rope"].items())
    values = {**facts["config"], "rope": rope, "dtype": facts["dtype"], "parameters": facts["num_parameters"]}
    for name, value in values.items():
        is_size = isinstance(value, int) and not isinstance(value, bool)
        table.add_row(name, f"{value:,}" if is_size else str(value))
    return table


def _parameter_table(facts: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"parameters of rank {facts['rank']} of {facts['tp']}; layers with equal rows are shown once"
    table = Table(title=title, title_justify="left")
    table.add_column("name", overflow="fold")
    for heading in ("shape", "cut", "here", "bytes"):
        table.add_column(heading, justify="right")
    for name, row, count in _grouped(facts["parameters"]):
        cut = "-" if row["axis"] is None else f"axis {row['axis']} / {row['shards']}"
        size = f"{row['bytes']:,}" + (f" x {count}" if count > 1 else "")
        table.add_row(name, _shape(row["shape"]), cut, _shape(row["local_shape"]), size)
    return table


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], int]]:
    """Rows that differ by their layer number only, as one: (name with the layers' range, a row, how many)."""
    groups: dict[tuple[Any, ...], list[tuple[int | None, dict[str, Any]]]] = {}
    for row in rows:
        pieces = row["name"].split(".")
        places = [i for i, piece in enumerate(pieces) if piece.isdigit()]
        number = int(pieces[places[0]]) if places else None
        name = ".".join("*" if i in places[:1] else piece for i, piece in enumerate(pieces))
        key = (name, tuple(row["shape"]), row["axis"], tuple(row["local_shape"]), row["bytes"])
        groups.setdefault(key, []).append((number, row))
    result = []
    for key, members in groups.items():
        numbers = [number for number, _ in members if number is not None]
        name = key[0].replace("*", layer_ranges(numbers), 1) if numbers else key[0]
        result.append((name, members[0][1], len(members)))
    return result


def _swap_lines(facts: dict[str, Any]) -> list[str]:
    def where(row: dict[str, Any]) -> str:
        return f" in layers {layer_ranges(row['layers'])}" if "layers" in row else ""

    return [f"swapped: {row['name']} {row['function']}{where(row)}" for row in facts["swapped"]]


def _fusion_lines(facts: dict[str, Any]) -> list[str]:
    """The fused blocks by layers, those with the same sets together."""
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for row in facts["fusion"]:
        decode, prefill = tuple(row["decode"]), tuple(row["prefill"])
        small, ahead = (tuple(row.get(name, decode)) for name in ("small", "ahead"))
        groups.setdefault((decode, prefill, small, ahead), []).append(row["layer"])
    lines = []
    for (decode, prefill, small, ahead), numbers in groups.items():
        where = f"fused in layers {layer_ranges(numbers)}:"
        few = "" if small == decode else f"; decode of few rows {_listed(small)}"
        few += "" if ahead == decode else f"; decode of more rows {_listed(ahead)}"
        if decode == prefill:
            lines.append(f"{where} {_listed(decode)}{few}")
        else:
            lines.append(f"{where} decode {_listed(decode)}{few}; with prompts {_listed(prefill)}")
    return lines


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
