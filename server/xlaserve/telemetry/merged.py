"""The metrics of several processes, merged as if one process had counted. Counts of a process that has ended are
kept."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import chain
from threading import Lock
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from xlaserve.telemetry.registry_snapshot import Family, Labels, Number, Point, Series, Snapshot

ROLE: Final = "role"
"""The label that tells the processes apart where a metric is shown for each of them."""
STATE: Final = "xlaserve_model_state"
"""The gauge with a series for each version in the repository."""
VERSIONS: Final = ("version", "shadow_version")
"""Labels that name a version, together with `model`."""


class Rule(Enum):
    """How the numbers of several processes become one number."""

    SUM = "sum"
    LEAST = "least"
    LARGEST = "largest"
    BY_ROLE = "by role"


RULES: Final[Mapping[str, Rule]] = {
    # Each process has its own share of the whole.
    **dict.fromkeys(
        (
            "xlaserve_in_flight_requests",
            "xlaserve_in_flight_message_bytes",
            "xlaserve_in_flight_images",
            "xlaserve_in_flight_images_limit",
            "xlaserve_in_flight_bytes",
            "xlaserve_in_flight_bytes_limit",
            "xlaserve_queue_images",
            "xlaserve_queued_work_seconds",
            "xlaserve_lanes",
            "nv_inference_pending_request_count",
        ),
        Rule.SUM,
    ),
    # Readings of the same thing by every process, of which the lowest is the worst: the certificate that expires first,
    # a program that one process has not verified.
    **dict.fromkeys(
        (
            "xlaserve_certificate_expiry_timestamp_seconds",
            "xlaserve_compile_watch",
            "xlaserve_decode_agreement",
            "xlaserve_model_examples_agreement",
            "xlaserve_precision_agreement",
            "xlaserve_program_verified",
        ),
        Rule.LEAST,
    ),
    # Readings of the same thing of which the highest is the worst; flags that are 1 where one process sets them;
    # readings of the machine, counters included, which every process repeats.
    **dict.fromkeys(
        (
            "xlaserve_auto_mode",
            "xlaserve_build_info",
            "xlaserve_decode_difference",
            "xlaserve_model_examples_difference",
            "xlaserve_model_info",
            "xlaserve_model_state",
            "xlaserve_model_warnings",
            "xlaserve_precision_difference",
            "xlaserve_program_difference",
            "xlaserve_program_not_finite_images",
            "xlaserve_ready",
            "xlaserve_gpu_energy_joules",
            "xlaserve_gpu_memory_size_bytes",
            "xlaserve_gpu_memory_used_bytes",
            "xlaserve_gpu_power_watts",
            "xlaserve_gpu_utilization_ratio",
            "xlaserve_in_flight_message_bytes_limit",
        ),
        Rule.LARGEST,
    ),
    **dict.fromkeys(
        (
            "process_cpu_seconds",
            "process_max_fds",
            "process_open_fds",
            "process_resident_memory_bytes",
            "process_start_time_seconds",
            "process_virtual_memory_bytes",
        ),
        Rule.BY_ROLE,
    ),
}
"""The rule of each metric by name. Without an entry, counters and histograms are summed, and gauges shown by role."""

Choose = Callable[[Number, Number], Number]
_CHOOSE: Final[Mapping[Rule, Choose]] = {
    Rule.SUM: operator.add,
    Rule.BY_ROLE: operator.add,
    Rule.LEAST: min,
    Rule.LARGEST: max,
}


@dataclass(slots=True, eq=False)
class Merged(Collector):
    """Merges the last snapshot of each running process with the counts of those that have ended.

    Counters and histograms never fall: the counts of a process are kept when it ends, is started again or removes a
    series, as one sum for each series. The counts of a version are removed once it has left the repository and no
    process shows a series of it. A process on standby shows no gauges: it has not taken over its role yet, or another
    process has. Safe to use from several threads.
    """

    _live: dict[int, Snapshot] = field(default_factory=dict)
    """The last snapshot of each process, by process number."""
    _kept: Snapshot = field(default_factory=dict)
    """Sums of counts that no running process shows any more."""
    _standby: set[int] = field(default_factory=set)
    """The numbers of processes on standby."""
    _lock: Lock = field(default_factory=Lock)

    def update(self, pid: int, role: str, snapshot: Snapshot) -> None:
        """Replaces the last snapshot of a process by `snapshot`."""
        snapshot = {name: _placed(family, role) for name, family in snapshot.items()}
        with self._lock:
            self._keep(self._live.get(pid, {}), snapshot)
            self._live[pid] = snapshot
            self._forget()

    def set_standby(self, pid: int, *, is_standby: bool) -> None:
        """Hides the gauges of a process from now on, or shows them again."""
        with self._lock:
            (self._standby.add if is_standby else self._standby.discard)(pid)

    def ended(self, pid: int) -> None:
        """Removes the gauges of a process that has ended, and keeps its counts. A process without a snapshot is
        ignored."""
        with self._lock:
            self._standby.discard(pid)
            self._keep(self._live.pop(pid, {}), {})
            self._forget()

    def collect(self) -> Iterator[Metric]:
        """Yields the merged metrics."""
        with self._lock:
            merged: Snapshot = {}
            for pid, snapshot in (*self._live.items(), (None, self._kept)):
                for family in snapshot.values():
                    if family.kind != "gauge" or pid not in self._standby:
                        _add(merged, family)
        return (family.metric() for family in merged.values())

    def _keep(self, before: Snapshot, after: Snapshot) -> None:
        """Adds to the kept sums each series of `before` that `after` lacks, or that has begun again at 0 in `after`."""
        for family in before.values():
            if not _is_kept(family):
                continue
            still = after[family.name].series if family.name in after else {}
            lost = {
                labels: series for labels, series in family.series.items() if _is_lost(series, still.get(labels, {}))
            }
            if lost:
                _add(self._kept, family._replace(series=lost))

    def _forget(self) -> None:
        """Removes the kept series of versions of which no running process shows a series."""
        states = [snapshot[STATE] for snapshot in self._live.values() if STATE in snapshot]
        if not any(family.series for family in states):
            return  # no engine runs, so that the list of versions is not known
        shown = {
            version
            for family in chain.from_iterable(snapshot.values() for snapshot in self._live.values())
            for labels in family.series
            for version in _versions(labels)
        }
        for family in self._kept.values():
            for labels in [labels for labels in family.series if not shown.issuperset(_versions(labels))]:
                del family.series[labels]


def rule_of(family: Family) -> Rule:
    """Returns the rule by which the family's numbers become one."""
    by_default = Rule.BY_ROLE if family.kind == "gauge" else Rule.SUM
    return RULES.get(family.name, by_default)


