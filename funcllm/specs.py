"""The algebra of Spec trees: one tree gives shapes, shards, random values, byte counts, loading and saving.

A Spec tree has the structure of the parameter tree that it describes, with a Spec where a tensor stands and `()` where
nothing does. Functions that take both trees walk them together; none of them knows an architecture.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from funcllm.group import SINGLE, Group
from funcllm.types import Part, PyTree, Read, Spec

STAGING_BYTES = 32 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


def is_spec(x: Any) -> bool:
    """Whether x is a Spec, the leaf of a Spec tree."""
    return isinstance(x, Spec)


def spec_leaves(specs: PyTree) -> list[Spec]:
    """The Specs of a tree, in its order. Raises ValueError for any other leaf."""
    leaves, _ = tree_flatten(specs, is_leaf=is_spec)
    for leaf in leaves:
        if not is_spec(leaf):
            raise ValueError(f"a tree of Specs holds a {type(leaf).__name__}; its leaves must be Spec, absent ones ()")
    return leaves


def map_specs(fn: Callable[[Spec], Any], specs: PyTree) -> PyTree:
    """The tree with fn(spec) in place of each Spec."""
    spec_leaves(specs)
    return tree_map(fn, specs, is_leaf=is_spec)


# --- shapes ----------------------------------------------------------------------------------------------------------


def local_slices(part: Part, group: Group = SINGLE) -> tuple[slice, ...]:
    """This rank's slice of the checkpoint's tensor, an axis at a time; the last one may be short, even empty."""
    slices = [slice(0, size) for size in part.shape]
    if part.axis is not None:
        size, width = part.shape[part.axis], _width(part)
        start = min(_shard(part, group) * width, size)
        slices[part.axis] = slice(start, min(start + width, size))
    return tuple(slices)


def local_part_shape(part: Part, group: Group = SINGLE) -> tuple[int, ...]:
    """The shape of this rank's slice with its padding: the same on every rank."""
    if part.axis is None:
        return part.shape
    return part.shape[: part.axis] + (_width(part),) + part.shape[part.axis + 1 :]


def local_shape(spec: Spec, group: Group = SINGLE) -> tuple[int, ...]:
    """The shape of this rank's parameter. Raises ValueError for parts that do not fit together."""
    shapes = [local_part_shape(part, group) for part in spec.parts]
    if not shapes:
        raise ValueError("a Spec needs at least one Part")
    if any(shape[0 if spec.stack else 1 :] != shapes[0][0 if spec.stack else 1 :] for shape in shapes):
        names = ", ".join(f"{part.name} {list(shape)}" for part, shape in zip(spec.parts, shapes))
        raise ValueError(f"parts do not {'stack' if spec.stack else 'concatenate along axis 0'}: {names}")
    if spec.stack:
        return (len(shapes), *shapes[0])
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def nbytes(specs: PyTree, group: Group = SINGLE, dtype: torch.dtype = torch.bfloat16) -> int:
    """The bytes that this rank's parameters take."""
    return sum(math.prod(local_shape(spec, group)) * (spec.dtype or dtype).itemsize for spec in spec_leaves(specs))


def part_views(spec: Spec, param: Tensor, group: Group = SINGLE) -> Iterator[tuple[Part, Tensor]]:
    """Each part with its view into the parameter, padding included."""
    start = 0
    for index, part in enumerate(spec.parts):
        if spec.stack:
            yield part, param[index]
        elif len(spec.parts) == 1:
            yield part, param
        else:
            rows = local_part_shape(part, group)[0]
            yield part, param.narrow(0, start, rows)
            start += rows


def named(params: PyTree, specs: PyTree, group: Group = SINGLE) -> dict[str, Tensor]:
    """Checkpoint names -> views of this rank's slices, without padding. Writing to a view changes the parameter."""
    return {part.name: _unpadded(view, part, group) for part, view in part_pairs(specs, params, group)}


def part_pairs(specs: PyTree, params: PyTree, group: Group = SINGLE) -> list[tuple[Part, Tensor]]:
    """Every part of the tree with its view, padding included, in the tree's order: the same order on every rank."""
    return [pair for spec, param in _pairs(specs, params) for pair in part_views(spec, param, group)]


# --- filling ---------------------------------------------------------------------------------------------------------


def assemble(
    specs: PyTree,
    read: Read,
    group: Group = SINGLE,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int], None] | None = None,
) -> PyTree:
    """This rank's parameters, each allocated once and filled part by part from read(name, slices).

    progress: told the bytes of each parameter when it stands. Made under no_grad, not in inference mode: autograd and
    in-place updates work on them. Raises ValueError where a tensor read has not the shape that its slices ask for.
    """
    stage = Staging(torch.device(device))

    def make(spec: Spec) -> Tensor:
        param = torch.empty(local_shape(spec, group), dtype=spec.dtype or dtype, device=device)
        for part, view in part_views(spec, param, group):
            slices = local_slices(part, group)
            _fill_part(view, part, group, _checked(read(part.name, slices), part, slices), stage)
        if progress is not None:
            progress(param.nbytes)
        return param

    with torch.inference_mode(False), torch.no_grad():
        params = map_specs(make, specs)
    stage.finish()
    return params


