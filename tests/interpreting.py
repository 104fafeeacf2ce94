"""Kernel tests of a file in a process where Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys


def assert_passes_interpreted(file: str) -> None:
    """Runs the tests of a file with Triton's interpreter; some must run and all must pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
