"""`xlaserve import`: translates a configuration of another server, or a model of another framework."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from xlaserve.commands import foreign_configs, import_model
from xlaserve.commands.command import Command, Invocation
from xlaserve.errors import ConfigError


def run(invocation: Invocation) -> int:
    """Prints the models as YAML, and on stderr a line for each field or model that was not translated."""
    own = invocation.own
    if own.file.suffix in import_model.NEEDED:
        _show([import_model.save(own)])
        return 0
    files = foreign_configs.of_repository(own.file) if own.file.is_dir() else [own.file]
    found = [foreign_configs.translate(file, own.batching_parameters) for file in files]
    for note in chain.from_iterable(one.notes for one in found):
        sys.stderr.write(f"{note}\n")
    models = [*chain.from_iterable(one.models for one in found)]
    if not models:
        raise ConfigError(f"{own.file}: expected a model that can be served")
    _show(models)
    return 0


def _show(models: list[dict[str, Any]]) -> None:
    sys.stdout.write(yaml.safe_dump({"models": models}, sort_keys=False, default_flow_style=None))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="TensorFlow Serving's models.config, Triton's config.pbtxt or a model repository of Triton's; or a model, "
        "as jax.export (.jax) or torch.export.save (.pt2) wrote it",
    )
    parser.add_argument(
        "--batching-parameters", type=Path, metavar="FILE", help="TensorFlow Serving's batching parameters"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the SavedModel to make of a model; by default named as its file"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="a .npz file of what a .jax file's function takes before the image"
    )


COMMAND = Command(run, add_options, ())
