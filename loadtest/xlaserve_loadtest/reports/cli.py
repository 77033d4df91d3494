"""`loadtest report`: every report there is, made from run files alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_jsonable_python
from rich.console import Console

from xlaserve_loadtest.analysis.conditions import Judged, judge
from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.parser import Parser, checked
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.reports import csv_rows, html, markdown, prometheus
from xlaserve_loadtest.reports.terminal import show
from xlaserve_loadtest.schedule.conditions import parse

SCHEMA: Final = "xlaserve.loadtest.report/1"
EXIT_CONDITION: Final = 3
"""A `--fail-if` condition is met, or can't be judged."""

_FORMATS: Final[Mapping[str, Callable[[Sequence[Summary]], str]]] = {
    "html": html.render,
    "markdown": lambda summaries: "\n---\n\n".join(map(markdown.render, summaries)),
    "csv": csv_rows.render,
    "json": lambda summaries: json.dumps(to_json(summaries), indent=2, allow_nan=False) + "\n",
    "push_file": prometheus.render,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: reported; 1: a file can't be read or written; 2: a wrong command line; 3: a condition is met.
    """
    options = parser().parse_args(arguments)
    try:
        summaries = [summarize(read_run(path), options.fail_if) for path in options.runs]
        return publish(summaries, options, Console())
    except (RunFileError, OSError) as error:
        sys.stderr.write(f"loadtest report: {error}\n")
        return 1


def parser() -> argparse.ArgumentParser:
    """Returns the subcommand's parser."""
    parser = Parser(
        prog="loadtest report", description="Makes reports from run files. Needs neither a server nor TensorFlow."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run files (NAME.run.jsonl.gz)")
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `publish` reads."""
    group = parser.add_argument_group("reports")
    group.add_argument("--html", type=_file, metavar="FILE", help="a page that needs nothing else")
    group.add_argument("--markdown", type=_file, metavar="FILE", help="for a pull request")
    group.add_argument("--csv", type=_file, metavar="FILE", help="a row for each arm and load")
    group.add_argument("--json", type=_file, metavar="FILE", help="everything, for programs")
    group.add_argument("--push-file", type=_file, metavar="FILE", help="Prometheus's text format")
    group.add_argument(
        "--fail-if",
        type=checked(parse),
        action="append",
        default=[],
        metavar="COND",
        help=f"exit with {EXIT_CONDITION} if so: p99>80ms, errors>0, dropped>1%%. By evidence, that is by bounds of "
        "95%% intervals and verdicts: 'xla/graph upper<0.95' (slower by 5%% for certain), 'xla/graph lower<0.95' "
        "(perhaps), 'xla/graph p99 lower>1.1', verdict=slower. A plain xla/graph<1.0 compares the point value: equal "
        "arms meet it about half the time",
    )


def publish(summaries: Sequence[Summary], options: argparse.Namespace, console: Console) -> int:
    """Writes the files asked for, prints the runs, and judges the conditions: 0, or 3 where one is met.

    Raises OSError where a file can't be written.
    """
    for name, render in _FORMATS.items():
        path: Path | None = getattr(options, name)
        if path is not None:
            # Whole or not at all: a collector may read at any time.
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(render(summaries))
            draft.replace(path)
    # Last, since a reader of stdout may close the pipe.
    for place, summary in enumerate(summaries):
        if place:
            console.rule()
        show(summary, console)
    judged = [
        each
        for summary in summaries
        for each in judge(summary.points or summary.curve, summary.comparisons, options.fail_if)
    ]
    return say_what_is_met(judged)


def say_what_is_met(judged: Iterable[Judged]) -> int:
    """Writes the conditions that are met, or can't be judged, to stderr; returns the exit status."""
    met = [each for each in judged if each.is_met]
    for each in met:
        sys.stderr.write(f"loadtest: --fail-if {each}\n")
    return EXIT_CONDITION if met else 0


def to_json(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Returns everything in JSON's types; infinite and unknown values are null."""
    return {"schema": SCHEMA, "runs": to_jsonable_python(summaries, inf_nan_mode="null")}


def _file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {path.parent}")
    return path
