"""The metrics of MLPerf Inference's scenarios, and in what a run differs from MLPerf's rules.

The rules are those of LoadGen and its configuration (github.com/mlcommons/inference): percentiles, durations and least
counts from loadgen/mlperf.conf; early stopping from loadgen/early_stopping.cc and `EarlyStopping` in
loadgen/results.cc; drawing of samples from `GenerateQueries` in loadgen/loadgen.cc. What is measured here is
modelled on them: MLPerf's results have its data sets, its accuracy targets and its review.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis.highest_rate import HighestRate
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record import requests as record
from xlaserve_loadtest.record.lines import Header
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.early_stopping import least_requests_for_estimate, percentile_estimate

MIN_DURATION_S: Final = 600.0
"""`min_duration` of every scenario."""
MIN_OFFLINE_SAMPLES: Final = 24_576
"""`min_query_count` of ResNet50, which in Offline counts samples."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """LoadGen's requirements of a scenario."""

    name: str
    images: int | None
    """Samples of a query; None: all are one query."""
    percentile: float | None = None
    """Percentile of the latency of queries, from 0 to 100."""


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "single-stream": Scenario("SingleStream", 1, 90.0),
    "multi-stream": Scenario("MultiStream", 8, 99.0),
    "server": Scenario("Server", 1, 99.0),
    "offline": Scenario("Offline", None),
}


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The metric of an MLPerf scenario."""

    arm: str
    scenario: str
    """The scenario's name in the run: "single-stream"."""
    name: str
    """The title in reports: "modelled on MLPerf SingleStream"."""
    metric: str
    """The metric's name with its unit: "p90 early-stopping estimate, ms"."""
    value: float | None
    queries: int
    """Queries that were measured."""
    images: int
    measured_s: float
    relaxed: tuple[str, ...]
    """The rules that were not kept, with what was done instead."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of an arm."""

    samples: Sequence[Sample]
    latencies_ms: NDArray[np.float64]
    """Latencies of the queries; infinity where one failed."""
    seconds: float
    images: int


def results(
    header: Header, samples: Sequence[Sample], points: Sequence[Point], rates: Sequence[HighestRate]
) -> tuple[ScenarioResult, ...]:
    """Returns the metric of the run's scenario for each arm; nothing where the run had no scenario."""
    if (scenario := SCENARIOS.get(header.scenario or "")) is None:
        return ()
    found = []
    for arm in header.arms:
        rate = next((rate for rate in rates if rate.arm == arm.name), None)
        own = [sample for sample in samples if sample.block.arm == arm.name and _counts(sample, scenario, rate)]
        if not own and rate is None:
            continue
        measured = _Measured(
            own,
            np.concatenate([_latencies_ms(sample) for sample in own] or [np.empty(0)]),
            sum(sample.seconds for sample in own),
            sum(int(sample.answered["images"].sum()) for sample in own),
        )
        point = next((point for point in points if point.arm == arm.name), None)
        metric, value = _metric(scenario, measured, point, rate)
        found.append(
            ScenarioResult(
                arm=arm.name,
                scenario=str(header.scenario),
                name=f"modelled on MLPerf {scenario.name}",
                metric=metric,
                value=value,
                queries=measured.latencies_ms.size,
                images=measured.images,
                measured_s=measured.seconds,
                relaxed=tuple(_relaxed(header, scenario, measured)),
            )
        )
    return tuple(found)


def _counts(sample: Sample, scenario: Scenario, rate: HighestRate | None) -> bool:
    if scenario.name != "Server":
        return sample.block.role == "measure"
    confirmed = rate.rate_per_s if rate else None
    return sample.block.role == "confirm" and confirmed is not None and sample.block.load.rate_per_s == confirmed


def _metric(
    scenario: Scenario, measured: _Measured, point: Point | None, rate: HighestRate | None
) -> tuple[str, float | None]:
    if scenario.name == "Server":
        return f"highest rate with {rate.slo if rate else 'no limit'}, 1/s", rate.rate_per_s if rate else None
    if scenario.percentile is None:
        return "images/s", point.images_per_s.value if point and point.images_per_s else None
    value = percentile_estimate(measured.latencies_ms, scenario.percentile)
    # Among queries that failed there is no latency.
    is_known = value is not None and math.isfinite(value)
    return f"p{scenario.percentile:g} early-stopping estimate, ms", value if is_known else None


def _latencies_ms(sample: Sample) -> NDArray[np.float64]:
    rows = record.measured(sample.rows)
    latencies_ms: NDArray[np.float64] = (rows["end_ns"] - rows["scheduled_ns"]) / 1e6
    latencies_ms[rows["status"] != Status.OK] = math.inf
    return latencies_ms


def _relaxed(header: Header, scenario: Scenario, measured: _Measured) -> Iterator[str]:
    queries = measured.latencies_ms.size
    if measured.seconds < MIN_DURATION_S:
        yield f"{measured.seconds:.3g} s instead of {MIN_DURATION_S:.0f} s"
    if scenario.name in ("SingleStream", "MultiStream") and scenario.percentile is not None:
        least = least_requests_for_estimate(scenario.percentile)
        if queries < least:
            yield f"{queries:,} queries instead of {least:,}: too few for an estimate"
    if failed := int(np.isinf(measured.latencies_ms).sum()):
        yield f"{failed:,} queries failed"
    if len(measured.samples) > 1:
        yield f"{len(measured.samples)} blocks in turn with other arms instead of one run"
    if scenario.name == "Offline":
        if measured.images < MIN_OFFLINE_SAMPLES:
            yield f"{measured.images:,} images instead of {MIN_OFFLINE_SAMPLES:,}"
        load = measured.samples[0].block.load
        pieces = f"requests of {load.images_per_request} images, {load.concurrency} at a time"
        yield f"one query in {pieces}, since servers limit what waits"
        yield "the requests' steady rate instead of all images over the time to the last answer"
    if scenario.name == "Server":
        yield "a limit of one's own instead of the benchmark's, and a search of the rate instead of a single run"
    what = "images of a folder" if header.configuration.get("images") else "synthetic images"
    yield f"{what} instead of the benchmark's performance set"
    if not header.configuration.get("draws_samples"):
        yield "samples in turn instead of drawn at random"
    yield "seeds of one's own instead of the round's, and no accuracy target"
