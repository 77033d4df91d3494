"""The command line: what is common to all commands. Each is a module of `xlaserve.commands`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from xlaserve import __version__, config
from xlaserve.commands import buckets, check, explain, ledger, profile, serve, show_config, warm
from xlaserve.commands.command import FAILED, Command, Invocation
from xlaserve.config import AutoBuckets, ModelSettings, Settings
from xlaserve.errors import XlaserveError
from xlaserve.telemetry import logs
from xlaserve_client.cli_parser import Parser

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
    except BrokenPipeError:  # the reader of stdout has seen enough
        status = FAILED
    sys.stderr.flush()
    # Not sys.exit, which waits for a compilation that a signal came into and that nothing can interrupt.
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="xlaserve", description="Serves vision models, compiled by XLA ahead of traffic.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    settings = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    settings.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=None,
        help="YAML file of settings; without it the built-in configuration serves builtin:digits",
    )
    fields = settings.add_argument_group(
        "settings", "Each overrides the environment's XLASERVE_<NAME> and the file; [defaults]."
    )
    for name, field in Settings.model_fields.items():
        _add_flag(fields, name, field)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, parents=[settings], help=command.help)
        if command is serve.COMMAND:
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            subparser.epilog = _models_explained()
        subparser.set_defaults(command=command)
        command.add_options(subparser)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = _explained(field).replace("%", "%%")
    if field.annotation in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name == "models":
        group.add_argument(flag, type=_yaml, metavar="YAML", help=f"{text} A YAML or JSON list.")
    else:
        group.add_argument(flag, metavar=_choices(field) or "VALUE", help=text)


def _models_explained() -> str:
    """Returns the text about the fields of a model, which have no flags."""
    return "\n".join(
        [
            "fields of a model, in a file or in --models:",
            *_fields_explained(ModelSettings, ""),
            *_fields_explained(AutoBuckets, "auto_buckets."),
        ]
    )


def _fields_explained(settings: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in settings.model_fields.items():
        yield f"  {prefix}{name} {_choices(field)}".rstrip()
        yield textwrap.fill(_explained(field), 78, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _explained(field: FieldInfo) -> str:
    """Returns what a field is for, and its default where that is a plain value."""
    text = (field.description or "").replace("\n", " ")
    default = field.default.value if isinstance(field.default, Enum) else field.default
    if isinstance(default, bool):
        default = str(default).lower()
    return f"{text} [{default}]" if isinstance(default, (str, int, float)) else text


def _choices(field: FieldInfo) -> str:
    """Returns the values that a field can have, where these are a few words, else nothing."""
    kind = field.annotation
    members = kind if isinstance(kind, type) and issubclass(kind, Enum) else get_args(kind)
    values = [member.value if isinstance(member, Enum) else member for member in members]
    return f"{{{','.join(values)}}}" if values and all(isinstance(value, str) for value in values) else ""


def _yaml(text: str) -> object:
    try:
        return config.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not YAML: {error}") from None
