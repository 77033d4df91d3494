"""Charts of a report: pure functions from plain figures to what plotly draws, each with how to read it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xlaserve_loadtest.markup import Markup, data, tag

COLOURS: Final = ("#3b7ddd", "#e8822e", "#1a9e84", "#b659c4", "#8d9a1f", "#d65468", "#6b7f99", "#a5713f")
"""Told apart on white and on near-black, and by most colour-blind readers in this order."""

_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "x")
_PERCENTILE_TICKS: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
_MOST_POINTS: Final = 1500
_BAR_PX: Final = 30


@dataclass(frozen=True)
class Chart:
    """What plotly draws, a title, and how to read it."""

    name: str
    """Its id in the page."""
    title: str
    reading: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)

    def render(self) -> Markup:
        """Returns the figure as HTML."""
        layout = _merge(_LAYOUT, self.layout)
        height = f"height:{layout['height']}px"
        source = data({"traces": list(self.traces), "layout": layout})
        return tag(
            "figure",
            tag("h3", self.title),
            tag("div", class_="plot", style=height, role="img", aria_label=self.title),
            tag("script", source, type="application/json", class_="chart"),
            tag("figcaption", self.reading),
            id=self.name,
        )


@dataclass(frozen=True)
class Bar:
    """A value with its interval; None where there is none."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """A named line; `y` as long as `x`."""

    label: str
    x: ArrayLike
    y: ArrayLike


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time."""

    at_s: float
    what: str
    text: str


