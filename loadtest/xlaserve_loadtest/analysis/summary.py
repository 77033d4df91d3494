"""Everything that any report shows of a run, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xlaserve_loadtest.analysis import caveats, conclusion, highest_rate, mlperf
from xlaserve_loadtest.analysis.compare import Comparison, baselines, compare
from xlaserve_loadtest.analysis.completeness import MARK, missing
from xlaserve_loadtest.analysis.conditions import percentiles as percentiles_for
from xlaserve_loadtest.analysis.highest_rate import HighestRate
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.mlperf import ScenarioResult
from xlaserve_loadtest.analysis.parts import Column, part_names
from xlaserve_loadtest.analysis.points import Point, point
from xlaserve_loadtest.analysis.price import Price, prices
from xlaserve_loadtest.analysis.samples import Sample, collect, label
from xlaserve_loadtest.record.lines import End, Equality, Failure, GeneratorLine, Header, Run, Server
from xlaserve_loadtest.schedule.conditions import Condition


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Something that happened."""

    at_s: float
    """Seconds from the start of the run's first block, as in `TimeSlice`."""
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A block on the time axis."""

    arm: str
    label: str
    from_s: float
    to_s: float
    """Seconds from the start of the run's first block."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run, as reports show it."""

    path: Path
    header: Header
    verdict_sentences: tuple[str, ...]
    """The answer, first in every report. It begins with the mark of an incomplete run, and what invalidates the
    comparison."""
    verdicts: tuple[str, ...]
    """A sentence for each comparison that is not a control."""
    points: tuple[Point, ...]
    """The measured points: by arm in the header's order, then by load."""
    curve: tuple[Point, ...]
    """Every load that was tried, those of `points` and of searches included: the throughput-latency curve."""
    comparisons: tuple[Comparison, ...]
    """All comparisons, controls included."""
    prices: tuple[Price, ...]
    highest_rates: tuple[HighestRate, ...]
    scenario: tuple[ScenarioResult, ...]
    equalities: tuple[Equality, ...]
    failures: tuple[Failure, ...]
    servers: tuple[Server, ...]
    events: tuple[TimedEvent, ...]
    spans: tuple[BlockSpan, ...]
    warnings: tuple[str, ...]
    """Warnings about the figures, most serious first."""
    notes: tuple[str, ...]
    """How to read the figures."""
    end: End | None
    """None when the file was cut off."""
    missing: tuple[str, ...]
    """Sentences about what was planned and is missing, which `warnings` hold too; empty where the run is complete."""
    duration_s: float
    """Seconds from the first block's start to the last one's end."""
    requests: int
    """Answered requests, searches included."""
    by_model: tuple[tuple[str, Point], ...] = ()
    """The requests of each model of `points` whose arm is for several; rates are its share of the arm's."""
    by_target: tuple[tuple[str, Point], ...] = ()
    """The same of each target of `points` whose arm has several."""
    by_generator: tuple[tuple[str, Point], ...] = ()
    """The same of each generator, where there are several."""
    generators: tuple[GeneratorLine, ...] = ()
    """Generators on other machines."""
    verdict: str = field(init=False)
    """`verdict_sentences`, joined."""
    is_complete: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_complete", not self.missing)
        object.__setattr__(self, "verdict", " ".join(self.verdict_sentences))

    @property
    def shown_points(self) -> tuple[Point, ...]:
        """The points that reports show: the measured ones, or every load that was tried where none was measured."""
        return self.points or self.curve


