"""What happens before and during the import of torch."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from typing import Any

import pytest

from funcllm.launch import early


def in_process(code: str, *arguments: str) -> str:
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_imports_go_without_collections_and_are_passed_over_later() -> None:
    code = """
import gc, sys, threading
from funcllm.launch import early
assert "torch" not in sys.modules
made = []
early.open_context = made.append
before = gc.get_freeze_count()
with early.importing("cuda:3"):
    print(gc.isenabled())
    import funcllm.config
    for thread in threading.enumerate():
        if thread.name == "CUDA context":
            thread.join()
    sys.modules["torch"] = sys
print(gc.isenabled(), gc.get_freeze_count() > before + 1000, made)
with early.importing("cuda:3"):
    print(gc.isenabled(), made)
"""
    assert in_process(code).split("\n") == ["False", "True True [3]", "True [3]"]


def test_collections_go_on_after_an_import_that_fails() -> None:
    code = """
import gc
from funcllm.launch import early
try:
    with early.importing("cpu"):
        raise ImportError
except ImportError:
    print(gc.isenabled())
"""
    assert in_process(code) == "True"


@pytest.mark.parametrize(
    ("device", "index"), [(None, 0), ("", 0), ("cuda", 0), ("cuda:2", 2), ("cpu", None), ("mps", None), ("cuda:x", 0)]
)
def test_the_gpu_of_a_device(device: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert early.gpu_index(device) == index
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert early.gpu_index(device) is None


@pytest.mark.parametrize(("failing", "made"), [("", True), ("cuInit", False), ("cuDevicePrimaryCtxRetain", False)])
def test_a_context_is_made_by_the_driver(failing: str, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Driver:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                calls.append((name, *(a for a in arguments if isinstance(a, int))))
                return int(name == failing)

            return call

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert early.open_context(2) is made
    expected = [("cuInit", 0), ("cuDeviceGet", 2), ("cuDevicePrimaryCtxRetain",)]
    assert calls == (expected[:1] if failing == "cuInit" else expected)

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert early.open_context(0) is False
    assert gc.isenabled()


def test_a_program_is_imported_in_this_way_and_told_its_arguments() -> None:
    command = [sys.executable, "-m", "funcllm.launch.early", "builtins:print", "cpu", "7", "8"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "['7', '8']\n"
