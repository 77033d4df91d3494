"""The tables of a run's reports; every format shows them from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.percentiles import Percentile
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.analysis.verdict import MEASURE_NAMES
from xlaserve_loadtest.record.requests import in_words
from xlaserve_loadtest.reports import resource_tables
from xlaserve_loadtest.reports.table import Cell, LowerBound, Number, Rows, Strong, Table, place, ratio, share, titled


@titled("")
def overview(summary: Summary) -> Rows:
    """Returns what a reader wants to know first of every arm and load: rates, latency, and how it compares."""
    compared = {(each.arm, each.label): each for each in summary.comparisons}
    for point in summary.shown_points:
        latencies = {
            each.percentile: _percentile(replace(each, low_ms=None, high_ms=None)) for each in point.percentiles
        }
        comparison = compared.get((point.arm, point.label))
        yield {
            **place(point),
            "images/s": None if point.images_per_s is None else point.images_per_s.value,
            "p50 ms": latencies.get(50),
            "p99 ms": latencies.get(99),
            "errors": sum(point.errors.values()) or None,
            "wrong": share(point.differing / point.compared if point.differing else None),
            "compared": None if comparison is None else against(comparison),
        }


def against(comparison: Comparison) -> str:
    """Returns a comparison in a few words: `1.17 times graph (1.12 to 1.22), p50 0.87`."""
    decided = comparison.ratio
    if comparison.is_control or decided is None:
        return _verdict(comparison)
    name = "" if comparison.decides == "images_per_s" else f"{MEASURE_NAMES[comparison.decides]} "
    has_bounds = decided.low is not None and decided.high is not None
    bounds = f" ({decided.low:.2f} to {decided.high:.2f})" if has_bounds else ""
    p50 = comparison.ratios["p50"] if comparison.decides == "images_per_s" else None
    more = "" if p50 is None else f", p50 {p50.value:.2f}"
    doubt = ", inconclusive" if comparison.verdict == "inconclusive" else ""
    return f"{name}{decided.value:.2f} times {comparison.baseline}{bounds}{more}{doubt}"


@titled("Throughput, with 95% intervals; * generator-limited")
def throughput(summary: Summary) -> Rows:
    """Returns images/s by arm and load."""
    for point in summary.shown_points:
        yield {
            "arm": point.arm + ("*" if point.generator.is_limited else ""),
            "load": point.label,
            "images/s": point.images_per_s,
            "requests/s": point.requests_per_s,
            "goodput/s": None if point.goodput is None else point.goodput.per_s,
            "in time": None if point.goodput is None else share(point.goodput.share),
            "answers": point.requests,
            "blocks": point.blocks,
            "errors": sum(point.errors.values()),
            "differing": Number(point.differing_text) if point.differing else None,
            "dropped": point.dropped,
        }


@titled("Latency in ms from when a request was due, with 95% bounds")
def latency(summary: Summary) -> Rows:
    """Returns percentiles by arm and load."""
    for point in summary.shown_points:
        yield {
            **place(point),
            "mean": _slow(point, point.mean_ms),
            **{each.name: _percentile(each) for each in point.percentiles},
            "slowest": _slow(point, point.max_ms),
        }


@titled("By model: latency in ms from when a request was due, with 95% bounds")
def by_model(summary: Summary) -> Rows:
    """Returns percentiles by arm, load and model, where an arm is for several."""
    for model, point in summary.by_model:
        yield {
            **place(point),
            "model": model,
            "answers": point.requests,
            "unanswered": point.unanswered,
            "mean": _slow(point, point.mean_ms),
            **{each.name: _percentile(each) for each in point.percentiles},
        }


@titled("By target: latency in ms from when a request was due, with 95% bounds")
def by_target(summary: Summary) -> Rows:
    """Returns rates, errors and percentiles by arm, load and target, where an arm has several."""
    yield from _parts("target", summary.by_target)


@titled("By generator: latency in ms from when a request was due, with 95% bounds")
def by_generator(summary: Summary) -> Rows:
    """Returns rates, errors and percentiles by arm, load and generator, where there are several generators."""
    yield from _parts("generator", summary.by_generator)


def _parts(kind: str, parts: Iterable[tuple[str, Point]]) -> Rows:
    for name, point in parts:
        yield {
            **place(point),
            kind: name,
            "requests/s": None if point.requests_per_s is None else point.requests_per_s.value,
            "answers": point.requests,
            "errors": sum(point.errors.values()),
            **{each.name: _percentile(each) for each in point.percentiles if each.percentile in (50, 99)},
        }


@titled("Ratios to the baseline, with 95% intervals over pairs; ? doubted by the A/A control")
def ratios(summary: Summary) -> Rows:
    """Returns every comparison of an arm with its baseline."""
    baselines = {comparison.baseline for comparison in summary.comparisons}
    for comparison in summary.comparisons:
        yield {
            **(
                {f"arm / {comparison.baseline}": comparison.arm}
                if len(baselines) == 1
                else {"arm / baseline": f"{comparison.arm} / {comparison.baseline}"}
            ),
            "load": comparison.label,
            **{
                MEASURE_NAMES[measure]: Number(f"{each.value:.3f} ?")
                if each and measure in comparison.doubts
                else ratio(each)
                for measure, each in comparison.ratios.items()
            },
            "typical": ratio(comparison.typical),
            f"pairs of {comparison.unit}": comparison.pairs,
            "verdict": _verdict(comparison),
        }


def _verdict(comparison: Comparison) -> str:
    if not comparison.is_control:
        is_verdict = comparison.verdict != "inconclusive" and bool(comparison.holds)
        return Strong(comparison.verdict + f", {comparison.holds}" * is_verdict)
    failed = ", ".join(MEASURE_NAMES[measure] for measure in comparison.failed)
    return Strong(f"A/A failed in {failed}") if failed else "A/A passed"


@titled("The highest rate confirmed to keep to the limit")
def highest_rates(summary: Summary) -> Rows:
    """Returns the highest rate that a search confirmed, by arm."""
    for rate in summary.highest_rates:
        yield {
            "arm": rate.arm,
            "limit": rate.slo,
            "requests/s": rate.rate_per_s,
            "too much": rate.rejected_per_s,
            "images/s": rate.images_per_s,
            "over the limit": f"{rate.over:,} of {rate.requests:,}" if rate.requests else None,
            "covers what comes each, s": rate.covered_s or None,
            "runs": rate.tried,
        }


@titled("Scenario modelled on MLPerf Inference")
def scenario(summary: Summary) -> Rows:
    """Returns the metric of the run's MLPerf scenario."""
    for result in summary.scenario:
        yield {
            "arm": result.arm,
            "scenario": result.name,
            "metric": result.metric,
            "value": result.value,
            "queries": result.queries,
            "seconds": result.measured_s,
        }


