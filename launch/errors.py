"""What a caller may catch: the errors of a running engine."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine has ended: a rank died, failed or could not follow. Open a new one."""


class CallError(RuntimeError):
    """A function given to `call` raised on a rank; the engine goes on."""
