"""The command line: what is common to all commands. Each is a module of `xlaserve.commands`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Container, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final

from xlaserve import __version__, config
from xlaserve.commands import named_models, settings_flags
from xlaserve.commands.command import FAILED, Command, Invocation, ListedCommand
from xlaserve.config import Settings
from xlaserve.errors import XlaserveError
from xlaserve.telemetry import logs
from xlaserve_client.cli_parser import Parser, add_completion

COMMANDS: Final[Mapping[str, tuple[ListedCommand, ...]]] = {
    "serve models": (
        ListedCommand("serve", "serve", "compile every model, then serve until a signal"),
        ListedCommand("run", "run", "answer images with a model, without a server"),
        ListedCommand("warm", "warm", "compile every model, print the ledger, and exit"),
        ListedCommand("upgrade", "upgrade", "have a newly started server take the place of one with fronts"),
    ),
    "look at models": (
        ListedCommand("inspect", "inspect", "say what is in a model file, and print a configuration for it"),
        ListedCommand("match", "match", "find the settings with which a model gives the outputs of a notebook"),
        ListedCommand("check", "check", "compile models in several modes, time them and compare them with eager"),
        ListedCommand("explain", "explain", "show what XLA or OpenVINO made of a model, and what it costs"),
        ListedCommand("profile", "profile", "record a trace for TensorBoard"),
        ListedCommand("ledger", "ledger", "show what a running server has compiled"),
    ),
    "fit a server to its traffic": (
        ListedCommand("plan", "plan", "say how many servers a load needs"),
        ListedCommand("buckets", "buckets", "propose buckets for a model from a running server's traffic"),
        ListedCommand(
            "calibrate",
            "calibrate",
            "make a model int8 for the mode openvino, on a folder of images, and measure how well it agrees",
        ),
    ),
    "configure": (
        ListedCommand("config", "show_config", "check the configuration"),
        ListedCommand(
            "import", "import_config", "translate a configuration of another server, or a JAX or PyTorch model"
        ),
        ListedCommand("key", "key", "make an API key"),
        ListedCommand("help", "help", "explain the fields of a model"),
    ),
}
"""All commands by what they are for, in the order in which the help shows them."""
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
_ALL: Final = tuple(command.name for command in chain(*COMMANDS.values()))
INTERRUPTED: Final = 128 + signal.SIGINT
_STDOUT, _STDERR = 1, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 on success, 1 with a message on stderr otherwise."""
    _hold_standard_files()
    options = vars(parser(_named(sys.argv[1:] if arguments is None else arguments)).parse_args(arguments))
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


def parser(only: Container[str] = _ALL) -> argparse.ArgumentParser:
    """Returns the parser of the commands; those that are not in `only` have no options, and are not imported."""
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
    for listed in chain(*COMMANDS.values()):
        command = listed.load() if listed.name in only else None
        parents = [settings_flags.parser_of(command.settings)] if command and command.settings else []
        subparser = commands.add_parser(listed.name, parents=parents, help=listed.help)
        if command is not None:
            _fill(subparser, listed.name, command)
    add_completion(found)
    return found


def _fill(parser: Parser, name: str, command: Command) -> None:
    parser.set_defaults(command=command)
    if command.sources:
        named_models.add_options(parser, command.sources)
    command.add_options(parser)
    if name == "serve":
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = SERVE_EXAMPLES
    if rare := settings_flags.rare(parser, command.settings):
        parser.usage = f"xlaserve {name} [option ...] [SOURCE ...]"
        parser.unlist(rare)
        texts = (parser.epilog, settings_flags.models_explained())
        parser.add_help_all("\n\n".join(filter(None, texts)))


def _named(arguments: Sequence[str]) -> Container[str]:
    """Returns the commands whose options are needed to parse a command line."""
    first = arguments[0] if arguments else "--help"
    if first in _ALL:
        return (first,)
    return () if first in ("-h", "--help", "--version") else _ALL


def _commands_by_group() -> str:
    """Returns the commands and what each does, under the headings of their groups."""
    width = shutil.get_terminal_size().columns - 2
    lines = []
    for group, listed in COMMANDS.items():
        lines.append(f"{group}:")
        texts = (f"  {command.name:<10} {command.help}" for command in listed)
        lines += [textwrap.fill(text, width, subsequent_indent=" " * 13) for text in texts]
    return "\n".join(lines)