@titled("Whether the arms give the same answers to the same images")
def equality(summary: Summary) -> Rows:
    """Returns the differences of outputs, by pair of arms."""
    for compared in summary.equalities:
        if compared.incomparable:
            yield {"outputs": compared.pair, "images": 0, "within tolerance": "can't be compared"}
            continue
        yield {
            "outputs": compared.pair,
            "model": compared.model,
            "images": compared.images,
            "largest difference": f"{compared.largest_absolute:.3g} ({compared.tolerance_absolute:.3g} allowed)",
            "largest relative": f"{compared.largest_relative:.3g} ({compared.tolerance_relative:.3g} allowed)",
            "top-1 agreement": share(compared.top1_agreement),
            "within tolerance": compared.is_equal,
        }


@titled("What failed")
def failures(summary: Summary) -> Rows:
    """Returns failed requests by arm and status."""
    for each in summary.failures:
        yield {"arm": each.arm, "status": in_words(each.status), "requests": each.count, "one message": each.message}


@titled("")
def arms(summary: Summary) -> Rows:
    """Returns the arms of the run."""
    for arm in summary.header.arms:
        yield {
            "arm": arm.name,
            "model": arm.model,
            "mode": arm.mode,
            "target": arm.target,
            "control of": arm.is_control_of,
        }


_ALL: Final = (
    *(throughput, latency, by_model, by_target, by_generator, ratios),
    *(highest_rates, scenario, equality, resource_tables.prices, resource_tables.stages, resource_tables.use),
)


_FOUND: Final = (highest_rates, scenario)
"""Tables of results that no sentence has."""


def first(summary: Summary) -> Iterator[Table]:
    """Yields what a reader wants to know first: a row for each arm and load, and what was searched for."""
    if len(summary.shown_points) > 1:
        yield overview(summary)
    for table in _FOUND:
        if (shown := table(summary)).columns:
            yield shown


def tables(summary: Summary) -> Iterator[Table]:
    """Yields the tables of a full report, most important first; only those that have rows."""
    for table in _ALL:
        if (shown := table(summary)).columns:
            yield shown


def _slow(point: Point, value_ms: float | None) -> float | None:
    return LowerBound(value_ms) if value_ms is not None and point.unanswered else value_ms


def _percentile(percentile: Percentile) -> Cell:
    if percentile.value_ms is None:
        return None
    return LowerBound(percentile.value_ms) if percentile.is_lower_bound else percentile
