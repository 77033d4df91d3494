"""`loadtest report`: makes all reports, from run files alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_jsonable_python
from rich.console import Console

from xlaserve_loadtest.analysis.conditions import Judged, judge
from xlaserve_loadtest.analysis.defaults import judge_by_default
from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.files import naming
from xlaserve_loadtest.parser import Parser, checked, file_to_write
from xlaserve_loadtest.printable import one_line, printable
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.reports import csv_rows, html, junit, markdown
from xlaserve_loadtest.reports.terminal import show
from xlaserve_loadtest.schedule.conditions import Condition, parse

SCHEMA: Final = "xlaserve.loadtest.report/1"
EXIT_CONDITION: Final = 3
"""Exit status where a `--fail-if` condition is met or can't be judged."""

STEP_SUMMARY: Final = "GITHUB_STEP_SUMMARY"
"""The environment variable with the file to which a step of a GitHub workflow appends its job's summary."""


class NotWrittenError(OSError):
    """Some reports can't be written; the message names each file."""

    def __init__(self, failures: Sequence[OSError]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.paths = [failure.filename for failure in failures]


_Judged = Sequence[Sequence[Judged]]
"""The judged conditions of each run."""
_FORMATS: Final[Mapping[str, Callable[[Sequence[Summary], _Judged], str]]] = {
    "html": lambda summaries, _: html.render(summaries),
    "markdown": markdown.render_all,
    "csv": lambda summaries, _: csv_rows.render(summaries),
    "json": lambda summaries, judged: json.dumps(to_json(summaries, judged), indent=2, allow_nan=False) + "\n",
    "junit": lambda summaries, judged: junit.render(map(junit.suite, summaries, judged)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: reported; 1: a file can't be read or written, or a run is incomplete; 2: a wrong command line; 3: a condition is
    met, even where 1 is true.
    """
    command = parser()
    options = command.parse_args(arguments)
    check(options, command, options.runs)
    try:
        discard(options)
        summaries = [summarize(read_run(path), options.fail_if) for path in options.runs]
        return publish(summaries, options, Console())
    except RunFileError as error:
        return fail(options, f"loadtest report: {error}")
    except OSError as error:
        sys.stderr.write(printable(f"loadtest report: {error}\n"))
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
    group.add_argument(
        "--details",
        action="store_true",
        help="print intervals, stages, resources and notes, not only the result",
    )
    group.add_argument("--html", type=file_to_write, metavar="FILE", help="a page that needs nothing else")
    group.add_argument("--csv", type=file_to_write, metavar="FILE", help="a row for each arm and load")
    group.add_argument("--json", type=file_to_write, metavar="FILE", help="everything, for programs")
    add_check_options(
        group,
        parse,
        f"exit with {EXIT_CONDITION} if so: p99>80ms, dropped>1%%; without one about them also for errors>0 and "
        "differing>0 (outputs), so that errors>1%% allows some. By evidence, that is by bounds of "
        "95%% intervals and verdicts: 'xla/graph upper<0.95' (slower by 5%% for certain), 'xla/graph lower<0.95' "
        "(perhaps), 'xla/graph p99 lower>1.1', verdict=slower. A plain xla/graph<1.0 compares the point value: equal "
        "arms meet it about half the time",
    )


def add_check_options(
    group: argparse._ActionsContainer, parse_condition: Callable[[str], Condition], fail_if: str
) -> None:
    """Adds the options for pipelines that several commands have; `fail_if` is the help text of that option."""
    group.add_argument(
        "--markdown", type=file_to_write, metavar="FILE", help=f"for a pull request; appended to ${STEP_SUMMARY}"
    )
    group.add_argument(
        "--junit",
        type=file_to_write,
        metavar="FILE",
        help="JUnit XML: a test case for each condition, and one for a complete run",
    )
    group.add_argument(
        "--fail-if", type=checked(parse_condition), action="append", default=[], metavar="COND", help=fail_if
    )
    group.add_argument(
        "--these-processes",
        action="store_true",
        help="judge verdicts and intervals even where each side had one server process: others of the same code may "
        "differ by more, so that a condition on them can't be judged without",
    )


def publish(
    summaries: Sequence[Summary], options: argparse.Namespace, console: Console, live: Sequence[Judged] = ()
) -> int:
    """Judges the runs by the options' conditions and the default ones, writes the reports, and prints the runs.

    Returns 0, 1 where a run is incomplete, or 3 where a condition is met. `live` are conditions that were judged during
    the first run.

    Raises NotWrittenError where a file can't be written, after everything else is done.
    """
    judged = [judge_summary(summary, options.fail_if, these_processes=options.these_processes) for summary in summaries]
    if summaries:
        judged[0] += live
    failures = []
    for name, render in _FORMATS.items():
        path: Path | None = getattr(options, name)
        if path is not None:
            try:
                write(path, render(summaries, judged))
            except OSError as error:
                failures.append(error)
    # Last, since a reader of stdout may close the pipe.
    for place, summary in enumerate(summaries):
        if place:
            console.rule()
        show(summary, console, has_details=options.details)
    is_incomplete = report_missing(summaries)
    status = report_met(chain.from_iterable(judged))
    if failures:
        raise NotWrittenError(failures)
    return status or int(is_incomplete)


def judge_summary(summary: Summary, conditions: Sequence[Condition], *, these_processes: bool = False) -> list[Judged]:
    """Judges a run by `conditions`, and by the default conditions that they don't replace.

    See `judge` for `these_processes`.
    """
    points = summary.shown_points
    return [
        *judge(points, summary.comparisons, conditions, summary.equalities, these_processes=these_processes),
        *judge_by_default(points, summary.equalities, conditions),
    ]


def check(options: argparse.Namespace, parser: argparse.ArgumentParser, read: Sequence[Path] = ()) -> None:
    """Ends with status 2 where a report would be written over one of the files in `read`."""
    sources = {path.resolve() for path in read}
    for path in _written(options):
        # Writing replaces a link to the run and not the run itself; a folder may have several names.
        if path.parent.resolve() / path.name in sources:
            parser.error(f"{path}: expected a file to write, and it is the run that is read")


def discard(options: argparse.Namespace, *more: Path) -> None:
    """Removes the files that will be written, and `more`, so that no report of an earlier run is left after a failure.

    Devices, pipes and the file that is appended to are not removed. Raises OSError.
    """
    for path in (*_written(options), *more):
        if path.is_file() and not _is_stream(path) and not _is_step_summary(path):
            path.unlink()


def fail(options: argparse.Namespace, message: str) -> int:
    """Writes to stderr why there is no report, and to the JUnit file if the options name one; returns the exit status
    1."""
    sys.stderr.write(printable(f"{message}\n"))
    if options.junit:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        suite = junit.Suite("loadtest", now, 0.0, "Nothing was measured.", (), missing=(message,))
        try:
            write(options.junit, junit.render([suite]))
        except OSError as error:
            sys.stderr.write(printable(f"loadtest: {error}\n"))
    return 1


def _written(options: argparse.Namespace) -> list[Path]:
    """Returns the report files that the options name; a command may lack some of the options."""
    named = (getattr(options, name, None) for name in _FORMATS)
    return [path for path in named if isinstance(path, Path)]


def write(path: Path, text: str) -> None:
    """Writes a file atomically, since a collector may read it at any time. Raises OSError.

    A device or a pipe, such as /dev/stdout, is written to and never replaced.
    """
    with naming(path):  # errors name `path` and not the draft
        _write(path, text)


def _write(path: Path, text: str) -> None:
    if _is_stream(path):
        with path.open("w", encoding="utf-8") as device:
            device.write(text)
        return
    if _is_step_summary(path):
        with path.open("a", encoding="utf-8") as summary:
            summary.write(text)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    """Returns whether a path is a device, a pipe, or a name of an open file such as /dev/stdout, which may be
    redirected."""
    folder = str(path.parent.resolve())
    is_open_file = folder.startswith("/proc/") or (path.is_symlink() and str(path.readlink()).startswith("/proc/"))
    return is_open_file or (path.exists() and not path.is_file())


def _is_step_summary(path: Path) -> bool:
    summary = os.environ.get(STEP_SUMMARY, "")
    return bool(summary) and path.absolute() == Path(summary).absolute()


def report_missing(summaries: Iterable[Summary]) -> bool:
    """Writes to stderr what each incomplete run lacks; returns whether a run is incomplete."""
    incomplete = [summary for summary in summaries if not summary.is_complete]
    for summary in incomplete:
        sys.stderr.write(one_line(f"loadtest: {summary.path}: incomplete: {' '.join(summary.missing)}") + "\n")
    return bool(incomplete)


def report_met(judged: Iterable[Judged]) -> int:
    """Writes to stderr the conditions that are met or can't be judged; returns the exit status."""
    met = [each for each in judged if each.is_met]
    for each in met:
        sys.stderr.write(one_line(f"loadtest: {each.option} {each}") + "\n")
    return EXIT_CONDITION if met else 0


def to_json(summaries: Sequence[Summary], judged: _Judged = ()) -> dict[str, Any]:
    """Returns the summaries and conditions in JSON's types; infinite and unknown values are null."""
    conditions = [
        {"condition": each.condition.text, "is_met": each.is_met, "is_judged": each.is_judged, "found": each.found}
        for each in chain.from_iterable(judged)
    ]
    return {"schema": SCHEMA, "runs": to_jsonable_python(summaries, inf_nan_mode="null"), "conditions": conditions}
