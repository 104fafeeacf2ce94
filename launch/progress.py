"""The progress bar of a batch: finished requests, prefill and decode tokens a second, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from funcllm.launch.scheduler import Stats

_INTERVAL = 0.2  # seconds between two updates


class GenerateProgress:
    """A context manager; `update(pending)` after each step. Draws nothing unless enabled."""

    def __init__(self, total: int, stats: Callable[[], Stats], *, enabled: bool) -> None:
        self._total, self._stats, self._bar = total, stats, _bar() if enabled and total else None
        self._drawn = 0.0

    def __enter__(self) -> GenerateProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("generate", total=self._total, speed="")
            self._begin, self._start = self._stats(), time.monotonic()
        return self

    def update(self, pending: int) -> None:
        """Shows how many requests are left."""
        now = time.monotonic()
        if self._bar is None or (pending and now - self._drawn < _INTERVAL):
            return
        self._drawn = now
        stats, seconds = self._stats(), max(now - self._start, 1e-9)
        prefill = (stats.prefill_tokens - self._begin.prefill_tokens) / seconds
        decode = (stats.generated_tokens - self._begin.generated_tokens) / seconds
        speed = f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"
        self._bar.update(self._task, completed=self._total - pending, speed=speed)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
