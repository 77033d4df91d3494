"""Whether a target kept up with an open loop. Pure; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.analysis.samples import Sample, latencies_ns
from xlaserve_loadtest.record.lines import Status

_LEAST_SHARE: Final = 0.03
"""Share of the requests due that must be left over."""
_NOISE: Final = 3.0
"""Standard deviations of the number of arrivals that must be left over: by chance a queue grows, too."""


@dataclass(frozen=True, slots=True)
class Overload:
    """A load under which more was sent than was answered."""

    due_per_s: float
    answered_per_s: float
    """Requests answered inside the windows, each second."""
    first_ms: float | None
    """Median latency of the requests due in the first quarter of the windows; None where none was answered."""
    last_ms: float | None
    """That of the last quarter."""

    @property
    def grows(self) -> bool:
        """Whether latency grew within the windows, so that it would be longer in a longer run."""
        return self.first_ms is not None and self.last_ms is not None and self.last_ms > 1.1 * self.first_ms


def overload(samples: Sequence[Sample]) -> Overload | None:
    """Returns how far the blocks of one open loop were too much for their target; None where it kept up.

    What was left over is the growth of the number of requests under way from the start of each window to its end,
    what was dropped, and what was refused with RESOURCE_EXHAUSTED.
    """
    windows = [sample for sample in samples if sample.block.load.type == "open" and sample.seconds]
    due = sum(sample.due for sample in windows)
    if sum(map(_left_over, windows)) <= max(_LEAST_SHARE * due, _NOISE * math.sqrt(due)):
        return None
    seconds = sum(sample.seconds for sample in windows)
    answered = sum((sample.requests_per_s or 0.0) * sample.seconds for sample in windows)
    first_ms, last_ms = (_median_ms(windows, quarter) for quarter in (0, 3))
    return Overload(due / seconds, answered / seconds, first_ms, last_ms)


def _left_over(sample: Sample) -> int:
    refused = int((sample.rows["status"][sample.rows["measured"]] == Status.RESOURCE_EXHAUSTED).sum())
    first_ns, last_ns = sample.block.window_ns or (0, 0)
    return _under_way(sample, last_ns) - _under_way(sample, first_ns) + sample.block.generator.dropped + refused


def _under_way(sample: Sample, at_ns: int) -> int:
    return int(((sample.rows["scheduled_ns"] < at_ns) & (sample.rows["end_ns"] >= at_ns)).sum())


def _median_ms(samples: Sequence[Sample], quarter: int) -> float | None:
    found: list[Nanoseconds] = []
    for sample in samples:
        first_ns, last_ns = sample.block.window_ns or (0, 1)
        quarters = 4 * (sample.answered["scheduled_ns"] - first_ns) // (last_ns - first_ns)
        found.append(latencies_ns(sample.answered[quarters == quarter]))
    latencies = np.concatenate(found)
    return float(np.median(latencies)) / 1e6 if latencies.size else None
