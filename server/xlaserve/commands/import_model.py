"""`xlaserve import` of a model: makes a SavedModel, which is served without the model's framework."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Final

from xlaserve.config import Settings
from xlaserve.errors import ConfigError, XlaserveError, cause
from xlaserve.runtimes.tf.device import configure

READERS: Final = {".jax": "jax_export", ".pt2": "torch_program"}
"""By the suffix of a file: the module of `model.sources` that reads it."""
NEEDED: Final = {".jax": ("jax",), ".pt2": ("jax", "torch", "torchax")}
"""Packages that the module needs."""
EXTRAS: Final = {".jax": "jax", ".pt2": "torch"}


def save(own: argparse.Namespace) -> dict[str, Any]:
    """Writes the SavedModel; returns the fields that configure it. Raises XlaserveError."""
    file: Path = own.file
    folder = own.out or Path(file.stem)
    if not file.is_file():
        raise ConfigError(f"{file}: expected a file, got {'a folder' if file.exists() else 'nothing'}")
    if folder.exists():
        raise ConfigError(f"--out: expected a folder that is to be made, got {folder}, which exists")
    if own.weights is not None and file.suffix != ".jax":
        raise ConfigError(f"--weights: expected none, as {file} has its own, got {own.weights}")
    if missing := [package for package in NEEDED[file.suffix] if importlib.util.find_spec(package) is None]:
        packages = ", ".join(missing)
        raise ConfigError(f"{file}: importing it needs {packages}; install xlaserve[{EXTRAS[file.suffix]}]")
    # The work is small, and a GPU may be another's.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    configure(Settings(device="cpu"), uses_tensorflow=True)
    try:
        reader = importlib.import_module(f"xlaserve.model.sources.{READERS[file.suffix]}")
        exported = reader.read(file, own.weights)
        importlib.import_module("xlaserve.model.sources.jax_file").save(exported, folder)
    except XlaserveError:
        raise
    except Exception as error:
        raise ConfigError(f"{file}: {type(error).__name__}: {cause(error)}") from error
    return {"name": file.stem, "source": f"{folder}/"}
