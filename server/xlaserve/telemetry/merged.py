"""The metrics of several processes as if one had counted: a process that ends takes nothing with it but its gauges."""

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
"""The label of what is shown for each process by itself."""
STATE: Final = "xlaserve_model_state"
"""The gauge that lists the versions there are."""
VERSIONS: Final = ("version", "shadow_version")
"""Labels that, with `model`, name a version."""


class Rule(Enum):
    """How one number is made of those of several processes."""

    SUM = "sum"
    LEAST = "least"
    LARGEST = "largest"
    BY_ROLE = "by role"


RULES: Final[Mapping[str, Rule]] = {
    # Each process has its own share of it.
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
    # What they all say of the same thing, where the worst counts: certificates that end first, what nobody checked.
    **dict.fromkeys(
        (
            "xlaserve_certificate_expiry_timestamp_seconds",
            "xlaserve_compile_watch",
            "xlaserve_decode_agreement",
            "xlaserve_precision_agreement",
            "xlaserve_program_verified",
        ),
        Rule.LEAST,
    ),
    # As well; or 1 where any of them says so; or readings of the machine, counters included, which each repeats.
    **dict.fromkeys(
        (
            "xlaserve_auto_mode",
            "xlaserve_build_info",
            "xlaserve_decode_difference",
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
"""Of counters and histograms that are not here the sum is shown, and gauges by role."""

Choose = Callable[[Number, Number], Number]
_CHOOSE: Final[Mapping[Rule, Choose]] = {
    Rule.SUM: operator.add,
    Rule.BY_ROLE: operator.add,
    Rule.LEAST: min,
    Rule.LARGEST: max,
}


@dataclass(slots=True, eq=False)
class Merged(Collector):
    """Shows the last snapshot of each process that lives, and what those that have ended had counted.

    Counters and histograms never fall: what a process counted stays when it ends, is started again or forgets a series.
    It goes with the version it is about, once that has left and no process shows anything of it. What is kept of
    processes that have ended is one sum for each series. Of a process that stands aside, no gauge is shown: another
    does what it is to do, or did. Called from any thread.
    """

    _live: dict[int, Snapshot] = field(default_factory=dict)
    """By process number."""
    _kept: Snapshot = field(default_factory=dict)
    """What nobody counts any more."""
    _aside: set[int] = field(default_factory=set)
    """The numbers of processes that stand aside."""
    _lock: Lock = field(default_factory=Lock)

    def update(self, pid: int, role: str, snapshot: Snapshot) -> None:
        """Takes the place of what the process showed before."""
        snapshot = {name: _placed(family, role) for name, family in snapshot.items()}
        with self._lock:
            self._keep(self._live.get(pid, {}), snapshot)
            self._live[pid] = snapshot
            self._forget()

    def stand_aside(self, pid: int, *, is_aside: bool) -> None:
        """The process stands aside from now on, or does no longer."""
        with self._lock:
            (self._aside.add if is_aside else self._aside.discard)(pid)

    def ended(self, pid: int) -> None:
        """The process has ended: its gauges go, its counts stay. Does nothing for one that showed nothing."""
        with self._lock:
            self._aside.discard(pid)
            self._keep(self._live.pop(pid, {}), {})
            self._forget()

    def collect(self) -> Iterator[Metric]:
        """Yields what all have counted together."""
        with self._lock:
            merged: Snapshot = {}
            for pid, snapshot in (*self._live.items(), (None, self._kept)):
                for family in snapshot.values():
                    if family.kind != "gauge" or pid not in self._aside:
                        _add(merged, family)
        return (family.metric() for family in merged.values())

    def _keep(self, before: Snapshot, after: Snapshot) -> None:
        """Keeps the counts that `after` lacks, or that began again in it."""
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
        """Forgets what is kept of versions that have left, unless some process still shows something of them."""
        states = [snapshot[STATE] for snapshot in self._live.values() if STATE in snapshot]
        if not any(family.series for family in states):
            return  # nobody is there who knows
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
    """Returns how the family's numbers become one."""
    by_default = Rule.BY_ROLE if family.kind == "gauge" else Rule.SUM
    return RULES.get(family.name, by_default)


def _is_kept(family: Family) -> bool:
    """Returns whether numbers of processes that have ended still count. A kind that is not told is a counter's."""
    return family.kind != "gauge" and rule_of(family) in (Rule.SUM, Rule.BY_ROLE)


def _placed(family: Family, role: str) -> Family:
    """Returns a process's family as it is added to others."""
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
    """Returns a number whose sums don't depend on their order.

    A sum that was smaller by a rounding error, once a process has ended, would look as if all had begun again at 0.
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
    """Returns both as one, with the exemplar that came last."""
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
