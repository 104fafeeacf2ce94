"""From every rank's parameters back to a Hugging Face folder.

Owns the layout of a written folder: unfused tensors under their checkpoint names without vocabulary padding, shards of
bounded size, an index when there are several, config.json and generation_config.json. Rank 0 writes; the others only
give their slices.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from funcllm.config import ModelConfig
from funcllm.group import SINGLE, Group, all_gather, all_reduce
from funcllm.specs import part_pairs
from funcllm.types import Part, PyTree
from funcllm.weights.load import INDEX, SINGLE_FILE

MAX_SHARD_BYTES = 5 << 30

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def save_params(
    params: PyTree,
    specs: PyTree,
    config: ModelConfig,
    folder: str | Path,
    *,
    group: Group = SINGLE,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a Hugging Face folder; every rank of the group calls it, and rank 0 writes.

    The tensors keep their dtype, and config.json names that of the largest. tokenizer_from: a folder whose tokenizer
    files are copied. Raises ValueError when the folder already holds weights, unless overwrite.
    """
    folder = Path(folder)
    pairs = part_pairs(specs, params, group)
    _prepare_together(folder, tokenizer_from, overwrite, group, pairs[0][1].device)
    if group.rank != 0:
        for part, view in pairs:
            _whole(part, view, group)
        return
    shards = split_shards([(part.name, part.shape, view.dtype) for part, view in pairs], max_shard_bytes)
    tensors = iter((part.name, _whole(part, view, group)) for part, view in pairs)
    write_shards(folder, shards, lambda name: _next(tensors, name))
    largest = max((view for _, view in pairs), key=lambda view: view.numel())
    write_config(folder, config, largest.dtype)
    if tokenizer_from is not None:
        copy_tokenizer(Path(tokenizer_from), folder)


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Makes the folder; weights that are already there are an error, or removed when overwrite says so."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    old = [*folder.glob("*.safetensors"), *folder.glob(INDEX)]
    if old and not overwrite:
        raise ValueError(f"{folder} already holds weights ({old[0].name}); name another folder, or overwrite it")
    for file in old:
        file.unlink()


def split_shards(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], max_shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut into shards of at most max_shard_bytes (one larger tensor is a shard of its own)."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[str]],
    tensor: Callable[[str], Tensor],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes each shard from tensor(name), asked in order, one shard in memory at a time; then the index if several."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = tensor(name)
            total += tensors[name].nbytes
            if progress is not None:
                progress(tensors[name].nbytes)
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_config(folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    """config.json, naming the dtype of the stored weights, and generation_config.json."""
    write_json(folder / "config.json", config.to_dict() | {"torch_dtype": str(dtype).removeprefix("torch.")})
    write_json(folder / "generation_config.json", config.generation_to_dict())


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a model folder's tokenizer files. Raises ValueError where there are none."""
    for file in _tokenizer_files(source):
        if file.resolve() != (folder / file.name).resolve():
            shutil.copyfile(file, folder / file.name)


def _tokenizer_files(source: Path) -> list[Path]:
    files = [source / name for name in TOKENIZER_FILES if (source / name).exists()]
    if not files:
        raise ValueError(f"{source} holds no tokenizer; name a folder with tokenizer.json")
    return files


def _prepare_together(
    folder: Path, tokenizer_from: str | Path | None, overwrite: bool, group: Group, device: torch.device
) -> None:
    """Rank 0 prepares the folder; when it cannot, every rank raises, so that none waits for slices."""
    error: Exception | None = None
    if group.rank == 0:
        try:
            if tokenizer_from is not None:
                _tokenizer_files(Path(tokenizer_from))
            prepare_folder(folder, overwrite=overwrite)
        except (ValueError, OSError) as caught:
            error = caught
    failed = all_reduce(torch.tensor([int(error is not None)], dtype=torch.int32, device=device), group)
    if error is not None:
        raise error
    if failed.item():
        raise ValueError(f"rank 0 cannot write to {folder}; its error says why")


def _whole(part: Part, view: Tensor, group: Group) -> Tensor:
    """The checkpoint's tensor from every rank's slice, padding cut off; on the CPU for rank 0, to be written."""
    view = view.detach()
    if part.axis is not None and part.shards > 1:
        width = view.shape[part.axis]
        slices = all_gather(view.contiguous(), group, part.axis).split(width, part.axis)
        view = torch.cat(slices[:: group.size // part.shards], part.axis)
        view = view.narrow(part.axis, 0, part.shape[part.axis])
    return view.to("cpu", copy=True).contiguous() if group.rank == 0 else view


def _next(tensors: Iterable[tuple[str, Tensor]], name: str) -> Tensor:
    found, tensor = next(iter(tensors))
    assert found == name, f"{found} came where {name} was to be written"
    return tensor
