"""How the ranks meet: devices, the process group of an engine, and the rendezvous of a launcher like torchrun."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from funcllm.group import Group, _ProcessHandle
from funcllm.launch.channel import Channel

JOIN_TIMEOUT = 120.0  # seconds in which all ranks, once alive, must meet in the process group

_LOOPBACK = "127.0.0.1"
_GREETING_SIZE = 18  # bytes of a token and a rank
_GREETING_TIMEOUT = 10.0

_joining = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place in an engine. name: of the process group; timeout: seconds that a collective may take."""

    rank: int
    size: int
    device: torch.device
    name: str
    timeout: float


def device_of(device: str | torch.device, rank: int, tp: int) -> torch.device:
    """The device of a rank; a GPU's index counts from that of `device`, or is LOCAL_RANK under torchrun."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    first, visible = device.index or 0, torch.cuda.device_count()
    local = rank % int(os.environ.get("LOCAL_WORLD_SIZE", tp)) if torchrun_rank(tp) is not None else rank
    if first + local >= visible:
        raise ValueError(f"rank {rank} of tp={tp} needs GPU {first + local}, {visible} are visible; use a smaller tp")
    return torch.device("cuda", first + local)


def set_device(device: torch.device) -> None:
    """Before anything else touches CUDA: a rank must open no context on another rank's GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def threads_per_rank(tp: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // tp)


def join(store: dist.Store, place: Place) -> dist.ProcessGroup:
    """A process group of its own, beside whatever default group the process may have.

    On GPUs, CUDA tensors go through NCCL and CPU tensors through gloo. The name counts the engines of a process, and is
    the same in every run: it is part of compiled code, which a random name would compile anew at every start.
    """
    with alone(store):
        return make_group(store, place)


@contextlib.contextmanager
def alone(store: dist.Store) -> Iterator[None]:
    """Sees to it that no other engine joins, and that the default group stands aside, while `make_group` runs.

    May be left while a `make_group` in another thread waits for a rank that died.
    """
    changes = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # the monitor sees to deaths; NCCL's own would kill the caller
    if isinstance(store, dist.TCPStore) and sys.platform == "linux":
        changes["GLOO_SOCKET_IFNAME"] = "lo"
    with _joining, _environment(changes):
        previous = dist.GroupMember.WORLD
        dist.distributed_c10d._update_default_pg(None)
        try:
            yield
        finally:
            dist.distributed_c10d._update_default_pg(previous)


def make_group(store: dist.Store, place: Place) -> dist.ProcessGroup:
    """The process group of `join`; for code that is `alone`. Waits for all ranks."""
    c10d = dist.distributed_c10d
    set_device(place.device)
    on_gpu = place.device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    handle, _ = c10d._new_process_group_helper(
        place.size,
        place.rank,
        [],
        dist.Backend(backend) if ":" not in backend else backend,
        store,
        group_name=place.name,  # type: ignore[arg-type]
        timeout=timedelta(seconds=place.timeout),
        device_id=place.device if on_gpu else None,
        group_desc="funcllm",
    )
    c10d._world.pg_group_ranks[handle] = {r: r for r in range(place.size)}
    return handle


def group_of(handle: dist.ProcessGroup) -> Group:
    return Group(handle.rank(), handle.size(), _ProcessHandle(handle.group_name, handle.size()))


def leave(handle: dist.ProcessGroup | None) -> None:
    if handle is not None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group(handle)


def abort(handle: dist.ProcessGroup) -> None:
    """Frees whoever is stuck in a collective of this group, and forgets the group."""
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):
            handle._get_backend(torch.device("cuda")).abort()
    with contextlib.suppress(Exception):
        dist.distributed_c10d._abort_process_group(handle)


def torchrun_rank(tp: int) -> int | None:
    """This process's rank where a launcher like torchrun started one process per rank, else None."""
    if tp == 1 or not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    size = int(os.environ["WORLD_SIZE"])
    if size != tp:
        raise ValueError(f"WORLD_SIZE={size} is set by a launcher but tp={tp}; start {tp} processes or unset RANK")
    return int(os.environ["RANK"])


def torchrun_store(place: Place) -> dist.Store:
    """The launcher's store, under the name of this engine."""
    timeout = timedelta(seconds=JOIN_TIMEOUT)
    store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.size, timeout=timeout)))
    return dist.PrefixStore(place.name, store)


def own_store(size: int, port: int = 0) -> dist.TCPStore:
    """The store of an engine on one host. Rank 0 binds it, to a port that is free (0); the others give that port.

    It listens on the loopback interface only.
    """
    timeout = timedelta(seconds=JOIN_TIMEOUT)
    if port:
        return dist.TCPStore(_LOOPBACK, port, size, is_master=False, timeout=timeout)
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        _LOOPBACK, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def reach_rank_0(store: dist.Store, rank: int) -> Channel:
    """A launcher's worker's channel to rank 0."""
    address = (os.environ["MASTER_ADDR"], int(store.get("port")))
    connection = socket.create_connection(address, JOIN_TIMEOUT)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes.fromhex(store.get("token").decode()) + rank.to_bytes(2, "little"))
    return Channel(connection)


def accept_workers(store: dist.Store, tp: int) -> list[Channel]:
    """Channels to ranks 1 and up: they connect to a port that rank 0 announces and prove that they read the store."""
    token = secrets.token_bytes(16)
    with socket.create_server(("", 0)) as server:
        server.settimeout(JOIN_TIMEOUT)
        store.set("token", token.hex())
        store.set("port", str(server.getsockname()[1]))
        channels: dict[int, Channel] = {}
        while len(channels) < tp - 1:
            connection, _ = server.accept()
            greeting = _greeting(connection)
            rank = int.from_bytes(greeting[16:], "little")
            known = len(greeting) == _GREETING_SIZE and secrets.compare_digest(greeting[:16], token)
            if not known or not 0 < rank < tp or rank in channels:
                connection.close()
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channels[rank] = Channel(connection)
    return [channels[rank] for rank in sorted(channels)]


def _greeting(connection: socket.socket) -> bytes:
    """What a connection says first; less where it does not say it in time, as a stranger may not."""
    greeting = b""
    connection.settimeout(_GREETING_TIMEOUT)
    with contextlib.suppress(OSError):
        while len(greeting) < _GREETING_SIZE and (more := connection.recv(_GREETING_SIZE - len(greeting))):
            greeting += more
    return greeting


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Environment variables for the time of a call; what the user set stays."""
    added = [name for name in changes if name not in os.environ]
    os.environ.update({name: changes[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
