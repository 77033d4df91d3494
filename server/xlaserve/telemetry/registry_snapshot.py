"""Snapshots of a metrics registry as plain data, which can be sent to another process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Final, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

BOUND: Final = "le"
"""The label with the upper bound of a histogram's bucket."""

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, without BOUND."""

Number = float | Fraction


class Point(NamedTuple):
    """A number of a series."""

    value: Number
    exemplar: Exemplar | None = None


Series = dict[tuple[str, str], Point]
"""The points of one set of labels, by the suffix after the family's name, such as `_total`, and the value of BOUND;
either may be empty."""


class Family(NamedTuple):
    """All series of one metric name."""

    name: str
    kind: str
    help_text: str
    series: dict[Labels, Series]

    def metric(self) -> Metric:
        """Returns the family as a Metric of prometheus-client."""
        metric = Metric(self.name, self.help_text, self.kind)
        for labels, series in self.series.items():
            for (suffix, bound), point in series.items():
                names = dict(labels) | ({BOUND: bound} if bound else {})
                metric.add_sample(self.name + suffix, names, float(point.value), exemplar=point.exemplar)
        return metric


Snapshot = dict[str, Family]
"""Families by their names."""


def take(registry: Collector) -> Snapshot:
    """Returns a snapshot of `registry`. Families of the same name become one."""
    snapshot: Snapshot = {}
    for metric in registry.collect():
        family = snapshot.setdefault(metric.name, Family(metric.name, metric.type, metric.documentation, {}))
        for sample in metric.samples:
            labels = tuple((name, value) for name, value in sample.labels.items() if name != BOUND)
            key = sample.name.removeprefix(metric.name), sample.labels.get(BOUND, "")
            family.series.setdefault(labels, {})[key] = Point(sample.value, sample.exemplar)
    return snapshot


def encode(snapshot: Snapshot) -> bytes:
    """Returns a snapshot as JSON, a few dozen bytes for each number."""
    families = [
        (family.name, family.kind, family.help_text, [_as_lists(*series) for series in family.series.items()])
        for family in snapshot.values()
    ]
    return json.dumps(families, separators=(",", ":")).encode()


def decode(text: bytes) -> Snapshot:
    """Reads a snapshot that `encode` wrote. Raises ValueError for anything else."""
    try:
        return {
            name: Family(name, kind, help_text, dict(map(_from_lists, series)))
            for name, kind, help_text, series in _load(text)
        }
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a snapshot of metrics: {error}") from None


def _load(text: bytes) -> Iterable[Any]:
    found: Iterable[Any] = json.loads(text)
    return found


def _as_lists(labels: Labels, series: Series) -> tuple[Any, ...]:
    return labels, [(*key, point.value, *_exemplar_as_list(point.exemplar)) for key, point in series.items()]


def _exemplar_as_list(exemplar: Exemplar | None) -> tuple[Any, ...]:
    return () if exemplar is None else (exemplar.labels, exemplar.value, exemplar.timestamp)


def _from_lists(lists: Any) -> tuple[Labels, Series]:
    labels, points = lists
    return (
        tuple((str(name), str(value)) for name, value in labels),
        {
            (suffix, bound): Point(value + 0, Exemplar(*exemplar) if exemplar else None)
            for suffix, bound, value, *exemplar in points
        },
    )
