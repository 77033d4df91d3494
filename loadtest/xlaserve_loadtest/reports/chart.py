"""A chart of a report: plotly's traces and layout, a title, and a text on how to read it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Final, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from xlaserve_loadtest.printable import one_line
from xlaserve_loadtest.reports.markup import data, tag

COLOURS: Final = ("#3b7ddd", "#e8822e", "#1a9e84", "#b659c4", "#8d9a1f", "#d65468", "#a5713f", "#3aa7c9")
"""Colours of arms, distinct on white and on near-black, and in this order for most colour-blind readers."""
EVENT: Final = "#d6293e"
"""Colour of limits and of events of a run."""
PART_COLOURS: Final = ("#8fa3ba", "#d9c27a", "#c9a0a0", "#a9c49a", "#56708f", "#b6a6cf", "#c3cad3", "#93c4c4")
"""Colours of the parts of a bar, paler than those of arms."""

_SHORT: Final = 28
"""Characters of a name on an axis."""
BAR_PX: Final = 34
"""Height of a bar and the room around it, for a name of two lines."""

_MODES: Final = ("xla", "graph", "eager", "autocluster", "auto", "openvino")
"""Modes whose colour is the same on every page."""


class Key(NamedTuple):
    """An entry of a legend, for all traces with its name in their `meta`."""

    name: str
    colour: str | None = None
    """None where the entry is for a dash or a symbol, in any colour."""
    mark: str = "bar"
    """One of plotly's dashes for a line, one of its symbols, or `bar`."""


_MARKS: Final[Mapping[str, str]] = {
    "bar": "\N{BLACK SQUARE}",
    "solid": "\N{HORIZONTAL BAR}\N{HORIZONTAL BAR}",
    "dash": "\N{EN DASH} \N{EN DASH}",
    "dot": "\N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}",
    "dashdot": "\N{EN DASH} \N{MIDDLE DOT}",
    "longdash": "\N{EM DASH} \N{EM DASH}",
    "longdashdot": "\N{EM DASH} \N{MIDDLE DOT}",
    "2px,9px": "\N{MIDDLE DOT}\N{EN SPACE}\N{MIDDLE DOT}",
    "15px,3px,3px,3px,3px,3px": "\N{EM DASH} \N{MIDDLE DOT}\N{MIDDLE DOT}",
    "circle": "\N{BLACK CIRCLE}",
    "triangle-up-open": "\N{WHITE UP-POINTING TRIANGLE}",
    "triangle-down": "\N{BLACK DOWN-POINTING TRIANGLE}",
}


def chart(
    name: str,
    title: str,
    reading: str,
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    *,
    legend: Sequence[Key] = (),
) -> Markup | None:
    """Returns a chart as HTML, None without `traces`; `name` is one word, `reading` is the text below the chart.

    The legend is above the chart, so that a long one does not shrink the chart; its entries hide and show traces.
    """
    if not traces:
        return None
    layout = _merge(_LAYOUT, layout)
    keys = [
        tag("button", tag("span", _MARKS[key.mark], style=key.colour and f"color:{key.colour}"), " ", key.name,
            type="button", data_key=key.name, aria_pressed="true")
        for key in legend
    ]  # fmt: skip
    return tag(
        "figure",
        tag("h3", title),
        tag("div", keys, class_="legend") if keys else None,
        tag("div", class_="plot", style=f"height:{layout['height']}px", role="img", aria_label=title),
        tag("script", data({"traces": traces, "layout": layout}), type="application/json", class_="chart"),
        tag("figcaption", reading),
        data_name=name,
    )


def mode_colours(modes: Sequence[str]) -> list[str]:
    """Returns a colour for each of `modes`: the mode's own for its first occurrence, and unused ones for all others."""
    own = {mode: COLOURS[index] for index, mode in enumerate(_MODES)}
    first = {mode: modes.index(mode) for mode in modes}
    taken = {own[mode] for mode in first if mode in own}
    rest = cycle([each for each in COLOURS if each not in taken] or COLOURS)
    return [own[mode] if mode in own and first[mode] == place else next(rest) for place, mode in enumerate(modes)]


def pale(colour: str) -> str:
    """Returns a paler form of a colour, for an arm's control."""
    return f"{colour}a0"


def label(text: str) -> str:
    """Returns text escaped for plotly, which otherwise takes some tags as formatting and dollars as formulas."""
    return html.escape(one_line(text), quote=False).replace("$", "&#36;")


def short_names(names: Iterable[str], limit: int = _SHORT) -> dict[str, str]:
    """Returns a short form of each name for an axis, which keeps the name's beginning and end and is unique."""
    short: dict[str, str] = {}
    for name in names:
        half = limit // 2
        fitting = name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"
        same = sum(other.startswith(fitting) for own, other in short.items() if own != name)
        short.setdefault(name, f"{fitting} ({same + 1})" if same and fitting != name else fitting)
    return short


def plain(values: ArrayLike) -> list[float | None]:
    """Returns numbers rounded to six digits for a chart, and None for numbers that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def line(
    name: str,
    x: ArrayLike,
    y: ArrayLike,
    colour: str,
    *,
    dash: str = "solid",
    keys: Sequence[str] = (),
    mode: str = "lines",
) -> dict[str, Any]:
    """Returns a trace of plotly with a line through points; `keys` are the legend entries that hide and show it."""
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(name),
        "meta": list(keys) or [name],
        "x": plain(x),
        "y": plain(y),
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 8, "color": colour},
    }


def bars(
    rows: Sequence[str], series: Mapping[str, ArrayLike], colours: Sequence[str], hover: str
) -> tuple[list[dict[str, Any]], list[Key]]:
    """Returns traces and legend of horizontal bars: each of `series` has a value for each of `rows`, which are HTML.

    `hover` is plotly's template of the text shown for a value.
    """
    keys = [Key(name, colour) for name, colour in zip(series, cycle(colours), strict=False)]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(key.name),
            "meta": [key.name],
            "y": list(rows),
            "x": plain(series[key.name]),
            "marker": {"color": key.colour},
            "hovertemplate": hover,
        }
        for key in keys
    ]
    return traces, keys


def bar_layout(mode: str, height_px: int, unit: str) -> dict[str, Any]:
    """Returns the layout of `bars`, with the first row at the top; `mode` is `stack` or `group`."""
    return {
        "barmode": mode,
        "height": height_px,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category", "tickmode": "linear", "tickfont": {"size": 11}},
    }


def rule(axis: str, at: float, colour: str) -> dict[str, Any]:
    """Returns a dotted line across the chart at one value of an axis (`x` or `y`)."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        f"{axis}0": at,
        f"{axis}1": at,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "line": {"color": colour, "width": 1, "dash": "dot"},
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
    "showlegend": False,
    "hovermode": "closest",
    "bargap": 0.3,
    "xaxis": _AXIS,
    "yaxis": _AXIS,
}
