"""Counters and histograms for the event loop: plain numbers, which are formatted when /metrics is read.

prometheus-client's own metrics take a lock and half a dozen calls for each observation, together some fifteen
microseconds a request. The metrics of this module are written by one thread only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """Adds `amount`."""
        self.value += amount


class Distribution:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.exemplars: dict[int, Exemplar] = {}
        """The last observation that was part of a sampled trace, by its index in `counts`."""
        self.counts = [0] * (len(bounds) + 1)
        """Observations in each bucket: up to its bound and above the bound before; the last bucket is above all
        bounds."""
        self.total = 0.0

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts `value`; where it belongs to a sampled trace, `trace_id` makes it the exemplar of its bucket."""
        index = bisect_left(self._bounds, value)
        self.counts[index] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[index] = Exemplar({"trace_id": trace_id}, value, time.time())


class LoopCounter(Collector):
    """A counter, registered in `registry`."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = labels
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """Returns the series of these label values, which begins at 0."""
        return self._series.setdefault(values, Count())

    @property
    def series(self) -> Mapping[tuple[str, ...], Count]:
        """The series, by label values."""
        return self._series

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Removes the series that have these labels. A removed series can still be counted in, but is no longer
        shown."""
        _remove(self._series, self._labels, labels)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Returns the counter with all its series."""
        family = CounterMetricFamily(self._name, self._help_text, labels=self._labels)
        for values, count in self._series.copy().items():
            family.add_metric(values, count.value)
        return [family]


class LoopHistogram(Collector):
    """A histogram with upper bounds `bounds`, registered in `registry`."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = labels
        self._bounds = bounds
        self._names = [str(float(bound)) for bound in bounds] + ["+Inf"]
        self._series: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """Returns the series of these label values, which begins without observations."""
        return self._series.setdefault(values, Distribution(self._bounds))

    @property
    def series(self) -> Mapping[tuple[str, ...], Distribution]:
        """The series, by label values."""
        return self._series

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Removes the series that have these labels. A removed series can still be observed in, but is no longer
        shown."""
        _remove(self._series, self._labels, labels)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Returns the histogram with all series that have observations."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._labels)
        for values, series in self._series.copy().items():
            if not any(series.counts):  # some twenty lines of zeros for each version that was never called
                continue
            exemplars = series.exemplars.copy()
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for index, counted in enumerate(zip(self._names, accumulate(series.counts.copy()), strict=True)):
                buckets.append((*counted, exemplars[index]) if index in exemplars else counted)
            family.add_metric(values, buckets, series.total)
        return [family]


def _remove(series: dict[tuple[str, ...], Any], names: Sequence[str], labels: Mapping[str, str]) -> None:
    """Removes the series that have these labels."""
    for values in [*series]:  # a copy, since another thread may be reading the series for /metrics
        if labels.items() <= dict(zip(names, values, strict=True)).items():
            del series[values]
