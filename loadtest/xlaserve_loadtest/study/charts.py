"""Charts of a sweep: pure functions from rows and groups to charts of plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from markupsafe import Markup

from xlaserve_loadtest.reports.chart import BAR_PX, Key, bar_layout, bars, chart, label, mode_colours, plain, rule
from xlaserve_loadtest.study.zoo import Group, Row

_OUTCOMES: Final = {"faster": "#12805c", "slower": "#b3261e", "undecided": "#8a94a3"}
_ROW_PX: Final = 20
_TICKS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_NARROW: Final = (0.4, 2.5)
_NARROW_TICKS: Final = (0.5, 0.7, 1, 1.4, 2)
"""Ticks of the axis where all ratios lie in `_NARROW`."""


def speed_ups(rows: Sequence[Row], mode: str, baseline: str) -> Markup | None:
    """Draws a bar for each row, in the given order. Every row must have a ratio; None without rows."""
    if not rows:
        return None
    outcomes = [row.result.verdict if row.result.verdict in _OUTCOMES else "undecided" for row in rows]
    traces = [
        _ratio_bars(outcome, [row for row, own in zip(rows, outcomes, strict=True) if own == outcome])
        for outcome in _OUTCOMES
        if outcome in outcomes
    ]
    is_narrow = all(_NARROW[0] <= (row.result.ratio or 1.0) <= _NARROW[1] for row in rows)
    ticks = _NARROW_TICKS if is_narrow else _TICKS
    return chart(
        f"speed-ups-{mode}",
        f"Every model by what {mode} is worth to it",
        f"Images/s in mode {mode} over those in mode {baseline}, for every model that ran in both; none is left out. "
        "The whisker is the 95% interval; it is undecided where that contains 1, or where the run was too short or too "
        "noisy. Bars are logarithmic: twice and half are as long.",
        traces,
        {
            "height": 80 + _ROW_PX * max(3, len(rows)),
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": {
                "type": "log",
                "title": {"text": f"times {baseline}"},
                "tickvals": list(ticks),
                "ticktext": [f"{tick:g}" for tick in ticks],
            },
            "yaxis": {
                "autorange": "reversed",
                "type": "category",
                "tickmode": "linear",
                "categoryarray": [label(row.label) for row in rows],
                "categoryorder": "array",
            },
            "shapes": [rule("x", 1, _OUTCOMES["undecided"])],
        },
        legend=[Key(outcome, colour) for outcome, colour in _OUTCOMES.items() if outcome in outcomes],
    )


def _ratio_bars(outcome: str, rows: Sequence[Row]) -> dict[str, Any]:
    ratios = [row.result.ratio or 0.0 for row in rows]
    bounds = [row.result.ratio_interval or (ratio, ratio) for row, ratio in zip(rows, ratios, strict=True)]
    return {
        "type": "bar",
        "orientation": "h",
        "meta": [outcome],
        "y": [label(row.label) for row in rows],
        # On a logarithmic axis twice as fast and half as fast are bars of the same length.
        "base": [1.0] * len(rows),
        "x": plain([ratio - 1 for ratio in ratios]),
        "customdata": plain(ratios),
        "marker": {"color": _OUTCOMES[outcome]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": plain([high - ratio for (_, high), ratio in zip(bounds, ratios, strict=True)]),
            "arrayminus": plain([ratio - low for (low, _), ratio in zip(bounds, ratios, strict=True)]),
            "thickness": 1,
            "width": 2,
        },
        "hovertemplate": "%{y}: %{customdata:.3~f} times<extra></extra>",
    }


def groups(of: Sequence[Group], *, name: str, title: str, what: str) -> Markup | None:
    """Draws images/s by group and mode; `what` names the property by which cells are grouped, such as `family`."""
    modes = list(dict.fromkeys(mode for group in of for mode in group.images_per_s))
    rates = {mode: [group.images_per_s.get(mode, float("nan")) for group in of] for mode in modes}
    hover = "%{y}: %{x:,.4~g} images/s<extra>%{fullData.name}</extra>"
    traces, keys = bars([label(group.name) for group in of], rates, mode_colours(modes), hover)
    return chart(
        name,
        title,
        f"Geometric mean of images/s over all cells of the same {what} that ran in every mode, so that the modes of "
        f"one {what} can be compared. Bars of another {what} are of other models: compare them with care.",
        traces,
        bar_layout("group", 60 + len(of) * (BAR_PX + 10 * len(modes)), "images/s"),
        legend=keys,
    )