def fill(params: PyTree, specs: PyTree, items: Iterable[tuple[str, Tensor]], group: Group = SINGLE) -> set[str]:
    """Writes whole tensors (name, tensor) into this rank's parameters, in place and in any order; the names written.

    Names that the specs do not know are left alone. Raises ValueError for a wrong shape, before that tensor is written.
    """
    places: dict[str, list[tuple[Part, Tensor]]] = {}
    for part, view in part_pairs(specs, params, group):
        places.setdefault(part.name, []).append((part, view))
    written = set()
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in items:
            for part, view in places.get(name, ()):
                if tuple(tensor.shape) != part.shape:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}; the model needs {list(part.shape)}")
                _unpadded(view, part, group).copy_(tensor[local_slices(part, group)])
                written.add(name)
    return written


def init_params(
    specs: PyTree,
    group: Group = SINGLE,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    std: float = 0.02,
) -> PyTree:
    """Random parameters: the same whole tensors for a seed at every tensor-parallel size and on every device.

    Each part is drawn by `init_part`, this rank's slice alone where that is a run of rows: on a GPU, or a few ahead on
    other threads.
    """
    on_gpu = torch.device(device).type == "cuda"
    drawn = [(part, spec) for spec in spec_leaves(specs) for part in spec.parts]

    def draw(item: tuple[Part, Spec]) -> Tensor:
        part, spec = item
        slices = local_slices(part, group)
        wanted = spec.dtype or dtype
        value = init_part(
            part.name,
            part.shape,
            seed=seed,
            std=std,
            init=spec.init,
            rows=slices[0] if slices else None,
            device=device if on_gpu else "cpu",
            dtype=wanted if wanted in _DRAWN_DTYPES else torch.float32,
        )
        return value[(slice(None),) + slices[1:]] if slices else value

    tensors = map(draw, drawn) if on_gpu else ahead(draw, drawn)
    return assemble(specs, lambda name, slices: next(tensors), group, device=device, dtype=dtype)


