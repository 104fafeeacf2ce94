"""What the machine has and what funcllm makes of it: versions, GPUs and links, compilers, kernels and why, settings.

Every check stands by itself: one that fails reports its failure as its value, and the others go on.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from funcllm.launch.memory import device_memory, gib

PACKAGES = (
    "funcllm", "torch", "triton", "flash-attn-4", "transformers", "tokenizers", "safetensors", "huggingface-hub",
    "numpy",
)  # fmt: skip
HEAD_DIMS = (64, 80, 96, 128, 256)
OTHER_HEAD_DIMS = (16, 48)
SETTINGS = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CXX", "CC", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "MASTER_ADDR", "MASTER_PORT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
SETTING_PREFIXES = ("NCCL_", "TORCH", "TRITON_", "FUNCLLM_", "NVSHMEM_")


class Section(TypedDict):
    """A title and the findings under it, name -> value."""

    title: str
    rows: dict[str, str]


def report() -> list[Section]:
    """All findings. Never raises; plain strings, so that it can be printed as JSON."""
    checks: tuple[tuple[str, Callable[[], dict[str, str]]], ...] = (
        ("versions", _versions),
        ("machine", _machine),
        ("GPUs", _gpus),
        ("links", _links),
        ("compilers", _compilers),
        ("kernels", _kernels),
        ("tensor parallelism", _parallelism),
        ("settings", lambda: settings_of(os.environ)),
    )
    return [Section(title=title, rows=_rows(check)) for title, check in checks]


def render(sections: Iterable[Section], width: int | None = None) -> str:
    """The findings as tables for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = width or shutil.get_terminal_size((100, 24)).columns
    console = Console(file=io.StringIO(), width=width, force_terminal=sys.stdout.isatty(), highlight=False)
    for section in sections:
        table = Table(
            box=box.SIMPLE_HEAD, title=section["title"], title_justify="left", show_header=False, padding=(0, 1)
        )
        table.add_column(no_wrap=True, style="bold")
        table.add_column(overflow="fold")
        for name, value in section["rows"].items():
            table.add_row(Text(name), Text(value))
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def settings_of(environment: Any) -> dict[str, str]:
    """The environment variables that change what funcllm does, as far as they are set."""
    names = [name for name in environment if name in SETTINGS or name.startswith(SETTING_PREFIXES)]
    return {name: environment[name] for name in sorted(names)} or {"environment": "nothing set that matters here"}


def kernel_choices(
    choose: Callable[..., Any], device: torch.device, dtypes: Iterable[torch.dtype], head_dims: Iterable[int]
) -> dict[str, str]:
    """The reasons of a chooser of kernels for each dtype and head dimension; equal answers share a row."""
    by_reason: dict[str, list[str]] = {}
    for dtype in dtypes:
        for head_dim in head_dims:
            reason = _reason(choose, device, head_dim, dtype)
            by_reason.setdefault(reason, []).append(f"{str(dtype).removeprefix('torch.')}/{head_dim}")
    everything = len(by_reason) == 1
    return {f"{device.type} {'any model' if everything else ', '.join(who)}": why for why, who in by_reason.items()}