def throughput(bars: Sequence[Bar]) -> Chart:
    """Returns images/s by arm; the bars' values in images/s."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [label(bar.label) for bar in bars],
        "x": [bar.value for bar in bars],
        "text": [_short(bar.value) for bar in bars],
        "textposition": "inside",
        "insidetextanchor": "start",
        "marker": {"color": [colour(index) for index in range(len(bars))]},
        "error_x": _interval(bars),
        "hovertemplate": "%{y}: %{x:,.4g} images/s<extra></extra>",
    }
    return Chart(
        "throughput",
        "Throughput",
        "Longer is better. The whisker is the 95% interval of the mean; where two whiskers overlap, rely on the ratio "
        "in the verdict, which compares neighbouring blocks and is the sharper test.",
        [trace],
        {
            "height": 90 + _BAR_PX * max(2, len(bars)),
            "showlegend": False,
            "xaxis": {"title": {"text": "images/s"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    )


def percentiles(curves: Sequence[Curve]) -> Chart:
    """Returns latency by percentile, in the manner of HdrHistogram; x in percent (below 100), y in ms."""
    traces = []
    highest = 0.9
    for index, curve in enumerate(curves):
        share = np.asarray(curve.x, float) / 100
        latency = np.asarray(curve.y, float)
        keep = share < 1
        tail = 1 / (1 - share[keep])
        highest = max(highest, *share[keep].tolist()) if keep.any() else highest
        traces.append(
            {
                **_line(curve.label, index, tail, latency[keep]),
                "customdata": (share[keep] * 100).tolist(),
                "hovertemplate": "p%{customdata:.6~g}: %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
    ticks = [percent for percent in _PERCENTILE_TICKS if percent / 100 <= highest]
    return Chart(
        "percentiles",
        "Latency by percentile",
        "Read upwards from 99: so long waited the slowest one in a hundred requests, or longer. Every step to the "
        "right is ten times rarer. A flat line treats all requests alike; one that rises at the right has a tail.",
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
            **_line(curve.label, index, curve.x, curve.y, mode="lines+markers"),
            "hovertemplate": "%{x:,.4~g} images/s, %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
        }
        for index, curve in enumerate(curves)
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images/s answered"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"{percentile}, ms"}, "rangemode": "tozero"},
    }
    if limit_ms is not None:
        layout["shapes"] = [_rule("y", limit_ms, COLOURS[5])]
        layout["annotations"] = [_note(x=0, xref="paper", y=limit_ms, yref="y", text=f"limit {limit_ms:g} ms")]
    return Chart(
        "load-curve",
        "Throughput and latency",
        "Each point is one load. To the right is more work done, upwards is longer waiting; the lower and further "
        "right a line, the better. Where a line turns upwards, the arm is saturated: more load only adds waiting.",
        traces,
        layout,
    )


def over_time(curves: Sequence[Curve], marks: Sequence[Mark]) -> Chart:
    """Returns latency over the run; x in seconds since its start, y in ms."""
    traces: list[dict[str, Any]] = []
    for index, curve in enumerate(curves):
        x, y = thin(np.asarray(curve.x, float), np.asarray(curve.y, float), _MOST_POINTS)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(curve.label),
                "x": _plain(x),
                "y": _plain(y),
                "marker": {"size": 3.5, "opacity": 0.65, "color": colour(index)},
                "hovertemplate": "%{x:.2f} s: %{y:,.4~g} ms<extra>%{fullData.name}</extra>",
            }
        )
    if marks:
        top = max((max(trace["y"], default=0.0) for trace in traces), default=1.0) or 1.0
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "x": [mark.at_s for mark in marks],
                "y": [top * 1.04] * len(marks),
                "text": [label(f"{mark.what}: {mark.text}") for mark in marks],
                "marker": {"symbol": "triangle-down", "size": 10, "color": COLOURS[5]},
                "hovertemplate": "%{x:.2f} s: %{text}<extra></extra>",
            }
        )
    return Chart(
        "over-time",
        "Latency over time",
        "Each dot is a request at the moment when it was due; the arms take turns. A level band is steady, a slope "
        "means that a queue grows, and a lone spike is a stall. Triangles mark compilations and other events: in a "
        "healthy run none lies inside the measured part. Long runs are thinned, slow requests last.",
        traces,
        {
            "xaxis": {"title": {"text": "seconds since the start"}},
            "yaxis": {"title": {"text": "latency, ms"}, "rangemode": "tozero"},
            "shapes": [_rule("x", mark.at_s, COLOURS[5]) for mark in marks],
        },
    )


def stages(arms: Sequence[str], stage_ms: Mapping[str, Sequence[float]]) -> Chart:
    """Returns mean ms of a request by stage, stacked for each arm; `stage_ms` holds a value for each of `arms`."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(stage),
            "y": [label(arm) for arm in arms],
            "x": list(values),
            "marker": {"color": colour(index)},
            "hovertemplate": "%{fullData.name}: %{x:,.4~g} ms<extra>%{y}</extra>",
        }
        for index, (stage, values) in enumerate(stage_ms.items())
    ]
    return Chart(
        "stages",
        "Where a request's time went",
        "A bar is a mean request from being sent to being answered. Only execute is the model; queue is waiting for "
        "others, network is what neither the server nor the load tester accounts for.",
        traces,
        {
            "barmode": "stack",
            "height": 130 + _BAR_PX * max(2, len(arms)),
            "xaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    )


def ledger(programs: Sequence[str], trace_s: Sequence[float], compile_s: Sequence[float]) -> Chart:
    """Returns what each program cost before traffic, in seconds."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [label(program) for program in programs],
            "x": list(seconds),
            "marker": {"color": colour(index)},
            "hovertemplate": "%{fullData.name}: %{x:,.3~g} s<extra>%{y}</extra>",
        }
        for index, (name, seconds) in enumerate((("trace", trace_s), ("compile", compile_s)))
    ]
    return Chart(
        "ledger",
        "What compiling cost",
        "One bar for each program, a mode at one input shape: seconds in which Python traced the model and the "
        "compiler built it. All of it was paid before the first request.",
        traces,
        {
            "barmode": "stack",
            "height": 130 + 24 * max(2, len(programs)),
            "xaxis": {"title": {"text": "s"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    )


def break_even(arms: Sequence[tuple[str, float, float]], crossing_images: float | None) -> Chart:
    """Returns seconds from a cold start until n images are done, for arms of (name, preparation s, images/s)."""
    rates = [rate for _, _, rate in arms]
    most = 3 * crossing_images if crossing_images else max(60 * rate for rate in rates)
    images = np.linspace(0, most, 60)
    traces = [
        {
            **_line(name, index, images, prepare_s + images / rate),
            "hovertemplate": "%{x:,.0f} images after %{y:,.3~g} s<extra>%{fullData.name}</extra>",
        }
        for index, (name, prepare_s, rate) in enumerate(arms)
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "s since the start"}, "rangemode": "tozero"},
    }
    if crossing_images:
        layout["shapes"] = [_rule("x", crossing_images, COLOURS[6])]
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


def thin(x: NDArray[np.float64], y: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns at most about `most` of the points: of each slice of time the slowest and evenly chosen others."""
    if x.size <= most:
        return x, y
    order = np.argsort(x, kind="stable")
    slices = np.array_split(order, most // 3)
    kept = np.unique(
        np.concatenate([[part[np.argmax(y[part])], part[0], part[part.size // 2]] for part in slices if part.size])
    )
    return x[kept], y[kept]


def label(text: str) -> str:
    """Returns text as plotly shows it literally; it would take some tags as formatting otherwise."""
    return html.escape(text, quote=False)


def colour(index: int) -> str:
    """Returns the colour of the arm or stage at this place."""
    return COLOURS[index % len(COLOURS)]


def _line(name: str, index: int, x: ArrayLike, y: ArrayLike, *, mode: str = "lines") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(name),
        "x": _plain(x),
        "y": _plain(y),
        "line": {"color": colour(index), "width": 2, "dash": _DASHES[index % len(_DASHES)]},
        "marker": {"size": 8, "symbol": _SYMBOLS[index % len(_SYMBOLS)]},
    }


def _plain(values: ArrayLike) -> list[float | None]:
    """Returns numbers to four digits or so, which is what a chart can show, and None for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def _interval(bars: Sequence[Bar]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if bar.high is None else max(0.0, bar.high - bar.value) for bar in bars],
        "arrayminus": [0.0 if bar.low is None else max(0.0, bar.value - bar.low) for bar in bars],
        "visible": any(bar.low is not None or bar.high is not None for bar in bars),
        "thickness": 1.5,
    }


def _rule(axis: str, at: float, colour_: str) -> dict[str, Any]:
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        f"{axis}0": at,
        f"{axis}1": at,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "line": {"color": colour_, "width": 1, "dash": "dot"},
    }


def _note(**place: Any) -> dict[str, Any]:
    return {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11}, **place}


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


_AXIS: Final[Mapping[str, Any]] = {
    "automargin": True,
    "fixedrange": True,
    "ticklabelstandoff": 5,
    "title": {"standoff": 10},
}
_LAYOUT: Final[Mapping[str, Any]] = {
    "height": 360,
    "autosize": True,
    "margin": {"l": 12, "r": 16, "t": 12, "b": 12},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12},
    "legend": {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "traceorder": "normal",
        "itemsizing": "constant",
    },
    "showlegend": True,
    "hovermode": "closest",
    "bargap": 0.3,
    "xaxis": _AXIS,
    "yaxis": _AXIS,
}
