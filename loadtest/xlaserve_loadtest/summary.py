"""Everything that any report shows of a run, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xlaserve_loadtest.compare import Comparison
from xlaserve_loadtest.points import Point
from xlaserve_loadtest.price import Price
from xlaserve_loadtest.record import End, Equality, Failure, Header, Server


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Something that happened."""

    at_s: float
    """From the start of the run's first block, as in `TimeSlice`."""
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A block on the time axis."""

    arm: str
    label: str
    from_s: float
    to_s: float
    """From the start of the run's first block."""


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest rate of an arm that kept to what was asked."""

    arm: str
    slo: str
    """The condition, as it was written: "p99<50ms"."""
    rate_per_s: float | None
    """Requests due each second; None where no rate that was tried kept to it."""
    images_per_s: float | None
    blocks: int
    """Runs at that rate."""
    tried: int
    """Rates that were tried."""


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The metric of an MLPerf scenario."""

    arm: str
    scenario: str
    metric: str
    """In words, with its unit: "p90 latency, ms"."""
    value: float | None
    is_official: bool
    """Whether it ran for the scenario's minimum duration."""
    why_not: str
    """What was missing; empty where it is official."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run, as reports show it."""

    path: Path
    header: Header
    verdict: str
    """The answer in one or two sentences, first in every report. What spoils the comparison stands first in it."""
    verdicts: tuple[str, ...]
    """A sentence for each comparison that is not a control."""
    points: tuple[Point, ...]
    """Measured: by arm in the header's order, then by load."""
    curve: tuple[Point, ...]
    """Every load that was tried, those of `points` and of searches included: the throughput-latency curve."""
    comparisons: tuple[Comparison, ...]
    """Controls included."""
    prices: tuple[Price, ...]
    highest_rates: tuple[HighestRate, ...]
    scenario: tuple[ScenarioResult, ...]
    equalities: tuple[Equality, ...]
    failures: tuple[Failure, ...]
    servers: tuple[Server, ...]
    events: tuple[TimedEvent, ...]
    spans: tuple[BlockSpan, ...]
    warnings: tuple[str, ...]
    """What makes the figures less than they seem, gravest first."""
    notes: tuple[str, ...]
    """How to read them."""
    end: End | None
    """None when the file was cut off."""
    duration_s: float
    """From the first block's start to the last one's end."""
    requests: int
    """All that were answered, warm-up and searches included."""
