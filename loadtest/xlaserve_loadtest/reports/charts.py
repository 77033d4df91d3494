"""Charts of a run: pure functions from its figures to what plotly draws, each with how to read it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from xlaserve_loadtest.analysis.highest_rate import slo_of
from xlaserve_loadtest.analysis.points import bucket_order
from xlaserve_loadtest.analysis.summary import Summary, TimedEvent
from xlaserve_loadtest.reports.chart import (
    BAR_PX,
    EVENT,
    PART_COLOURS,
    Key,
    bar_layout,
    bars,
    chart,
    label,
    line,
    plain,
    rule,
)
from xlaserve_loadtest.reports.drawn import Drawn, arm_colours
from xlaserve_loadtest.reports.table import number

_PERCENTILE_TICKS: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
_OVER_TIME: Final = {"p50": "circle", "slowest": "triangle-up-open"}
_CHARACTER_PX: Final = 8
_WIDE_RANGE: Final = 30
"""From this ratio of the greatest latency to the least on, a chart of latencies is logarithmic."""


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
        "in the verdict, which compares neighbouring blocks and is the sharper test.",
        [trace],
        {
            **bar_layout("stack", 70 + BAR_PX * max(2, len(shown)), "images/s"),
            "margin": {"r": 14 + _CHARACTER_PX * max(map(len, texts))},
            "annotations": [
                {**place, "y": each.row, "text": text} for (each, _), text in zip(shown, texts, strict=True)
            ],
        },
    )


def percentiles(points: Sequence[Drawn]) -> Markup | None:
    """Draws latency by percentile, in the manner of HdrHistogram."""
    traces = []
    highest = 0.9
    for each in points:
        share = np.array([value.percentile for value in each.point.curve]) / 100
        latency = np.array([value.latency_ms for value in each.point.curve])
        keep = share < 1
        if not share.size:
            continue
        highest = max(highest, *share[keep].tolist())
        traces.append(
            {
                **line(each.name, 1 / (1 - share[keep]), latency[keep], each.colour, dash=each.dash, keys=each.keys),
                "customdata": (share[keep] * 100).tolist(),
                "hovertemplate": "p%{customdata:.6~g}: %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
    loads = {each.point.label: Key(each.point.label, mark=each.dash) for each in points if each.has_load}
    ticks = [percent for percent in _PERCENTILE_TICKS if percent / 100 <= highest]
    return chart(
        "percentiles",
        "Latency by percentile",
        "Read upwards from 99: one request in a hundred took that long or longer. Every step to the right is ten times "
        "rarer. A flat line treats all requests alike; one that rises at the right has a tail.",
        traces,
        {
            "xaxis": {
                "title": {"text": "percentile"},
                "type": "log",
                "tickvals": [1 / (1 - percent / 100) for percent in ticks],
                "ticktext": [f"{percent:g}" for percent in ticks],
            },
            "yaxis": _latency_axis("latency, ms", (value for trace in traces for value in trace["y"])),
        },
        legend=[*_legend(points, "solid"), *loads.values()],
    )


def load_curve(summary: Summary) -> Markup | None:
    """Draws latency over throughput, a point for each load, and the limit that was asked for."""
    slo = slo_of(summary.header)
    percentile, limit_ms = (slo.metric, slo.limit) if slo and slo.percentile else ("p99", None)
    traces, keys = [], []
    for arm, colour in arm_colours(summary).items():
        pairs = sorted(
            (point.images_per_s.value, value)
            for point in summary.curve
            if point.arm == arm and point.images_per_s and (value := point.percentile(percentile).value_ms) is not None
        )
        if len(pairs) > 1:
            rates, latencies_ms = zip(*pairs, strict=True)
            traces.append(
                {
                    **line(arm, rates, latencies_ms, colour, mode="lines+markers"),
                    "hovertemplate": "%{x:,.4~g} images/s, %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
                }
            )
            keys.append(Key(arm, colour, "solid"))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images/s answered"}, "rangemode": "tozero"},
        "yaxis": _latency_axis(f"{percentile}, ms", (value for trace in traces for value in trace["y"])),
    }
    if limit_ms is not None:
        layout["shapes"] = [rule("y", limit_ms, EVENT)]
        note = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11}}
        at = math.log10(limit_ms) if layout["yaxis"].get("type") == "log" else limit_ms
        place = {"x": 0, "xref": "paper", "y": at, "yref": "y"}
        layout["annotations"] = [{**note, **place, "text": f"limit {limit_ms:g} ms"}]
    return chart(
        "load-curve",
        "Latency at each load",
        "Each point is one load. To the right is more work done, upwards is longer waiting; the lower and further "
        "right a line, the better. Where a line turns upwards, the arm is saturated: more load only adds waiting.",
        traces,
        layout,
        legend=keys,
    )


def over_time(points: Sequence[Drawn], events: Sequence[TimedEvent]) -> Markup | None:
    """Draws latency over the run, and what happened meanwhile."""
    series = [each for each in points if each.point.over_time]
    if not series:
        return None
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(each.name),
            "meta": [each.point.arm, what],
            "x": plain([part.at_s for part in each.point.over_time]),
            "y": plain([part.p50_ms if what == "p50" else part.max_ms for part in each.point.over_time]),
            "marker": {"size": 5, "symbol": symbol, "color": each.colour},
            "hovertemplate": f"{what} %{{y:,.4~g}} ms at %{{x:.2f}} s<extra>%{{fullData.name}}</extra>",
        }
        for each in series
        for what, symbol in _OVER_TIME.items()
    ]
    highest = max(part.max_ms for each in series for part in each.point.over_time)
    axis = _latency_axis(
        "latency, ms",
        (value for each in series for part in each.point.over_time for value in (part.p50_ms, part.max_ms)),
    )
    keys = [*_legend(series, "circle"), *(Key(what, mark=symbol) for what, symbol in _OVER_TIME.items())]
    if events:
        keys.append(Key("compilation or other event", EVENT, "triangle-down"))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "meta": ["compilation or other event"],
                "x": plain([event.at_s for event in events]),
                "y": plain([highest * 1.06] * len(events)),
                "text": [label(f"{event.what}: {event.text}") for event in events],
                "marker": {"symbol": "triangle-down", "size": 10, "color": EVENT},
                "hovertemplate": "%{x:.2f} s: %{text}<extra></extra>",
            }
        )
    return chart(
        "over-time",
        "Latency over time",
        "Each mark is a short stretch of time; the arms take turns. A level band is steady, a slope means that a queue "
        "grows, a lone spike is a stall. In a healthy run no event lies among the marks.",
        traces,
        {
            "xaxis": {"title": {"text": "seconds since the start"}},
            "yaxis": axis,
            "shapes": [rule("x", event.at_s, EVENT) for event in events],
        },
        legend=keys,
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
        legend=_legend([each for each, _ in reported], "bar"),
    )


def _legend(points: Sequence[Drawn], mark: str) -> list[Key]:
    """Returns an entry for each arm."""
    return list({each.point.arm: Key(each.point.arm, each.colour, mark) for each in points}.values())


def _latency_axis(title: str, values_ms: Iterable[float | None]) -> dict[str, Any]:
    """Returns an axis from 0 on, or a logarithmic one where the least would not be seen on that."""
    known = [value for value in values_ms if value]
    if known and max(known) > _WIDE_RANGE * min(known):
        return {"title": {"text": title}, "type": "log", "dtick": "D2", "minorloglabels": "complete"}
    return {"title": {"text": title}, "rangemode": "tozero"}
