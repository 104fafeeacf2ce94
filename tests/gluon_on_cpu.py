"""Runs a Gluon kernel's own Python code on CPU tensors, one program after the other: what gluon_gemm.py uses, no more.

Copies happen as late as their waits allow: a slot of shared memory is NaN from the request of a copy to the wait that
covers it. A product reads its operands when it is asked for and again when it is waited for, and what has changed
between is NaN. So a wait that is missing or too short, and a slot that is filled anew too early, give NaN.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pointer(NamedTuple):
    """Elements of a flat tensor at the given places."""

    flat: Tensor
    at: Any = 0

    def __add__(self, other: Any) -> Pointer:  # type: ignore[override]
        return self._replace(at=self.at + other)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.flat.dtype)


class Shared(NamedTuple):
    """A descriptor of shared memory: a view of its tensor."""

    values: Tensor

    def index(self, i: int) -> Shared:  # type: ignore[override]
        return Shared(self.values[i])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.values.permute(*order))


class Machine:
    """The state of one running program, and the functions that act on it."""

    def __init__(self, program: int) -> None:
        self.program = program
        self.asked: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[Callable[[], None]] = []
        self.events: list[str] = []

    def copy(self, to: Shared, pointer: Pointer, mask: Any = True, eviction_policy: str = "") -> None:
        to.values.fill_(float("nan"))
        kind = "ask for weight" if eviction_policy else "ask for x"
        self.events.append(kind)
        self.asked.append(lambda: (to.values.copy_(load(pointer, mask)), None)[1])

    def commit_group(self) -> None:
        self.groups.append(self.asked)
        self.asked = []

    def wait_group(self, newer: int) -> None:
        done, self.groups = self.groups[: len(self.groups) - newer], self.groups[len(self.groups) - newer :]
        for request in (request for group in done for request in group):
            request()

    def product(self, a: Shared, b: Shared, sums: Tensor, *, is_async: bool) -> Tensor:
        assert is_async
        first = (a.values.float(), b.values.float())

        def done() -> None:
            left, right = (torch.where(then == now.values, then, float("nan")) for then, now in zip(first, (a, b)))
            sums.add_(left @ right)

        self.products.append(done)
        return sums

    def product_wait(self, newer: int, *, deps: list[Tensor]) -> Tensor:
        done, self.products = self.products[: len(self.products) - newer], self.products[len(self.products) - newer :]
        for product in done:
            product()
        return deps[0]


def load(pointer: Pointer, mask: Any = True, other: float = 0.0, **_: Any) -> Tensor:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    return torch.where(mask, pointer.flat[torch.where(mask, at, 0)], other)


def store(pointer: Pointer, values: Any, mask: Any = True) -> None:
    at, mask, values = torch.broadcast_tensors(
        torch.as_tensor(pointer.at), torch.as_tensor(mask), torch.as_tensor(values, dtype=pointer.flat.dtype)
    )
    pointer.flat[at[mask]] = values[mask]


def atomic_add(pointer: Pointer, value: int, **_: Any) -> int:
    before = int(pointer.flat[pointer.at])
    pointer.flat[pointer.at] += value
    return before


def minimum(a: Tensor, b: int) -> Tensor:
    return a.clamp(max=b)


def language(machine: Machine) -> types.SimpleNamespace:
    """What stands for `gluon.language`; layouts are of no account."""

    def empty(*_: Any, **__: Any) -> None:
        return None

    return types.SimpleNamespace(
        BlockedLayout=empty, SliceLayout=empty, NVMMASharedLayout=empty, NVMMADistributedLayout=empty,
        float32=torch.float32, int32=torch.int32, int64=torch.int64,
        program_id=lambda axis: machine.program,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, float("nan"), dtype=dtype)),
        expand_dims=torch.unsqueeze, reshape=torch.reshape, permute=torch.permute, exp=torch.exp,
        split=lambda x: x.unbind(-1), convert_layout=lambda x, layout: x, minimum=minimum,
        load=load, store=store, atomic_add=atomic_add, static_range=range, static_assert=_claim,
    )  # fmt: skip


def _claim(condition: bool, message: str) -> None:
    assert condition, message


def launch(module: Any, name: str, programs: Sequence[int], arguments: dict[str, Any]) -> list[list[str]]:
    """Runs these programs of a kernel of the module, in this order; of each, what it did, one word an event."""
    events = []
    for program in programs:
        machine = Machine(program)
        namespace = {
            "gl": language(machine),
            "async_copy": types.SimpleNamespace(commit_group=machine.commit_group, wait_group=machine.wait_group),
            "_copy": machine.copy,
            "_barrier": lambda: None,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": machine.product,
            "warpgroup_mma_wait": machine.product_wait,
            "gdc_wait": lambda machine=machine: machine.events.append("wait"),
            "gdc_launch_dependents": lambda machine=machine: machine.events.append("release"),
            "range": range,
        }
        for own, value in vars(module).items():
            if own not in namespace and hasattr(value, "fn"):
                namespace[own] = types.FunctionType(value.fn.__code__, namespace)
        namespace[name](**arguments)
        assert not machine.asked, "copies were not committed"
        assert not machine.products, "products were not waited for"
        events.append(machine.events)
    return events
