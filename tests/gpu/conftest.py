"""Tests of what only a GPU has. `GPU_TESTS_ON=cpu` runs on the CPU what makes sense there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 280

Run = Callable[..., str]


@pytest.fixture(scope="session")
def device() -> str:
    """What the servers under test run on."""
    if wanted := os.environ.get("GPU_TESTS_ON"):
        return wanted
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("needs a GPU that TensorFlow can use")
    return "gpu"


@pytest.fixture
def real_gpu(device: str) -> None:
    """For what a CPU can't stand in for."""
    if device == "cpu":
        pytest.skip("a CPU has nothing of the kind")


@pytest.fixture
def xlaserve(device: str, tmp_path: Path) -> Run:
    """Runs a command of `xlaserve` with `config` on the device and returns what it prints."""

    def run(command: str, config: Mapping[str, Any], *options: object) -> str:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"device": device, **config}))
        done = subprocess.run(
            [sys.executable, "-m", "xlaserve", command, "--config", str(file), *map(str, options)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run
