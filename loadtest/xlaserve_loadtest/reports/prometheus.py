"""The report in Prometheus's text format, for a textfile collector or a push gateway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.judgement import Measure, Verdict
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary

_LABELS: Final = ("model", "mode", "arm", "load")
_RATIOS: Final[dict[Measure, str]] = {"images_per_s": "images_per_second", "p50": "latency_p50", "p99": "latency_p99"}


def render(summaries: Sequence[Summary], judged: Sequence[Sequence[Judged]] = ()) -> str:
    """Returns gauges for each model, mode, arm and load, of the last of `summaries` that has it; unknown figures are
    left out.

    `judged` has the judged conditions of each summary.
    """
    registry = CollectorRegistry()
    complete = Gauge("loadtest_run_complete", "0 where a run ended before all was measured.", registry=registry)
    complete.set(all(summary.is_complete for summary in summaries))
    _add_points(summaries, registry)
    _add_comparisons(summaries, registry)
    met, known = (
        Gauge(f"loadtest_condition_{name}", text, ["condition"], registry=registry)
        for name, text in (
            ("met", "1 where a condition is met, or can't be judged."),
            ("judged", "0 where a condition can't be judged."),
        )
    )
    for each in chain.from_iterable(judged):
        met.labels(each.condition.text).set(each.is_met)
        known.labels(each.condition.text).set(each.is_judged)
    return generate_latest(registry).decode()


def _add_points(summaries: Sequence[Summary], registry: CollectorRegistry) -> None:
    gauge = partial(_gauge, registry)
    images = gauge("images_per_second", "Images answered each second.")
    images_bound = gauge("images_per_second_bound", "Bound of the 95% interval of images/s.", "bound")
    requests = gauge("requests_per_second", "Requests answered each second.")
    latency = gauge("latency_seconds", "Latency from the time a request was due.", "quantile")
    latency_bound = gauge("latency_bound_seconds", "Bound of the 95% interval of a latency.", "quantile", "bound")
    censored = gauge(
        "latency_is_lower_bound", "1 where the latency falls among requests that were not answered.", "quantile"
    )
    errors = gauge("errors", "Measured requests that failed.")
    compared = gauge("compared", "Answers under load that were compared with what the same request got alone.")
    differing = gauge("differing", "Answers of these that differ beyond the tolerance.")
    dropped = gauge("dropped", "Requests that were due and never sent.")
    goodput = gauge("goodput_requests_per_second", "Requests answered each second within the limit of --slo.")
    in_time = gauge("goodput_ratio", "Share of requests that were answered within the limit of --slo.")
    others = gauge("others_processor_ratio", "Share of the processors that neither load test nor server used.")
    limited = gauge("generator_limited", "1 where the load generator was the limit.")
    for summary in summaries:
        for point in summary.points:
            labels = _labels(summary, point)
            for figure, rate in ((images, point.images_per_s), (requests, point.requests_per_s)):
                if rate is not None:
                    figure.labels(*labels).set(rate.value)
            for bound, value in _bounds(point.images_per_s):
                images_bound.labels(*labels, bound).set(value)
            for percentile in point.percentiles:
                if percentile.value_ms is not None:
                    quantile = f"{percentile.percentile / 100:g}"
                    latency.labels(*labels, quantile).set(percentile.value_ms / 1000)
                    censored.labels(*labels, quantile).set(percentile.is_lower_bound)
                    for bound, value_ms in (("low", percentile.low_ms), ("high", percentile.high_ms)):
                        if value_ms is not None:
                            latency_bound.labels(*labels, quantile, bound).set(value_ms / 1000)
            errors.labels(*labels).set(sum(point.errors.values()))
            compared.labels(*labels).set(point.compared)
            differing.labels(*labels).set(point.differing)
            dropped.labels(*labels).set(point.dropped)
            if point.goodput is not None:
                goodput.labels(*labels).set(point.goodput.per_s)
                in_time.labels(*labels).set(point.goodput.share)
            if point.generator.others is not None:
                others.labels(*labels).set(point.generator.others)
            limited.labels(*labels).set(point.generator.is_limited)


def _add_comparisons(summaries: Sequence[Summary], registry: CollectorRegistry) -> None:
    gauge = partial(_gauge, registry)
    ratio = gauge("ratio", "Ratio to the baseline, with its 95% interval.", "baseline", "measure", "bound")
    verdict = gauge("verdict", "1 for the verdict on an arm against its baseline, else 0.", "baseline", "verdict")
    others = gauge(
        "verdict_holds_for_other_processes", "0 where the verdict is of the processes that were measured.", "baseline"
    )
    for summary in summaries:
        for comparison in summary.comparisons:
            labels = (*_labels(summary, comparison), comparison.baseline)
            for measure, name in _RATIOS.items():
                for bound, value in _with_bounds(comparison.ratios[measure]):
                    ratio.labels(*labels, name, bound).set(value)
            for bound, value in _with_bounds(comparison.typical):
                ratio.labels(*labels, "images_per_second_typical", bound).set(value)
            others.labels(*labels).set(not comparison.holds)
            for possible in get_args(Verdict):
                verdict.labels(*labels, possible).set(possible == comparison.verdict)


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"loadtest_{name}", text, (*_LABELS, *labels), registry=registry)


def _labels(summary: Summary, of: Point | Comparison) -> tuple[str, ...]:
    arm = next(arm for arm in summary.header.arms if arm.name == of.arm)
    return arm.model, arm.mode, of.arm, of.label


def _with_bounds(estimate: Estimate | None) -> Iterator[tuple[str, float]]:
    if estimate is not None:
        yield from (("value", estimate.value), *_bounds(estimate))


def _bounds(estimate: Estimate | None) -> Iterator[tuple[str, float]]:
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        yield from (("low", estimate.low), ("high", estimate.high))