def summarize(run: Run, conditions: Iterable[Condition] = ()) -> Summary:
    """Computes everything that reports show, and the percentiles that `conditions` ask for.

    A run in which nothing was measured gives an empty summary.
    """
    header = run.header
    samples = collect(run)
    start_ns = min((sample.block.start_ns for sample in samples), default=0)
    end_ns = max((sample.block.end_ns for sample in samples), default=start_ns)
    percentiles = percentiles_for([*conditions, highest_rate.slo_of(header)])
    curve = _points(header, samples, (start_ns, end_ns), percentiles)
    points = tuple(point for point in curve if point.role == "measure")
    measured = [sample for sample in samples if sample.block.role == "measure"]
    comparisons = compare(header, samples)
    rates = highest_rate.highest_rates(header, samples, curve)
    results = mlperf.results(header, samples, points, rates)
    lacking = missing(run, samples)
    mark = (MARK,) if lacking and any(point.requests for point in curve) else ()
    return Summary(
        path=run.path,
        header=header,
        verdict_sentences=mark + conclusion.sentences(run, curve, comparisons, rates),
        verdicts=tuple(conclusion.sentence(comparison) for comparison in comparisons if not comparison.is_control),
        points=points,
        curve=curve,
        by_model=tuple(_shares(points, _by_model(header, samples, (start_ns, end_ns), percentiles))),
        by_target=tuple(_shares(points, _by_part("target", header, measured, (start_ns, end_ns), percentiles))),
        by_generator=tuple(_shares(points, _by_part("generator", header, measured, (start_ns, end_ns), percentiles))),
        generators=run.generators,
        comparisons=comparisons,
        prices=prices(header.arms, baselines(header), run.servers, points, comparisons),
        highest_rates=rates,
        scenario=results,
        equalities=run.equalities,
        failures=run.failures,
        servers=run.servers,
        events=tuple(TimedEvent((event.at_ns - start_ns) / 1e9, event.what, event.text) for event in run.events),
        spans=tuple(
            BlockSpan(
                sample.block.arm,
                label(sample.block.load),
                (sample.block.start_ns - start_ns) / 1e9,
                (sample.block.end_ns - start_ns) / 1e9,
            )
            for sample in samples
        ),
        warnings=tuple(caveats.warnings(run, samples, points, comparisons)),
        notes=tuple(caveats.notes(run, samples, points, comparisons, results)),
        end=run.end,
        missing=lacking,
        duration_s=(end_ns - start_ns) / 1e9,
        requests=sum(point.requests for point in curve),
    )


def _by_model(
    header: Header, samples: Sequence[Sample], span_ns: tuple[int, int], percentiles: Sequence[float]
) -> Iterator[tuple[str, Point]]:
    for arm in header.arms:
        own = [sample for sample in samples if (sample.block.arm, sample.block.role) == (arm.name, "measure")]
        for index, model in enumerate(arm.models):
            only = [sample.of_model(index) for sample in own]
            yield from ((model, point) for point in _points(header, only, span_ns, percentiles))


def _by_part(
    column: Column, header: Header, samples: Sequence[Sample], span_ns: tuple[int, int], percentiles: Sequence[float]
) -> Iterator[tuple[str, Point]]:
    for arm in header.arms:
        own = [sample for sample in samples if sample.block.arm == arm.name]
        names = part_names(column, header, own)
        for index, name in enumerate(names) if len(names) > 1 else ():
            only = [sample.of_part(column, index) for sample in own]
            yield from ((name, point) for point in _points(header, only, span_ns, percentiles))


def _shares(wholes: Sequence[Point], parts: Iterable[tuple[str, Point]]) -> Iterator[tuple[str, Point]]:
    """Yields parts of points with their share of the whole's rates, so that they add up to them."""
    for name, part in parts:
        (whole,) = (point for point in wholes if (point.arm, point.label) == (part.arm, part.label))
        yield (
            name,
            replace(
                part,
                requests_per_s=_share(whole.requests_per_s, part.requests, whole.requests),
                images_per_s=_share(whole.images_per_s, part.images, whole.images),
            ),
        )


def _share(rate: Estimate | None, part: int, whole: int) -> Estimate | None:
    return None if rate is None or not whole else Estimate(rate.value * part / whole, None, None)


def _points(
    header: Header, samples: Sequence[Sample], span_ns: tuple[int, int], percentiles: Sequence[float]
) -> tuple[Point, ...]:
    """Returns a point for each arm, role and load, by arm in the header's order, otherwise in the order of the run."""
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.block.arm, sample.block.role, label(sample.block.load)), []).append(sample)
    order = {arm.name: place for place, arm in enumerate(header.arms)}
    keys = sorted(groups, key=lambda key: order.get(key[0], len(order)))
    return tuple(point(groups[key], span_ns=span_ns, percentiles=percentiles) for key in keys)
