"""What one arm did under one load: rates, latencies, errors, and what its server did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from xlaserve_loadtest.record import Load
from xlaserve_loadtest.stages import Stage
from xlaserve_loadtest.stats import Estimate, Percentile

Role = Literal["measure", "search", "curve"]


@dataclass(frozen=True, slots=True)
class GeneratorFigures:
    """Whether the load generator kept up."""

    workers: int
    """At most."""
    cpu_ms_per_request: float | None
    busy: float | None
    """Share of its measured ceiling, in its busiest block; None where that is not known."""
    sends: int
    late_sends: int
    late_share: float
    is_limited: bool
    """Over 80% of its ceiling, or more than 1% of sends late: the result says more of it than of the target."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What the server used; None where it could not be seen."""

    cpu_s: float | None
    cpu_ms_per_image: float | None
    peak_rss_bytes: int | None
    gpu_utilisation: float | None
    """Mean share, from 0 to 1."""
    gpu_memory_bytes: int | None
    """At most."""
    compilations: int | None
    """During the blocks; anything but 0 means that somebody waited for the compiler."""


@dataclass(frozen=True, slots=True)
class Padding:
    """What batches were padded with."""

    images: int
    padded_rows: int
    waste: float
    """Share of rows that were padding."""
    batches_by_bucket: Mapping[str, int]
    """By batch, height and width, smallest first: "8x224x224"."""


@dataclass(frozen=True, slots=True)
class CurveValue:
    """A point of the percentile curve."""

    percentile: float
    """From 0 to 100."""
    latency_ms: float


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """Answers to requests that were due in a short stretch of the run."""

    at_s: float
    """Middle of the stretch, from the start of the run's first block."""
    answers: int
    p50_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Point:
    """One arm under one load, all its blocks together."""

    arm: str
    role: Role
    load: Load
    label: str
    """The load in words: "16 at a time", "50/s poisson", "offline"."""
    blocks: int
    measured_s: float
    requests: int
    """Answered."""
    images: int
    """Answered."""
    images_per_s: Estimate | None
    requests_per_s: Estimate | None
    mean_ms: float | None
    percentiles: tuple[Percentile, ...]
    max_ms: float | None
    errors: Mapping[str, int]
    """Failed requests by status, most frequent first."""
    warmup_errors: Mapping[str, int]
    dropped: int
    """Due, but never sent."""
    steady: bool | None
    """Whether every block that was asked to became steady; None where none was asked."""
    generator: GeneratorFigures
    server: ServerFigures
    stages: tuple[Stage, ...]
    """Shares of the mean latency, in the order of a request's way; empty where the server told none."""
    padding: Padding | None
    curve: tuple[CurveValue, ...]
    over_time: tuple[TimeSlice, ...]
    block_images_per_s: tuple[float | None, ...]
    """In the order of the run; None for a block in which nothing was measured."""

    def percentile(self, name: str) -> Percentile:
        """Returns the percentile called `name` ("p99")."""
        return next(percentile for percentile in self.percentiles if percentile.name == name)
