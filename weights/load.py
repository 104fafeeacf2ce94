"""From a Hugging Face folder, a mapping or a stream of tensors to this rank's parameters.

Owns everything that can be wrong with a checkpoint. Receives a Spec tree and reads the slices that it asks for, no
others; every expected tensor is found with its exact shape before the first byte is read, or a ValueError says which
are not and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from funcllm.config import ModelConfig, parse_dtype, read_json
from funcllm.group import SINGLE, Group
from funcllm.qwen3 import param_specs
from funcllm.record import FUNCTIONS, MODEL_FUNCTIONS, Layers
from funcllm.specs import assemble, fill, init_part, nbytes, spec_leaves
from funcllm.types import Component, Part, PyTree, Spec

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # segments that trainers put in
_HARMLESS = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|\.attn\.bias)$")
_ADAPTER = re.compile(r"\.(lora_[ABE]\w*|lora_embedding_[AB]|lora_magnitude_vector|base_layer)(\.|$)")
_QUANTISED = re.compile(r"\.(qweight|qzeros|g_idx|scales|weight_scale(_inv)?|input_scale|weight_packed|SCB|absmax)$")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored tensor: its file, its name there, its dtype as safetensors writes it, its shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def load_params(
    folder: str | Path | Mapping[str, Tensor],
    specs: PyTree,
    group: Group = SINGLE,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    config: ModelConfig | None = None,
    sources: Mapping[str, Any] | None = None,
    strict: bool = False,
    progress: bool | None = None,
) -> PyTree:
    """This rank's parameters from a Hugging Face folder, or a mapping name -> whole tensor, cast to dtype.

    dtype: None or "auto" is the config's, else that of the stored weights. config: the folder's own by default, needed
    with a mapping. sources: place ("layers.3.mlp", or "" for all) -> a mapping, a safetensors file or a module, asked
    before the folder by full names and by names relative to the place (see `layer_sources`); what none has is filled by
    the Spec's init, unless it belongs to the architecture. strict: unused tensors are an error, not a warning.
    progress: a bar on stderr from rank 0; None: when stderr is a terminal.
    """
    if isinstance(folder, Mapping):
        if config is None:
            raise ValueError("load_params from a mapping needs the model's config; pass config=")
        where, all_found = "the tensors given", [_given(name, tensor) for name, tensor in folder.items()]
    else:
        where, all_found = str(folder), _stored(open_checkpoint(folder))
        config = config or ModelConfig.from_pretrained(folder)
    required = {part.name for spec in spec_leaves(param_specs(config)) for part in spec.parts}
    by_name = _by_canonical_name(all_found, where)
    own = {place: _mapping(source) for place, source in (sources or {}).items()}
    found = _locate(specs, by_name, own, required, where)
    if group.rank == 0:
        _check_extras(specs, by_name, config, required, where, strict)
    chosen = parse_dtype(dtype) or config.dtype or _stored_dtype(found.values())

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        return found[name].read(slices)

    with _bar(progress, group, nbytes(specs, group, chosen)) as advance:
        return assemble(specs, read, group, device=device, dtype=chosen, progress=advance)


def layer_sources(layers: Layers, num_layers: int) -> dict[str, Any]:
    """Place -> source of every Component in a record that has one; for `load_params(..., sources=)`."""
    sources: dict[str, Any] = {}
    for index in (None, *range(num_layers)):
        record = layers.of(index)
        for name in FUNCTIONS:
            fn = getattr(record, name)
            if isinstance(fn, Component) and fn.source is not None:
                sources |= dict.fromkeys(_places(name, index), fn.source)
    return sources


def _places(function: str, index: int | None) -> tuple[str, ...]:
    """Where the parameters of a function stand: outside the layers (None), or in one of them."""
    if index is None:
        return (function,) if function in (*MODEL_FUNCTIONS, "norm") else ()
    if function in MODEL_FUNCTIONS:
        return ()
    names = ("input_layernorm", "post_attention_layernorm") if function == "norm" else (function,)
    return tuple(f"layers.{index}.{name}" for name in names)


def refill(params: PyTree, specs: PyTree, source: Any, group: Group = SINGLE, *, partial: bool = False) -> set[str]:
    """Overwrites this rank's parameters in place from new weights; the names written.

    source: a Hugging Face folder, a safetensors file, a mapping name -> whole tensor, a module, or an iterator of
    (name, whole tensor), whose tensors are used in the order they come and not kept. Names may carry trainers'
    prefixes. Raises ValueError for a wrong shape and, unless partial, when a name of the specs never came: a folder or
    a mapping is checked before anything is written, an iterator cannot be.
    """
    parts = {canonical(part.name): part for spec in spec_leaves(specs) for part in spec.parts}
    items: Iterable[tuple[str, Tensor]]
    if isinstance(source, str | Path | Mapping | nn.Module):
        tensors = _mapping(source)
        names = {canonical(name): name for name in tensors}
        shapes = {c: tuple(_shape(tensors, names[c])) for c in parts if c in names}
        _refuse_gaps(
            [part for c, part in parts.items() if c not in names and not partial],
            [(part, shapes[c]) for c, part in parts.items() if c in names and shapes[c] != part.shape],
            "the new weights",
        )
        items = ((parts[c].name, tensors[name]) for c, name in names.items() if c in parts)
    else:
        items = ((parts[canonical(n)].name if canonical(n) in parts else n, tensor) for n, tensor in source)
    written = fill(params, specs, items, group)
    _refuse_gaps([p for p in parts.values() if p.name not in written and not partial], [], "the new weights")
    return written


def canonical(name: str) -> str:
    """A tensor's name without what trainers wrap around it: module., base_model.model., _orig_mod., model. ..."""
    segments = [segment for segment in name.split(".") if segment not in _WRAPPERS]
    while segments and segments[0] in ("module", "base_model", "model"):
        segments = segments[1:]
    return ".".join(segments)


