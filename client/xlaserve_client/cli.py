"""The `xlaserve-client` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc

from xlaserve_client import cli_answers, cli_images
from xlaserve_client.cli_parser import Parser, add_completion
from xlaserve_client.connection import DEFAULT_DEADLINE_S, DEFAULT_TARGET, MAX_PRIORITY, checked_deadline
from xlaserve_client.errors import ClientError
from xlaserve_client.results import Model
from xlaserve_client.sync import VisionClient

TOKEN_VARIABLE: Final = "XLASERVE_TOKEN"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 when something failed, 2 for a wrong command line."""
    options = parser().parse_args(arguments)
    try:
        client = VisionClient(
            options.target,
            deadline_s=options.deadline,
            priority=options.priority,
            credentials=_credentials(options),
            token=_token(),
        )
        with client:
            return int(options.run(client, options))
    except (ClientError, OSError, TypeError, ValueError) as error:
        cli_answers.complain(options, error)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    common = Parser(add_help=False)
    common.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="the server, or fleet://HOST:PORT (%(default)s)"
    )
    common.add_argument(
        "--deadline", type=_deadline, default=DEFAULT_DEADLINE_S, metavar="S", help="seconds for a call (%(default)g)"
    )
    priorities = range(1, MAX_PRIORITY + 1)
    common.add_argument("--priority", type=int, choices=priorities, default=0, help="1 is the highest; 2 by default")
    common.add_argument("--tls", action="store_true", help="speak TLS; implied by the options that begin so")
    common.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificates that are trusted, PEM")
    common.add_argument("--tls-cert", type=Path, metavar="FILE", help="this client's own certificate, PEM")
    common.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    common.add_argument("--json", action="store_true", help="print JSON")
    found = Parser(
        prog="xlaserve-client",
        description=f"Asks an xlaserve server. {TOKEN_VARIABLE} holds the API key or the token, if it needs one.",
        epilog="Options follow the command: xlaserve-client classify --target HOST:PORT MODEL IMAGE",
    )
    found.set_defaults(program=found.prog)
    found.add_argument("--version", action="version", version=version("xlaserve"))
    commands = found.add_subparsers(title="commands", required=True, metavar="COMMAND")
    cli_images.add_commands(commands, common)
    models = commands.add_parser("models", parents=[common], help="list the models and their state")
    models.set_defaults(run=_models)
    add_completion(found)
    return found


def _token() -> str | None:
    return os.environ.get(TOKEN_VARIABLE) or None


def _credentials(options: argparse.Namespace) -> grpc.ChannelCredentials | None:
    files = (options.tls_ca, options.tls_key, options.tls_cert)
    if not options.tls and not any(files):
        return None
    return grpc.ssl_channel_credentials(*(path and path.read_bytes() for path in files))


def _deadline(text: str) -> float:
    try:
        return checked_deadline(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds greater than 0, got {text}") from None


def _models(client: VisionClient, options: argparse.Namespace) -> int:
    models = client.models()
    if options.json:
        cli_answers.say([json.dumps([dataclasses.asdict(model) for model in models], indent=2)])
        return 0
    columns: list[tuple[str, Callable[[Model], str]]] = [
        ("MODEL", lambda model: model.name),
        ("VERSION", lambda model: model.version),
        ("STATE", _state),
        ("TASK", lambda model: model.task),
        ("MODES", lambda model: ",".join(f"{mode}*" * (mode == model.default_mode) or mode for mode in model.modes)),
        ("BUCKETS", _buckets),
        ("COMPILE", lambda model: f"{model.compile_s:.1f} s"),
        ("WEIGHTS", lambda model: model.weights),
        ("SOURCE", lambda model: model.source),
    ]
    rows = [[title for title, _ in columns], *([show(model) for _, show in columns] for model in models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cli_answers.say(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    cli_answers.say(
        f"{model.name}: inputs {', '.join(map(str, model.inputs))}" for model in models if not model.is_of_one_image
    )
    cli_answers.say(f"{model.name}: {model.reason}" for model in models if model.reason)
    cli_answers.say(f"{model.name}: warning: {warning}" for model in models for warning in model.warnings)
    return 0


def _state(model: Model) -> str:
    return f"{model.state} {len(model.programs)}/{model.programs_total}" if model.state == "compiling" else model.state


def _buckets(model: Model) -> str:
    sizes = dict.fromkeys((bucket.height, bucket.width) for bucket in model.buckets)
    return " ".join(
        ",".join(str(bucket.batch) for bucket in model.buckets if (bucket.height, bucket.width) == size)
        + f" x {size[0]}x{size[1]}"
        for size in sizes
    )
