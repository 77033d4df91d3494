"""The `xlaserve-client` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from xlaserve_client.connection import DEFAULT_DEADLINE_S, DEFAULT_TARGET, checked_deadline
from xlaserve_client.errors import ClientError, InvalidRequest
from xlaserve_client.results import ClassifyResult, Model
from xlaserve_client.sync import VisionClient

_IN_FLIGHT: Final = 16
"""Images under way at the same time: one request each, for the server to batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 when something failed, 2 for a wrong command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        with VisionClient(options.target, deadline_s=options.deadline) as client:
            return int(options.run(client, options))
    except (ClientError, ValueError) as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="the server (%(default)s)")
    common.add_argument(
        "--deadline", type=_deadline, default=DEFAULT_DEADLINE_S, metavar="S", help="seconds for a call (%(default)g)"
    )
    common.add_argument("--json", action="store_true", help="print JSON")
    parser = argparse.ArgumentParser(prog="xlaserve-client", description="Asks an xlaserve server.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    classify = commands.add_parser("classify", parents=[common], help="name what is in images")
    classify.add_argument("model", metavar="MODEL")
    classify.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="a JPEG, PNG or WebP file")
    classify.add_argument("--top-k", type=int, default=5, metavar="K", help="classes to print (%(default)s)")
    classify.add_argument("--mode", help="eager, graph or xla; the model's default without it")
    classify.set_defaults(run=_classify)
    models = commands.add_parser("models", parents=[common], help="list the models and their state")
    models.set_defaults(run=_models)
    return parser


def _deadline(text: str) -> float:
    try:
        return checked_deadline(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds greater than 0, got {text}") from None


def _classify(client: VisionClient, options: argparse.Namespace) -> int:
    ask = partial(client.classify, model=options.model, top_k=options.top_k, mode=options.mode)
    answered: list[tuple[Path, ClassifyResult]] = []
    failed = False
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        pending = [(path, pool.submit(ask, path)) for path in options.images]
        try:
            for path, future in pending:
                try:
                    answered.append((path, future.result()))
                except OSError as error:
                    failed = True
                    _complain(f"{path}: {error.strerror or error}")
                except InvalidRequest as error:
                    failed = True
                    _complain(f"{path}: {error.message}")
                else:
                    if not options.json:
                        _say(_classification_lines(*answered[-1]))
        finally:
            pool.shutdown(cancel_futures=True)
    if options.json:
        _say([json.dumps([{"image": str(path), **dataclasses.asdict(result)} for path, result in answered], indent=2)])
    return int(failed)


def _classification_lines(path: Path, result: ClassifyResult) -> list[str]:
    spent = f", {result.timings.total_s * 1000:.1f} ms in the server" if result.timings else ""
    lines = [f"{path}  ({result.mode or 'unknown mode'}{spent})"]
    categories = result.classifications[0].categories
    for category in categories:
        index = "" if category.label == str(category.index) else f"  ({category.index})"
        lines.append(f"  {category.score:9.4f}  {category.label}{index}")
    return lines


def _models(client: VisionClient, options: argparse.Namespace) -> int:
    models = client.models()
    if options.json:
        _say([json.dumps([dataclasses.asdict(model) for model in models], indent=2)])
        return 0
    columns: list[tuple[str, Callable[[Model], str]]] = [
        ("MODEL", lambda model: model.name),
        ("VERSION", lambda model: model.version),
        ("STATE", _state),
        ("MODES", lambda model: ",".join(f"{mode}*" * (mode == model.default_mode) or mode for mode in model.modes)),
        ("BUCKETS", _buckets),
        ("COMPILE", lambda model: f"{model.compile_s:.1f} s"),
        ("WEIGHTS", lambda model: model.weights),
        ("SOURCE", lambda model: model.source),
    ]
    rows = [[title for title, _ in columns], *([show(model) for _, show in columns] for model in models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    _say(f"{model.name}: {model.reason}" for model in models if model.reason)
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


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


def _complain(problem: object) -> None:
    sys.stderr.write(f"xlaserve-client: {problem}\n")


if __name__ == "__main__":
    sys.exit(main())
