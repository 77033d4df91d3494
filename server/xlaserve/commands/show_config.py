"""`xlaserve config`: checks the configuration, and shows it."""

from __future__ import annotations

import argparse
import sys

from xlaserve import config
from xlaserve.commands.command import Command, Invocation


def run(invocation: Invocation) -> int:
    """Says that the configuration is valid, or prints it; a wrong one does not come this far."""
    valid = "the configuration is valid; --show prints it\n"
    sys.stdout.write(config.dump(invocation.settings) if invocation.own.show else valid)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("--show", action="store_true", default=False, help="print the effective configuration")


COMMAND = Command("config", "check the configuration", run, add_options)
