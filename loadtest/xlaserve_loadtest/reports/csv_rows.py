"""The report as CSV, with a row for each arm, load and role of each run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Final

from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.percentiles import PERCENTILES
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.printable import one_line

_FORMULA: Final = ("=", "+", "-", "@")


def render(summaries: Sequence[Summary]) -> str:
    """Returns CSV with a header line; unknown values are empty. Names of columns have their unit."""
    rows = [_row(summary, point) for summary in summaries for point in summary.curve]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["run"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    """Returns a value, with text escaped that a spreadsheet would take for a formula."""
    if not isinstance(value, str):
        return value
    return f"'{text}" if (text := one_line(value)).startswith(_FORMULA) else text


def _row(summary: Summary, point: Point) -> dict[str, object]:
    arm = next((arm for arm in summary.header.arms if arm.name == point.arm), None)
    own = (other for other in summary.comparisons if (other.arm, other.label) == (point.arm, point.label))
    comparison = next(own, None) if point.role == "measure" else None
    latencies: dict[str, object] = {}
    for name in (f"p{percentile:g}" for percentile in PERCENTILES):
        value = point.percentile(name)
        latencies |= {f"{name}_ms": value.value_ms, f"{name}_low_ms": value.low_ms, f"{name}_high_ms": value.high_ms}
        latencies |= {f"{name}_is_lower_bound": value.is_lower_bound}
    return {
        "run": summary.header.started_at,
        "arm": point.arm,
        "model": arm and arm.model,
        "mode": arm and arm.mode,
        "role": point.role,
        "load": point.label,
        "blocks": point.blocks,
        "measured_s": point.measured_s,
        "requests": point.requests,
        "images": point.images,
        **_estimate("images_per_s", point.images_per_s),
        **_estimate("typical_images_per_s", point.typical_images_per_s),
        **_estimate("requests_per_s", point.requests_per_s),
        "mean_ms": point.mean_ms,
        **latencies,
        "max_ms": point.max_ms,
        "errors": sum(point.errors.values()),
        "compared": point.compared,
        "differing": point.differing,
        "dropped": point.dropped,
        "goodput_per_s": point.goodput and point.goodput.per_s,
        "goodput_share": point.goodput and point.goodput.share,
        "is_generator_limited": point.generator.is_limited,
        "processors_used_by_others": point.generator.others,
        "padding_waste": point.padding and point.padding.waste,
        "server_cpu_ms_per_image": point.server.cpu_ms_per_image,
        "server_peak_rss_bytes": point.server.peak_rss_bytes,
        "energy_j_per_image": point.server.energy_j_per_image,
        "baseline": comparison and comparison.baseline,
        **_estimate("ratio", comparison.ratio if comparison else None),
        **_estimate("typical_images_per_s_ratio", comparison.typical if comparison else None),
        "verdict": comparison and comparison.verdict,
        "verdict_holds": comparison and comparison.holds,
        "is_run_complete": summary.is_complete,
    }


def _estimate(name: str, estimate: Estimate | None) -> dict[str, object]:
    return {
        name: estimate and estimate.value,
        f"{name}_low": estimate and estimate.low,
        f"{name}_high": estimate and estimate.high,
    }
