"""The kernels of whole decode steps compile for sm_90 with the arguments that launches have, one row included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launches_sm90 import SHARED

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

EVERY_STEP = {
    "_decode_inputs_kernel",
    "_embed_kernel",
    "_angles_kernel",
    "_norm_kernel",
    "_stream_kernel",
    "_qkv_kernel",
    "_decode_kernel",
    "_prefill_kernel",
    "_pick_kernel",
    "_token_kernel",
    "_noise_keys_kernel",
    "_min_p_kernel",
    "_advance_kernel",
}


def test_steps_of_any_size_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "launches_sm90.py"), "1", "2", "9", "64"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["rows"] for line in lines] == [1, 2, 9, 64]
    assert {name for name, _ in lines[0]["kernels"]} >= EVERY_STEP
    assert "_silu_mul_kernel" in {name for name, _ in lines[2]["kernels"]}
    assert all(shared <= SHARED for line in lines for _, shared in line["kernels"])
