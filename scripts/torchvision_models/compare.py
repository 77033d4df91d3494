"""Imports an export as `xlaserve import` does, and compares each mode with PyTorch: `... .compare FOLDER`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scripts.torchvision_models import record
from scripts.torchvision_models.record import BATCH, COMPARED, EXPORT, PIXELS, WANTED

from xlaserve.commands import import_model
from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings

MODES: Final = (Mode.XLA, Mode.GRAPH)
STAYS: Final = "stays StableHLO"
"""Words of the warning about a model that is not translated to TensorFlow's operations."""


class _Kept(logging.Handler):
    """The warnings of an import."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(folder: Path) -> None:
    """Writes what came of the model."""
    kept = _Kept()
    logging.getLogger("xlaserve").addHandler(kept)
    started = time.monotonic()
    saved = folder / "saved"
    import_model.save(argparse.Namespace(file=folder / EXPORT, out=saved, weights=None))
    imported_s = time.monotonic() - started

    from xlaserve.models import catalog  # noqa: PLC0415 - after TensorFlow has been configured

    pixels = np.load(folder / PIXELS)
    settings = ModelSettings(
        name="it", source=str(saved), preprocess="torch", buckets=(BucketSettings(BATCH),), task="tensors", modes=MODES
    )
    model = catalog.load(settings)
    wanted = dict(np.load(folder / WANTED))
    names = [output.name for output in model.task.outputs]
    differences, compiled_s = {}, {}
    for mode in MODES:
        started = time.monotonic()
        executable = model.program.compile(mode, Bucket(*pixels.shape[:3])).executable
        compiled_s[str(mode)] = time.monotonic() - started
        differences[str(mode)] = difference(wanted, dict(zip(names, executable(pixels), strict=True)))
    result = {
        "imported_s": imported_s,
        "compiled_s": compiled_s,
        "differences": differences,
        "outputs": {name: list(value.shape[1:]) for name, value in wanted.items()},
        "lowerings": model.lowerings,
        "stays": next((text.rpartition(": ")[2] for text in kept.texts if STAYS in text), ""),
        "versions": {name: version(name) for name in ("torchax", "jax", "tensorflow-cpu")},
    }
    (folder / COMPARED).write_text(json.dumps(result))


def difference(wanted: Mapping[str, NDArray[Any]], got: Mapping[str, NDArray[Any]]) -> float:
    """Returns the largest difference of an output, over the largest magnitude of that output; infinity for NaN.

    Raises ValueError where there are other outputs, or of other shapes.
    """
    if wanted.keys() != got.keys():
        raise ValueError(f"expected the outputs {', '.join(wanted)}, got {', '.join(got)}")
    largest = 0.0
    for name, values in wanted.items():
        # Maps come with their channels last.
        expected = values.transpose(0, 2, 3, 1) if values.ndim == 4 else values
        if expected.shape != got[name].shape:
            raise ValueError(f"{name}: expected {list(expected.shape)}, got {list(got[name].shape)}")
        apart = np.abs(expected.astype(np.float64) - got[name]).max() / max(np.abs(expected).max(), 1e-30)
        largest = max(largest, float(np.nan_to_num(apart, nan=np.inf)))
    return largest


if __name__ == "__main__":
    with record.telling():
        main(Path(sys.argv[1]))
