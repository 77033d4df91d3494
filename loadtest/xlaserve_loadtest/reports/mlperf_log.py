"""A summary with the fields of LoadGen's `mlperf_log_summary.txt` (`LogSummary` in loadgen/results.cc)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xlaserve_loadtest.analysis.mlperf import MIN_DURATION_S, MIN_OFFLINE_SAMPLES, ScenarioResult
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.schedule.early_stopping import least_requests_for_estimate

SUFFIX: Final = ".mlperf_log_summary.txt"

_LINE: Final = "=" * 48


def render(summary: Summary) -> str:
    """Returns the summary of each arm of a run that has a scenario."""
    return "\n".join("\n".join(_lines(summary, result)) + "\n" for result in summary.scenario)


def _lines(summary: Summary, result: ScenarioResult) -> Iterator[str]:
    configuration = summary.header.configuration
    yield from (_LINE, "Summary of a load test; not an MLPerf result", _LINE)
    yield f"SUT name : {result.arm}"
    yield f"Scenario : {result.name}"
    yield "Mode     : PerformanceOnly"
    yield f"{result.metric} : {'none' if result.value is None else f'{result.value:.6g}'}"
    conditions = {"Run complete": summary.is_complete, **dict(_conditions(result))}
    yield f"Result is : {'VALID' if all(conditions.values()) else 'INVALID'}"
    for name, is_met in conditions.items():
        yield f"  {name} : {'Yes' if is_met else 'NO'}"
    if rate := next((rate for rate in summary.highest_rates if rate.arm == result.arm), None):
        yield f"  Overlatency queries : {rate.over} of {rate.requests}"
        yield f"  Lowest rate rejected : {'none' if rate.rejected_per_s is None else f'{rate.rejected_per_s:.6g}'}"
    yield "Rules that were relaxed:"
    yield from (f" * {rule}" for rule in result.relaxed)
    yield from ("", _LINE, "Additional Stats", _LINE)
    yield f"Queries : {result.queries}"
    yield f"Samples : {result.images}"
    yield f"Duration (s) : {result.measured_s:.3f}"
    points = [point for point in summary.curve if point.arm == result.arm and point.role in ("measure", "confirm")]
    for point in points[-1:]:
        yield from _latencies(point)
    yield from ("", _LINE, "Test Parameters Used", _LINE)
    for key in ("slo", "duration_s", "seed", "schedule_seed", "sample_seed", "images", "model", "deadline_s"):
        if configuration.get(key) is not None:
            yield f"{key} : {configuration[key]}"


def _conditions(result: ScenarioResult) -> Iterator[tuple[str, bool]]:
    """Yields LoadGen's conditions of a valid result."""
    yield "Min duration satisfied", result.measured_s >= MIN_DURATION_S
    match result.scenario:
        case "single-stream" | "multi-stream":
            least = least_requests_for_estimate(90.0 if result.scenario == "single-stream" else 99.0)
            yield "Min queries satisfied", result.queries >= least
            yield "Early stopping satisfied", result.value is not None
        case "server":
            yield "Early stopping satisfied", result.value is not None
        case _:
            yield "Min samples satisfied", result.images >= MIN_OFFLINE_SAMPLES


def _latencies(point: Point) -> Iterator[str]:
    for name, value_ms in (
        ("Mean latency", point.mean_ms),
        ("Max latency", point.max_ms),
        *((f"{found.percentile:g} percentile latency", found.value_ms) for found in point.percentiles),
    ):
        yield f"{name} (ns) : {'none' if value_ms is None else round(value_ms * 1e6)}"
