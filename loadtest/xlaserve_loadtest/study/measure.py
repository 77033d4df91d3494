"""Measurement of one cell of a sweep: an ordinary load test in a separate process, whose failure does not end the
sweep."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import psutil

from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.launcher import ending_with_us
from xlaserve_loadtest.record.lines import SUFFIX
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.study.record import Cell, ModeResult
from xlaserve_loadtest.targets.embedded import configuration, served_name

COMMAND: Final = (sys.executable, "-m", "xlaserve_loadtest")
STOP_TIMEOUT_S: Final = 60.0
"""Seconds for a load test to stop; it stops its server first."""

_DEADLINE_S: Final = 120.0
"""Deadline of a request in seconds: large models are slow on small machines, which is a result, not a failure."""

_ERROR_PREFIX: Final = "loadtest: "
_REASON_CHARACTERS: Final = 600


@dataclass(frozen=True)
class Measurement:
    """The settings with which cells are measured."""

    modes: tuple[str, ...]
    baseline: str
    duration_s: float
    """Measured seconds for each mode."""
    concurrency: int
    timeout_s: float
    """Seconds for a cell's load test, starting and compiling included."""
    is_in_process: bool
    has_control: bool
    folder: Path
    """The folder of the run files."""
    processes: int = 4
    """Server processes of each mode, one after the other."""


def measure(cell: Cell, how: Measurement, command: Sequence[str] = COMMAND) -> dict[str, ModeResult]:
    """Measures a cell and returns a result for each mode; a failure of the model becomes a reason, never an exception.

    All modes run interleaved in one load test. Where that fails, each mode is measured alone, to find the one that
    fails: the others then have figures, but no ratio, as they were not measured together.
    """
    results = _attempt(cell, how.modes, how, command)
    if len(how.modes) > 1 and any(result.reason for result in results.values()):
        return {mode: _attempt(cell, (mode,), how, command)[mode] for mode in how.modes}
    return results


def _attempt(cell: Cell, modes: tuple[str, ...], how: Measurement, command: Sequence[str]) -> dict[str, ModeResult]:
    how.folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{cell.source}-{cell.resolution or 'own'}-b{cell.batch}-{'-'.join(modes)}")
    record = how.folder / f"{name}{SUFFIX}"
    record.unlink(missing_ok=True)
    config, page = (how.folder / f"{name}.{kind}" for kind in ("json", "html"))
    options = [*_arguments(cell, modes, how, config), "--record", str(record), "--html", str(page)]
    failure = _run([*command, *options], how.timeout_s)
    # Some megabytes for each cell, which can be made again from the record.
    page.unlink(missing_ok=True)
    try:
        summary = summarize(read_run(record))
    except RunFileError as error:
        return dict.fromkeys(modes, ModeResult(reason=failure or str(error)))
    return {mode: result_of(summary, mode, failure) for mode in modes}


def result_of(summary: Summary, mode: str, failure: str | None = None) -> ModeResult:
    """Returns the result of one mode; `failure` is the reason why its load test failed, None where it succeeded."""
    point = next((point for point in summary.points if point.arm == mode), None)
    if point is None or point.images_per_s is None or failure:
        failures = (f"{each.status}: {each.message}" for each in summary.failures if each.arm == mode)
        return ModeResult(reason=next(failures, None) or failure or "nothing was answered")
    comparison = next((each for each in summary.comparisons if each.arm == mode and not each.is_control), None)
    ratio = comparison.ratios.get("images_per_s") if comparison else None
    price = next((price for price in summary.prices if price.arm == mode), None)
    equality = next((each for each in summary.equalities if each.arm == mode), None)
    ranks = {each.name: each.value_ms for each in point.percentiles if not each.is_lower_bound}
    is_baseline = mode == summary.header.baseline
    return ModeResult(
        images_per_s=point.images_per_s.value,
        images_per_s_interval=_interval(point.images_per_s.low, point.images_per_s.high),
        ratio=1.0 if is_baseline else ratio.value if ratio else None,
        ratio_interval=_interval(ratio.low, ratio.high) if ratio else None,
        verdict=comparison.verdict if comparison else None,
        verdict_reason=comparison.reason or None if comparison else None,
        p50_ms=ranks.get("p50"),
        p99_ms=ranks.get("p99"),
        trace_s=price.trace_s if price else None,
        compile_s=price.compile_s if price else None,
        outputs_agree=equality.is_equal if equality else None,
    )


def _arguments(cell: Cell, modes: Sequence[str], how: Measurement, config: Path) -> list[str]:
    size = {} if cell.resolution is None else {"input_size": [cell.resolution, cell.resolution]}
    config.write_text(configuration([cell.source], modes, buckets=[cell.batch], **size))
    options = {
        "--config": str(config),
        "--model": served_name(cell.source),
        "--mode": ",".join(modes),
        "--duration": f"{how.duration_s:g}",
        "--concurrency": str(how.concurrency),
        "--images-per-request": str(cell.batch),
        # Differing outputs are a result of the sweep, and do not fail the load test.
        "--fail-if": "differing>100%",
    }
    if len(modes) > 1:
        options["--baseline"] = how.baseline
    if not how.is_in_process:
        options |= {"--deadline": f"{_DEADLINE_S:g}", "--start-timeout": f"{how.timeout_s:g}"}
        if len(modes) > 1:
            options["--processes"] = str(how.processes)
    flags = ["--in-process"] * how.is_in_process + ["--no-control"] * (not how.has_control)
    return [*chain.from_iterable(options.items()), *flags]


def _run(command: Sequence[str], timeout_s: float) -> str | None:
    """Runs a load test to its end or its timeout. Returns the reason why it failed, None where it succeeded."""
    with subprocess.Popen(
        ending_with_us(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C must reach only the sweep, which stops its load tests in order.
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            return f"not done after {timeout_s:g} s"
        except BaseException:
            _stop(process)
            raise
    if process.returncode == 0:
        return None
    return _reason(errors.splitlines()) or f"the load test ended with status {process.returncode}"


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a load test and all its descendants."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for member in family:
        with suppress(psutil.Error):
            member.kill()


def _reason(lines: Iterable[str]) -> str:
    """Returns the load test's last error, and the last line, which is of its server's stderr if it quotes that."""
    reported = [line.strip() for line in lines if line.strip()]
    own = [line for line in reported if line.startswith(_ERROR_PREFIX)][-1:]
    return "; ".join(dict.fromkeys([*own, *reported[-1:]]))[:_REASON_CHARACTERS]


def _interval(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)
