"""Limits of time that hold on an idle machine, and on a busy one as well."""

from __future__ import annotations

import time

MOST = 45.0  # seconds; what hangs in these tests hangs for a minute
_SAMPLE = 0.05


def patient(seconds: float) -> float:
    """What `seconds` on an idle machine are on this one now, by the share of a core that this thread gets; at most MOST
    where `seconds` are less.
    """
    start, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < _SAMPLE:
        pass
    return max(seconds, min(MOST, seconds * (time.monotonic() - start) / _SAMPLE))
