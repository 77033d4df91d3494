"""`xlaserve inspect`: what is in a model file, and the configuration that serves it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from xlaserve.commands.command import Command, Invocation
from xlaserve.errors import ConfigError, ModelFailed


def run(invocation: Invocation) -> int:
    """Prints what is in a file, and its configuration. Raises ModelFailed where it can't be served."""
    try:
        from xlaserve.inspection.model_file import formats, serving, text  # noqa: PLC0415 - they need h5py
    except ModuleNotFoundError as error:
        raise ConfigError(f"inspect needs {error.name}; install xlaserve[cpu] or xlaserve[gpu]") from error
    found = formats.describe(invocation.own.file)
    plan = serving.plan(found)
    if invocation.own.json:
        sys.stdout.write(f"{json.dumps(text.as_json(found, plan), indent=2)}\n")
    else:
        sys.stdout.write(text.as_yaml(found, plan))
    sys.stdout.flush()  # before the reason on stderr
    if plan.refusal:
        raise ModelFailed(plan.refusal)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a model: .keras, .h5, .pb, .onnx, .tflite, .pt2, .jax, a SavedModel's folder, or a folder of versions",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")


COMMAND = Command(run, add_options, ())
