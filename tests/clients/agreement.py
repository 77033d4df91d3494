"""Compares loadtest with perf_analyzer on one server that takes exactly 5 ms for each request, one after the other.

python -m tests.clients.agreement [--rounds 9] [--seconds 6]

Each measures every load once in a round, in turn. The table has the medians of all rounds, and the difference of the
two p50 of a round with its 95% interval: of both from when a request was sent, as perf_analyzer counts. The trace, of a
Poisson process, is the same for both.

What each adds by itself shows with a second server, which takes no time, under the same load: the difference there is
the clients' own. Where requests wait at the server it is hidden.
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
from xlaserve_loadtest.record.requests import answered
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
    hides_clients: bool = False
    """Whether what the clients add is hidden, as the server always has another request to answer."""


class Figures(NamedTuple):
    """What one of the two says."""

    per_s: float
    p50_ms: float
    sent_p50_ms: float
    """Of latency from when a request was sent, and not from when it was due."""
    p90_ms: float


class Round(NamedTuple):
    """What the two say of the server of 5 ms, and of the one that takes no time."""

    perf_analyzer: Figures
    loadtest: Figures
    idle_perf_analyzer: Figures | None
    """None where the load hides what clients add."""
    idle_loadtest: Figures | None

    @property
    def difference_ms(self) -> float:
        """By how much p50 is higher with loadtest."""
        return self.loadtest.sent_p50_ms - self.perf_analyzer.p50_ms

    @property
    def own_ms(self) -> float:
        """How much of that the clients add."""
        if not (self.idle_loadtest and self.idle_perf_analyzer):
            return 0.0
        return self.idle_loadtest.sent_p50_ms - self.idle_perf_analyzer.p50_ms


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
    return [
        Case("one at a time", ("--concurrency", "1"), ("--concurrency-range", "1"), service_ms),
        Case("4 at a time", ("--concurrency", "4"), ("--concurrency-range", "4"), 4 * service_ms, hides_clients=True),
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


def both(address: str, case: Case, folder: Path, seconds: float, order: int) -> tuple[Figures, Figures]:
    """Measures with perf_analyzer and loadtest, in this order or, where `order` is -1, the other way round."""
    theirs, ours = [tool(address, case, folder, seconds) for tool in (by_perf_analyzer, by_loadtest)[::order]][::order]
    return theirs, ours


def table(found: Sequence[tuple[Case, Sequence[Round]]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield (
        "| load | true p50, ms | perf_analyzer | loadtest, from sent | difference | at a server of 0 ms | rest "
        "| from due | p90 of both | 1/s |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for case, rounds in found:
        theirs, ours = (Figures(*np.median(side, axis=0)) for side in zip(*(each[:2] for each in rounds), strict=True))
        own = "hidden" if case.hides_clients else interval([each.own_ms for each in rounds])
        yield (
            f"| {case.name} | {case.p50_ms:.2f} | {theirs.p50_ms:.2f} | {ours.sent_p50_ms:.2f} "
            f"| {interval([each.difference_ms for each in rounds])} | {own} "
            f"| {interval([each.difference_ms - each.own_ms for each in rounds])} "
            f"| {ours.p50_ms:.2f} | {theirs.p90_ms:.2f}, {ours.p90_ms:.2f} | {theirs.per_s:,.1f}, {ours.per_s:,.1f} |"
        )


def interval(values_ms: Sequence[float]) -> str:
    """Returns a mean with its 95% interval."""
    mean = estimate(values_ms)
    return f"{mean.value:+.2f}" + ("" if mean.low is None else f" ({mean.low:+.2f} to {mean.high:+.2f})")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.agreement", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each measures a load")
    options = parser.parse_args()
    running = timed_server.running
    with tempfile.TemporaryDirectory() as name, running(SERVICE_S) as timed, running(0.0) as idle:
        folder = Path(name)
        found: list[tuple[Case, list[Round]]] = [(case, []) for case in cases(folder, options.seconds)]
        for turn in range(options.rounds):
            order = 1 if turn % 2 else -1
            for case, rounds in found:
                servers = (timed.address,) if case.hides_clients else (timed.address, idle.address)[::order]
                said = {server: both(server, case, folder, options.seconds, order) for server in servers}
                rounds.append(Round(*said[timed.address], *said.get(idle.address, (None, None))))
                print(f"round {turn + 1}, {case.name}: {rounds[-1]}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    machine = environment.describe()
    print(f"\n{machine.cpu}, {machine.cores} cores, {options.rounds} rounds, {options.seconds:g} s each")


if __name__ == "__main__":
    main()
