"""Named inputs on the command line: `infer --input left=a.png --input age=3.5`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from xlaserve_client.results import Model

_ARRAY_SUFFIX: Final = ".npy"


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--input`."""
    parser.add_argument(
        "--input",
        action="append",
        type=_named,
        default=[],
        metavar="NAME=VALUE",
        dest="inputs",
        help="an input of a model of several, in place of images: an image file, a .npy file, or numbers in JSON such"
        " as 3.5 or [1,2]; once for each input",
    )


def check(options: argparse.Namespace) -> None:
    """Raises ValueError unless either images or inputs are given, each input once."""
    if bool(options.images) == bool(options.inputs):
        raise ValueError("expected IMAGE ..., or --input NAME=VALUE for each input of the model")
    names = [name for name, _ in options.inputs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--input {repeated[0]}: expected each input once")


def read(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the inputs for `VisionClient.infer`. Raises ValueError and OSError."""
    return {name: _value(name, text) for name, text in options.inputs}


def command(model: Model) -> str:
    """Returns the command that runs a model on its inputs, to be completed."""
    values = [f"--input {one.name}={'IMAGE' if one.is_image else 'NUMBERS'}" for one in model.inputs]
    return f"xlaserve-client infer {model.name} {' '.join(values)}"


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE such as left=a.png or age=3.5, got {text!r}")
    return name, value


def _value(name: str, text: str) -> Any:
    path = Path(text)
    if path.suffix.lower() == _ARRAY_SUFFIX:
        try:
            return np.load(path, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"--input {name}: {path}: {error}") from None
    if path.is_file():
        return path
    try:
        return json.loads(text)
    except ValueError:
        expected = "an image file, a .npy file, or numbers in JSON"
        raise ValueError(f"--input {name}: expected {expected}, got {text!r}, which is no file") from None
