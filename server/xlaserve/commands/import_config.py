"""`xlaserve import`: translates a configuration of another server."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

import yaml

from xlaserve.commands import foreign_configs, text_proto
from xlaserve.commands.command import Command, Invocation
from xlaserve.errors import ConfigError


def run(invocation: Invocation) -> int:
    """Prints the models as YAML, and on stderr a line for each field or model that was not translated."""
    own = invocation.own
    batching = _read(own.batching_parameters) if own.batching_parameters else None
    files = foreign_configs.of_repository(own.file) if own.file.is_dir() else [own.file]
    found = [foreign_configs.translate(_read(file), file, batching) for file in files]
    for note in chain.from_iterable(one.notes for one in found):
        sys.stderr.write(f"{note}\n")
    models = [*chain.from_iterable(one.models for one in found)]
    if not models:
        raise ConfigError(f"{own.file}: expected a model that can be served")
    sys.stdout.write(yaml.safe_dump({"models": models}, sort_keys=False, default_flow_style=None))
    return 0


def _read(file: Path) -> text_proto.Message:
    try:
        return text_proto.parse(file.read_text())
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'expected text in UTF-8'}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="CONFIG",
        help="TensorFlow Serving's models.config, Triton's config.pbtxt, or a model repository of Triton's",
    )
    parser.add_argument(
        "--batching-parameters", type=Path, metavar="FILE", help="TensorFlow Serving's batching parameters"
    )


COMMAND = Command("import", "translate a configuration of TensorFlow Serving or Triton", run, add_options, ())
