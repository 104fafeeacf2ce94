"""How many KV blocks fit: arithmetic on measured bytes, agreed among the ranks.

Pure functions of their arguments, but for `measure_kv_blocks` and `device_memory`, which read what the machine has. The
order of measuring is the caller's: compile, then the peak of the largest step, then a dry capture, then this.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from funcllm.group import SINGLE, Group, all_gather

TRASH_BLOCKS = 1  # block 0 takes the writes of padding and dead rows
PREFIX_ALLOWANCE = 0.25  # blocks for cached prefixes beyond what running sequences can use
GPU_FRACTION = 0.9
CPU_FRACTION = 0.3


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank's device, measured with the weights loaded and caches of allocators emptied.

    total, free: of the device, other processes' use taken off free. peak_activation: what the largest step needs beside
    the weights. graphs: what captures will take. state: sequence state, rings, logits and scratch, not allocated yet.
    """

    total: int
    free: int
    weights: int
    peak_activation: int = 0
    graphs: int = 0
    state: int = 0

    @property
    def reserved(self) -> int:
        """What must stay free for other things than KV blocks."""
        return self.peak_activation + self.graphs + self.state


def cache_bytes(init_cache: Callable[..., Any], block_size: int, num_rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of one more block, bytes that do not depend on the number of blocks) of any cache a model makes.

    init_cache(num_blocks, block_size, num_rows, device, dtype), as in Model; it runs on the meta device.
    """
    one, two = (_tree_bytes(init_cache(n, block_size, num_rows, torch.device("meta"), dtype)) for n in (1, 2))
    return two - one, 2 * one - two


def useful_kv_blocks(
    max_num_seqs: int, max_model_len: int, block_size: int, allowance: float = PREFIX_ALLOWANCE
) -> int:
    """The largest pool that can be of use: every sequence at full length, prefixes on top, and the trash block."""
    sequences = max_num_seqs * blocks_of(max_model_len, block_size)
    return sequences + math.ceil(allowance * sequences) + TRASH_BLOCKS


def blocks_of(length: int, block_size: int) -> int:
    """How many blocks a sequence of this length takes."""
    return -(-length // block_size)


def fitting_kv_blocks(
    use: MemoryUse, bytes_per_block: int, fraction: float, size_by: Literal["total", "free"] = "total"
) -> int:
    """How many blocks fit into one rank's budget; 0 where not one does.

    size_by "total": weights, activations, graphs, state and blocks take at most `fraction` of the device, and never
    more than what other processes left. "free": they take at most `fraction` of what is free with the weights loaded.
    """
    left = use.free - use.reserved
    wanted = fraction * use.total - use.weights if size_by == "total" else fraction * use.free
    return max(0, int(min(left, wanted - use.reserved)) // bytes_per_block)


def num_kv_blocks(
    use: MemoryUse,
    bytes_per_block: int,
    *,
    group: Group,
    cap: int,
    minimum: int = 1 + TRASH_BLOCKS,
    fraction: float = GPU_FRACTION,
    size_by: Literal["total", "free"] = "total",
    kv_blocks: int | None = None,
) -> int:
    """The number of KV blocks of every rank: what fits on the rank with the least memory, and not more than cap.

    kv_blocks: the number that the user wants, which is taken as it is if it fits. minimum: what the engine cannot do
    without, the trash block included. A collective: every rank calls it and gets the same number, or the same
    ValueError, which names the numbers of the tightest rank.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"memory fraction {fraction} must be above 0 and at most 1")
    if kv_blocks is not None and kv_blocks < minimum:
        raise ValueError(f"kv_blocks={kv_blocks} is below {minimum}, the least that works, trash block included")
    # An explicit number skips the guess: it must fit into what is free, whatever the fraction.
    fitting = fitting_kv_blocks(use, bytes_per_block, *((fraction, size_by) if kv_blocks is None else (1.0, "free")))
    table = all_gather(torch.tensor([[fitting, *astuple(use)]], dtype=torch.int64), group).tolist()
    rank, (least, *numbers) = min(enumerate(table), key=lambda entry: entry[1][0])
    wanted = min(cap, least) if kv_blocks is None else kv_blocks
    needed = minimum if kv_blocks is None else kv_blocks
    if needed > least:
        tightest = MemoryUse(**dict(zip(MemoryUse.__dataclass_fields__, numbers)))
        raise ValueError(_too_small(tightest, rank, group.size, bytes_per_block, least, needed, kv_blocks))
    if wanted < minimum:
        raise ValueError(f"a pool of {wanted} KV blocks is below {minimum}, the least that works; raise max_num_seqs")
    return wanted


