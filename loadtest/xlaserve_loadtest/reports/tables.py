"""The tables of a report, as text in cells; the terminal and Markdown draw them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.figures import NOTHING, mebibytes, share
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.statistics import PERCENTILES, Estimate
from xlaserve_loadtest.analysis.summary import Summary


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first `words` columns hold words, the others figures."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2


def grids(summary: Summary) -> Iterator[Grid]:
    """Yields the tables of a run, most important first; only those that have rows."""
    points = summary.points or summary.curve
    for grid in (
        _throughput(points),
        _latency(points),
        _comparisons(summary),
        _answers(summary),
        _prices(summary),
        _stages(points),
        _use(points),
    ):
        if grid.rows:
            yield _without_empty_columns(_without_single_load(grid))


def _throughput(points: tuple[Point, ...]) -> Grid:
    return Grid(
        "Throughput, with 95% intervals over blocks; * generator-limited",
        ("arm", "load", "images/s", "requests/s", "answers", "blocks", "errors", "dropped"),
        tuple(
            (
                point.arm + ("*" if point.generator.is_limited else ""),
                point.label,
                _estimate(point.images_per_s),
                _estimate(point.requests_per_s),
                f"{point.requests:,}",
                str(point.blocks),
                f"{sum(point.errors.values()):,}",
                f"{point.dropped:,}",
            )
            for point in points
        ),
    )


def _latency(points: tuple[Point, ...]) -> Grid:
    names = tuple(f"p{percentile:g}" for percentile in PERCENTILES)
    rows = []
    for point in points:
        found = (point.percentile(name) for name in names)
        bounded = (_between(one.value_ms, one.low_ms, one.high_ms) for one in found)
        rows.append((point.arm, point.label, _number(point.mean_ms), *bounded))
    return Grid("Latency in ms, with 95% bounds", ("arm", "load", "mean", *names), tuple(rows))


def _comparisons(summary: Summary) -> Grid:
    baselines = list(dict.fromkeys(found.baseline for found in summary.comparisons))

    def row(found: Comparison) -> tuple[str, ...]:
        arm = found.arm if len(baselines) == 1 else f"{found.arm} / {found.baseline}"
        verdict = found.verdict if not found.is_control else "A/A failed" if found.has_failed else "A/A passed"
        ratios = (_estimate(found.ratios[measure], 3) for measure in ("images_per_s", "p50", "p99"))
        return (arm, found.label, *ratios, str(found.pairs), verdict)

    return Grid(
        f"Ratios to {', '.join(baselines)}, with 95% intervals over pairs of blocks",
        ("arm", "load", "images/s", "p50", "p99", "pairs", "verdict"),
        tuple(row(found) for found in summary.comparisons),
    )


def _answers(summary: Summary) -> Grid:
    rates = (
        (
            rate.arm,
            f"highest rate with {rate.slo}, 1/s",
            _number(rate.rate_per_s),
            f"{rate.blocks} runs, {rate.tried} rates tried",
        )
        for rate in summary.highest_rates
    )
    results = (
        (
            result.arm,
            f"{result.scenario}: {result.metric}",
            _number(result.value),
            "official duration" if result.is_official else "shorter than official",
        )
        for result in summary.scenario
    )
    equalities = (
        (
            equality.arm,
            f"outputs against {equality.baseline}, largest difference",
            f"{equality.largest_absolute:.2g}",
            ("equal" if equality.is_equal else "NOT equal")
            + ("" if equality.top1_agreement is None else f", top-1 agreement {equality.top1_agreement:.1%}"),
        )
        for equality in summary.equalities
    )
    return Grid("Findings", ("arm", "what", "value", "remark"), (*rates, *results, *equalities))


def _prices(summary: Summary) -> Grid:
    return Grid(
        "Price of compiling",
        ("arm", "break-even", "programs", "trace s", "compile s"),
        tuple(
            (price.arm, price.text, str(len(price.programs)), _number(price.trace_s), _number(price.compile_s))
            for price in summary.prices
        ),
    )


def _stages(points: tuple[Point, ...]) -> Grid:
    reported = [point for point in points if point.stages]
    names = tuple(dict.fromkeys(stage.name for point in reported for stage in point.stages))
    rows = []
    for point in reported:
        shares = {stage.name: stage.share for stage in point.stages}
        rows.append((point.arm, point.label, *(f"{shares[name]:.1%}" if name in shares else NOTHING for name in names)))
    return Grid("Where the mean latency went", ("arm", "load", *names), tuple(rows))


def _use(points: tuple[Point, ...]) -> Grid:
    return Grid(
        "What it took: padding, server and generator",
        ("arm", "load", "padding", "CPU ms/image", "peak MiB", "GPU", "GPU MiB", "generator busy", "late"),
        tuple(
            (
                point.arm,
                point.label,
                share(point.padding.waste if point.padding else None),
                _number(point.server.cpu_ms_per_image),
                mebibytes(point.server.peak_rss_bytes),
                share(point.server.gpu_utilisation),
                mebibytes(point.server.gpu_memory_bytes),
                share(point.generator.busy),
                f"{point.generator.late_share:.2%}",
            )
            for point in points
        ),
    )


def _without_single_load(grid: Grid) -> Grid:
    """Moves a load that all rows share from its column to the title."""
    if "load" not in grid.headings:
        return grid
    place = grid.headings.index("load")
    loads = {row[place] for row in grid.rows}
    if len(loads) > 1:
        return grid

    def without(cells: tuple[str, ...]) -> tuple[str, ...]:
        return cells[:place] + cells[place + 1 :]

    return Grid(f"{grid.title}, {loads.pop()}", without(grid.headings), tuple(map(without, grid.rows)), grid.words - 1)


def _without_empty_columns(grid: Grid) -> Grid:
    """Leaves out columns without any figure."""
    kept = [
        place
        for place in range(len(grid.headings))
        if place < grid.words or any(row[place] != NOTHING for row in grid.rows)
    ]

    def without(cells: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(cells[place] for place in kept)

    return Grid(grid.title, without(grid.headings), tuple(map(without, grid.rows)), grid.words)


def _estimate(found: Estimate | None, decimals: int | None = None) -> str:
    return NOTHING if found is None else _between(found.value, found.low, found.high, decimals)


def _between(value: float | None, low: float | None, high: float | None, decimals: int | None = None) -> str:
    """Returns a figure with its bounds behind the only space, so that a narrow table breaks there."""
    if value is None or (low is None and high is None):
        return _number(value, decimals)
    return f"{_number(value, decimals)} ({_number(low, decimals)}-{_number(high, decimals)})"


def _number(value: float | None, decimals: int | None = None) -> str:
    """Returns a figure with three or four digits, all of one size with the same decimals, so that columns align."""
    if value is None:
        return NOTHING
    if decimals is None:
        decimals = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"
