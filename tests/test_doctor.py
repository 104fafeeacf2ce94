from __future__ import annotations

import json
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from funcllm.launch import doctor
from funcllm.launch.doctor import kernel_choices, render, report, settings_of

TITLES = ["versions", "machine", "GPUs", "links", "compilers", "kernels", "tensor parallelism", "settings"]


def rows(title: str) -> dict[str, str]:
    return next(section["rows"] for section in report() if section["title"] == title)


def test_the_report_is_plain_data_with_all_sections() -> None:
    found = report()
    assert [section["title"] for section in found] == TITLES
    assert json.loads(json.dumps(found)) == found
    assert not any("check failed" in section["rows"] for section in found)
    assert rows("versions")["torch"].startswith(torch.__version__)
    assert rows("versions")["python"].startswith(platform.python_version())
    assert rows("tensor parallelism")["gloo"] == "available"


def test_without_a_gpu_it_says_so_and_names_the_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert rows("GPUs") == {"none": "this torch is built without CUDA; funcllm runs on the CPU"}
    assert list(rows("kernels")) == ["cpu any model"]
    assert "the device is cpu" in rows("kernels")["cpu any model"]


def fake_gpus(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]]) -> None:
    def properties(index: int) -> Any:
        major, minor = capabilities[index]
        return SimpleNamespace(name=f"GPU {index}", major=major, minor=minor, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: one + two != 3)


def test_gpus_and_their_links_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, [(9, 0), (9, 0), (7, 5)])
    assert rows("GPUs")["cuda:0"] == "GPU 0, sm_90, 132 SMs, 140 GiB, 60 GiB free"
    assert rows("GPUs")["cuda:2"].endswith("below sm_80: no bfloat16, kernels untested")
    assert rows("links")["cuda:0"] == "reaches the memory of cuda:1, cuda:2"
    assert rows("links")["cuda:1"] == "reaches the memory of cuda:0; not of cuda:2"
    assert rows("tensor parallelism")["tp"] == "up to 3 on GPUs here"


def test_a_check_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    assert rows("GPUs") == {"check failed": "RuntimeError: driver too old"}
    assert "torch" in rows("versions")


def test_kernel_choices_of_equal_reason_share_a_row() -> None:
    def choose(device: torch.device, head_dim: int, dtype: torch.dtype, block_size: int) -> Any:
        if head_dim == 48:
            raise ValueError("head_dim=48")
        return SimpleNamespace(why=("flash", "paged") if head_dim == 128 and dtype is torch.bfloat16 else ())

    dtypes = (torch.bfloat16, torch.float32)
    assert kernel_choices(choose, torch.device("cuda", 0), dtypes, (128, 64, 48)) == {
        "cuda bfloat16/128": "flash; paged",
        "cuda bfloat16/64, float32/128, float32/64": "the defaults",
        "cuda bfloat16/48, float32/48": "refused: head_dim=48",
    }


def test_a_missing_compiler_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    found = rows("compilers")["C++ (torch.compile on CPU)"]
    assert found == "missing: no g++ or c++ or clang++ in PATH; run without --compile, or install one"
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    assert rows("compilers")["ptxas"] == "missing: TRITON_PTXAS_PATH=/nowhere/ptxas is no file"


def test_settings_show_what_matters_and_no_secrets() -> None:
    environment = {"HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "HOME": "/root", "OMP_NUM_THREADS": "2", "RANK": "0"}
    assert settings_of(environment) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "RANK": "0"}
    assert settings_of({"HOME": "/root"}) == {"environment": "nothing set that matters here"}


@pytest.mark.parametrize("package", ["flash-attn-4", "funcllm", "no-such-package"])
def test_absent_packages_are_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", absent)
    assert doctor._version(package).startswith("not installed")


def test_the_findings_are_rendered_with_every_name_and_value() -> None:
    text = render([{"title": "versions", "rows": {"torch": "2.13", "odd [markup]": "x" * 30}}], width=60)
    for part in ("versions", "torch", "2.13", "odd [markup]", "x" * 30):
        assert part in text
    narrow = render([{"title": "t", "rows": {"name": "y" * 90}}], width=40)
    assert narrow.count("y") == 90
    assert max(map(len, narrow.splitlines())) <= 40
