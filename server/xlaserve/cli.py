"""The command line: what is common to all commands. Each is a module of `xlaserve.commands`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args, get_origin

from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from xlaserve import __version__, config
from xlaserve.commands import (
    buckets,
    calibrate,
    check,
    explain,
    import_config,
    inspect,
    key,
    ledger,
    plan,
    profile,
    serve,
    show_config,
    upgrade,
    warm,
)
from xlaserve.commands.command import FAILED, Command, Invocation
from xlaserve.config import AutoBuckets, BucketSettings, ModelSettings, Settings, ShadowSettings
from xlaserve.errors import XlaserveError
from xlaserve.telemetry import logs
from xlaserve_client.cli_parser import Parser, add_completion

COMMANDS: Final = (
    serve.COMMAND,
    upgrade.COMMAND,
    warm.COMMAND,
    buckets.COMMAND,
    plan.COMMAND,
    calibrate.COMMAND,
    check.COMMAND,
    inspect.COMMAND,
    explain.COMMAND,
    profile.COMMAND,
    ledger.COMMAND,
    key.COMMAND,
    show_config.COMMAND,
    import_config.COMMAND,
)
_PLACEHOLDERS: Final[Mapping[object, str]] = {
    **{bool: "{true,false}", int: "N", float: "X", Path: "PATH"},
    **{AutoBuckets: "", ShadowSettings: "", BucketSettings: "N"},
}
INTERRUPTED: Final = 128 + signal.SIGINT
_STDOUT, _STDERR = 1, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 on success, 1 with a message on stderr otherwise."""
    _hold_standard_files()
    options = vars(parser().parse_args(arguments))
    command: Command = options.pop("command")
    file = options.pop("config", None)
    flags = {name: options.pop(name) for name in command.settings if options.get(name) is not None}

    load = partial(config.load, file, flags) if command.settings else Settings

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


def _hold_standard_files() -> None:
    """Opens /dev/null for those of the files 0 to 2 that are closed: what is opened next would have their numbers, and
    processes that are started would take it for theirs."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # Python has none of those that were closed when it began.
    sys.stdout = sys.stdout or os.fdopen(_STDOUT, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(_STDERR, "w", closefd=False)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    found = Parser(prog="xlaserve", description="Serves vision models, compiled by XLA ahead of traffic.")
    found.add_argument("--version", action="version", version=__version__)
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        parents = [_settings_parser(command.settings)] if command.settings else []
        subparser = commands.add_parser(command.name, parents=parents, help=command.help)
        if command is serve.COMMAND:
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            subparser.epilog = _models_explained()
        subparser.set_defaults(command=command)
        command.add_options(subparser)
    add_completion(found)
    return found


def _settings_parser(names: Sequence[str]) -> Parser:
    """Returns the parser of `--config` and of the flags of some settings."""
    found = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    found.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=None,
        help="YAML file of settings; without it the built-in configuration serves builtin:digits",
    )
    fields = found.add_argument_group(
        "settings", "Each overrides the environment's XLASERVE_<NAME> and the file; [defaults]."
    )
    for name in names:
        _add_flag(fields, name, Settings.model_fields[name])
    return found


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = _explained(field).replace("%", "%%")
    if field.annotation in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name == "models":
        group.add_argument(flag, type=_yaml, metavar="YAML", help=f"{text} A YAML or JSON list.")
    else:
        kind = Path if Path in get_args(field.annotation) else str
        group.add_argument(flag, type=kind, metavar=_takes(field.annotation), help=text)


def _models_explained() -> str:
    """Returns the text about the fields of a model, which have no flags."""
    lines = ["fields of a model, in a file or in --models:"]
    width = shutil.get_terminal_size().columns - 2
    for prefix, settings in (("", ModelSettings), ("auto_buckets.", AutoBuckets), ("shadow.", ShadowSettings)):
        for name, field in settings.model_fields.items():
            is_mapping = any(isinstance(item, PlainSerializer) for item in field.metadata)
            lines.append(f"  {prefix}{name} {'{NAME: TEXT}' if is_mapping else _takes(field.annotation)}".rstrip())
            lines.append(textwrap.fill(_explained(field), width, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines)


def _explained(field: FieldInfo) -> str:
    """Returns what a field is for, and its default where that is a plain value or a list of such."""
    text = (field.description or "").replace("\n", " ")
    if field.is_required():
        return f"{text} [required]"
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    words = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    is_plain = words and all(isinstance(value, (str, int, float, BucketSettings)) for value in values)
    return f"{text} [{', '.join(words)}]" if is_plain else text


def _takes(kind: Any) -> str:
    """Returns what stands for a value of a type: `{all,first_bucket}`, `N`, `[N,...]`."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is tuple:
        return f"[{','.join('...' if part is ... else _takes(part) for part in parts)}]"
    if isinstance(kind, type) and issubclass(kind, Enum):
        parts = [member.value for member in kind]
    if parts and isinstance(parts[0], str):
        return f"{{{','.join(parts)}}}"
    return _takes(parts[0]) if parts else _PLACEHOLDERS.get(kind, "TEXT")


def _yaml(text: str) -> object:
    try:
        return config.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not YAML: {error}") from None
