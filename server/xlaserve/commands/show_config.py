"""`xlaserve config`: checks the configuration, and shows it."""

from __future__ import annotations

import argparse
import sys

from xlaserve import config
from xlaserve.commands import image_defaults
from xlaserve.commands.command import Command, Invocation


def run(invocation: Invocation) -> int:
    """Says that the configuration is valid, or prints it; a wrong one does not come this far."""
    if invocation.own.show:
        sys.stdout.write(image_defaults.commented(config.dump(invocation.settings), invocation.settings.models))
        return 0
    config.check_files(invocation.settings)
    sys.stdout.write("the configuration is valid; --show prints it\n")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("--show", action="store_true", help="print the effective configuration")


COMMAND = Command(run, add_options, sources="*")