def init_part(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    std: float = 0.02,
    init: Any = None,
    rows: slice | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The random value of one checkpoint tensor, whole or its `rows`: a function of (seed, name, shape) alone.

    Without an init of its own a matrix is normal with deviation std, a bias 0, and any other vector (a norm) 1. The
    numbers are the same bits on every device and for every choice of rows, in fp32 or rounded from it. init(shape,
    generator) is called for the whole tensor, on the CPU, and gives its own device and dtype.
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
    if init is not None:
        with torch.device("cpu"):
            value = init(shape, torch.Generator().manual_seed(key >> 1))
        return value if rows is None else value[rows]
    start, stop, _ = (rows or slice(None)).indices(shape[0] if shape else 1)
    taken = (max(0, stop - start), *shape[1:]) if shape else shape
    if len(shape) > 1:
        first = start * math.prod(shape[1:])
        return normal_values(key, first, math.prod(taken), std, device, dtype).view(taken)
    return torch.full(taken, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)


def normal_values(
    key: int,
    start: int,
    count: int,
    std: float = 1.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Numbers start to start + count of the endless sequence that belongs to a key: normal, with deviation std.

    Number i is one of 65536 quantiles of the normal distribution, chosen by 16 bits of a hash of (key, i // 4): integer
    operations and a look-up, whose bits are the same everywhere. The hash is two rounds of xor and multiply over the
    words of a Weyl sequence.
    """
    device = torch.device(device)
    table_q = _quantiles(std).to(dtype).to(device)
    out_n = torch.empty(count, dtype=dtype, device=device)
    first, last = start // 4, -(-(start + count) // 4)
    size = max(1, min(_CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS, last - first))
    steps_w = torch.arange(size, device=device) * _signed(_WEYL)
    words_w = torch.empty_like(steps_w)
    halves_w2, pieces_n = words_w.view(torch.int32).view(-1, 2), words_w.view(torch.int16)
    for word in range(first, last, size):
        torch.add(steps_w, _signed(key + word * _WEYL), out=words_w)
        halves_w2[:, 0] ^= halves_w2[:, 1]
        for _ in range(2):
            words_w *= _signed(_MIX)
            halves_w2[:, 0] ^= halves_w2[:, 1]
        begin, end = max(start, 4 * word), min(start + count, 4 * (word + size))
        picked = pieces_n[begin - 4 * word : end - 4 * word].to(torch.int32) + (1 << 15)
        torch.index_select(table_q, 0, picked, out=out_n[begin - start : end - start])
    return out_n


_DRAWN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU_WORDS, _DEVICE_WORDS = 1 << 14, 1 << 22  # hashed at a time: in cache, and enough for a GPU with 0.3 GB for it
_WEYL, _MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # 2^64 / golden ratio; an odd number that mixes well


@functools.lru_cache(maxsize=8)
def _quantiles(std: float) -> Tensor:
    """65536 numbers of mean 0 and deviation std that split the normal distribution evenly, in fp32 on the CPU."""
    with torch.device("cpu"), torch.inference_mode(False):
        upper = torch.special.ndtri((torch.arange(1 << 15, dtype=torch.float64) + 0.5) / (1 << 16) + 0.5)
        upper = upper * (std / upper.square().mean().sqrt())
        return torch.cat([-upper.flip(0), upper]).float()


def _signed(value: int) -> int:
    """The low 64 bits of a number as the int64 of the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def ahead(fn: Callable[[Item], Result], items: Iterable[Item], workers: int = 0) -> Iterator[Result]:
    """fn(item) for each item, in order, with up to `workers` (default: one a core, 8 at most) running ahead."""
    workers = workers or min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[Result]] = deque()
        for item in items:
            running.append(pool.submit(fn, item))
            if len(running) > workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


# --- modules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FromModule:
    """An init that gives a module's own value; for `specs_of`."""

    value: Tensor

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return self.value


def specs_of(module: nn.Module, prefix: str) -> dict[str, Spec]:
    """The Specs of a module's state, whole on every rank: the module's own names -> Spec, named `prefix.name`.

    A parameter node of this structure goes straight into `torch.func.functional_call(module, params, args)`. Where no
    source has a tensor, the module's own value stands. Integer buffers keep their dtype.
    """

    def spec(name: str, tensor: Tensor) -> Spec:
        part = Part(name=f"{prefix}.{name}" if prefix else name, shape=tuple(tensor.shape))
        dtype = None if tensor.is_floating_point() else tensor.dtype
        return Spec(parts=(part,), init=FromModule(tensor.detach().cpu()), dtype=dtype)

    return {name: spec(name, tensor) for name, tensor in module.state_dict().items()}


def whole(specs: PyTree) -> PyTree:
    """The same specs with every part whole on every rank: what a single rank would hold."""

    def unsharded(spec: Spec) -> Spec:
        return replace(spec, parts=tuple(replace(p, axis=None, shards=1, owner=None) for p in spec.parts))

    return map_specs(unsharded, specs)


# --- private ---------------------------------------------------------------------------------------------------------


def _shard(part: Part, group: Group) -> int:
    if not 1 <= part.shards <= group.size or group.size % part.shards:
        raise ValueError(f"{part.name}: {part.shards} shards do not go over {group.size} ranks; use a divisor of it")
    return group.rank * part.shards // group.size


def _width(part: Part) -> int:
    assert part.axis is not None
    return -(-part.shape[part.axis] // part.shards)


def _unpadded(view: Tensor, part: Part, group: Group) -> Tensor:
    if part.axis is None:
        return view
    own = local_slices(part, group)[part.axis]
    return view.narrow(part.axis, 0, own.stop - own.start)


def _pairs(specs: PyTree, params: PyTree) -> list[tuple[Spec, Tensor]]:
    leaves, structure = tree_flatten(specs, is_leaf=is_spec)
    spec_leaves(leaves)
    return list(zip(leaves, structure.flatten_up_to(params)))


def _checked(tensor: Tensor, part: Part, slices: tuple[slice, ...]) -> Tensor:
    expected = tuple(s.stop - s.start for s in slices)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{part.name} was read with shape {list(tensor.shape)}; the model needs {list(expected)}")
    return tensor


def _fill_part(view: Tensor, part: Part, group: Group, tensor: Tensor, stage: Staging) -> None:
    own = _unpadded(view, part, group)
    stage.copy(own, tensor)
    if part.axis is not None and own.shape != view.shape:
        used = own.shape[part.axis]
        view.narrow(part.axis, used, view.shape[part.axis] - used).zero_()


class Staging:
    """Copies host tensors to a device: two pinned buffers in turn on CUDA, a plain copy elsewhere.

    A page-cached file is read into one buffer while the other is on its way, which a copy from pageable memory cannot.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        self.buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self.turn = 0
        if device.type == "cuda":
            stage = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self.buffers = [(buffer, torch.cuda.Event()) for buffer in stage]
        self.device = device

    def copy(self, target: Tensor, tensor: Tensor) -> None:
        if not self.buffers or tensor.device.type != "cpu" or target.numel() == 0:
            target.copy_(tensor)
            return
        capacity = len(self.buffers[0][0])
        row_bytes = max(1, target[:1].numel() * target.element_size()) if target.dim() else target.element_size()
        if not target.dim() or row_bytes > capacity:
            target.copy_(tensor)
            return
        rows = capacity // row_bytes
        for start in range(0, target.shape[0], rows):
            self._send(target[start : start + rows], tensor[start : start + rows])

    def finish(self) -> None:
        """Waits until every copy has arrived; the buffers may go after it."""
        if self.buffers:
            torch.cuda.current_stream(self.device).synchronize()

    def _send(self, target: Tensor, rows: Tensor) -> None:
        buffer, sent = self.buffers[self.turn]
        self.turn = 1 - self.turn
        sent.synchronize()
        pinned = buffer[: rows.numel() * target.element_size()].view(target.dtype).view(rows.shape)
        pinned.copy_(rows)
        target.copy_(pinned, non_blocking=True)
        sent.record(torch.cuda.current_stream(self.device))
