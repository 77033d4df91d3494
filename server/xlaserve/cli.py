"""The command line: what is common to all commands. Each is a module of `xlaserve.commands`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo

from xlaserve import __version__, config
from xlaserve.commands import buckets, check, explain, ledger, profile, serve, show_config, warm
from xlaserve.commands.command import FAILED, Command, Invocation
from xlaserve.config import Settings
from xlaserve.errors import XlaserveError
from xlaserve.telemetry import logs

COMMANDS: Final = (
    serve.COMMAND,
    warm.COMMAND,
    buckets.COMMAND,
    check.COMMAND,
    explain.COMMAND,
    profile.COMMAND,
    ledger.COMMAND,
    show_config.COMMAND,
)
INTERRUPTED: Final = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 on success, 1 with a message on stderr otherwise."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command: Command = options.pop("command")
    file = options.pop("config")
    flags = {name: options.pop(name) for name in Settings.model_fields if options.get(name) is not None}

    def load() -> Settings:
        return config.load(file, flags)

    try:
        settings = load()
        logs.configure(settings.log_level, settings.log_format)
        logs.quiet_tensorflow()
        status = command.run(Invocation(argparse.Namespace(**options), settings, load))
        sys.stdout.flush()
    except XlaserveError as error:
        sys.stderr.write(f"xlaserve: {error}\n")
        status = FAILED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has seen enough
        status = FAILED
    sys.stderr.flush()
    # Not sys.exit, which waits for a compilation that a signal came into and that nothing can interrupt.
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlaserve", description="Serves vision models, compiled by XLA ahead of traffic."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    settings = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    settings.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=None,
        help="YAML file of settings; without it the built-in configuration serves builtin:digits",
    )
    fields = settings.add_argument_group("settings", "Each overrides the environment's XLASERVE_<NAME> and the file.")
    for name, field in Settings.model_fields.items():
        _add_flag(fields, name, field)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, parents=[settings], help=command.help)
        subparser.set_defaults(command=command)
        command.add_options(subparser)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = (field.description or "").replace("\n", " ").replace("%", "%%")
    if field.annotation in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name == "models":
        group.add_argument(flag, type=_yaml, metavar="YAML", help=f"{text} A YAML or JSON list.")
    else:
        group.add_argument(flag, metavar="VALUE", help=text)


def _yaml(text: str) -> object:
    try:
        return config.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not YAML: {error}") from None
