"""Objects on their way to another process: functions of `__main__`, lambdas and closures travel by value.

Functions and classes of importable modules are shipped by reference, so that a default stays recognisable as the
default. A function shipped by value gets a real module of its own for its globals: torch.compile imports the module of
a function by the `__name__` in its globals, and the `__main__` of a worker is another one than its sender's.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import io
import itertools
import pickle
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

_PREFIX = "funcllm_shipped_"

_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[str, types.ModuleType] = weakref.WeakValueDictionary()


def dumps(value: Any) -> bytes:
    """The value as bytes for `loads` in a process that can import the same modules.

    Tensors of a GPU travel as CPU tensors, since another rank would otherwise open a context on that GPU.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value that `dumps` packed, its shipped functions rebound to modules of their own."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(cloudpickle.Pickler):
    """Packs a tensor's own elements only: not its device, nor the rest of the storage that it is a view of."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and _is_foreign(obj):
            return obj.detach().to("cpu", copy=True).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _is_foreign(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    return tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


class _Unpickler(pickle.Unpickler):
    """Gives the functions that cloudpickle rebuilds a module for each set of globals that they share."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._by_globals: dict[int, tuple[dict[str, Any], types.ModuleType]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name == "_make_function" and module.split(".")[0] == "cloudpickle":
            return functools.partial(_make_function, self._by_globals)  # no method: Python 3.10 never frees that cycle
        return super().find_class(module, name)


def _make_function(
    by_globals: dict[int, tuple[dict[str, Any], types.ModuleType]],
    code: types.CodeType,
    shared: dict[str, Any],
    name: Any,
    argdefs: Any,
    closure: Any,
) -> types.FunctionType:
    """A function that cloudpickle rebuilds, whose globals are those of the module of its shared globals."""
    if id(shared) not in by_globals:
        by_globals[id(shared)] = (shared, _module_of(shared))
    return types.FunctionType(code, by_globals[id(shared)][1].__dict__, name, argdefs, closure)


def _module_of(shared: dict[str, Any]) -> types.ModuleType:
    """A module with a name of its own and a copy of the globals. It lives as long as a function that uses them."""
    module = types.ModuleType(f"{_PREFIX}{next(_numbers)}")
    module.__dict__.update({key: value for key, value in shared.items() if key != "__name__"})
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__shipped__"] = module
    _modules[module.__name__] = module
    return module


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the shipped modules that are alive; `sys.modules` itself would keep them for ever."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, cls()) if fullname in _modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It was filled when its functions arrived."""
