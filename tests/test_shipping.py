from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from funcllm.launch import shipping
from funcllm.launch.errors import EngineError
from funcllm.launch.shipping import dumps, loads


def shipped_from_a_script(tmp_path: Path, body: str) -> Any:
    """What a script's `value` becomes here, the script's functions being those of its __main__."""
    script, data = tmp_path / "script.py", tmp_path / "data"
    script.write_text(
        f"from funcllm.launch.shipping import dumps\n{body}\nopen({str(data)!r}, 'wb').write(dumps(value))\n"
    )
    subprocess.run([sys.executable, str(script)], check=True)
    return loads(data.read_bytes())


def test_functions_of_modules_travel_by_reference() -> None:
    assert loads(dumps((json.dumps, EngineError))) == (json.dumps, EngineError)
    assert len(dumps(json.dumps)) < 100


def test_functions_of_a_script_share_a_module_that_can_be_imported(tmp_path: Path) -> None:
    body = """
SCALE = 2
count = 0
def inner(x): return x * SCALE
def outer(x):
    global count
    count += 1
    return inner(x), count
class Layer:
    def __call__(self, x): return inner(x) + 1
value = outer, inner, Layer(), lambda x: inner(x) + count
"""
    outer, inner, layer, by_lambda = shipped_from_a_script(tmp_path, body)
    assert outer(3) == (6, 1)
    assert (inner(4), layer(4), by_lambda(4)) == (8, 9, 9)
    assert outer.__globals__ is inner.__globals__ is by_lambda.__globals__
    name = outer.__globals__["__name__"]
    assert name != "__main__"
    assert importlib.import_module(name).__dict__ is outer.__globals__
    assert importlib.import_module(name).inner is inner
    assert outer(3) == (6, 2)


def test_a_script_s_function_compiles_with_its_globals(tmp_path: Path) -> None:
    body = """
import torch
SHIFT = torch.ones(2)
def inner(x): return x + SHIFT
def value(x): return inner(x) * 2
"""
    value = shipped_from_a_script(tmp_path, body)
    compiled = torch.compile(value, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [2, 2]
    value.__globals__["SHIFT"] = torch.zeros(2)
    assert compiled(torch.zeros(2)).tolist() == [0, 0]


def test_what_was_shipped_goes_when_nobody_uses_it() -> None:
    gc.collect()
    before = len(shipping._modules)
    scale = 3
    functions = [loads(dumps(lambda x: x * scale)) for _ in range(20)]
    assert [function(2) for function in functions] == [6] * 20
    assert len(shipping._modules) == before + 20
    del functions
    gc.collect()
    assert len(shipping._modules) == before


@pytest.mark.parametrize("shape", ["row", "column", "whole", "expanded", "empty"])
def test_a_tensor_travels_without_the_storage_around_it(shape: str) -> None:
    whole = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000)
    views = {
        "row": whole[3],
        "column": whole[:, 5],
        "whole": whole,
        "expanded": torch.ones(1).expand(5),
        "empty": whole[:0],
    }
    tensor = views[shape]
    data = dumps({"x": [tensor]})
    assert torch.equal(loads(data)["x"][0], tensor)
    assert len(data) < tensor.numel() * 4 + 2000


def test_parameters_and_shared_tensors_keep_their_kind() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loaded = loads(dumps([parameter, parameter]))
    assert loaded[0] is loaded[1]
    assert isinstance(loaded[0], torch.nn.Parameter)
