"""Charts of a report: pure functions from plain figures to what plotly draws, each with how to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from xlaserve_loadtest.reports.chart import BAR_PX, COLOURS, Chart, bar_layout, bars, colour, label, plain, rule
from xlaserve_loadtest.reports.table import number

_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "x")
_PERCENTILE_TICKS: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)


@dataclass(frozen=True)
class Bar:
    """A value with its interval; None where there is none."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 0


@dataclass(frozen=True)
class Curve:
    """A named line; `y` as long as `x`."""

    label: str
    x: ArrayLike
    y: ArrayLike
    colour: int
    """Index of its colour: that of its arm."""
    style: int = 0
    """Index of its dashes and symbol: that of its load."""


@dataclass(frozen=True)
class Series:
    """An arm's latency over the run, in slices of time: `at_s`, `p50_ms` and `max_ms` of equal length."""

    label: str
    at_s: Sequence[float]
    p50_ms: Sequence[float]
    max_ms: Sequence[float]
    colour: int


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time."""

    at_s: float
    what: str
    text: str


def throughput(arms: Sequence[Bar]) -> Chart:
    """Returns images/s by arm; their values in images/s."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [label(bar.label) for bar in arms],
        "x": [bar.value for bar in arms],
        "text": [number(bar.value) for bar in arms],
        "textposition": "inside",
        "insidetextanchor": "start",
        "marker": {"color": [colour(bar.colour) for bar in arms]},
        "error_x": _interval(arms),
        "hovertemplate": "%{y}: %{x:,.4g} images/s<extra></extra>",
    }
    return Chart(
        "throughput",
        "Images/s by arm",
        "Longer is better. The whisker is the 95% interval of the mean; where two whiskers overlap, rely on the ratio "
        "in the verdict, which compares neighbouring blocks and is the sharper test.",
        [trace],
        {
            **bar_layout("stack", 90 + BAR_PX * max(2, len(arms)), "images/s"),
            "showlegend": False,
        },
    )


def percentiles(curves: Sequence[Curve]) -> Chart:
    """Returns latency by percentile, in the manner of HdrHistogram; x in percent (below 100), y in ms."""
    traces = []
    highest = 0.9
    for curve in curves:
        share = np.asarray(curve.x, float) / 100
        latency = np.asarray(curve.y, float)
        keep = share < 1
        tail = 1 / (1 - share[keep])
        highest = max(highest, *share[keep].tolist()) if keep.any() else highest
        traces.append(
            {
                **_line(curve, tail, latency[keep]),
                "customdata": (share[keep] * 100).tolist(),
                "hovertemplate": "p%{customdata:.6~g}: %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
    ticks = [percent for percent in _PERCENTILE_TICKS if percent / 100 <= highest]
    return Chart(
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


def load_curve(curves: Sequence[Curve], percentile: str, limit_ms: float | None = None) -> Chart:
    """Returns latency over throughput, a point for each load; x in images/s, y in ms at `percentile`."""
    traces = [
        {
            **_line(curve, curve.x, curve.y, mode="lines+markers"),
            "hovertemplate": "%{x:,.4~g} images/s, %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
        }
        for curve in curves
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images/s answered"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"{percentile}, ms"}, "rangemode": "tozero"},
    }
    if limit_ms is not None:
        layout["shapes"] = [rule("y", limit_ms, COLOURS[5])]
        layout["annotations"] = [_note(x=0, xref="paper", y=limit_ms, yref="y", text=f"limit {limit_ms:g} ms")]
    return Chart(
        "load-curve",
        "Latency at each load",
        "Each point is one load. To the right is more work done, upwards is longer waiting; the lower and further "
        "right a line, the better. Where a line turns upwards, the arm is saturated: more load only adds waiting.",
        traces,
        layout,
    )


def over_time(series: Sequence[Series], marks: Sequence[Mark]) -> Chart:
    """Returns latency over the run, in seconds since its start and ms."""
    traces: list[dict[str, Any]] = []
    for one in series:
        for what, values, symbol in (("p50", one.p50_ms, "circle"), ("slowest", one.max_ms, "triangle-up-open")):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label(one.label),
                    "legendgroup": label(one.label),
                    "showlegend": symbol == "circle",
                    "x": plain(one.at_s),
                    "y": plain(values),
                    "marker": {"size": 5, "symbol": symbol, "color": colour(one.colour)},
                    "hovertemplate": f"{what} %{{y:,.4~g}} ms at %{{x:.2f}} s<extra>%{{fullData.name}}</extra>",
                }
            )
    if marks:
        top = max((value for one in series for value in one.max_ms), default=1.0)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "x": plain([mark.at_s for mark in marks]),
                "y": plain([top * 1.06] * len(marks)),
                "text": [label(f"{mark.what}: {mark.text}") for mark in marks],
                "marker": {"symbol": "triangle-down", "size": 10, "color": COLOURS[5]},
                "hovertemplate": "%{x:.2f} s: %{text}<extra></extra>",
            }
        )
    return Chart(
        "over-time",
        "Latency over time",
        "Each dot is the median of a short stretch of time, the open triangle above it the slowest request of that "
        "stretch; the arms take turns. A level band is steady, a slope means that a queue grows, a lone spike is a "
        "stall. Red triangles mark compilations and other events: in a healthy run none lies among the dots.",
        traces,
        {
            "xaxis": {"title": {"text": "seconds since the start"}},
            "yaxis": {"title": {"text": "latency, ms"}, "rangemode": "tozero"},
            "shapes": [rule("x", mark.at_s, COLOURS[5]) for mark in marks],
            "legend": {"itemsizing": "constant"},
        },
    )


