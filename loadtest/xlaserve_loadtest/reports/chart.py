"""One chart of a report: what plotly draws, a title, and how to read it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from xlaserve_loadtest.reports.markup import data, tag

MUTED: Final = 6
"""Index of the colour of what is only there for comparison."""

COLOURS: Final = ("#3b7ddd", "#e8822e", "#1a9e84", "#b659c4", "#8d9a1f", "#d65468", "#6b7f99", "#a5713f")
"""Distinct on white and on near-black, and for most colour-blind readers in this order."""

BAR_PX: Final = 30
"""Height of a bar and the room around it."""


def chart(
    name: str, title: str, reading: str, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]
) -> Markup | None:
    """Returns what plotly draws as HTML, None without `traces`; `name` is one word, `reading` says how to read it."""
    if not traces:
        return None
    layout = _merge(_LAYOUT, layout)
    return tag(
        "figure",
        tag("h3", title),
        tag("div", class_="plot", style=f"height:{layout['height']}px", role="img", aria_label=title),
        tag("script", data({"traces": traces, "layout": layout}), type="application/json", class_="chart"),
        tag("figcaption", reading),
        data_name=name,
    )


def label(text: str) -> str:
    """Returns text as plotly shows it literally; it would take some tags as formatting otherwise."""
    return html.escape(text, quote=False)


def colour(index: int) -> str:
    """Returns the colour of the arm or stage at this place."""
    return COLOURS[index % len(COLOURS)]


def plain(values: ArrayLike) -> list[float | None]:
    """Returns numbers to four digits or so, which is what a chart can show, and None for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def bars(rows: Sequence[str], series: Mapping[str, ArrayLike], hover: str) -> list[dict[str, Any]]:
    """Returns horizontal bars: for each of `series` a value for each of `rows`; `hover` is shown for a value."""
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(name),
            "y": [label(row) for row in rows],
            "x": plain(values),
            "marker": {"color": colour(index)},
            "hovertemplate": hover,
        }
        for index, (name, values) in enumerate(series.items())
    ]


def bar_layout(mode: str, height_px: int, unit: str) -> dict[str, Any]:
    """Returns the layout of `bars`, from the top down; `mode` is stack or group."""
    return {
        "barmode": mode,
        "height": height_px,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }


def rule(axis: str, at: float, colour_: str) -> dict[str, Any]:
    """Returns a dotted line across the chart at one value of an axis (`x` or `y`)."""
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
    },
    "showlegend": True,
    "hovermode": "closest",
    "bargap": 0.3,
    "xaxis": _AXIS,
    "yaxis": _AXIS,
}
