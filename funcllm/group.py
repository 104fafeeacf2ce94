"""Groups of ranks and the collectives over them: the only place that communicates.

A `Group` is an explicit static argument. Its handle does the work: torch.distributed between processes, a barrier and
shared slots between threads of one process, nothing for a single rank. The collectives are out of place and carry their
own derivative rules, so that a model may be differentiated at any tensor-parallel size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Handle(Protocol):
    def all_reduce(self, x: Tensor, op: str) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, concatenated along axis 0 in rank order."""
        ...


@dataclass(frozen=True)
class Group:
    """This rank's place among `size` ranks that share a model."""

    rank: int = 0
    size: int = 1
    handle: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not among the {self.size} ranks of the group, 0 to {self.size - 1}")


SINGLE = Group()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The elementwise sum of every rank's x, on every rank. `x` itself for a single rank.

    The transpose of a sum over ranks is a sum over ranks: a gradient that passes through is summed too, see
    `funcllm.grads.sync_grads`.
    """
    if group.size == 1:
        return x
    if torch.compiler.is_compiling() or not _differentiable(x):
        return group.handle.all_reduce(x, "sum")
    return _AllReduce.apply(x, group)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """The elementwise maximum over the ranks; not differentiable."""
    return x if group.size == 1 else group.handle.all_reduce(x, "max")


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Every rank's x, concatenated along `dim` in rank order, on every rank. `x` itself for a single rank."""
    if group.size == 1:
        return x
    if torch.compiler.is_compiling() or not _differentiable(x):
        return _gather(x, group, dim)
    return _AllGather.apply(x, group, dim)


def process_group(handle: dist.ProcessGroup | None = None) -> Group:
    """The Group of an initialised torch.distributed process group (default: the world)."""
    handle = handle if handle is not None else dist.group.WORLD
    if handle is None:
        raise ValueError("torch.distributed is not initialised; call init_process_group first or use SINGLE")
    if handle.size() == 1:
        return SINGLE
    return Group(handle.rank(), handle.size(), _ProcessHandle(handle.group_name, handle.size()))


def run_threads(fn: Callable[[Group], Result], size: int) -> list[Result]:
    """fn(group) on `size` ranks that are threads of this process; the results by rank, or the first rank's error.

    For tests and `check_layer`: real collectives without processes. Raises RuntimeError where a rank returns while
    another waits in a collective, which between processes would wait for ever. Not for forward-mode derivatives
    (torch.func.jvp), whose levels belong to the process: take those between processes.
    """
    exchange = _Exchange(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[rank] = fn(Group(rank, size, _ThreadHandle(exchange, rank)))
            exchange.swap(rank, _RETURNED)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors[rank] = error
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


def _differentiable(x: Tensor) -> bool:
    return torch._C._functorch.maybe_current_level() is not None or (torch.is_grad_enabled() and x.requires_grad)


def _gather(x: Tensor, group: Group, dim: int) -> Tensor:
    return group.handle.all_gather(x.movedim(dim, 0).contiguous()).movedim(0, dim)


def _own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.rank]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group.handle.all_reduce(x, "sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return all_reduce(tangent, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, group: Group) -> tuple[Tensor, Any]:
        return all_reduce(x, group), in_dims[0]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group, dim: int) -> Tensor:
        return _gather(x, group, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group, ctx.dim = inputs[1], inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _own_slice(all_reduce(grad, ctx.group), ctx.group, ctx.dim), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return all_gather(tangent, ctx.group, ctx.dim)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, group: Group, dim: int) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], -1)
        dim = dim if dim >= 0 else dim + x.dim() - 1
        return all_gather(x, group, dim), x.dim() - 1


@dataclass(frozen=True)
class _ProcessHandle:
    """Collectives of torch.distributed in their functional form, which torch.compile traces."""

    group_name: str
    size: int

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x.contiguous(), op, self.group_name))

    def all_gather(self, x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), self.size, self.group_name))


_RETURNED = object()


class _Exchange:
    """One slot a rank, and a barrier around reading them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size

    def swap(self, rank: int, x: Any) -> list[Any]:
        self.slots[rank] = x
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        returned = [i for i, value in enumerate(values) if value is _RETURNED]
        if 0 < len(returned) < len(values):
            raise RuntimeError(
                f"rank {returned[0]} returned while others wait in a collective; every rank must make the same calls"
            )
        return values


@dataclass(frozen=True)
class _ThreadHandle:
    exchange: _Exchange
    rank: int

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        values = self.exchange.swap(self.rank, x)
        total = values[0]
        for value in values[1:]:
            total = total + value if op == "sum" else torch.maximum(total, value)
        return total.clone() if total is x else total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.exchange.swap(self.rank, x))
