"""Whether a target kept up with an open loop. Pure; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from xlaserve_loadtest.analysis import settling
from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS
from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.analysis.samples import Sample, is_too_much, latencies_ns, rate
from xlaserve_loadtest.record import requests as record
from xlaserve_loadtest.record.requests import Rows

_CONFIDENCE: Final = 0.99
"""That latency grows, where it is known that more was due than was answered."""
_LEAST_GROWTH: Final = 1.1


@dataclass(frozen=True, slots=True)
class Overload:
    """A load under which more was due than was answered."""

    due_per_s: float
    answered_per_s: float
    """Requests answered each second inside the windows: the point's requests/s."""
    first_ms: float | None
    """Median latency of the requests due in the first quarter of the windows; None where none was answered."""
    last_ms: float | None
    """Median latency of the requests due in the last quarter."""
    grows: bool
    """Whether latency grew within the windows, so that it would be longer in a longer run."""
    is_capped: bool
    """Whether it was the generator's limit of requests under way that was reached, and nothing else was left over."""
    max_in_flight: int | None = None
    """That limit, where the record has it."""


def overload(samples: Sequence[Sample]) -> Overload | None:
    """Returns how far the blocks of one open loop were too much for their target; None where it kept up."""
    if not is_too_much(samples):
        return None
    windows = [sample for sample in samples if sample.seconds]
    due = sum(sample.due for sample in windows) / sum(sample.seconds for sample in windows)
    answered = rate(windows, "requests")
    first_ms, last_ms = (_median_ms(windows, quarter) for quarter in (0, 3))
    is_longer = first_ms is not None and last_ms is not None and last_ms > _LEAST_GROWTH * first_ms
    return Overload(
        due_per_s=due,
        answered_per_s=answered.value if answered else 0.0,
        first_ms=first_ms,
        last_ms=last_ms,
        grows=is_longer and settling.grows(_pieces([_latencies(sample) for sample in windows]), _CONFIDENCE),
        is_capped=not is_too_much(samples, dropped=False),
        max_in_flight=samples[0].max_in_flight,
    )


def _pieces(blocks: Sequence[Nanoseconds]) -> list[Nanoseconds]:
    """Returns blocks, each cut into pieces where they are too few to tell growth from noise.

    A piece has a quarter of each third of its block.
    """
    if len(blocks) >= MIN_BLOCKS:
        return list(blocks)
    return [
        piece.ravel() for block in blocks for piece in block[: block.size // 12 * 12].reshape(3, 4, -1).swapaxes(0, 1)
    ]


def _latencies(sample: Sample) -> Nanoseconds:
    """Returns the latencies of answers, in the order in which requests were due."""
    answered: Rows = record.answered(sample.rows)
    return latencies_ns(answered[np.argsort(answered["scheduled_ns"], kind="stable")])


def _median_ms(samples: Sequence[Sample], quarter: int) -> float | None:
    found: list[Nanoseconds] = []
    for sample in samples:
        first_ns, last_ns = sample.block.window_ns or (0, 1)
        quarters = 4 * (sample.answered["scheduled_ns"] - first_ns) // (last_ns - first_ns)
        found.append(latencies_ns(sample.answered[quarters == quarter]))
    latencies = np.concatenate(found)
    return float(np.median(latencies)) / 1e6 if latencies.size else None
