"""`loadtest sweep`: a resumable study of every model, resolution, batch and mode, failures included."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from xlaserve_loadtest.parser import (
    Parser,
    count_to,
    counts_to,
    folder_to_write,
    names,
    number_over,
)
from xlaserve_loadtest.reports.cli import EXIT_CONDITION
from xlaserve_loadtest.reports.table import number
from xlaserve_loadtest.reports.terminal import show_table, widen
from xlaserve_loadtest.run import environment
from xlaserve_loadtest.schedule.arrivals import MAX_CONCURRENCY
from xlaserve_loadtest.study import catalog
from xlaserve_loadtest.study import html as zoo_html
from xlaserve_loadtest.study.measure import Measurement, measure
from xlaserve_loadtest.study.record import (
    Cell,
    Entry,
    ModeResult,
    Sweep,
    SweepFile,
    SweepFileError,
    read,
    state_of_file,
)

REPORT: Final = "report.html"
NATIVE: Final = "native"
BASELINE: Final = "graph"
PROCESSES: Final = 4

_MAX_SHOWN: Final = 3
_MAX_BATCH: Final = 65_536
_MAX_SIDE: Final = 65_536


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep: all combinations of its fields."""

    models: tuple[catalog.Model, ...]
    modes: tuple[str, ...]
    batches: tuple[int, ...]
    resolutions: tuple[int | None, ...]
    """Resolutions in pixels; None for each model's own."""

    def cells(self) -> list[tuple[catalog.Model, Cell]]:
        """Returns every cell with its model, cells of a model together, so that an interrupted sweep has whole
        models."""
        return [
            (model, Cell(model.source, resolution, batch))
            for model in self.models
            # A model's own resolution is one cell with that number, where it is known.
            for resolution in dict.fromkeys(asked or model.size for asked in self.resolutions)
            for batch in self.batches
        ]


