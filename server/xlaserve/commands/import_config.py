"""`xlaserve import`: translates a configuration of another server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from xlaserve.commands import foreign_configs, text_proto
from xlaserve.commands.command import Command, Invocation
from xlaserve.errors import ConfigError


def run(invocation: Invocation) -> int:
    """Prints the models as YAML, and on stderr a line for each field that was not translated."""
    own = invocation.own
    batching = _read(own.batching_parameters) if own.batching_parameters else None
    found = foreign_configs.translate(_read(own.file), own.file, batching)
    sys.stdout.write(yaml.safe_dump({"models": found.models}, sort_keys=False, default_flow_style=None))
    for note in found.notes:
        sys.stderr.write(f"{note}\n")
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
        "file", type=Path, metavar="CONFIG", help="TensorFlow Serving's models.config, or Triton's config.pbtxt"
    )
    parser.add_argument(
        "--batching-parameters", type=Path, metavar="FILE", help="TensorFlow Serving's batching parameters"
    )


COMMAND = Command("import", "translate a configuration of TensorFlow Serving or Triton", run, add_options)
