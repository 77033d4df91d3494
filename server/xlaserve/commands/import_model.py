"""`xlaserve import` of a model: makes a SavedModel, which is served without the model's framework."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from xlaserve.config import Settings
from xlaserve.engine.causes import cause
from xlaserve.errors import ConfigError, XlaserveError
from xlaserve.programs.tf.device import configure


class Needed(NamedTuple):
    """Requirements for reading a kind of file."""

    extra: str
    packages: tuple[str, ...]


NEEDED: Final = {".jax": Needed("jax", ("jax",)), ".pt2": Needed("torch", ("jax", "torch", "torchax"))}
"""By the suffix of a file."""


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
    needed = NEEDED[file.suffix]
    if missing := [package for package in needed.packages if importlib.util.find_spec(package) is None]:
        raise ConfigError(f"{file}: importing it needs {', '.join(missing)}; install xlaserve[{needed.extra}]")
    # The work is small, and a GPU may be another's.
    os.environ["JAX_PLATFORMS"] = "cpu"
    configure(Settings(device="cpu"), uses_tensorflow=True)
    from xlaserve.models.sources import jax_export, jax_file  # noqa: PLC0415 - they need what was configured

    with TemporaryDirectory() as temporary:
        exported, weights = file, own.weights
        if file.suffix == ".pt2":
            exported, weights = Path(temporary, file.name), Path(temporary, f"{file.stem}.npz")
            _convert(file, exported, weights)
        try:
            jax_file.save(jax_export.read(exported, weights), folder)
        except XlaserveError:
            raise
        except Exception as error:
            raise ConfigError(f"{file}: {type(error).__name__}: {cause(error)}") from error
    return {"name": file.stem, "source": f"{folder}/"}


def _convert(file: Path, exported: Path, weights: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "xlaserve.models.sources.torch_to_jax", file, exported, weights]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it ended by a signal"])[-1]
        raise ConfigError(f"{file}: expected what torch.export.save() wrote and torchax can convert: {reason}")