# --- the folder ------------------------------------------------------------------------------------------------------


def open_checkpoint(folder: str | Path) -> dict[str, Entry]:
    """Every tensor stored in a folder, by its stored name, from the headers alone.

    Raises ValueError for a folder without readable safetensors weights, naming what it holds instead and the way out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a folder that holds config.json and *.safetensors")
    files, weight_map = _weight_files(folder)
    missing = [file for file in files if not file.exists()]
    if missing:
        lost = [name for name, file in weight_map.items() if not (folder / file).exists()]
        tensors = f", with them {_compressed(lost)}" if lost else ""
        raise ValueError(
            f"{folder}: {', '.join(file.name for file in missing)} missing{tensors}; the download is incomplete:"
            " fetch the folder again"
        )
    stored = {file: read_header(file) for file in files}
    if weight_map:
        _check_index(folder, weight_map, stored)
        return {name: stored[folder / file][name] for name, file in weight_map.items()}
    return {name: entry for entries in stored.values() for name, entry in entries.items()}


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; one that is cut short, or no safetensors file at all, is a ValueError."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder, and should be a safetensors file; fetch it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or 8 + length > size:
            raise ValueError(f"{file} is cut short or no safetensors file ({size} bytes); fetch it again")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((int(value["data_offsets"][1]) for value in header.values()), default=0)
            entries = {
                name: Entry(file=file, name=name, dtype=value["dtype"], shape=tuple(value["shape"]))
                for name, value in header.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{file} has no readable safetensors header; fetch it again") from None
    if end > size:
        raise ValueError(f"{file} is cut short: {size} bytes of {end}; the download is incomplete, fetch it again")
    return entries


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """(files, weight map: tensor -> file name, empty without an index). A single file wins over an index."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE], {}
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no weight_map; fetch it again")
        if any(not isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{folder / INDEX} has a weight_map of other values than file names; fetch it again")
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_"))
    if not files:
        raise ValueError(_why_no_weights(folder))
    return _all_shards(files), {}


def _all_shards(files: list[Path]) -> list[Path]:
    """The files with the shards that their names (model-00001-of-00003) promise, present or not."""
    pattern = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
    for file in files:
        match = pattern.fullmatch(file.name)
        if match:
            stem, digits, count = match[1], len(match[2]), match[3]
            return [file.with_name(f"{stem}-{i:0{digits}}-of-{count}.safetensors") for i in range(1, int(count) + 1)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{files[0].parent} holds {names} and no {INDEX} that says which to use; fetch the index too")
    return files


def _why_no_weights(folder: Path) -> str:
    names = [file.name for file in folder.iterdir()]

    def some(*patterns: str) -> bool:
        return any(Path(name).match(pattern) for name in names for pattern in patterns)

    if "adapter_config.json" in names:
        return f"{folder} holds an adapter, not a model; merge it into its base first (peft: merge_and_unload)"
    if some("*.gguf"):
        return f"{folder} holds GGUF files only; use the model's safetensors checkpoint, GGUF is not read"
    if some("*.bin", "*.pt", "*.pth", "*.ckpt"):
        return (
            f"{folder} holds pickled weights (*.bin, *.pt) only; convert them to safetensors: load the folder with"
            " transformers and call save_pretrained"
        )
    return f"{folder} holds no *.safetensors; the download is incomplete or this is no model folder"


def _check_index(folder: Path, weight_map: Mapping[str, str], stored: Mapping[Path, Mapping[str, Entry]]) -> None:
    absent = [name for name, file in weight_map.items() if name not in stored[folder / file]]
    if absent:
        files = ", ".join(sorted({weight_map[name] for name in absent}))
        raise ValueError(
            f"{folder / INDEX} says that {files} holds {_compressed(absent)}, and it does not; the index and the files"
            " are of different checkpoints, or a download is incomplete: fetch the folder again"
        )


# --- matching names --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A tensor that can be read: its stored name, what its dtype is called, its shape, its slices."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], Tensor]


def _stored(entries: Mapping[str, Entry]) -> list[_Found]:
    open_file = _files()

    def found(name: str, entry: Entry) -> _Found:
        read = functools.partial(_stored_slice, open_file, entry)
        return _Found(name=name, dtype=entry.dtype, shape=entry.shape, read=read)

    return [found(name, entry) for name, entry in entries.items()]


def _given(name: str, tensor: Tensor) -> _Found:
    dtype = next((code for code, known in _FLOATS.items() if known is tensor.dtype), str(tensor.dtype))
    return _Found(name=name, dtype=dtype, shape=tuple(tensor.shape), read=tensor.__getitem__)


def _initialised(part: Part, spec: Spec) -> _Found:
    def read(slices: tuple[slice, ...]) -> Tensor:
        return init_part(part.name, part.shape, init=spec.init)[slices]

    return _Found(name=part.name, dtype="init", shape=part.shape, read=read)


def _locate(
    specs: PyTree,
    by_name: Mapping[str, _Found],
    sources: Mapping[str, Mapping[str, Tensor]],
    required: set[str],
    where: str,
) -> dict[str, _Found]:
    """Each part's tensor: of a source, the checkpoint or its init. Raises for all that is missing or misshapen."""
    missing: list[Part] = []
    misshapen: list[tuple[Part, tuple[int, ...]]] = []
    located: dict[str, _Found] = {}
    for spec in spec_leaves(specs):
        for part in spec.parts:
            found = _from_sources(part.name, sources) or by_name.get(canonical(part.name))
            if found is None and spec.init is not None and part.name not in required:
                found = _initialised(part, spec)
            if found is None:
                missing.append(part)
                continue
            located[part.name] = found
            _refuse_quantised(found, spec, where)
            if found.shape != part.shape:
                misshapen.append((part, found.shape))
    _refuse_gaps(missing, misshapen, where)
    return located


def _by_canonical_name(all_found: Iterable[_Found], where: str) -> dict[str, _Found]:
    by_name: dict[str, _Found] = {}
    for found in all_found:
        other = by_name.setdefault(canonical(found.name), found)
        if other is not found:
            raise ValueError(f"{where}: both {other.name} and {found.name} are the same tensor; keep one of them")
    return by_name


def _from_sources(name: str, sources: Mapping[str, Mapping[str, Tensor]]) -> _Found | None:
    for place, tensors in sources.items():
        relative = name[len(place) + 1 :] if place and name.startswith(f"{place}.") else name
        if place and relative == name:
            continue
        for key in (name, relative):
            if key in tensors:
                return _given(key, tensors[key])
    return None


def _mapping(source: Any) -> Mapping[str, Tensor]:
    """A source as a mapping name -> whole tensor: itself, a module's state, a file or folder, read when asked."""
    if isinstance(source, nn.Module):
        return source.state_dict()
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.exists():
            raise ValueError(f"{path} does not exist; give a safetensors file or a folder of them")
        return _Lazy(open_checkpoint(path) if path.is_dir() else read_header(path))
    raise ValueError(
        f"a {type(source).__name__} is no source of tensors; give a mapping, a safetensors file or a module"
    )


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return tensors.entries[name].shape if isinstance(tensors, _Lazy) else tuple(tensors[name].shape)


class _Lazy(Mapping[str, Tensor]):
    """Stored tensors as a mapping, mapped from their file when asked."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries, self.open_file = entries, _files()

    def __getitem__(self, name: str) -> Tensor:
        return _stored_slice(self.open_file, self.entries[name], tuple(slice(0, n) for n in self.entries[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _files() -> Callable[[Path], Any]:
    """A function that opens a safetensors file once and keeps it mapped as long as the function lives."""
    opened: dict[Path, Any] = {}

    def open_file(file: Path) -> Any:
        if file not in opened:
            try:
                opened[file] = safe_open(str(file), framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged ({error}); fetch it again") from error
        return opened[file]

    return open_file


def _stored_slice(open_file: Callable[[Path], Any], entry: Entry, slices: tuple[slice, ...]) -> Tensor:
    file = open_file(entry.file)
    if not entry.shape or 0 in entry.shape:
        return file.get_tensor(entry.name)
    if any(s.start == s.stop for s in slices):
        return torch.empty([s.stop - s.start for s in slices])
    return file.get_slice(entry.name)[slices]


# --- refusals --------------------------------------------------------------------------------------------------------


def _refuse_gaps(missing: list[Part], misshapen: list[tuple[Part, tuple[int, ...]]], where: str) -> None:
    """One ValueError that lists all that is missing and all that has another shape."""
    complaints = []
    if missing:
        names = [part.name for part in missing]
        hint = "the download may be incomplete: fetch the folder again"
        if names == ["lm_head.weight"]:
            hint = "if the head is the embedding, set tie_word_embeddings to true in config.json"
        complaints.append(f"{where}: no {_compressed(names)}; {hint}")
    if misshapen:
        wrong = ", ".join(f"{part.name} {list(shape)} instead of {list(part.shape)}" for part, shape in misshapen)
        complaints.append(
            f"{where} has other shapes than config.json asks for: {wrong}; fetch both from one checkpoint"
        )
    if complaints:
        raise ValueError("; ".join(complaints))


def _refuse_quantised(found: _Found, spec: Spec, where: str) -> None:
    integers_wanted = spec.dtype is not None and not spec.dtype.is_floating_point
    if found.dtype not in (*_FLOATS, "init") and not integers_wanted:
        raise ValueError(
            f"{where}: {found.name} is stored as {found.dtype}: the checkpoint is quantised; use the unquantised"
            " bf16, fp16 or fp32 checkpoint"
        )


def _check_extras(
    specs: PyTree, by_name: Mapping[str, _Found], config: ModelConfig, required: set[str], where: str, strict: bool
) -> None:
    """Tensors that no spec asks for: an error where dropping them changes the model, else one warning or nothing."""
    used = {canonical(part.name) for spec in spec_leaves(specs) for part in spec.parts}
    known = used | {canonical(name) for name in required}
    extras = [found.name for name, found in by_name.items() if name not in known and not _HARMLESS.search(found.name)]
    for pattern, what, way_out in (
        (_ADAPTER, "an adapter that is not merged", "merge it into its base first (peft: merge_and_unload)"),
        (_QUANTISED, "quantised weights", "use the unquantised bf16, fp16 or fp32 checkpoint"),
    ):
        matching = [name for name in extras if pattern.search(name)]
        if matching:
            raise ValueError(f"{where} holds {what} ({_compressed(matching)}); {way_out}")
    if config.tie_word_embeddings and "lm_head.weight" in map(canonical, extras):
        _check_tied_head(by_name, where)
        extras = [name for name in extras if canonical(name) != "lm_head.weight"]
    denied = [name for name in extras if _changes_the_model(canonical(name), used)]
    if denied:
        raise ValueError(
            f"{where} holds {_compressed(denied)}, which a {config.architecture} with this config.json does not use;"
            " without them the model is another: use the config.json that belongs to the weights"
        )
    if extras and strict:
        raise ValueError(f"{where} holds tensors that the model does not use: {_compressed(extras)}; remove them")
    if extras:
        warnings.warn(f"{where}: tensors that the model does not use: {_compressed(extras)}", stacklevel=3)


def _changes_the_model(name: str, used: set[str]) -> bool:
    """Whether an unused tensor is the bias of a used layer, or the head norm of a used attention."""
    layer, _, leaf = name.rpartition(".")
    norm_of = re.sub(r"[qk]_norm$", "q_proj", layer)
    return (leaf == "bias" and f"{layer}.weight" in used) or (norm_of != layer and f"{norm_of}.weight" in used)


def _check_tied_head(by_name: Mapping[str, _Found], where: str) -> None:
    """A stored head beside a tied config must be the embedding; a few rows tell."""
    head, embed = by_name["lm_head.weight"], by_name.get("embed_tokens.weight")
    if embed is None:
        return
    same = head.shape == embed.shape
    for row in (0, 1, head.shape[0] // 2, head.shape[0] - 1) if same else ():
        slices = (slice(row, row + 1), slice(0, head.shape[1]))
        same = same and torch.equal(head.read(slices).float().cpu(), embed.read(slices).float().cpu())
    if not same:
        raise ValueError(
            f"{where} stores an lm_head.weight that differs from the embedding, and config.json says"
            " tie_word_embeddings; set it to false to use the stored head"
        )


def _compressed(names: Iterable[str]) -> str:
    """Names with their layer numbers gathered: model.layers.{0-3,7}.mlp.up_proj.weight."""
    gathered: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?\.layers\.|layers\.)(\d+)(\..*)", name)
        key = (match[1], match[3]) if match else (name,)
        gathered.setdefault(key, []).append(int(match[2]) if match else 0)
    return ", ".join(key[0] if len(key) == 1 else f"{key[0]}{_braced(n)}{key[1]}" for key, n in gathered.items())


def _braced(numbers: list[int]) -> str:
    text = layer_ranges(numbers)
    return text if text.isdigit() else f"{{{text}}}"


def layer_ranges(numbers: Iterable[int]) -> str:
    """Numbers of layers in short: 0-3,7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# --- dtype and progress ----------------------------------------------------------------------------------------------


def _stored_dtype(found: Iterable[_Found]) -> torch.dtype:
    """The dtype of the largest stored tensor; fp32 where none is stored."""
    floats = [tensor for tensor in found if tensor.dtype in ("F32", "F16", "BF16")]
    if not floats:
        return torch.float32
    return _FLOATS[max(floats, key=lambda tensor: math.prod(tensor.shape)).dtype]


@contextlib.contextmanager
def _bar(progress: bool | None, group: Group, total: int) -> Iterator[Callable[[int], None] | None]:
    wanted = sys.stderr.isatty() if progress is None else progress
    if not wanted or group.rank != 0:
        yield None
        return
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=total)
        yield lambda count: bar.advance(task, count)
