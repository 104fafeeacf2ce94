"""The lagged loop: plan(n + 1), launch it, then commit step n + 1 - depth.

Owns the steps under way. At depth 0 each step is read before the next is planned; at depth 1 and more the host plans,
packs and reads while the device computes. The same tokens come out at every depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from funcllm.launch.plan import Ints, Plan, pack
from funcllm.launch.request import Request, RequestId
from funcllm.launch.scheduler import Bools, Event, Scheduler


class Executor(Protocol):
    """What runs plans: all ranks of an engine, the null model, or a test's oracle."""

    def launch(self, words: npt.NDArray[np.int32], plan: Plan, /) -> Any:
        """Puts a packed plan on the stream, behind those before it, and returns a handle of its outputs."""
        ...

    def read(self, handle: Any, /) -> tuple[Ints, Ints, Bools | Ints]:
        """Waits for a step. Returns (token_ids, counts, alive) of its rows in padded order."""
        ...


class LoopFailed(RuntimeError):
    """A step failed, every request ended with an error, and the loop takes no more."""


class _Launched(NamedTuple):
    plan: Plan
    handle: Any


class Loop:
    """Drives a scheduler and an executor. depth: how many steps are launched ahead of the one that is read.

    When a step raises, every pending request ends with an error event, `failure` holds the exception, and `submit` and
    `step` raise LoopFailed from then on.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int = 1) -> None:
        if depth < 0:
            raise ValueError(f"depth={depth} must be at least 0; 0 reads each step before the next is planned")
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.failure: BaseException | None = None
        self._launched: deque[_Launched] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: requests that have not ended, or steps that are not read."""
        return self.failure is None and self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError when it can never be served."""
        self._raise_if_failed()
        self.scheduler.submit(request)

    def abort(self, request_id: RequestId) -> Event | None:
        """Ends a request at once; None when it has ended already or is unknown."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[Event]:
        """Launches the next step, if there is one, and commits what is due. Returns what became of the requests."""
        self._raise_if_failed()
        events: list[Event] = []
        try:
            self._step(events)
        except Exception as error:
            events += self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        return events

    def drain(self) -> list[Event]:
        """Commits every step under way without launching another."""
        self._raise_if_failed()
        events: list[Event] = []
        try:
            while self._launched:
                events += self._commit()
        except Exception as error:
            return events + self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        return events

    def run(self) -> Iterator[Event]:
        """Steps until nothing is left to do, and yields all events."""
        while self.has_work:
            yield from self.step()

    def _step(self, events: list[Event]) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        elif not self._launched and self.scheduler.has_work:
            raise RuntimeError("nothing is under way and nothing can run: the scheduler is stuck")
        while len(self._launched) > self.depth:
            events += self._commit()
        if plan is None and self._launched:
            events += self._commit()

    def _launch(self, plan: Plan) -> None:
        try:
            handle = self.executor.launch(pack(plan), plan)
        except BaseException:
            self.scheduler.launch_failed(plan)
            raise
        self.scheduler.launched(plan)
        self._launched.append(_Launched(plan, handle))

    def _commit(self) -> list[Event]:
        plan, handle = self._launched.popleft()
        token_ids, counts, alive = self.executor.read(handle)
        return self.scheduler.commit(plan, token_ids, counts, alive)

    def _fail(self, error: BaseException) -> list[Event]:
        self.failure = error
        self._launched.clear()
        return self.scheduler.fail_all(f"{type(error).__name__}: {error}")

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise LoopFailed(f"a step failed before: {self.failure}; start a new engine") from self.failure
