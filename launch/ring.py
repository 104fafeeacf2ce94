"""Rings between host and device: what goes up (plans) and what comes down (outputs) while steps are in flight.

A slot is used again only after its copy's event, and the rings are longer than the number of steps in flight, so
neither side waits for the other on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcllm.types import StepOutputs

Ints = npt.NDArray[np.int32]


class Outputs(NamedTuple):
    """What the host reads of one step, in the padded order of its rows."""

    token_ids: Ints
    counts: Ints
    alive: Ints
    captured: dict[str, Tensor]


class Handle(NamedTuple):
    """A launched step. `ready` tells without waiting; `read` waits and returns its outputs, once."""

    ready: Callable[[], bool]
    read: Callable[[], Outputs]


def outputs_now(outputs: StepOutputs) -> Handle:
    """The handle of a step that is already done (CPU)."""
    read = Outputs(
        outputs.token_ids_l.numpy(),
        outputs.count_l.numpy(),
        outputs.alive_l.to(torch.int32).numpy(),
        dict(outputs.captured),
    )
    return Handle(lambda: True, lambda: read)


class PlanRing:
    """Pinned host buffers that packed plans are copied from, asynchronously."""

    def __init__(self, size: int, capacity: int) -> None:
        self._buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(size)]
        self._sent = [torch.cuda.Event() for _ in range(size)]

    def copy_to(self, target: Tensor, words: Ints, step: int) -> None:
        """Copies the words to the start of a device tensor, in stream order."""
        slot = step % len(self._buffers)
        self._sent[slot].synchronize()
        pinned = self._buffers[slot][: len(words)]
        pinned.numpy()[:] = words
        target[: len(words)].copy_(pinned, non_blocking=True)
        self._sent[slot].record()


class OutputRing:
    """Device buffers that the tail of a step writes, and their pinned mirrors, copied on a side stream.

    The slot that a step writes is counted on the device, so that a captured step writes another slot at each replay;
    the host counts along. Every call of `store` must be followed by one of `collect` or `skip`.
    """

    def __init__(self, size: int, max_rows: int, device: torch.device) -> None:
        self._size, self._max_rows = size, max_rows
        self._side = torch.cuda.Stream(device)
        self._written = torch.zeros(1, dtype=torch.int64, device=device)
        self._step = 0
        self._device: dict[str, Tensor] = {}
        self._host: dict[str, Tensor] = {}
        self._add("", torch.empty((0, 3), dtype=torch.int32, device=device))
        self._done = [torch.cuda.Event() for _ in range(size)]

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """(int32 [slots, rows, 3], slots written so far, int64 [1]): for a kernel that stores the rows by itself."""
        return self._device[""].view(self._size, self._max_rows, 3), self._written

    def store(self, outputs: StepOutputs) -> None:
        """Writes the outputs into the current slot. Capturable, once a call outside of a capture made the buffers."""
        rows = torch.stack([outputs.token_ids_l, outputs.count_l, outputs.alive_l.to(torch.int32)], dim=1)
        self.store_captured({"": rows, **outputs.captured})
        self._written += 1

    def store_captured(self, values: Mapping[str, Tensor]) -> None:
        """Writes values [rows, ...] into the current slot, which stays the current one."""
        for name, value in values.items():
            if name not in self._device:
                self._add(name, value)
            index = self._written % self._size * self._max_rows + torch.arange(value.shape[0], device=value.device)
            self._device[name].index_copy_(0, index, value)

    def _add(self, name: str, like: Tensor) -> None:
        shape = (self._size * self._max_rows, *like.shape[1:])
        self._device[name] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._host[name] = torch.zeros(shape, dtype=like.dtype, pin_memory=True)

    def skip(self) -> None:
        """Passes over the slot of a step whose outputs nobody reads."""
        self._step += 1

    def collect(self, num_rows: int) -> Handle:
        """Starts the copy of the last step's outputs to the host."""
        slot = self._step % self._size
        self._step += 1
        part = slice(slot * self._max_rows, slot * self._max_rows + num_rows)
        done = self._done[slot]
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for name, buffer in self._device.items():
                self._host[name][part].copy_(buffer[part], non_blocking=True)
            done.record()

        def read() -> Outputs:
            done.synchronize()
            rows = self._host[""][part].numpy().copy()
            captured = {name: host[part].clone() for name, host in self._host.items() if name}
            return Outputs(rows[:, 0], rows[:, 1], rows[:, 2], captured)

        return Handle(done.query, read)
