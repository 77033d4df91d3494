"""Loadtest's own command against a server of exactly known times, over a real socket: figures are true within 1%.

python -m tests.prove.sockets [--only NAME]

The server takes one request after the other, each for as long as a load's `service_s`. Behind an open loop the truth is
the queue of the very requests that were sent. What a request takes outside the server is in its latency: 1 to 2 ms of
Python's gRPC on both sides, where both rested before. So the server takes 400 ms where requests find it idle; a queue
hides most of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tests.clients import timed_server
from tests.loadtest.queues import QUEUES, Seconds, quantile

from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.record.lines import Run
from xlaserve_loadtest.run import environment

OFF: Final = 0.01
"""Share of the truth by which a figure may be off."""
TRACE: Final = "arrivals.jsonl"
"""Where the Poisson load's requests are kept, in the folder that loadtest runs in."""
SLO: Final = "p50<100ms"
SERVER_SERVICE_S: Final = 0.005
SERVER_LOAD: Final = 0.7
"""Share of its capacity at which the p99 of the Server scenario is at its limit."""


class Figure(NamedTuple):
    """What loadtest says, and what is true."""

    name: str
    low: float
    high: float
    """The true value lies from `low` to `high`; both are the same where it is known exactly."""
    measured: float | None

    @property
    def off(self) -> float:
        """By which share of the truth it is off; infinity where it is missing."""
        if self.measured is None:
            return float("inf")
        nearest = min(max(self.measured, self.low), self.high)
        return (self.measured - nearest) / (nearest or 1)

    @property
    def holds(self) -> bool:
        return abs(self.off) <= OFF


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of loadtest, and the times that its server takes for a request."""

    service_s: float
    slow_s: float
    run: Run
    summary: Summary
    folder: Path


Truth = Callable[[Measured], Iterator[Figure]]


def closed(slots: int) -> Truth:
    """The lane is always busy, and each request waits for those of all slots."""

    def figures(found: Measured) -> Iterator[Figure]:
        yield _exact("requests/s", 1 / found.service_s, _requests_per_s(found))
        yield from _latencies(found, np.full(len(found.run.requests), slots * found.service_s * 1000))

    return figures


def offline(found: Measured) -> Iterator[Figure]:
    """The lane is always busy; of a server that names no buckets, a request holds one image."""
    yield _exact("images/s", 1 / found.service_s, _scenario(found))


def one_query_at_a_time(found: Measured) -> Iterator[Figure]:
    """The percentile lies among the slow queries, and all of them take the same."""
    yield _exact(found.summary.scenario[0].metric, found.slow_s * 1000, _scenario(found))


def open_loop(requests: int, seconds: float) -> Truth:
    """Rates are those of the schedule, latencies those of its queue."""

    def figures(found: Measured) -> Iterator[Figure]:
        yield _exact("requests/s", requests / seconds, _requests_per_s(found))
        yield from _latencies(found, queue_ms(found))

    return figures


def saved(seconds: float) -> Truth:
    """As `open_loop`, of the requests in the file of `--save-arrivals`, which were due when that says."""

    def figures(found: Measured) -> Iterator[Figure]:
        at_s = trace_s(found)
        due_ns = np.sort(found.run.requests["scheduled_ns"][found.run.requests["measured"]])
        differs_ms = None
        if due_ns.size == at_s.size:
            differs_ms = float(np.abs((due_ns - due_ns[0]) / 1e6 - (at_s - at_s[0]) * 1000).max())
        yield Figure("due as in the trace, off by ms", 0.0, 1e-3, differs_ms)
        yield from open_loop(at_s.size, seconds)(found)

    return figures


def replayed(found: Measured) -> Iterator[Figure]:
    """As `saved`; how long a trace takes follows from its requests."""
    at_s = trace_s(found)
    seconds = at_s[-1] + (at_s[-1] - at_s[0]) / (at_s.size - 1)
    yield from saved(float(seconds))(found)


def search(highest_per_s: float) -> Truth:
    """What was found is at most the highest rate, and near it; what was too much is at least that."""

    def figures(found: Measured) -> Iterator[Figure]:
        (rate,) = found.summary.highest_rates
        yield Figure("found, requests/s", 0.8 * highest_per_s, highest_per_s, rate.rate_per_s)
        yield Figure("too much, requests/s", highest_per_s, 1.2 * highest_per_s, rate.rejected_per_s)

    return figures


def trace_s(found: Measured) -> Seconds:
    """Returns when the requests of the trace are due."""
    return np.array([json.loads(line)["at_s"] for line in (found.folder / TRACE).read_text().splitlines()])


def queue_ms(found: Measured) -> NDArray[np.float64]:
    """Returns the true latencies of all requests, in the order in which they are in the run file."""
    due_s = found.run.requests["scheduled_ns"] / 1e9
    latencies_ms, free_s = np.empty(due_s.size), 0.0
    for place in np.argsort(due_s, kind="stable"):
        free_s = max(free_s, due_s[place]) + found.service_s
        latencies_ms[place] = (free_s - due_s[place]) * 1000
    return latencies_ms


def _latencies(found: Measured, true_ms: NDArray[np.float64]) -> Iterator[Figure]:
    (point,) = found.summary.points
    own_ms = true_ms[found.run.requests["measured"]]
    yield _exact("mean, ms", float(own_ms.mean()), point.mean_ms)
    for percentile in (50, 90):
        true = float(np.percentile(own_ms, percentile, method="inverted_cdf"))
        yield _exact(f"p{percentile}, ms", true, point.percentile(f"p{percentile}").value_ms)


def _exact(name: str, true: float, measured: float | None) -> Figure:
    return Figure(name, true, true, measured)


def _requests_per_s(found: Measured) -> float | None:
    (point,) = found.summary.points
    return point.requests_per_s.value if point.requests_per_s else None


def _scenario(found: Measured) -> float | None:
    (result,) = found.summary.scenario
    return result.value


@dataclass(frozen=True, slots=True)
class Load:
    """What loadtest is asked for, and what is true of it."""

    name: str
    options: tuple[str, ...]
    truth: Truth
    service_s: float = 0.1
    slow: tuple[int, float] = (0, 0.0)
    """One in so many requests takes so many seconds."""
    is_long: bool = False
    """Whether it takes minutes, and so runs only where it is named."""


LOADS: Final = (
    Load("closed-1", ("--concurrency", "1", "--duration", "22"), closed(1), service_s=0.4),
    Load("closed-4", ("--concurrency", "4", "--duration", "12"), closed(4)),
    Load("closed-16", ("--concurrency", "16", "--duration", "12"), closed(16), service_s=0.025),
    Load(
        "constant",
        ("--rate", "1.6", "--arrivals", "constant", "--duration", "30"),
        open_loop(48, 30),
        service_s=0.4,
    ),
    Load("poisson", ("--rate", "1.5", "--duration", "40", "--save-arrivals", TRACE), saved(40), service_s=0.4),
    Load("replay", ("--replay", TRACE), replayed, service_s=0.4),
    Load(
        "profile", ("--profile", "0.5..3.5:16,3.5:6,0.5:8", "--arrivals", "constant"), open_loop(57, 30), service_s=0.4
    ),
    Load("offline", ("--scenario", "offline", "--duration", "15"), offline),
    Load(
        "single-stream",
        ("--scenario", "single-stream", "--duration", "12", "--full-duration"),
        one_query_at_a_time,
        service_s=0.025,
        slow=(5, 0.4),
    ),
    Load(
        "multi-stream",
        ("--scenario", "multi-stream", "--duration", "40", "--full-duration"),
        one_query_at_a_time,
        service_s=0.025,
        slow=(25, 0.4),
    ),
    Load(
        "find-max",
        ("--find-max", "--slo", SLO, "--arrivals", "constant", "--duration", "5"),
        search(40),
        service_s=0.025,
    ),
    Load(
        "server",
        (
            *("--scenario", "server", "--duration", "5", "--slo-ms"),
            f"{quantile(QUEUES['M/D/1'], SERVER_LOAD, 99, 1_000_000) * SERVER_SERVICE_S * 1000:.3f}",
        ),
        search(SERVER_LOAD / SERVER_SERVICE_S),
        service_s=SERVER_SERVICE_S,
        is_long=True,
    ),
)
"""In this order: `replay` sends what `poisson` saved."""


def measure(load: Load, folder: Path) -> tuple[list[Figure], str]:
    """Returns loadtest's figures, and why the machine, or the load, was unfit; nothing where it was fit."""
    options = [str(folder / TRACE) if option == TRACE else option for option in load.options]
    with timed_server.running(load.service_s, *load.slow) as server:
        run = timed_server.by_loadtest(server.address, folder, *options)
    summary = summarize(run)
    figures = list(load.truth(Measured(load.service_s, load.slow[1], run, summary, folder)))
    reasons = sorted({limit for point in summary.curve for limit in point.generator.limits})
    late_ms = np.percentile(server.late_s, [50, 90, 100]) * 1000
    if late_ms[1] > OFF / 2 * max(load.service_s, load.slow[1]) * 1000:
        reasons.append(f"the server itself was late by {late_ms[0]:.1f} ms (p50), {late_ms[1]:.1f} ms (p90)")
    if (running := os.getloadavg()[0]) > (os.cpu_count() or 1) / 2:
        reasons.append(f"load average {running:.1f}")
    return figures, "; ".join(reasons)


