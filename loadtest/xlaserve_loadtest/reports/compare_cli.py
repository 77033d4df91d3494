"""`loadtest compare A B`: compares two runs, from their files alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from xlaserve_loadtest.analysis.changes import (
    CODE,
    Change,
    Difference,
    changes,
    differences,
    judge_changes,
    judge_each,
    parse_condition,
)
from xlaserve_loadtest.analysis.completeness import MARK
from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.analysis.verdict import MEASURE_NAMES
from xlaserve_loadtest.parser import Parser, names
from xlaserve_loadtest.printable import one_line
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.reports import junit, markdown
from xlaserve_loadtest.reports.cli import (
    EXIT_CONDITION,
    add_check_options,
    check,
    discard,
    fail,
    report_met,
    report_missing,
    write,
)
from xlaserve_loadtest.reports.table import Table, ratio
from xlaserve_loadtest.reports.terminal import show_table, widen

_NOTE: Final = "Intervals cover what varies within each run; what changed between the two is in the ratio."


def parser() -> argparse.ArgumentParser:
    """Returns the subcommand's parser."""
    parser = Parser(
        prog="loadtest compare",
        description="Compares the arms of run B with those of run A of the same names and loads. There is no verdict "
        "where the runs differ in more than the code: the machine, other versions, options, or the length of blocks.",
    )
    parser.add_argument("first", type=Path, metavar="A", help="run file")
    parser.add_argument("second", type=Path, metavar="B", help="run file")
    parser.add_argument(
        "--changed",
        type=names,
        default=CODE,
        metavar="NAME,NAME",
        help="what was changed on purpose, as `differs:` names it, such as packages or flags.XLA_FLAGS; "
        f"{','.join(CODE)} without. Never the machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_check_options(
        parser,
        parse_condition,
        f"exit with {EXIT_CONDITION} if so, or if it can't be judged: 'B/A upper<0.95', 'xla:B/A p99 lower>1.1', "
        "verdict=slower, xla:verdict=slower; without one about them also for errors>0 and differing>0 in either run",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: compared; 1: a file can't be read, a run is incomplete, or they have no arm and load in common; 2: a wrong
    command line; 3: a condition is met, even where a run is incomplete.
    """
    command = parser()
    options = command.parse_args(arguments)
    check(options, command, (options.first, options.second))
    try:
        discard(options)
        runs = read_run(options.first), read_run(options.second)
    except (RunFileError, OSError) as error:
        return fail(options, f"loadtest compare: {error}")
    summaries = summarize(runs[0]), summarize(runs[1])
    missing = [f"{summary.path.name}: {text}" for summary in summaries for text in summary.missing]
    apart = differences(*runs, options.changed)
    compared = changes(*runs, apart)
    judged = [
        *judge_changes(compared, options.fail_if, these_processes=options.these_processes),
        *judge_each(*summaries, options.fail_if),
    ]
    failure: OSError | None = None
    try:
        if options.junit:
            headline = " ".join([*_mark(missing), *map(_sentence, compared)])
            name = " and ".join(path.name.partition(".")[0] for path in (options.first, options.second))
            suite = junit.Suite(name, runs[1].header.started_at, 0.0, headline, judged, missing)
            write(options.junit, junit.render([suite]))
        if options.markdown:
            write(options.markdown, "\n".join(_markdown(compared, apart, judged, missing)) + "\n")
    except OSError as error:
        failure = error
    if options.json:
        document = {
            "changes": list(map(dataclasses.asdict, compared)),
            "differences": [each.text for each in apart],
            "reasons_not_to_conclude": [each.text for each in apart if each.is_reason],
            "missing": missing,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        show(compared, apart, Console(), missing)
    report_missing(summaries)
    if not compared:
        sys.stderr.write("loadtest compare: the runs have measured no arm under the same load\n")
        return 1
    status = report_met(judged) or int(bool(missing))
    if failure:
        sys.stderr.write(f"loadtest compare: {failure}\n")
        return 1
    return status


def show(
    compared: Sequence[Change], apart: Sequence[Difference], console: Console, missing: Sequence[str] = ()
) -> None:
    """Prints the changes, what is missing of the runs, other differences, and the figures of both runs."""
    widen(console)
    for text in (*_mark(missing), *missing):
        console.print(Text(one_line(text), "yellow"))
    for change in compared:
        console.print(Text(one_line(_sentence(change)), "bold"))
    for difference in apart:
        console.print(Text.assemble((_kind(difference), "yellow"), one_line(difference.text)))
    if not compared:
        return
    show_table(figures(compared), console)
    console.print(Text(_NOTE, "dim"))


def _mark(missing: Sequence[str]) -> list[str]:
    return [MARK] if missing else []


def _markdown(
    compared: Sequence[Change], apart: Sequence[Difference], judged: Sequence[Judged], missing: Sequence[str]
) -> Iterator[str]:
    yield from (f"**{markdown.plain(text)}**\n" for text in _mark(missing))
    yield from (f"- {markdown.plain(text)}\n" for text in missing)
    yield from (f"**{markdown.plain(_sentence(change))}**\n" for change in compared)
    if judged:
        yield from (*markdown.condition_lines(judged), "")
    yield from (f"- {markdown.plain(_kind(difference) + difference.text)}" for difference in apart)
    if compared:
        table = figures(compared)
        yield from ("", f"{markdown.plain(table.title)}:", "", *markdown.lines(table), "", _NOTE)


def _kind(difference: Difference) -> str:
    return "no verdict, differs: " if difference.is_reason else "differs: "


def figures(compared: Sequence[Change]) -> Table:
    """Returns a row for each arm and load of two runs."""
    return Table.of(
        (
            {
                "arm": change.arm,
                "load": change.label,
                "A images/s": change.images_per_s[0],
                "B images/s": change.images_per_s[1],
                "typical": ratio(change.typical),
                **{MEASURE_NAMES[measure]: ratio(estimate) for measure, estimate in change.ratios.items()},
            }
            for change in compared
        ),
        f"B over A, with 95% intervals over {compared[0].unit}",
    )


def _sentence(change: Change) -> str:
    ratio = change.ratios[change.decides]
    latency = "" if change.decides == "images_per_s" else " latency"
    size = "" if ratio is None else f"{ratio.value:.3f} times the {MEASURE_NAMES[change.decides]}{latency}"
    if size and ratio and ratio.low is not None and ratio.high is not None:
        size = f"{size} (95% interval {ratio.low:.3f} to {ratio.high:.3f})"
    where = f"{change.arm} at {change.label}"
    if change.is_other_machine:
        return f"{where} is {size or 'not comparable'}, on another machine: no verdict."
    if change.verdict == "inconclusive":
        return f"{where}: inconclusive; {change.reason}{': ' if size else ''}{size}."
    return f"{where} became {change.verdict}: {size}{f', {change.holds}' * bool(change.holds)}."
