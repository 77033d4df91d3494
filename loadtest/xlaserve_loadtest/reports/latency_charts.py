"""Charts of latency: by percentile, model, load and time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from markupsafe import Markup

from xlaserve_loadtest.analysis.highest_rate import slo_of
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.samples import label as load_label
from xlaserve_loadtest.analysis.summary import Summary, TimedEvent
from xlaserve_loadtest.reports.chart import BAR_PX, EVENT, Key, bar_layout, chart, label, line, plain, rule, short_names
from xlaserve_loadtest.reports.drawn import DASHES, Drawn, arm_colours, arm_keys

_PERCENTILE_TICKS: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
_OVER_TIME: Final = {"p50": "circle", "slowest": "triangle-up-open"}
_TAILS: Final = ("p99", "p95", "p90")
"""Percentiles in the tail; the first for which every point has enough answers is drawn."""
_WIDE_RANGE: Final = 30
"""Ratio of the greatest latency to the least above which a chart of latencies is logarithmic."""
_LEVEL: Final = ("poisson", "constant")
"""Arrivals of a constant rate, unless the load has stages or a ramp."""


class _LoadAxis(NamedTuple):
    """Name, texts and unit of the chart of one type of load."""

    name: str
    title: str
    unit: str
    reading: str


_CLOSED: Final = _LoadAxis(
    "closed-loads",
    "Closed loops: latency and images/s",
    "images/s answered",
    "Each point is a number of requests that a closed loop keeps under way, which grows along the line. To the right "
    "is more work done, upwards is longer waiting; the lower and further right a line, the better. Where it turns "
    "upwards, the arm is saturated: more requests at a time only add waiting.",
)
_OPEN: Final = _LoadAxis(
    "open-loads",
    "Open loops: latency at each rate",
    "requests/s due",
    "Each point is a rate at which requests arrived, whether or not others were answered. The lower a line and the "
    "further right it stays level, the better. Where it turns upwards, the arm is about to fall behind.",
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
        legend=[*arm_keys(points, "solid"), *loads.values()],
    )


def by_model(summary: Summary) -> Markup | None:
    """Draws for each model of a mix the latency of each arm, from p50 to a percentile in the tail."""
    tail = next(
        (name for name in _TAILS if all(point.percentile(name).value_ms for _, point in summary.by_model)), None
    )
    if not summary.by_model or tail is None:
        return None
    short = short_names(model for model, _ in summary.by_model)
    several = len({point.label for _, point in summary.by_model}) > 1
    colours = arm_colours(summary)
    traces: list[dict[str, Any]] = []
    for arm in dict.fromkeys(point.arm for _, point in summary.by_model):
        own = [(model, point) for model, point in summary.by_model if point.arm == arm]
        bounds_ms = [[point.percentile(name).value_ms or 0.0 for name in ("p50", tail)] for _, point in own]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label(arm),
                "meta": [arm],
                "y": [
                    f"{label(short[model])}<br>{label(point.label)}" if several else label(short[model])
                    for model, point in own
                ],
                "base": plain([low for low, _ in bounds_ms]),
                "x": plain([high - low for low, high in bounds_ms]),
                "customdata": [plain(pair) for pair in bounds_ms],
                "marker": {"color": colours[arm]},
                "hovertemplate": f"%{{y}}: p50 %{{customdata[0]:,.4~g}} ms, {tail} %{{customdata[1]:,.4~g}} ms"
                "<extra>%{fullData.name}</extra>",
            }
        )
    rows = len({row for trace in traces for row in trace["y"]})
    axis = _latency_axis(
        f"p50 to {tail}, ms",
        (value for trace in traces for pair in trace["customdata"] for value in pair),
    )
    return chart(
        "by-model",
        "Latency of each model of the mix",
        f"A bar reaches from p50 to {tail}: further left is faster, and a longer bar has a longer tail. Models of one "
        "mix are measured together, so that each waits for the others.",
        traces,
        {**bar_layout("group", 70 + rows * (BAR_PX + 10 * len(traces)), axis["title"]["text"]), "xaxis": axis},
        legend=[Key(trace["meta"][0], trace["marker"]["color"]) for trace in traces],
    )


def load_curves(summary: Summary) -> Iterator[Markup | None]:
    """Draws latency at each load: of closed loops over images/s answered, of open loops over requests/s due.

    The rate of a closed loop is a result and the rate of an open loop is given, so they share no axis.
    """
    yield _load_curve(
        summary,
        _CLOSED,
        (
            (point, point.load.concurrency or 0, point.images_per_s.value)
            for point in summary.curve
            if point.load.type == "closed" and point.images_per_s
        ),
    )
    yield _load_curve(
        summary,
        _OPEN,
        (
            (point, point.load.rate_per_s, point.load.rate_per_s)
            for point in summary.curve
            if point.load.rate_per_s
            and point.load.arrivals in _LEVEL
            and not (point.load.stages or point.load.ramp_per_s)
        ),
    )


def _load_curve(summary: Summary, axis: _LoadAxis, points: Iterable[tuple[Point, float, float]]) -> Markup | None:
    """Draws lines through points. Each point comes with its order along the line and its `x`."""
    slo = slo_of(summary.header)
    percentile, limit_ms = (slo.metric, slo.limit) if slo and slo.percentile else ("p99", None)
    # Loads of one line differ only in concurrency or rate. Of a rate that was tried again, the longest run is drawn.
    lines: dict[tuple[str, str], dict[float, tuple[Point, float, float]]] = {}
    for point, place, x in points:
        latency_ms = point.percentile(percentile).value_ms
        if latency_ms is not None:
            kind = load_label(replace(point.load, concurrency=None, rate_per_s=None))
            own = lines.setdefault((point.arm, kind), {})
            if place not in own or own[place][0].requests < point.requests:
                own[place] = point, x, latency_ms
    lines = {key: own for key, own in lines.items() if len(own) > 1}
    kinds = dict(zip(dict.fromkeys(kind for _, kind in lines), DASHES * len(lines), strict=False))
    colours = arm_colours(summary)
    traces = [
        {
            **line(
                arm,
                [own[place][1] for place in sorted(own)],
                [own[place][2] for place in sorted(own)],
                colours[arm],
                dash=kinds[kind],
                keys=[arm, kind] if len(kinds) > 1 else [arm],
                mode="lines+markers",
            ),
            "text": [label(own[place][0].label) for place in sorted(own)],
            "hovertemplate": f"%{{text}}: %{{x:,.4~g}} {axis.unit}, {percentile} %{{y:,.4~g}} ms"
            "<extra>%{fullData.name}</extra>",
        }
        for (arm, kind), own in lines.items()
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": axis.unit}, "rangemode": "tozero"},
        "yaxis": _latency_axis(f"{percentile}, ms", (value for trace in traces for value in trace["y"])),
    }
    if limit_ms is not None:
        layout["shapes"] = [rule("y", limit_ms, EVENT)]
        note = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11}}
        at = math.log10(limit_ms) if layout["yaxis"].get("type") == "log" else limit_ms
        where = {"x": 0, "xref": "paper", "y": at, "yref": "y"}
        layout["annotations"] = [{**note, **where, "text": f"limit {limit_ms:g} ms"}]
    arms = [Key(arm, colours[arm], "solid") for arm in dict.fromkeys(arm for arm, _ in lines)]
    dashes = [Key(kind, mark=dash) for kind, dash in kinds.items()] if len(kinds) > 1 else []
    return chart(
        axis.name,
        axis.title,
        axis.reading,
        traces,
        layout,
        legend=[*arms, *dashes],
    )


def over_time(points: Sequence[Drawn], events: Sequence[TimedEvent]) -> Markup | None:
    """Draws latency over the time of the run, and its events."""
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
    keys = [*arm_keys(series, "circle"), *(Key(what, mark=symbol) for what, symbol in _OVER_TIME.items())]
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
            "xaxis": {"title": {"text": "seconds since the start"}, "rangemode": "tozero"},
            "yaxis": axis,
            "shapes": [rule("x", event.at_s, EVENT) for event in events],
        },
        legend=keys,
    )


def _latency_axis(title: str, values_ms: Iterable[float | None]) -> dict[str, Any]:
    """Returns an axis that begins at 0, or a logarithmic one where the least value would not be visible on it."""
    known = [value for value in values_ms if value]
    if known and max(known) > _WIDE_RANGE * min(known):
        return {"title": {"text": title}, "type": "log", "dtick": "D2", "minorloglabels": "complete"}
    return {"title": {"text": title}, "rangemode": "tozero"}
