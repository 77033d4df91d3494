"""`xlaserve help`: texts that are too long for the help of a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Final

from xlaserve.commands.command import Command, Invocation
from xlaserve.commands.settings_flags import models_explained

TOPICS: Final[Mapping[str, Callable[[], str]]] = {"models": models_explained}


def run(invocation: Invocation) -> int:
    """Prints the text about a topic."""
    sys.stdout.write(f"{TOPICS[invocation.own.topic]()}\n")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("topic", choices=tuple(TOPICS), help="models: the fields of a model in a configuration")


COMMAND = Command(run, add_options, ())
