"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


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
