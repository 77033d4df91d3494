"""Keras 2, the package `tf_keras`, in a separate process: in one process it and Keras 3 change each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PROCESS: Final = (sys.executable, "-P", "-m", "xlaserve.models.sources.keras2_export")
FAILED: Final = "xlaserve: "
"""Beginning of the line on the process's stderr that says, as JSON, why it failed."""
NOT_IMPORTED: Final = "can't be imported"
ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "-1",  # the work is small, and a GPU may be another's
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_USE_LEGACY_KERAS": "1",  # `tf.keras` in the code of custom objects is Keras 2 as well
}
TIMEOUT_S: Final = 1800.0


class Keras2Error(Exception):
    """Keras 2 could not read a file; the text is its own."""


def export(file: Path, folder: Path, custom_objects: Mapping[str, str], *, safe_mode: bool) -> None:
    """Makes a SavedModel in `folder` of a model that Keras 2 reads, as it is for inference.

    `custom_objects` are paths, `package.module:attribute`, by name. Blocks for seconds. Raises Keras2Error.
    """
    options = json.dumps({"custom_objects": dict(custom_objects), "safe_mode": safe_mode})
    paths = [path for path in sys.path if path]  # custom objects may be in folders that were added to it
    done = subprocess.run(
        [*PROCESS, str(file), str(folder), options],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0:
        return
    said = [line.removeprefix(FAILED) for line in done.stderr.splitlines() if line.startswith(FAILED)]
    raise Keras2Error(json.loads(said[-1]) if said else f"its process ended with status {done.returncode}")