def plain_client() -> str:
    """Returns what a plain client sees of the machine at the moment, in words."""
    with timed_server.running(0.1) as server:
        more_ms = np.array(timed_server.by_plain_client(server.address, 30)) * 1000 - 100
    p50, p90 = np.percentile(more_ms, [50, 90])
    return f"{p50:.1f} ms (p50) and {p90:.1f} ms (p90)"


def table(found: Sequence[tuple[Load, Sequence[Figure], str]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield "| load | a request takes, ms | figure | true | measured | off by | |"
    yield "|---|--:|---|--:|--:|--:|---|"
    for load, figures, unfit in found:
        for one in figures:
            true = f"{one.low:,.5g}" if one.low == one.high else f"{one.low:,.5g} to {one.high:,.5g}"
            measured = "none" if one.measured is None else f"{one.measured:,.5g}"
            verdict = "holds" if one.holds else f"**OFF**{unfit and f' ({unfit})'}"
            service = f"{load.service_s * 1000:g}" + (
                f", 1 in {load.slow[0]} {load.slow[1] * 1000:g}" if load.slow[0] else ""
            )
            yield f"| {load.name} | {service} | {one.name} | {true} | {measured} | {one.off:+.2%} | {verdict} |"


def main() -> int:
    """Runs the command; returns 1 where a figure is off by more than 1%."""
    names = [load.name for load in LOADS]
    later = ", ".join(load.name for load in LOADS if load.is_long)
    parser = argparse.ArgumentParser(prog="python -m tests.prove.sockets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"may be repeated; without, all but {later}"
    )
    only = parser.parse_args().only or [load.name for load in LOADS if not load.is_long]
    if "replay" in only and "poisson" not in only:
        parser.error("replay sends what poisson saved: expected --only poisson as well")
    began_s, before, plain_before = time.monotonic(), os.getloadavg()[0], plain_client()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for load in (load for load in LOADS if load.name in only):
            found.append((load, *measure(load, Path(folder))))
            print("\n".join(list(table(found[-1:]))[2:]), file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    held = [one.holds for _, figures, _ in found for one in figures]
    machine, after = environment.describe(), os.getloadavg()[0]
    print(f"\n{sum(held)} of {len(held)} figures are within {OFF:.0%} of the truth")
    print(
        f"{machine.cpu}, {machine.cores} cores, load average {before:.1f} before and {after:.1f} after, "
        f"{time.monotonic() - began_s:.0f} s"
    )
    print(
        f"what a plain blocking client of gRPC took beyond the server's 100 ms: {plain_before} before, "
        f"{plain_client()} after"
    )
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