def _is_kept(family: Family) -> bool:
    """Returns whether a family's numbers still count after its process has ended. An untyped family is a counter."""
    return family.kind != "gauge" and rule_of(family) in (Rule.SUM, Rule.BY_ROLE)


def _placed(family: Family, role: str) -> Family:
    """Returns a process's family ready to be added to others: exact numbers, and the role as a label where the rule
    says so."""
    label = ((ROLE, role),) if rule_of(family) is Rule.BY_ROLE else ()
    number = _exact if _is_kept(family) else _as_it_is
    return family._replace(
        series={
            (*labels, *label): {key: Point(number(point.value), point.exemplar) for key, point in series.items()}
            for labels, series in family.series.items()
        }
    )


def _as_it_is(value: Number) -> Number:
    return value


def _exact(value: Number) -> Number:
    """Returns a number whose sums don't depend on the order of addition.

    Otherwise a sum could become smaller by a rounding error when a process ends, which Prometheus takes for a counter
    that began again at 0.
    """
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() else Fraction(value)
    return value


def _is_lost(before: Series, after: Series) -> bool:
    return any(key not in after or after[key].value < point.value for key, point in before.items())


def _add(merged: Snapshot, family: Family) -> None:
    """Adds the family's numbers to those of its name in `merged`."""
    together = merged.setdefault(family.name, family._replace(series={}))
    combine = partial(_combine, _CHOOSE[rule_of(family)])
    for labels, series in family.series.items():
        sums = together.series.setdefault(labels, {})
        for key, point in series.items():
            sums[key] = combine(sums[key], point) if key in sums else point


def _combine(choose: Choose, first: Point, second: Point) -> Point:
    """Returns the two points combined by `choose`, with the later exemplar."""
    exemplars = [point.exemplar for point in (first, second) if point.exemplar is not None]
    newest = max(exemplars, key=lambda exemplar: exemplar.timestamp or 0.0, default=None)
    return Point(choose(first.value, second.value), newest)


def _versions(labels: Labels) -> Iterable[tuple[str, str]]:
    """Yields the name and number of each version that the labels name."""
    values = dict(labels)
    if model := values.get("model"):
        for name in VERSIONS:
            if version := values.get(name):
                yield model, version
