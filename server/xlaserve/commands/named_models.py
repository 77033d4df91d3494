"""Models that a command line names by their sources, as in `xlaserve serve mine.keras --labels cat,dog`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from xlaserve import config
from xlaserve.config import ModelSettings, sources
from xlaserve.config.errors_in_words import did_you_mean
from xlaserve.errors import ConfigError
from xlaserve.programs.cache.records import check_writable

LISTS: Final = ("modes", "buckets", "labels", "input_size")
"""Fields of a model that flags give as lists: `1,4,16`."""
FLAGS: Final = {
    "name": "its name in requests; the name of the file without it",
    "task": "the meaning of its outputs; told by the model without it",
    "labels": "its classes' names: a file with one a line, or a list such as cat,dog",
    "preprocess": "how pixels from 0 to 255 are scaled for the network: none, unit, tf, torch, caffe, standardize or"
    " {mean: 127, deviation: 128}",
    "input_size": "height and width for a model that takes any: 224,224",
    "color": "the colours that it was trained with: grey, rgb, bgr, rgba or yuv",
    "weights": "imagenet, random, a preset or a file",
    "modes": "the modes to serve it in, such as xla,graph; the first is the default",
    "buckets": "the batch sizes to compile: 1,4,16, or auto",
}
OF_ONE: Final = ("name", "labels")
"""Flags that say something of one model, and not of several."""
CONFIGURATIONS: Final = (".yaml", ".yml", ".json")


def add_options(parser: argparse.ArgumentParser, number: Literal["1", "*"] = "*") -> None:
    """Adds one source or any number of them, and the flags for the fields of their models."""
    text = "a model's file or folder, or a name such as keras.applications:ResNet50"
    if number == "1":
        parser.add_argument("sources", nargs=1, metavar="SOURCE", help=text)
    else:
        text = f"{text}; else the models of --config"
        parser.add_argument("sources", nargs=number, metavar="SOURCE", help=text)
    group = parser.add_argument_group("models", "Fields of the models that SOURCE names.")
    for field, text in FLAGS.items():
        group.add_argument(f"--{field.replace('_', '-')}", dest=f"model_{field}", metavar=_metavar(field), help=text)
    group.add_argument(
        "--set",
        dest="model_fields",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of a model, as a configuration has it: --set threshold=0.3; see xlaserve help models",
    )


def settings_of(options: Mapping[str, Any]) -> dict[str, object]:
    """Returns the setting `models` that a command line gives by sources; none where it names no source.

    Raises ConfigError.
    """
    given = {field: options[f"model_{field}"] for field in FLAGS if options.get(f"model_{field}") is not None}
    own = {field: _value(field, text) for field, text in given.items()} | _assigned(options["model_fields"])
    named: list[str] = options["sources"]
    if not named:
        if own:
            flag = next(iter(given), "set").replace("_", "-")
            raise ConfigError(f"--{flag}: expected a SOURCE with it, such as xlaserve serve mine.keras --{flag} ...")
        return {}
    for source in named:
        if Path(source).suffix in CONFIGURATIONS:
            raise ConfigError(f"SOURCE: expected a model, got {source}, a configuration: --config {source}")
    if len(named) > 1 and (alone := [field for field in own if field in OF_ONE]):
        raise ConfigError(f"--{alone[0]}: expected one SOURCE with it, got {len(named)}: {', '.join(named)}")
    names = [str(own.get("name") or sources.name_of(source)) for source in named]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"SOURCE: expected models of different names, got {repeated} twice: serve them by --config")
    return {
        "models": [
            {"name": name, "source": _as_source(source), **own} for name, source in zip(names, named, strict=True)
        ]
    }


def defaults(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Returns defaults of a server whose models are named by sources: it answers as early as it can.

    Makes the folder of its compile cache, for the user alone.
    """
    early: dict[str, object] = {"ready_when": "first_bucket"}
    try:
        folder = _cache_folder(environ)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(folder)
    except (OSError, RuntimeError):  # a file system that can't be written, or a user without a home
        return early
    return early | {"compile_cache": str(folder)}


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the user's folder for caches of this program, by the XDG Base Directory Specification."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "xlaserve"


def _as_source(source: str) -> str:
    """Returns a source as settings have it: a path with a colon as `./` and the path."""
    is_path = sources.kind_of_name(source) is None and not sources.looks_like_path(source) and Path(source).exists()
    return f"./{source}" if is_path else source


def _assigned(assignments: list[str]) -> dict[str, object]:
    own = {}
    for assignment in assignments:
        field, is_assigned, text = assignment.partition("=")
        if not is_assigned or field not in ModelSettings.model_fields:
            hint = did_you_mean(field, ModelSettings.model_fields) if is_assigned else ""
            raise ConfigError(f"--set: expected FIELD=VALUE with a field of a model, got {assignment}{hint}")
        own[field] = _parsed(f"--set {field}", text)
    return own


def _parsed(flag: str, text: str) -> object:
    try:
        return config.parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: not YAML: {error}") from None


def _value(field: str, text: str) -> object:
    is_list = field in LISTS and text != "auto" and not (field == "labels" and "," not in text)
    if field == "preprocess" and text.startswith("{"):
        return _parsed("--preprocess", text)
    if not is_list:
        return text
    words = [word.strip() for word in text.split(",") if word.strip()]
    return words if field in ("modes", "labels") else [int(word) if word.isdecimal() else word for word in words]


def _metavar(field: str) -> str:
    return {"labels": "FILE", "buckets": "N,...", "modes": "MODE,...", "input_size": "H,W"}.get(field, "TEXT")