def _reason(choose: Callable[..., Any], device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    block_size = 16 if device.type == "cpu" else 32
    try:
        return "; ".join(choose(device, head_dim, dtype, block_size).why) or "the defaults"
    except Exception as error:
        return f"refused: {error}"


def _rows(check: Callable[[], dict[str, str]]) -> dict[str, str]:
    try:
        return check()
    except Exception as error:
        return {"check failed": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str]:
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    versions = {name: _version(name) for name in PACKAGES}
    versions["torch"] = f"{torch.__version__} (built for {build})"
    return {"python": f"{platform.python_version()} ({sys.executable})", **versions}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        absent = {
            "funcllm": "not installed, runs from its source folder",
            "flash-attn-4": "not installed; optional: pip install 'funcllm[flash]'",
        }
        return absent.get(package, "not installed")


def _machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, free = device_memory(torch.device("cpu"))
    return {
        "system": platform.platform(),
        "CPU": f"{_cpu_name()}, {cores} cores usable, torch uses {torch.get_num_threads()} threads",
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{gib(total)}, {gib(free)} free",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU or driver"
        )
        return {"none": f"{why}; funcllm runs on the CPU"}
    return {f"cuda:{index}": _gpu(index) for index in range(torch.cuda.device_count())}


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    capability = f"sm_{properties.major}{properties.minor}"
    notes = "" if properties.major >= 8 else "; below sm_80: no bfloat16, kernels untested"
    try:
        total, free = device_memory(torch.device("cuda", index))
        memory = f"{gib(total)}, {gib(free)} free"
    except RuntimeError as error:
        memory = f"memory unknown ({error})"
    return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs, {memory}{notes}"


def _links() -> dict[str, str]:
    count = torch.cuda.device_count()
    if count < 2:
        return {"peer access": f"nothing to link: {count} GPUs"}
    return {f"cuda:{index}": _peers(index, count) for index in range(count)}


def _peers(index: int, count: int) -> str:
    others = [other for other in range(count) if other != index]
    reached = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
    missing = [other for other in others if other not in reached]
    text = f"reaches the memory of {', '.join(f'cuda:{other}' for other in reached) or 'no other GPU'}"
    return text + (f"; not of {', '.join(f'cuda:{other}' for other in missing)}" if missing else "")


def _compilers() -> dict[str, str]:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "C++ (torch.compile on CPU)": _compiler(os.environ.get("CXX"), ("g++", "c++", "clang++")),
        "C (Triton's launchers)": _compiler(os.environ.get("CC"), ("gcc", "cc", "clang")),
        "Python.h": str(header) if header.is_file() else f"missing ({header}); install the Python development package",
        "ptxas": _ptxas(),
    }


def _compiler(chosen: str | None, names: tuple[str, ...]) -> str:
    """The path and version of the first compiler there is."""
    candidates = (chosen,) if chosen else names
    path = next((found for name in candidates if (found := shutil.which(name))), None)
    if path is None:
        return f"missing: no {' or '.join(candidates)} in PATH; run without --compile, or install one"
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    first_line = (run.stdout or run.stderr).splitlines()[:1]
    return f"{path} ({first_line[0].strip()})" if first_line else path


def _ptxas() -> str:
    own = os.environ.get("TRITON_PTXAS_PATH")
    if own:
        return own if Path(own).is_file() else f"missing: TRITON_PTXAS_PATH={own} is no file"
    try:
        folder = Path(str(importlib.metadata.distribution("triton").locate_file("triton/backends/nvidia/bin")))
    except importlib.metadata.PackageNotFoundError:
        return "missing: triton is not installed"
    found = sorted(folder.glob("ptxas*"))
    return ", ".join(map(str, found)) if found else shutil.which("ptxas") or f"missing: none in {folder} or PATH"


def _kernels() -> dict[str, str]:
    from funcllm.kernels.bundle import fast_kernels

    rows = kernel_choices(fast_kernels, torch.device("cpu"), (torch.float32, torch.bfloat16), HEAD_DIMS)
    for device in _distinct_gpus():
        rows |= kernel_choices(fast_kernels, device, (torch.bfloat16, torch.float32), (*HEAD_DIMS, *OTHER_HEAD_DIMS))
    return rows


def _distinct_gpus() -> list[torch.device]:
    """The first GPU of each kind."""
    kinds: dict[Any, torch.device] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        kinds.setdefault(torch.cuda.get_device_capability(index), torch.device("cuda", index))
    return list(kinds.values())


def _parallelism() -> dict[str, str]:
    if not dist.is_available():
        return {"torch.distributed": "missing in this build of torch: only tp 1 works"}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "NCCL": _nccl(),
        "gloo": "available" if dist.is_gloo_available() else "missing: no tp on the CPU",
        "tp": f"up to {gpus} on GPUs here" if gpus else "any size on the CPU; more than one only for tests",
        "parent-death signal": "yes" if sys.platform == "linux" else "no: workers watch their channel only",
    }


def _nccl() -> str:
    if not dist.is_nccl_available():
        return "missing in this build of torch" + ("" if torch.version.cuda is None else ": no tp on GPUs")
    return ".".join(map(str, torch.cuda.nccl.version()))
