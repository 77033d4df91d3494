"""The commands: serve, warm, config."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic.fields import FieldInfo

from xlaserve import __version__, config, console
from xlaserve.config import Settings
from xlaserve.errors import XlaserveError
from xlaserve.telemetry import logs

FAILED: Final = 1
INTERRUPTED: Final = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 on success, 1 with a message on stderr otherwise."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command: Callable[[argparse.Namespace, Settings, Callable[[], Settings]], int] = options.pop("command")
    own = argparse.Namespace(**{key: options.pop(key) for key in ("show", "json") if key in options})
    file, flags = options.pop("config"), {key: value for key, value in options.items() if value is not None}

    def load() -> Settings:
        return config.load(file, flags)

    try:
        settings = load()
        logs.configure(settings.log_level, settings.log_format)
        logs.quiet_tensorflow()
        status = command(own, settings, load)
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


def _serve(own: argparse.Namespace, settings: Settings, load: Callable[[], Settings]) -> int:
    async def serve() -> int:
        from xlaserve.app import App  # noqa: PLC0415

        with console.WarmUp(settings) as progress:
            app = App(settings, read_models=lambda: load().models, on_record=progress.record, on_loaded=progress.end)
            return await app.run()

    return _run(serve())


def _warm(own: argparse.Namespace, settings: Settings, load: Callable[[], Settings]) -> int:
    async def warm() -> int:
        from xlaserve.app import App  # noqa: PLC0415

        with console.WarmUp(settings) as progress:
            app = App(settings, on_record=progress.record)
            await app.repository.load_all()
        versions = app.repository.index()
        console.print_ledger((entry for version in versions for entry in version.ledger), own.json)
        return 0 if all(app.repository.serving().values()) else FAILED

    return _run(warm())


def _config(own: argparse.Namespace, settings: Settings, load: Callable[[], Settings]) -> int:
    sys.stdout.write(config.dump(settings) if own.show else "the configuration is valid; --show prints it\n")
    return 0


def _run(main: Coroutine[Any, Any, int]) -> int:
    import uvloop  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


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
    serve = commands.add_parser("serve", parents=[settings], help="compile every model, then serve until a signal")
    serve.set_defaults(command=_serve)
    warm = commands.add_parser("warm", parents=[settings], help="compile every model, print the ledger, and exit")
    warm.set_defaults(command=_warm)
    warm.add_argument("--json", action="store_true", default=False, help="print JSON instead of a table")
    show = commands.add_parser("config", parents=[settings], help="check the configuration")
    show.set_defaults(command=_config)
    show.add_argument("--show", action="store_true", default=False, help="print the effective configuration")
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = (field.description or "").replace("\n", " ").replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name == "models":
        group.add_argument(flag, type=_yaml, metavar="YAML", help=f"{text} A YAML or JSON list.")
    else:
        group.add_argument(flag, metavar="VALUE", help=text)


def _yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"not YAML: {error}") from None
