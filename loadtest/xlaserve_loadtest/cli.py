"""The `loadtest` command."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.status import Status

from xlaserve_loadtest import payload, report
from xlaserve_loadtest.session import Session, Settings
from xlaserve_loadtest.target import TargetError

_MIN_WIDTH: Final = 110
"""Columns that the table gets where the output is not a terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: every mode was measured to the end; 1: at least one of them stopped answering, or the target could not be used;
    2: a wrong command line; 130: interrupted.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.target and options.config:
        parser.error("--config is for a server that is started here, not for a --target")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}")
    session = Session(
        Settings(
            model=options.model,
            modes=options.mode,
            duration_s=options.duration,
            warmup_s=options.warmup,
            concurrency=options.concurrency,
            images_per_request=options.images_per_request,
            payload=options.payload,
            size=options.size,
            target=options.target,
            config=options.config,
            seed=options.seed,
            deadline_s=options.deadline,
            start_timeout_s=options.start_timeout,
        )
    )
    failure: TargetError | None = None
    with _Terminal() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        try:
            interrupted = loop.run(_run(session, progress))
        except TargetError as error:
            failure, interrupted = error, False
    if failure:
        sys.stderr.write(f"loadtest: {failure}\n")
        return 1
    arms = report.summaries(session)
    out = Console()
    if not out.is_terminal:
        out = Console(width=max(out.width, _MIN_WIDTH))
    out.print(report.table(session, arms))
    for note in report.notes(session, arms, interrupted=interrupted):
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    if options.json:
        document = report.document(session, arms, interrupted=interrupted)
        options.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    if interrupted:
        return 130
    return 0 if report.complete(session, arms) and not session.obituary else 1


async def _run(session: Session, progress: _Terminal) -> bool:
    """Runs the session and returns whether it was interrupted by Ctrl-C or SIGTERM."""
    task = asyncio.create_task(session.run(progress))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return False


class _Terminal:
    """Shows on stderr what is going on: a living line in a terminal, one line for each step elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = self._console.status("starting") if self._console.is_terminal else None

    def __enter__(self) -> _Terminal:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def show(self, text: str) -> None:
        if self._status and text:
            self._status.update(text.replace("[", r"\["))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest",
        description="Measures images/s and latency of a model in several modes, interleaved. "
        "Without --target it starts a server of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive, positive_count = _number(float, 0.0), _number(int, 0)
    parser.add_argument("--mode", type=_modes, default=("xla", "graph"), metavar="M,M", help="modes to compare")
    parser.add_argument(
        "--model", default="digits", help="a served model's name; without --target and --config also a source"
    )
    parser.add_argument("--duration", type=positive, default=5.0, metavar="S", help="measured seconds for each mode")
    parser.add_argument("--warmup", type=positive, default=1.0, metavar="S", help="seconds before a mode is measured")
    parser.add_argument("--concurrency", type=positive_count, default=16, metavar="N", help="requests at a time")
    parser.add_argument("--images-per-request", type=positive_count, default=1, metavar="N", help="images in a request")
    parser.add_argument("--payload", choices=payload.KINDS, default="pixels", help="raw pixels or PNG files")
    parser.add_argument("--size", type=_size, metavar="HxW", help="height and width of the images")
    parser.add_argument("--target", metavar="HOST:PORT", help="measure this running server")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration of the server that is started")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of images and of the order of blocks")
    parser.add_argument("--deadline", type=positive, default=10.0, metavar="S", help="seconds for each request")
    parser.add_argument(
        "--start-timeout", type=positive, default=900.0, metavar="S", help="seconds for the server to get ready"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    return parser


def _number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not least < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number over {least:g}, got {text}")
        return value

    parse.__name__ = "number"
    return parse


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(mode.strip() for mode in text.split(","))
    if not all(modes) or len(set(modes)) != len(modes):
        raise argparse.ArgumentTypeError(f"expected modes such as xla,graph,eager, each once, got {text}")
    return modes


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH such as 224x224, got {text}")
    return int(height), int(width)


if __name__ == "__main__":
    sys.exit(main())