def stages(arms: Sequence[str], stage_ms: Mapping[str, Sequence[float]]) -> Chart:
    """Returns mean ms of a request by stage, stacked for each arm; `stage_ms` holds a value for each of `arms`."""
    return Chart(
        "stages",
        "The stages of a request",
        "A bar is a mean request from being sent to being answered. Only execute is the model; queue is waiting for "
        "others, network is what neither the server nor the load tester accounts for.",
        bars(arms, stage_ms, "%{fullData.name}: %{x:,.4~g} ms<extra>%{y}</extra>"),
        bar_layout("stack", 130 + BAR_PX * max(2, len(arms)), "ms"),
    )


def ledger(programs: Sequence[str], trace_s: Sequence[float], compile_s: Sequence[float]) -> Chart:
    """Returns what each program cost before traffic, in seconds."""
    return Chart(
        "ledger",
        "What compiling cost",
        "One bar for each program, a mode at one input shape: seconds in which Python traced the model and the "
        "compiler built it. All of it was paid before the first request.",
        bars(programs, {"trace": trace_s, "compile": compile_s}, "%{fullData.name}: %{x:,.3~g} s<extra>%{y}</extra>"),
        bar_layout("stack", 130 + 24 * max(2, len(programs)), "s"),
    )


def break_even(arms: Sequence[tuple[str, float, float]], crossing_images: float | None) -> Chart:
    """Returns seconds from a cold start until n images are done, for arms of (name, preparation s, images/s)."""
    rates = [rate for _, _, rate in arms]
    most = 3 * crossing_images if crossing_images else max(60 * rate for rate in rates)
    images = np.linspace(0, most, 60)
    traces = [
        {
            **_line(Curve(name, (), (), index, index), images, prepare_s + images / rate),
            "hovertemplate": "%{x:,.0f} images after %{y:,.3~g} s<extra>%{fullData.name}</extra>",
        }
        for index, (name, prepare_s, rate) in enumerate(arms)
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "s since the start"}, "rangemode": "tozero"},
    }
    if crossing_images:
        layout["shapes"] = [rule("x", crossing_images, COLOURS[6])]
    return Chart(
        "break-even",
        "When compiling pays for itself",
        "Lines start at the seconds that tracing and compiling took; the steeper a line, the slower the arm. To the "
        "right of a crossing, the arm that is lower has made up for its later start.",
        traces,
        layout,
    )


def buckets(arms: Sequence[str], names: Sequence[str], batches: Sequence[Sequence[float]]) -> Chart:
    """Returns batches run by bucket, for each arm a value for each of `names`."""
    traces = [
        {
            "type": "bar",
            "name": label(arm),
            "x": [label(name) for name in names],
            "y": list(values),
            "marker": {"color": colour(index)},
            "hovertemplate": "%{x}: %{y:,} batches<extra>%{fullData.name}</extra>",
        }
        for index, (arm, values) in enumerate(zip(arms, batches, strict=True))
    ]
    return Chart(
        "buckets",
        "Batches by bucket",
        "How often each compiled shape ran. Large buckets under load are good; a batch in a bucket larger than itself "
        "is filled up with padding, whose share stands in the table.",
        traces,
        {
            "barmode": "group",
            "height": 300,
            "xaxis": {"title": {"text": "batch x height x width"}, "type": "category"},
            "yaxis": {"title": {"text": "batches"}},
        },
    )


def _line(curve: Curve, x: ArrayLike, y: ArrayLike, *, mode: str = "lines") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(curve.label),
        "x": plain(x),
        "y": plain(y),
        "line": {"color": colour(curve.colour), "width": 2, "dash": _DASHES[curve.style % len(_DASHES)]},
        "marker": {"size": 8, "symbol": _SYMBOLS[curve.style % len(_SYMBOLS)]},
    }


def _interval(bars: Sequence[Bar]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if bar.high is None else max(0.0, bar.high - bar.value) for bar in bars],
        "arrayminus": [0.0 if bar.low is None else max(0.0, bar.value - bar.low) for bar in bars],
        "visible": any(bar.low is not None or bar.high is not None for bar in bars),
        "thickness": 1.5,
    }


def _note(**place: Any) -> dict[str, Any]:
    return {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11}, **place}
