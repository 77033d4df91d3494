"""The command line: what is common to all commands. Each is a module of `xlaserve.commands`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

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
    named_models,
    plan,
    profile,
    run,
    serve,
    settings_flags,
    show_config,
    upgrade,
    warm,
)
from xlaserve.commands import help as help_
from xlaserve.commands.command import FAILED, Command, Group, Invocation
from xlaserve.config import Settings
from xlaserve.errors import XlaserveError
from xlaserve.telemetry import logs
from xlaserve_client.cli_parser import Parser, add_completion

COMMANDS: Final = (
    serve.COMMAND,
    run.COMMAND,
    warm.COMMAND,
    upgrade.COMMAND,
    inspect.COMMAND,
    check.COMMAND,
    explain.COMMAND,
    profile.COMMAND,
    ledger.COMMAND,
    plan.COMMAND,
    buckets.COMMAND,
    calibrate.COMMAND,
    show_config.COMMAND,
    import_config.COMMAND,
    key.COMMAND,
    help_.COMMAND,
)
EXAMPLES: Final = """examples:
  xlaserve run mine.keras photo.jpg      answer a picture
  xlaserve serve mine.keras              serve a file; its page is on port 8000
  xlaserve inspect mine.h5 > models.yaml see what is in a file
  xlaserve serve --config models.yaml    serve what a configuration says"""
SERVE_EXAMPLES: Final = """examples:
  xlaserve serve mine.keras --labels cat,dog --preprocess unit
  xlaserve serve keras.applications:ResNet50 --weights imagenet --http-port 80
  xlaserve serve --config models.yaml

Fields of a model: xlaserve help models"""
INTERRUPTED: Final = 128 + signal.SIGINT
_STDOUT, _STDERR = 1, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 on success, 1 with a message on stderr otherwise."""
    _hold_standard_files()
    options = vars(parser().parse_args(arguments))
    command: Command = options.pop("command")
    file = options.pop("config", None)
    flags = {name: options.pop(name) for name in command.settings if options.get(name) is not None}

    try:
        defaults: Mapping[str, object] = {}
        if command.sources and (named := named_models.settings_of(options)):
            flags, defaults = {**flags, **named}, named_models.defaults()
        load = partial(config.load, file, flags, defaults=defaults) if command.settings else Settings
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
    found = Parser(
        prog="xlaserve",
        description="Serves vision models, compiled by XLA ahead of traffic.",
        epilog=f"{_commands_by_group()}\n\n{EXAMPLES}\n\nxlaserve COMMAND --help explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="xlaserve [-h] [--version] COMMAND ...",
    )
    found.add_argument("--version", action="version", version=__version__)
    commands = found.add_subparsers(required=True, metavar="COMMAND", prog=found.prog)
    found.unlist([commands])  # the epilog has them
    for command in COMMANDS:
        parents = [settings_flags.parser_of(command.settings)] if command.settings else []
        subparser = commands.add_parser(command.name, parents=parents, help=command.help)
        subparser.set_defaults(command=command)
        if command.sources:
            named_models.add_options(subparser, command.sources)
        command.add_options(subparser)
        if command is serve.COMMAND:
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            subparser.epilog = SERVE_EXAMPLES
        if rare := settings_flags.rare(subparser, command.settings):
            subparser.usage = f"xlaserve {command.name} [option ...] [SOURCE ...]"
            subparser.unlist(rare)
            subparser.add_help_all(f"{SERVE_EXAMPLES}\n\n{settings_flags.models_explained()}")
    add_completion(found)
    return found


def _commands_by_group() -> str:
    """Returns the commands and what each does, under the headings of their groups."""
    width = shutil.get_terminal_size().columns - 2
    lines = []
    for group in Group:
        lines.append(f"{group.value}:")
        texts = (f"  {command.name:<10} {command.help}" for command in COMMANDS if command.group is group)
        lines += [textwrap.fill(text, width, subsequent_indent=" " * 13) for text in texts]
    return "\n".join(lines)
