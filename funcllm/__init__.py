"""funcllm: a paged, tensor-parallel Qwen3 engine made of pure functions that can be swapped, tapped and differentiated.

The names below are the public interface. Each is imported when it is first asked for, so that `import funcllm` costs
nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {  # public name -> the module that defines it
    "attend": "funcllm.attention",
    "write_kv": "funcllm.attention",
    "settle": "funcllm.block",
    "check_layer": "funcllm.check",
    "ModelConfig": "funcllm.config",
    "qwen3_config": "funcllm.config",
    "sync_grads": "funcllm.grads",
    "SINGLE": "funcllm.group",
    "Group": "funcllm.group",
    "all_reduce": "funcllm.group",
    "process_group": "funcllm.group",
    "run_threads": "funcllm.group",
    "FAST": "funcllm.kernels.bundle",
    "REFERENCE": "funcllm.kernels.bundle",
    "Engine": "funcllm.launch.engine",
    "generate": "funcllm.launch.engine",
    "EngineError": "funcllm.launch.errors",
    "SamplingParams": "funcllm.launch.request",
    "head_ids": "funcllm.layers",
    "vocab_ids": "funcllm.layers",
    "logits": "funcllm.qwen3",
    "qwen3": "funcllm.qwen3",
    "Layers": "funcllm.record",
    "site": "funcllm.sites",
    "init_params": "funcllm.specs",
    "Component": "funcllm.types",
    "Context": "funcllm.types",
    "Extra": "funcllm.types",
    "Part": "funcllm.types",
    "Spec": "funcllm.types",
    "Stream": "funcllm.types",
    "load_params": "funcllm.weights.load",
    "save_params": "funcllm.weights.save",
}

if TYPE_CHECKING:
    from funcllm.attention import attend as attend
    from funcllm.attention import write_kv as write_kv
    from funcllm.block import settle as settle
    from funcllm.check import check_layer as check_layer
    from funcllm.config import ModelConfig as ModelConfig
    from funcllm.config import qwen3_config as qwen3_config
    from funcllm.grads import sync_grads as sync_grads
    from funcllm.group import SINGLE as SINGLE
    from funcllm.group import Group as Group
    from funcllm.group import all_reduce as all_reduce
    from funcllm.group import process_group as process_group
    from funcllm.group import run_threads as run_threads
    from funcllm.kernels.bundle import FAST as FAST
    from funcllm.kernels.bundle import REFERENCE as REFERENCE
    from funcllm.launch.engine import Engine as Engine
    from funcllm.launch.engine import generate as generate
    from funcllm.launch.errors import EngineError as EngineError
    from funcllm.launch.request import SamplingParams as SamplingParams
    from funcllm.layers import head_ids as head_ids
    from funcllm.layers import vocab_ids as vocab_ids
    from funcllm.qwen3 import logits as logits
    from funcllm.qwen3 import qwen3 as qwen3
    from funcllm.record import Layers as Layers
    from funcllm.sites import site as site
    from funcllm.specs import init_params as init_params
    from funcllm.types import Component as Component
    from funcllm.types import Context as Context
    from funcllm.types import Extra as Extra
    from funcllm.types import Part as Part
    from funcllm.types import Spec as Spec
    from funcllm.types import Stream as Stream
    from funcllm.weights.load import load_params as load_params
    from funcllm.weights.save import save_params as save_params

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'funcllm' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


class _Package(ModuleType):
    """The package, in which `qwen3` is the function: importing the module of that name must not hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
