"""Charts of a run: pure functions from its figures to what plotly draws, each with how to read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from xlaserve_loadtest.analysis.points import Point, bucket_order
from xlaserve_loadtest.analysis.price import Price
from xlaserve_loadtest.analysis.scenario import slo_of
from xlaserve_loadtest.analysis.summary import Summary, TimedEvent
from xlaserve_loadtest.reports.chart import BAR_PX, COLOURS, MUTED, bar_layout, bars, chart, colour, label, plain, rule
from xlaserve_loadtest.reports.table import number

_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "x")
_PERCENTILE_TICKS: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)


@dataclass(frozen=True)
class Drawn:
    """A measured point, and how charts show it."""

    point: Point
    name: str
    """The arm, and the load where there are several."""
    hue: int
    """Index of its colour: that of its arm."""
    style: int
    """Index of its dashes and symbol: that of its load where there are several, else that of its arm."""


def drawn(summary: Summary) -> list[Drawn]:
    """Returns the measured points of a run."""
    hues = _hues(summary)
    arms = list(dict.fromkeys(point.arm for point in summary.points))
    loads = list(dict.fromkeys(point.label for point in summary.points))
    if len(loads) == 1:
        return [Drawn(point, point.arm, hues[point.arm], arms.index(point.arm)) for point in summary.points]
    return [
        Drawn(point, f"{point.arm}, {point.label}", hues[point.arm], loads.index(point.label))
        for point in summary.points
    ]


def throughput(points: Sequence[Drawn]) -> Markup | None:
    """Draws images/s by arm."""
    shown = [(each, rate) for each in points if (rate := each.point.images_per_s) is not None]
    if not shown:
        return None
    rates = [rate for _, rate in shown]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [label(each.name) for each, _ in shown],
        "x": [rate.value for rate in rates],
        "text": [number(rate.value) for rate in rates],
        "textposition": "inside",
        "insidetextanchor": "start",
        "marker": {"color": [colour(each.hue) for each, _ in shown]},
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
    return chart(
        "throughput",
        "Images/s by arm",
        "Longer is better. The whisker is the 95% interval of the mean; where two whiskers overlap, rely on the ratio "
        "in the verdict, which compares neighbouring blocks and is the sharper test.",
        [trace],
        {**bar_layout("stack", 90 + BAR_PX * max(2, len(shown)), "images/s"), "showlegend": False},
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
                **_line(each.name, 1 / (1 - share[keep]), latency[keep], each.hue, each.style),
                "customdata": (share[keep] * 100).tolist(),
                "hovertemplate": "p%{customdata:.6~g}: %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
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
            "yaxis": {"title": {"text": "latency, ms"}, "rangemode": "tozero"},
        },
    )


def load_curve(summary: Summary) -> Markup | None:
    """Draws latency over throughput, a point for each load, and the limit that was asked for."""
    slo = slo_of(summary.header)
    percentile, limit_ms = (slo.metric, slo.limit) if slo and slo.percentile else ("p99", None)
    traces = []
    for arm, hue in _hues(summary).items():
        pairs = sorted(
            (point.images_per_s.value, value)
            for point in summary.curve
            if point.arm == arm and point.images_per_s and (value := point.percentile(percentile).value_ms) is not None
        )
        if len(pairs) > 1:
            rates, latencies_ms = zip(*pairs, strict=True)
            traces.append(
                {
                    **_line(arm, rates, latencies_ms, hue, hue, mode="lines+markers"),
                    "hovertemplate": "%{x:,.4~g} images/s, %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
                }
            )
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images/s answered"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"{percentile}, ms"}, "rangemode": "tozero"},
    }
    if limit_ms is not None:
        layout["shapes"] = [rule("y", limit_ms, COLOURS[5])]
        note = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11}}
        place = {"x": 0, "xref": "paper", "y": limit_ms, "yref": "y"}
        layout["annotations"] = [{**note, **place, "text": f"limit {limit_ms:g} ms"}]
    return chart(
        "load-curve",
        "Latency at each load",
        "Each point is one load. To the right is more work done, upwards is longer waiting; the lower and further "
        "right a line, the better. Where a line turns upwards, the arm is saturated: more load only adds waiting.",
        traces,
        layout,
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
            "legendgroup": label(each.name),
            "showlegend": what == "p50",
            "x": plain([part.at_s for part in each.point.over_time]),
            "y": plain([part.p50_ms if what == "p50" else part.max_ms for part in each.point.over_time]),
            "marker": {"size": 5, "symbol": symbol, "color": colour(each.hue)},
            "hovertemplate": f"{what} %{{y:,.4~g}} ms at %{{x:.2f}} s<extra>%{{fullData.name}}</extra>",
        }
        for each in series
        for what, symbol in (("p50", "circle"), ("slowest", "triangle-up-open"))
    ]
    if events:
        top = max(part.max_ms for each in series for part in each.point.over_time)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "x": plain([event.at_s for event in events]),
                "y": plain([top * 1.06] * len(events)),
                "text": [label(f"{event.what}: {event.text}") for event in events],
                "marker": {"symbol": "triangle-down", "size": 10, "color": COLOURS[5]},
                "hovertemplate": "%{x:.2f} s: %{text}<extra></extra>",
            }
        )
    return chart(
        "over-time",
        "Latency over time",
        "Each dot is the median of a short stretch of time, the open triangle above it the slowest request of that "
        "stretch; the arms take turns. A level band is steady, a slope means that a queue grows, a lone spike is a "
        "stall. Red triangles mark compilations and other events: in a healthy run none lies among the dots.",
        traces,
        {
            "xaxis": {"title": {"text": "seconds since the start"}},
            "yaxis": {"title": {"text": "latency, ms"}, "rangemode": "tozero"},
            "shapes": [rule("x", event.at_s, COLOURS[5]) for event in events],
            "legend": {"itemsizing": "constant"},
        },
    )


def stages(points: Sequence[Drawn]) -> Markup | None:
    """Draws the mean latency by stage, stacked for each arm."""
    reported = [each for each in points if each.point.stages]
    stage_ms = {
        stage: [sum(part.mean_ms for part in each.point.stages if part.name == stage) for each in reported]
        for stage in dict.fromkeys(part.name for each in reported for part in each.point.stages)
    }
    return chart(
        "stages",
        "The stages of a request",
        "A bar is a mean request from being sent to being answered. Only execute is the model; queue is waiting for "
        "others, network is what neither the server nor the load tester accounts for.",
        bars([each.name for each in reported], stage_ms, "%{fullData.name}: %{x:,.4~g} ms<extra>%{y}</extra>"),
        bar_layout("stack", 130 + BAR_PX * max(2, len(reported)), "ms"),
    )


def ledger(prices: Sequence[Price]) -> Markup | None:
    """Draws what each program cost before traffic."""
    programs = [(price.arm, program) for price in prices for program in price.programs]
    spent_s = {
        "trace": [program.trace_s for _, program in programs],
        "compile": [program.compile_s for _, program in programs],
    }
    names = [f"{arm} {'x'.join(map(str, program.bucket))}" for arm, program in programs]
    return chart(
        "ledger",
        "What compiling cost",
        "One bar for each program, a mode at one input shape: seconds in which Python traced the model and the "
        "compiler built it. All of it was paid before the first request.",
        bars(names, spent_s, "%{fullData.name}: %{x:,.3~g} s<extra>%{y}</extra>"),
        bar_layout("stack", 130 + 24 * max(2, len(programs)), "s"),
    )


def break_even(summary: Summary) -> Markup | None:
    """Draws seconds from a cold start until n images are done, for the arms that have a price."""
    best: dict[str, float] = {}
    for point in summary.points:
        if point.images_per_s is not None and point.images_per_s.value > 0:
            best[point.arm] = max(best.get(point.arm, 0.0), point.images_per_s.value)
    arms = [price for price in summary.prices if price.arm in best]
    if len(arms) < 2:
        return None
    crossings = (price.break_even_images for price in summary.prices)
    crossing = max((images for images in crossings if images and math.isfinite(images)), default=None)
    images = np.linspace(0, 3 * crossing if crossing else 60 * max(best[price.arm] for price in arms), 60)
    traces = [
        {
            **_line(price.arm, images, price.trace_s + price.compile_s + images / best[price.arm], index, index),
            "hovertemplate": "%{x:,.0f} images after %{y:,.3~g} s<extra>%{fullData.name}</extra>",
        }
        for index, price in enumerate(arms)
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "s since the start"}, "rangemode": "tozero"},
    }
    if crossing:
        layout["shapes"] = [rule("x", crossing, COLOURS[6])]
    return chart(
        "break-even",
        "When compiling pays for itself",
        "Lines start at the seconds that tracing and compiling took; the steeper a line, the slower the arm. To the "
        "right of a crossing, the arm that is lower has made up for its later start.",
        traces,
        layout,
    )


def buckets(points: Sequence[Drawn]) -> Markup | None:
    """Draws how many batches ran in each bucket, by arm."""
    reported = [(each.name, each.point.padding.batches_by_bucket) for each in points if each.point.padding]
    names = sorted({bucket for _, batches in reported for bucket in batches}, key=bucket_order)
    traces = [
        {
            "type": "bar",
            "name": label(name),
            "x": [label(bucket) for bucket in names],
            "y": [batches.get(bucket, 0) for bucket in names],
            "marker": {"color": colour(index)},
            "hovertemplate": "%{x}: %{y:,} batches<extra>%{fullData.name}</extra>",
        }
        for index, (name, batches) in enumerate(reported)
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
            "xaxis": {"title": {"text": "batch x height x width"}, "type": "category"},
            "yaxis": {"title": {"text": "batches"}},
        },
    )


def _hues(summary: Summary) -> dict[str, int]:
    """Returns the index of each arm's colour; a control's is muted."""
    arms = summary.header.arms
    return {arm.name: index if arm.is_control_of is None else MUTED for index, arm in enumerate(arms)}


def _line(name: str, x: ArrayLike, y: ArrayLike, hue: int, style: int, *, mode: str = "lines") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(name),
        "x": plain(x),
        "y": plain(y),
        "line": {"color": colour(hue), "width": 2, "dash": _DASHES[style % len(_DASHES)]},
        "marker": {"size": 8, "symbol": _SYMBOLS[style % len(_SYMBOLS)]},
    }