def measure_kv_blocks(
    *,
    device: torch.device,
    weight_bytes: int,
    peak_bytes: int,
    graph_bytes: int,
    bytes_per_block: int,
    fraction: float,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    group: Group = SINGLE,
    kv_blocks: int | None = None,
) -> int:
    """num_kv_blocks for this device as it is now: weights and state allocated, the cache and the graphs not yet.

    On a CPU the pool takes at most CPU_FRACTION of the memory that is free, shared by all ranks, whatever `fraction`.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        weight_bytes = max(weight_bytes, torch.cuda.memory_allocated(device))
    total, free = device_memory(device, sharing=1 if on_gpu else group.size)
    return num_kv_blocks(
        MemoryUse(total=total, free=free, weights=weight_bytes, peak_activation=peak_bytes, graphs=graph_bytes),
        bytes_per_block,
        group=group,
        cap=useful_kv_blocks(max_num_seqs, max_model_len, block_size),
        fraction=fraction if on_gpu else min(fraction, CPU_FRACTION),
        size_by="total" if on_gpu else "free",
        kv_blocks=kv_blocks,
    )


def device_memory(device: torch.device, sharing: int = 1) -> tuple[int, int]:
    """(total, free) bytes of a device. `sharing` ranks divide one memory, as they do on a CPU.

    A CPU's memory is what the machine has, or what its container may use if that is less.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        total, free = _host_memory()
    return total // sharing, free // sharing


def describe(use: MemoryUse) -> str:
    """The numbers behind a decision, for people."""
    names = {"total": use.total, "free": use.free, "weights": use.weights, "peak activation": use.peak_activation}
    names |= {"graphs": use.graphs, "state": use.state}
    return ", ".join(f"{name} {gib(size)}" for name, size in names.items())


def gib(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _too_small(
    use: MemoryUse, rank: int, size: int, bytes_per_block: int, fitting: int, needed: int, kv_blocks: int | None
) -> str:
    where = f"rank {rank} of {size}" if size > 1 else "the device"
    why = f"kv_blocks={kv_blocks}" if kv_blocks is not None else f"the least that works is {needed} KV blocks"
    others = use.total - use.free - use.weights
    neighbour = f"; other processes and the context hold {gib(others)}" if others > use.total // 10 else ""
    way_out = "lower kv_blocks" if kv_blocks is not None else "raise the memory fraction, lower max_model_len"
    return (
        f"{why} ({gib(needed * bytes_per_block)}), but {fitting} of {gib(bytes_per_block)} fit on {where}: "
        f"{describe(use)}{neighbour}; {way_out}, use a larger tp, or free memory"
    )


def _tree_bytes(tree: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) of the host, or of the control group that this process is confined to."""
    total, available = _meminfo(root / "proc/meminfo")
    for limit_file, usage_file in (
        (root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"),
        (root / "sys/fs/cgroup/memory/memory.limit_in_bytes", root / "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _number_in(limit_file), _number_in(usage_file)
        if limit is not None and limit < total:
            return limit, max(0, min(available, limit - (usage or 0)))
    return total, available


def _meminfo(path: Path) -> tuple[int, int]:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return tuple(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