def run(
    plan: Plan,
    file: SweepFile,
    measure_cell: Callable[[Cell], Mapping[str, ModeResult]],
    *,
    retry_failed: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measures the cells that are not done yet, and adds each to `file` when it is measured.

    `measure_cell` returns a result for each mode of the plan, even if the model fails.
    """
    todo = [
        (model, cell)
        for model, cell in plan.cells()
        if not file.sweep.done(cell, plan.modes, retry_failed=retry_failed)
    ]
    for line in left_out(file.sweep):
        tell(line)
    skipped = len(plan.cells()) - len(todo)
    if skipped:
        tell(f"{skipped} of {len(plan.cells())} are done already")

    for count, (model, cell) in enumerate(todo, start=1):
        tell(f"[{count}/{len(todo)}] {cell}")
        start = clock()
        file_state, results = state_of_file(cell.source), measure_cell(cell)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        file.add(Entry(cell, model.name, model.family, results, at, round(clock() - start, 1), file_state))
        for mode, result in results.items():
            tell(f"    {mode}: {_in_words(result)}")


def left_out(sweep: Sweep) -> Iterator[str]:
    """Yields a line for each group of results that are left out because they were measured under other conditions."""
    for why, count in Counter(tuple(why) for why in sweep.left_out.values()).items():
        more = f" and {len(why) - _MAX_SHOWN} more" if len(why) > _MAX_SHOWN else ""
        tested = "result is left out: it was" if count == 1 else "results are left out: they were"
        yield f"{count} {tested} not measured as this sweep measures ({'; '.join(why[:_MAX_SHOWN])}{more})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: every cell has figures or a reason why it has none; 1: nothing could be measured; 2: a wrong command line or
    state file; 3: outputs of some cells differ from the baseline's; 130: interrupted; the same command resumes.
    """
    command = parser()
    options = command.parse_args(arguments)
    if options.list:
        sys.stdout.writelines(f"{model.name:<20} {model.family:<16} {model.size}\n" for model in catalog.applications())
        return 0
    baseline = options.baseline or next((mode for mode in options.mode if mode == BASELINE), options.mode[0])
    if baseline not in options.mode:
        command.error(f"--baseline: expected one of {', '.join(options.mode)}, got {baseline}")
    if options.in_process and options.processes:
        command.error("--processes is for servers, and --in-process has none")
    # The state file has the number that is in force.
    options.processes = options.processes or PROCESSES
    try:
        models = catalog.find(options.models)
    except ValueError as error:
        command.error(f"--models: {error}")
    plan = Plan(models, options.mode, options.batch, options.resolution)
    how = Measurement(
        modes=options.mode,
        baseline=baseline,
        duration_s=options.duration,
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        is_in_process=options.in_process,
        has_control=not options.no_control,
        folder=options.out / "runs",
        processes=options.processes,
    )
    asked = {name: value for name, value in vars(options).items() if name not in {"out", "report", "list"}}
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    interrupted = False
    # Handled like Ctrl-C, so that load tests and servers are stopped.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.report:
            sweep = read(options.out)
            for line in left_out(sweep):
                _tell(line)
        else:
            where = asdict(environment.describe())
            with SweepFile(options.out, Sweep(where, asked, baseline, started_at)) as file:
                sweep = file.sweep
                try:
                    run(plan, file, partial(measure, how=how), retry_failed=options.retry_failed, tell=_tell)
                except KeyboardInterrupt:
                    interrupted = True
                    _tell("interrupted; the same command goes on from here")
    except SweepFileError as error:
        _tell(f"loadtest sweep: {error}")
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    report = options.out / REPORT
    report.write_text(zoo_html.render(sweep), encoding="utf-8")
    console = Console()
    widen(console)
    show_table(zoo_html.outcomes(sweep), console)
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        return 130
    if differing := [
        f"{entry.cell}, {mode}"
        for entry in sweep.entries.values()
        for mode, result in entry.results.items()
        if result.outputs_agree is False
    ]:
        _tell(f"loadtest sweep: outputs differ from the baseline's: {'; '.join(differing)}")
        return EXIT_CONDITION
    return 0 if any(result.images_per_s for entry in sweep.entries.values() for result in entry.results.values()) else 1


def _in_words(result: ModeResult) -> str:
    if result.reason is not None:
        return result.reason
    ratio = f", {result.ratio:.2f} times the baseline ({result.verdict})" if result.ratio and result.verdict else ""
    return f"{number(result.images_per_s)} images/s{ratio}"


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def parser() -> argparse.ArgumentParser:
    """Returns the subcommand's parser."""
    parser = Parser(
        prog="loadtest sweep",
        description="Measures every model, resolution, batch and mode with random weights, and reports what XLA is "
        "worth to each. Interrupted, it goes on where it stopped; what was measured with another version, duration, "
        "load or model file is left out and measured again; what does not run is kept with the reason.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the models of keras.applications and stop")
    parser.add_argument("--report", action="store_true", help="only write the report again, from --out")
    parser.add_argument(
        "--models", type=names, default=("all",), metavar="A,B", help="models, families, sources, paths, or all"
    )
    parser.add_argument(
        "--batch", type=counts_to(_MAX_BATCH), default=(1, 8), metavar="N,N", help="images in a request and a bucket"
    )
    parser.add_argument(
        "--resolution", type=_resolutions, default=(None,), metavar="N,N", help="height and width in pixels, or native"
    )
    parser.add_argument("--mode", type=names, default=("xla", "graph"), metavar="M,M", help="modes to compare")
    parser.add_argument(
        "--baseline", metavar="M", help="mode that the others are compared with; graph or the first mode"
    )
    seconds = number_over(float, 0, "seconds")
    parser.add_argument("--duration", type=seconds, default=5.0, metavar="S", help="measured seconds for each mode")
    parser.add_argument(
        "--concurrency", type=count_to(MAX_CONCURRENCY), default=4, metavar="N", help="requests at a time"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=900.0, metavar="S", help="seconds for one cell, compilation included"
    )
    parser.add_argument("--in-process", action="store_true", help="call the compiled functions without a server")
    parser.add_argument(
        "--processes",
        type=number_over(int, 0),
        metavar="N",
        help=f"server processes of each mode, one after the other ({PROCESSES}); below 4 can't show what differs",
    )
    parser.add_argument("--no-control", action="store_true", help="leave out the A/A control of each cell: faster")
    parser.add_argument("--retry-failed", action="store_true", help="measure again what has no figure")
    parser.add_argument(
        "--out", type=folder_to_write, default=Path("sweep"), metavar="DIR", help="folder of state and report"
    )
    return parser


def _resolutions(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == NATIVE else count_to(_MAX_SIDE)(part) for part in names(text))
