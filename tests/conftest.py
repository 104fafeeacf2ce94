"""Fixtures that several test files share."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from funcllm.launch.ranks import start_ranks

COLLECTIVE_TIMEOUT = 120.0  # seconds after which a collective whose partner does not come fails, in these tests
LAST_RESORT = 60.0  # seconds after pytest's own timeout, which cannot reach a main thread that hangs in C++ code

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # the real one; while a test runs it is captured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends this process, every thread's stack told, where a test hangs and pytest's own timeout has not ended it."""
    limit = float(item.config.getoption("timeout", None) or item.config.getini("timeout") or 0.0)
    if limit:
        faulthandler.dump_traceback_later(limit + LAST_RESORT, file=item.config.stash[_stderr], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def collectives_do_not_hang() -> Iterator[None]:
    """Ranks that a test starts wait for each other for minutes, not for the half hour of a real run."""
    defaults: dict[str, Any] = start_ranks.__kwdefaults__
    usual = defaults["collective_timeout"]
    defaults["collective_timeout"] = COLLECTIVE_TIMEOUT
    yield
    defaults["collective_timeout"] = usual


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many test processes run: one with a GPU, which tests would share, else one a core, four at most."""
    return 0 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 folder whose tokenizer maps bytes to ids and has a chat template; fp32, 512 positions.

    Its weights are large (std 0.25), so that greedy tokens do not repeat at once.
    """
    from dataclasses import replace

    from funcllm.config import qwen3_config
    from funcllm.weights.random_model import write_random_model

    folder = tmp_path_factory.mktemp("byte_model")
    config = replace(qwen3_config("tiny"), max_position_embeddings=512)
    write_random_model(folder, config, seed=1, dtype=torch.float32, std=0.25)
    return folder
