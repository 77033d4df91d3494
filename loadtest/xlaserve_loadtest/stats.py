"""What a run's numbers say. Pure: from a record to summaries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record import STAGES, BlockRecord, Rows, Status

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval over blocks."""

    value: float
    low: float | None
    """None where there were too few blocks for an interval."""
    high: float | None


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of latency with its 95% confidence bounds."""

    name: str
    """"p99"."""
    percentile: float
    """From 0 to 100."""
    value_ms: float | None
    """None where there were too few answers to support it."""
    low_ms: float | None
    high_ms: float | None
    """None where the bound lies beyond what was seen."""
    needs: int
    """Answers that it takes."""


@dataclass(frozen=True)
class Summary:
    """What one arm did while it was measured."""

    arm: str
    requests: int
    """Answered."""
    images: int
    """Answered."""
    images_per_s: float | None
    requests_per_s: float | None
    mean_ms: float | None
    percentiles_ms: Mapping[str, float | None]
    """By name (p50 ...); None where there are too few answers to tell."""
    errors: Mapping[str, int]
    """Failed requests by status."""
    warmup_errors: Mapping[str, int]
    """The same before measurement."""
    stages_ms: Mapping[str, float]
    """Mean time in each stage inside the server, for those it told."""
    block_images_per_s: tuple[float | None, ...]
    """In the order of the run."""
    generator_cpu_ms: float | None
    """CPU time of the load generator for each request."""
    generator_busy: float | None
    """Share of one core that the load generator used."""


def least_count(percentile: float, confidence: float = 0.99) -> int:
    """Returns how many answers it takes before a percentile can be told with `confidence`.

    It is the least n for which the greatest of n answers lies above the percentile with that probability; the same
    counts as MLPerf's early stopping: 44 for p90, 90 for p95, 459 for p99.
    """
    return math.ceil(math.log(1 - confidence) / math.log(percentile / 100))


def percentile_ms(latencies_ns: NDArray[np.int64], percentile: float) -> float | None:
    """Returns a latency that was really seen (nearest rank), in milliseconds; None where there are too few."""
    if latencies_ns.size < least_count(percentile):
        return None
    return float(np.percentile(latencies_ns, percentile, method="inverted_cdf")) / 1e6


def summarize(arm: str, blocks: Sequence[BlockRecord], requests: Rows) -> Summary:
    """Sums up one arm from all blocks and requests of a run.

    A closed loop's rate is taken over whole cycles: what was answered for each second of a slot's time, times the
    slots. Counting answers in a window of fixed length instead would be off by up to a batch per block.
    Failed requests count as errors and for the slots' time, and in nothing else.
    """
    own = [block for block in blocks if block.arm == arm]
    rows = requests[np.isin(requests["block"], [block.index for block in own])]
    measured = rows[rows["measured"]]
    answered = measured[measured["status"] == Status.OK]
    latencies_ns = answered["end_ns"] - answered["scheduled_ns"]
    ended = [block for block in own if block.end_ns is not None]
    wall_s = sum((block.end_ns or 0) - block.start_ns for block in ended) / 1e9
    cpu_s = sum(block.cpu_s for block in ended)
    return Summary(
        arm=arm,
        requests=answered.size,
        images=int(answered["images"].sum()),
        images_per_s=_rate(own, int(answered["images"].sum())),
        requests_per_s=_rate(own, answered.size),
        mean_ms=float(latencies_ns.mean()) / 1e6 if answered.size else None,
        percentiles_ms={f"p{percentile:g}": percentile_ms(latencies_ns, percentile) for percentile in PERCENTILES},
        errors=_errors(measured),
        warmup_errors=_errors(rows[~rows["measured"]]),
        stages_ms=_stages(answered),
        block_images_per_s=tuple(
            _rate([block], int(answered["images"][answered["block"] == block.index].sum())) for block in own
        ),
        generator_cpu_ms=cpu_s * 1000 / rows.size if ended and rows.size else None,
        generator_busy=cpu_s / wall_s if wall_s else None,
    )


def ratio_to(baseline: Summary, arm: Summary) -> float | None:
    """Returns images/s of `arm` over those of `baseline`; None where either answered nothing."""
    if not baseline.images_per_s or arm.images_per_s is None:
        return None
    return arm.images_per_s / baseline.images_per_s


def _rate(blocks: Sequence[BlockRecord], count: int) -> float | None:
    mean_slot_s = sum(block.slot_ns / block.slots for block in blocks) / 1e9
    return count / mean_slot_s if mean_slot_s else None


def _errors(rows: Rows) -> dict[str, int]:
    counts = Counter(rows["status"][rows["status"] != Status.OK].tolist())
    return {Status(status).name: count for status, count in counts.most_common()}


def _stages(rows: Rows) -> dict[str, float]:
    told = {stage: rows[stage][~np.isnan(rows[stage])] for stage in STAGES}
    return {
        f"{stage.removesuffix('_s')}_ms": float(values.mean()) * 1000 for stage, values in told.items() if values.size
    }
