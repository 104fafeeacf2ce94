"""Objects on their way to another process: functions of `__main__`, lambdas and closures travel by value.

Functions and classes of importable modules are shipped by reference, so that a default stays recognisable as the
default. A function shipped by value gets a real module of its own for its globals: torch.compile looks the globals of
a function up in `sys.modules` by their `__name__`, and the `__main__` of a worker is another one than its sender's.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
import types
import weakref
from typing import Any

import cloudpickle
import torch

_numbers = itertools.count()


def dumps(value: Any) -> bytes:
    """The value as bytes for `loads` in a process that can import the same modules."""
    return cloudpickle.dumps(value)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value that `dumps` packed, its shipped functions rebound to modules of their own."""
    return _Unpickler(io.BytesIO(data)).load()


def to_cpu(value: Any) -> Any:
    """The value with its tensors on the CPU: a tensor of another rank's GPU would open a context there."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


class _Unpickler(pickle.Unpickler):
    """Gives the functions that cloudpickle rebuilds a module each for the globals that they share."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._modules: dict[int, tuple[dict[str, Any], types.ModuleType]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name == "_make_function" and module.split(".")[0] == "cloudpickle":
            return self._make_function
        return super().find_class(module, name)

    def _make_function(self, code: Any, globals: Any, name: Any, argdefs: Any, closure: Any) -> types.FunctionType:
        module = self._module(globals)
        function = types.FunctionType(code, module.__dict__, name, argdefs, closure)
        weakref.finalize(function, _release, module).atexit = False
        module.__dict__["__functions__"] += 1
        return function

    def _module(self, shared: dict[str, Any]) -> types.ModuleType:
        """The module that stands for the globals dictionary of this pickle."""
        if id(shared) not in self._modules:
            module = types.ModuleType(f"funcllm_shipped_{next(_numbers)}")
            module.__dict__.update({key: value for key, value in shared.items() if key != "__name__"})
            module.__dict__["__builtins__"] = __builtins__
            module.__dict__["__functions__"] = 0
            sys.modules[module.__name__] = module
            self._modules[id(shared)] = (shared, module)
        return self._modules[id(shared)][1]


def _release(module: types.ModuleType) -> None:
    """Forgets a shipped module when the last of its functions is gone."""
    module.__dict__["__functions__"] -= 1
    if module.__dict__["__functions__"] == 0:
        sys.modules.pop(module.__name__, None)
