"""The report in Prometheus's text format, for a textfile collector or a push gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from xlaserve_loadtest.analysis.judgement import Measure
from xlaserve_loadtest.analysis.summary import Summary

_LABELS: Final = ("model", "mode", "arm", "load")
_RATIOS: Final[dict[Measure, str]] = {"images_per_s": "images_per_second", "p50": "latency_p50", "p99": "latency_p99"}


def render(summaries: Sequence[Summary]) -> str:
    """Returns gauges of the last of `summaries` for each model, mode, arm and load; figures not known are left out."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"loadtest_{name}", text, (*_LABELS, *labels), registry=registry)

    images = gauge("images_per_second", "Images answered each second.")
    requests = gauge("requests_per_second", "Requests answered each second.")
    latency = gauge("latency_seconds", "Latency from the time a request was due.", "quantile")
    censored = gauge(
        "latency_is_lower_bound", "1 where the latency falls among requests that were not answered.", "quantile"
    )
    errors = gauge("errors", "Measured requests that failed.")
    dropped = gauge("dropped", "Requests that were due and never sent.")
    limited = gauge("generator_limited", "1 where the load generator was the limit.")
    ratio = gauge("ratio", "Ratio to the baseline, with its 95% interval.", "baseline", "measure", "bound")
    for summary in summaries:
        arms = {arm.name: arm for arm in summary.header.arms}
        for point in summary.points:
            labels = (arms[point.arm].model, arms[point.arm].mode, point.arm, point.label)
            for figure, rate in ((images, point.images_per_s), (requests, point.requests_per_s)):
                if rate is not None:
                    figure.labels(*labels).set(rate.value)
            for percentile in point.percentiles:
                if percentile.value_ms is not None:
                    quantile = f"{percentile.percentile / 100:g}"
                    latency.labels(*labels, quantile).set(percentile.value_ms / 1000)
                    censored.labels(*labels, quantile).set(percentile.is_lower_bound)
            errors.labels(*labels).set(sum(point.errors.values()))
            dropped.labels(*labels).set(point.dropped)
            limited.labels(*labels).set(point.generator.is_limited)
        for comparison in summary.comparisons:
            labels = (arms[comparison.arm].model, arms[comparison.arm].mode, comparison.arm, comparison.label)
            for measure, name in _RATIOS.items():
                estimate = comparison.ratios[measure]
                bounds = {"value": estimate.value, "low": estimate.low, "high": estimate.high} if estimate else {}
                for bound, value in bounds.items():
                    if value is not None:
                        ratio.labels(*labels, comparison.baseline, name, bound).set(value)
    return generate_latest(registry).decode()
