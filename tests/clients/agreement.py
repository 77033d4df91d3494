"""Compares loadtest with perf_analyzer on one server that takes exactly 5 ms for each request, one after the other.

python -m tests.clients.agreement [--rounds 9] [--seconds 6]

Each measures every load once in a round, in turn. The table has the medians of all rounds, and the difference of the
two p50 of a round with its 95% interval: of both from when a request was sent, as perf_analyzer counts. The trace, of a
Poisson process, is the same for both. A second server, which takes no time, shows what each adds by itself.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from tests.clients import timed_server
from tests.clients.registry import perf_analyzer

from xlaserve_loadtest.analysis.intervals import estimate
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.lines import answered
from xlaserve_loadtest.run import environment

SERVICE_S: Final = 0.005
CONSTANT_PER_S: Final = 50
POISSON_PER_S: Final = 60
WINDOWS: Final = 3
"""Windows of perf_analyzer, which takes three at least."""


class Case(NamedTuple):
    """A load, as each of the two is asked for it."""

    name: str
    loadtest: tuple[str, ...]
    perf_analyzer: tuple[str, ...]
    p50_ms: float
    """The true one, of the server alone."""
    service_s: float = SERVICE_S


class Figures(NamedTuple):
    """What one of the two says."""

    per_s: float
    p50_ms: float
    sent_p50_ms: float
    """Of latency from when a request was sent, and not from when it was due."""
    p90_ms: float


Rounds = Sequence[tuple[Figures, Figures]]
"""What perf_analyzer and loadtest said in each round."""


def cases(folder: Path, seconds: float) -> list[Case]:
    """Returns the loads; writes the trace into `folder`, as each of the two reads it."""
    service_ms = SERVICE_S * 1000
    due_s = np.sort(np.random.default_rng(0).uniform(0, seconds, round(POISSON_PER_S * seconds))).tolist()
    trace, intervals = folder / "trace.jsonl", folder / "intervals.txt"
    trace.write_text("".join(f"{at_s - due_s[0]:.6f}\n" for at_s in due_s))
    ends_s = [*due_s[1:], seconds + due_s[0]]
    intervals.write_text("".join(f"{(end - at) * 1e6:.0f}\n" for at, end in zip(due_s, ends_s, strict=True)))
    free_s = accumulate(due_s, lambda free, at: max(free, at) + SERVICE_S, initial=0.0)
    waited_ms = [max(free - at, 0) * 1000 for free, at in zip(free_s, due_s, strict=False)]
    one = (("--concurrency", "1"), ("--concurrency-range", "1"))
    return [
        Case("one at a time, of 0 ms", *one, 0.0, service_s=0.0),
        Case("one at a time", *one, service_ms),
        Case("4 at a time", ("--concurrency", "4"), ("--concurrency-range", "4"), 4 * service_ms),
        Case(
            f"constant, {CONSTANT_PER_S}/s",
            ("--rate", str(CONSTANT_PER_S), "--arrivals", "constant"),
            ("--request-rate-range", str(CONSTANT_PER_S)),
            service_ms,
        ),
        Case(
            f"Poisson, {POISSON_PER_S}/s",
            ("--replay", str(trace)),
            ("--request-intervals", str(intervals)),
            service_ms + median(waited_ms),
        ),
    ]


def by_perf_analyzer(address: str, case: Case, folder: Path, seconds: float) -> Figures:
    """Measures with perf_analyzer."""
    file = folder / "perf_analyzer.csv"
    windows = ("-p", f"{seconds / WINDOWS * 1000:.0f}", "-r", str(WINDOWS), "-s", "999")
    done = perf_analyzer(address, folder, "-m", "timed", "-f", str(file), *windows, *case.perf_analyzer)
    if done.returncode:
        raise RuntimeError(f"perf_analyzer: {done.stdout}{done.stderr}")
    with file.open(newline="") as opened:
        (row,) = csv.DictReader(opened)
    p50_us, p90_us = float(row["p50 latency"]), float(row["p90 latency"])
    return Figures(float(row["Inferences/Second"]), p50_us / 1000, p50_us / 1000, p90_us / 1000)


def by_loadtest(address: str, case: Case, folder: Path, seconds: float) -> Figures:
    """Measures with loadtest."""
    run = timed_server.by_loadtest(address, folder, "--duration", f"{seconds:g}", *case.loadtest)
    (point,) = summarize(run).points
    rows = answered(run.requests)
    sent_p50_ms = float(np.median(rows["end_ns"] - rows["start_ns"])) / 1e6
    rate, p50, p90 = point.images_per_s, point.percentile("p50").value_ms, point.percentile("p90").value_ms
    if rate is None or p50 is None or p90 is None:
        raise RuntimeError(f"loadtest: {seconds:g} s are too short")
    return Figures(rate.value, p50, sent_p50_ms, p90)


def table(found: Sequence[tuple[Case, Rounds]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield "| load | true p50, ms | perf_analyzer | loadtest, from sent | difference | from due | p90 of both | 1/s |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for case, rounds in found:
        theirs, ours = (Figures(*side) for side in np.median(rounds, axis=0))
        more = estimate([our.sent_p50_ms - their.p50_ms for their, our in rounds])
        interval = "" if more.low is None else f" ({more.low:+.2f} to {more.high:+.2f})"
        yield (
            f"| {case.name} | {case.p50_ms:.2f} | {theirs.p50_ms:.2f} | {ours.sent_p50_ms:.2f} "
            f"| {more.value:+.2f}{interval} | {ours.p50_ms:.2f} "
            f"| {theirs.p90_ms:.2f}, {ours.p90_ms:.2f} | {theirs.per_s:,.1f}, {ours.per_s:,.1f} |"
        )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.agreement", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each measures a load")
    options = parser.parse_args()
    tools = (by_perf_analyzer, by_loadtest)
    running = timed_server.running
    with tempfile.TemporaryDirectory() as name, running(SERVICE_S) as timed, running(0.0) as idle:
        folder = Path(name)
        found: list[tuple[Case, list[tuple[Figures, Figures]]]] = [
            (case, []) for case in cases(folder, options.seconds)
        ]
        for turn in range(options.rounds):
            order = 1 if turn % 2 else -1
            for case, rounds in found:
                address = (timed if case.service_s else idle).address
                theirs, ours = [tool(address, case, folder, options.seconds) for tool in tools[::order]][::order]
                rounds.append((theirs, ours))
                print(f"round {turn + 1}, {case.name}: {theirs}, {ours}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    machine = environment.describe()
    print(f"\n{machine.cpu}, {machine.cores} cores, {options.rounds} rounds, {options.seconds:g} s each")


if __name__ == "__main__":
    main()
