"""Counts requests while a run goes on, for `--abort-if` and for the metrics on `--live-port`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.run.sender import Live
from xlaserve_loadtest.schedule.conditions import COUNTS, RATIO, VERDICT, Condition, ConditionError, parse

ABORT_IF: Final = "--abort-if"

_CHANCE: Final = 1e-6
"""A share is over its limit where chance would bring that many so rarely: there are many looks at a run."""
_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LABELS: Final = ("arm", "load")
_UNSEEN: Final = "no request was measured"


def parse_abort(text: str) -> Condition:
    """Reads a condition that can be judged while a run goes on. Raises ConditionError, which says why others can't."""
    condition = parse(text)
    if condition.metric in (RATIO, VERDICT):
        raise ConditionError(f"{text!r}: arms are compared when all of their blocks are there; see --fail-if")
    if condition.metric not in (*COUNTS, "max") and condition.percentile is None:
        raise ConditionError(f"{text!r}: {condition.metric} is judged over whole blocks; see --fail-if")
    if condition.op not in (">", ">="):
        raise ConditionError(f"{text!r}: expected > or >=; what is below a limit at first may not stay there")
    if condition.bound:
        raise ConditionError(
            f"{text!r}: bounds take whole blocks; without one, the run ends once more requests are over the limit than "
            "chance explains"
        )
    return condition


@dataclass
class Counts:
    """Measured requests of one arm under one load."""

    images: int = 0
    answers: int = 0
    errors: int = 0
    dropped: int = 0
    latency_s: float = 0.0
    """Sum over the answers."""
    buckets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_BUCKETS_S) + 1, np.int64))
    """Answers by latency, one more than there are bounds."""
    over: dict[str, int] = field(default_factory=dict)
    """Answers over the limit of each condition on latency."""

    @property
    def due(self) -> int:
        """Requests that ended or were never sent."""
        return self.answers + self.errors + self.dropped


class Watch(Collector):
    """`begin` is called for each block, `add` at each look at its answers; `on_met` once, when a condition is met."""

    def __init__(self, conditions: Sequence[Condition] = ()) -> None:
        self.reason = ""
        """The condition that is met, with what was found."""
        self.on_met: Callable[[], object] = lambda: None
        self._conditions = conditions
        self._counts: dict[tuple[str, str], Counts] = {}
        self._now: tuple[str, str] | None = None
        self._found: dict[str, str] = {}
        # Metrics are read in another thread.
        self._lock = threading.Lock()

    def begin(self, arm: str, load: str) -> None:
        """Begins a block of `arm` under a load."""
        with self._lock:
            self._now = (arm, load)
            self._counts.setdefault(self._now, Counts())

    def add(self, live: Live) -> None:
        """Adds what happened since the last look."""
        if self._now is None:
            return
        latencies_ms = live.latencies_ms[live.measured]
        with self._lock:
            counts = self._counts[self._now]
            counts.images += live.measured_images
            counts.answers += latencies_ms.size
            counts.errors += live.measured_errors
            counts.dropped += live.dropped
            counts.latency_s += float(latencies_ms.sum(dtype=np.float64)) / 1e3
            places = np.searchsorted(_BUCKETS_S, latencies_ms / 1e3)
            counts.buckets += np.bincount(places, minlength=counts.buckets.size)
            for condition in self._conditions:
                if condition.is_time:
                    is_over = (
                        latencies_ms >= condition.limit if condition.op == ">=" else latencies_ms > condition.limit
                    )
                    counts.over[condition.text] = counts.over.get(condition.text, 0) + int(is_over.sum())
        arm, load = self._now
        for condition in self._conditions:
            if condition.arm in (None, arm) and (found := _met(condition, counts)):
                self._found.setdefault(condition.text, f"{arm}, {load}: {found}")
        if self._found and not self.reason:
            self.reason = f"{ABORT_IF} " + next(f"{text}: {found}" for text, found in self._found.items())
            self.on_met()

    def judged(self) -> list[Judged]:
        """Returns each condition and whether it ended the run."""
        judged = []
        for condition in self._conditions:
            arms = (arm for (arm, _), counts in self._counts.items() if counts.due)
            is_judged = any(condition.arm in (None, arm) for arm in arms)
            found = self._found.get(condition.text, "not met while the run went on" if is_judged else _UNSEEN)
            judged.append(Judged(condition, condition.text in self._found or not is_judged, is_judged, found, ABORT_IF))
        return judged

    def collect(self) -> Iterator[Metric]:
        """Yields the counts as Prometheus's metrics."""
        counters = {
            name: CounterMetricFamily(f"loadtest_live_{name}", text, labels=_LABELS)
            for name, text in (
                ("images", "Images of measured requests that were answered."),
                ("answers", "Measured requests that were answered."),
                ("errors", "Measured requests that failed."),
                ("dropped", "Measured requests that were due and never sent."),
            )
        }
        latency = HistogramMetricFamily(
            "loadtest_live_latency_seconds", "Latency from the time a request was due.", labels=_LABELS
        )
        active = GaugeMetricFamily(
            "loadtest_live_active", "1 for the arm and load of the present block.", labels=_LABELS
        )
        with self._lock:
            for key, counts in self._counts.items():
                for name, counter in counters.items():
                    counter.add_metric(key, getattr(counts, name))
                bounds = [*(f"{bound:g}" for bound in _BUCKETS_S), "+Inf"]
                sums = np.cumsum(counts.buckets).tolist()
                latency.add_metric(key, list(zip(bounds, sums, strict=True)), counts.latency_s)
                active.add_metric(key, float(key == self._now))
        yield from (*counters.values(), latency, active)

    @contextlib.contextmanager
    def served(self, address: tuple[str, int] | None) -> Iterator[None]:
        """Serves the metrics at `address` in the meantime; nothing where it is None. Raises OSError."""
        if address is None:
            yield
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, thread = start_http_server(address[1], address[0], registry)
        except OSError as error:
            raise OSError(f"--live-port {address[0]}:{address[1]}: {error.strerror}") from None
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _met(condition: Condition, counts: Counts) -> str:
    """Returns what was found where a condition is met, otherwise an empty text."""
    if condition.metric in COUNTS:
        count = {"errors": counts.errors, "dropped": counts.dropped}[condition.metric]
        is_met = _is_over(count, counts.due, condition.limit) if condition.is_share else condition.holds(count)
        return f"{count:,} of {counts.due:,}" if is_met else ""
    # A request that was not answered has no latency below any limit.
    over = counts.over.get(condition.text, 0) + counts.errors + counts.dropped
    share = 0.0 if condition.percentile is None else 1 - condition.percentile / 100
    return f"{over:,} of {counts.due:,} requests over it" if _is_over(over, counts.due, share) else ""


def _is_over(count: int, total: int, share: float) -> bool:
    """Whether `count` of `total` is more than `share` would bring by chance (Chernoff's bound on the binomial)."""
    if not count or count <= share * total:
        return False
    if share <= 0:
        return True
    found = count / total
    rest = (1 - found) * math.log((1 - found) / (1 - share)) if found < 1 else 0.0
    return total * (found * math.log(found / share) + rest) > -math.log(_CHANCE)
