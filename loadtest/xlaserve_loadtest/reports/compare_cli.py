"""`loadtest compare A B`: what changed from one run to another, from their files alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.text import Text

from xlaserve_loadtest.analysis.intervals import Estimate, unpaired_ratio
from xlaserve_loadtest.analysis.judgement import MEASURE_NAMES, Measure, Verdict, judge
from xlaserve_loadtest.analysis.samples import Sample, collect, label
from xlaserve_loadtest.parser import Parser
from xlaserve_loadtest.record.lines import Environment, Run
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.reports.table import Table, ratio
from xlaserve_loadtest.reports.terminal import show_table, widen

_IGNORED_OPTIONS: Final = ("record", "html", "markdown", "csv", "json", "push_file", "fail_if", "output")
"""Options that change what is written, not what is measured."""


@dataclass(frozen=True, slots=True)
class Change:
    """One arm under one load: the second run over the first."""

    arm: str
    label: str
    images_per_s: tuple[float, float]
    """In the first run and in the second."""
    ratios: dict[Measure, Estimate | None]
    decides: Measure
    verdict: Verdict
    reason: str


def parser() -> argparse.ArgumentParser:
    """Returns the subcommand's parser."""
    parser = Parser(
        prog="loadtest compare",
        description="Compares the arms of run B with those of run A of the same names and loads.",
    )
    parser.add_argument("first", type=Path, metavar="A", help="run file")
    parser.add_argument("second", type=Path, metavar="B", help="run file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: compared; 1: a file can't be read, or the runs have no arm and load in common; 2: a wrong command line.
    """
    options = parser().parse_args(arguments)
    try:
        runs = read_run(options.first), read_run(options.second)
    except RunFileError as error:
        sys.stderr.write(f"loadtest compare: {error}\n")
        return 1
    compared, apart = changes(*runs), list(differences(*runs))
    if options.json:
        sys.stdout.write(
            json.dumps({"changes": list(map(dataclasses.asdict, compared)), "differences": apart}, indent=2) + "\n"
        )
    else:
        _show(compared, apart, Console())
    if not compared:
        sys.stderr.write("loadtest compare: the runs have measured no arm under the same load\n")
    return 0 if compared else 1


def changes(first: Run, second: Run) -> list[Change]:
    """Compares what both runs measured: arms of the same name under the same load. Blocks of two runs are not pairs."""
    groups = [_groups(run) for run in (first, second)]
    seed = first.header.seed
    return [
        _change(arm, load, groups[0][arm, load], groups[1][arm, load], seed)
        for arm, load in groups[1]
        if (arm, load) in groups[0]
    ]


def differences(first: Run, second: Run) -> Iterator[str]:
    """Yields differences between two runs other than the arms: machine, software, options."""
    one, other = first.header, second.header
    for field in dataclasses.fields(Environment):
        yield from _difference(field.name, getattr(one.environment, field.name), getattr(other.environment, field.name))
    options = dict.fromkeys((*one.configuration, *other.configuration))
    for name in options:
        if name not in _IGNORED_OPTIONS:
            yield from _difference(name, one.configuration.get(name), other.configuration.get(name))


def _groups(run: Run) -> dict[tuple[str, str], list[Sample]]:
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in collect(run):
        if sample.block.role == "measure" and sample.images_per_s:
            groups.setdefault((sample.block.arm, label(sample.block.load)), []).append(sample)
    return groups


def _change(arm: str, load: str, first: Sequence[Sample], second: Sequence[Sample], seed: int) -> Change:
    rates = [np.array([sample.images_per_s for sample in side], np.float64) for side in (first, second)]
    second_ns, first_ns = ([sample.latencies_ns for sample in samples] for samples in (second, first))
    images_per_s = unpaired_ratio(np.log(rates[1]), np.log(rates[0]), seed=seed)
    judgement = judge(images_per_s, second_ns, first_ns, second[0].block.load.type, seed=seed, paired=False)
    return Change(arm, load, (float(rates[0].mean()), float(rates[1].mean())), *judgement)


def _difference(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from _difference(f"{name}.{key}", one.get(key), other.get(key))
    elif one != other:
        yield f"{name}: {_shown(one)} became {_shown(other)}"


def _shown(value: Any) -> str:
    if value is None or value in ((), []):
        return "nothing"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _show(compared: Sequence[Change], apart: Sequence[str], console: Console) -> None:
    widen(console)
    for change in compared:
        console.print(Text(_sentence(change), "bold"))
    for difference in apart:
        console.print(Text.assemble(("differs: ", "yellow"), difference))
    if not compared:
        return
    table = Table.of(
        (
            {
                "arm": change.arm,
                "load": change.label,
                "A images/s": change.images_per_s[0],
                "B images/s": change.images_per_s[1],
                **{MEASURE_NAMES[measure]: ratio(estimate) for measure, estimate in change.ratios.items()},
            }
            for change in compared
        ),
        "B over A, with 95% intervals over blocks",
    )
    show_table(table, console)
    console.print(
        Text("Intervals cover the blocks within each run; other changes between the runs are in the ratio.", "dim")
    )


def _sentence(change: Change) -> str:
    if change.verdict == "inconclusive":
        return f"{change.arm} at {change.label}: inconclusive; {change.reason}."
    ratio = change.ratios[change.decides]
    size = "" if ratio is None else f": {ratio.value:.3f} times the {MEASURE_NAMES[change.decides]}"
    return f"{change.arm} at {change.label} became {change.verdict}{size}."
