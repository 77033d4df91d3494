"""Charts of a run's throughput, stages and buckets: pure functions from its figures to charts of plotly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from xlaserve_loadtest.analysis.points import bucket_order
from xlaserve_loadtest.reports.chart import BAR_PX, PART_COLOURS, bar_layout, bars, chart, label
from xlaserve_loadtest.reports.drawn import Drawn, arm_keys
from xlaserve_loadtest.reports.table import number

_CHARACTER_PX: Final = 8


def throughput(points: Sequence[Drawn]) -> Markup | None:
    """Draws images/s by arm."""
    shown = [(each, rate) for each in points if (rate := each.point.images_per_s) is not None]
    if not shown:
        return None
    rates = [rate for _, rate in shown]
    trace = {
        "type": "bar",
        "orientation": "h",
        "meta": [[*each.keys] for each, _ in shown],
        "y": [each.row for each, _ in shown],
        "x": [rate.value for rate in rates],
        "marker": {"color": [each.colour for each, _ in shown]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [0.0 if rate.high is None else max(0.0, rate.high - rate.value) for rate in rates],
            "arrayminus": [0.0 if rate.low is None else max(0.0, rate.value - rate.low) for rate in rates],
            "visible": any(rate.low is not None or rate.high is not None for rate in rates),
            "thickness": 1.5,
        },
        "hovertemplate": "%{y}: %{x:,.4g} images/s<extra></extra>",
    }
    # In a column of their own at the right, where no whisker can cross them.
    texts = [number(rate.value) for rate in rates]
    place = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False, "xshift": 6}
    return chart(
        "throughput",
        "Images/s by arm",
        "Longer is better. The whisker is the 95% interval of the mean; where two whiskers overlap, rely on the ratio "
        "in the verdict, which compares pairs and is the sharper test.",
        [trace],
        {
            **bar_layout("stack", 70 + BAR_PX * max(2, len(shown)), "images/s"),
            "margin": {"r": 14 + _CHARACTER_PX * max(map(len, texts))},
            "annotations": [
                {**place, "y": each.row, "text": text} for (each, _), text in zip(shown, texts, strict=True)
            ],
        },
    )


def stages(points: Sequence[Drawn]) -> Markup | None:
    """Draws the mean latency by stage, stacked for each arm."""
    reported = [each for each in points if each.point.stages]
    stage_ms = {
        stage: [sum(part.mean_ms for part in each.point.stages if part.name == stage) for each in reported]
        for stage in dict.fromkeys(part.name for each in reported for part in each.point.stages)
    }
    hover = "%{fullData.name}: %{x:,.4~g} ms<extra>%{y}</extra>"
    traces, keys = bars([each.row for each in reported], stage_ms, PART_COLOURS, hover)
    return chart(
        "stages",
        "The stages of a request",
        "A bar is a mean request from being sent to being answered. Only execute is the model; queue is waiting for "
        "others, client is the load tester's CPU time, and unaccounted is what neither side can tell: kernels, network "
        "and queues of gRPC.",
        traces,
        bar_layout("stack", 70 + BAR_PX * max(2, len(reported)), "ms"),
        legend=keys,
    )


def buckets(points: Sequence[Drawn]) -> Markup | None:
    """Draws how many batches ran in each bucket, by arm."""
    by_arm: dict[str, Counter[str]] = {}
    for each in points:
        if each.point.padding:
            by_arm.setdefault(each.point.arm, Counter()).update(each.point.padding.batches_by_bucket)
    firsts = {each.point.arm: each for each in reversed(points)}
    reported = [(firsts[arm], batches) for arm, batches in by_arm.items()]
    names = sorted({bucket for _, batches in reported for bucket in batches}, key=bucket_order)
    sizes = {bucket.partition("x")[2] for bucket in names}
    shown = [bucket.partition("x")[0] for bucket in names] if len(sizes) == 1 else names
    traces = [
        {
            "type": "bar",
            "name": label(each.point.arm),
            "meta": [each.point.arm],
            "x": shown,
            "y": [batches.get(bucket, 0) for bucket in names],
            "marker": {"color": each.colour},
            "hovertemplate": "%{x}: %{y:,} batches<extra>%{fullData.name}</extra>",
        }
        for each, batches in reported
    ]
    return chart(
        "buckets",
        "Batches by bucket",
        "How often each compiled shape ran. Large buckets under load are good; a batch in a bucket larger than itself "
        "is filled up with padding, whose share stands in the table.",
        traces if names else [],
        {
            "barmode": "group",
            "height": 300,
            "xaxis": {
                "title": {"text": f"images, of {sizes.pop()}" if len(sizes) == 1 else "images x height x width"},
                "type": "category",
                "tickangle": 0 if shown is not names else -90,
            },
            "yaxis": {"title": {"text": "batches"}},
        },
        legend=arm_keys((each for each, _ in reported), "bar"),
    )
