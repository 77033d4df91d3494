"""Charts of the cost of compiling: by program, and against the time that it saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from xlaserve_loadtest.analysis.price import Price
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.chart import (
    EVENT,
    PART_COLOURS,
    Key,
    bar_layout,
    bars,
    chart,
    label,
    line,
    rule,
    short_names,
)
from xlaserve_loadtest.reports.drawn import arm_colours

_SHORT: Final = 22
"""Characters of an arm's name next to a bucket."""


def ledger(prices: Sequence[Price]) -> Markup | None:
    """Draws the seconds of tracing and compiling of each program."""
    programs = [(price.arm, program) for price in prices for program in price.programs]
    spent_s = {
        "trace": [program.trace_s for _, program in programs],
        "compile": [program.compile_s for _, program in programs],
    }
    short = short_names((price.arm for price in prices), _SHORT)
    rows = [f"{label(short[arm])} {'x'.join(map(str, program.bucket))}" for arm, program in programs]
    traces, keys = bars(rows, spent_s, PART_COLOURS, "%{fullData.name}: %{x:,.3~g} s<extra>%{y}</extra>")
    return chart(
        "ledger",
        "What compiling cost",
        "One bar for each program, a mode at one input shape: seconds in which Python traced the model and the "
        "compiler built it. All of it was paid before the first request.",
        traces,
        bar_layout("stack", 70 + 24 * max(2, len(programs)), "s"),
        legend=keys,
    )


def break_even(summary: Summary) -> Markup | None:
    """Draws seconds from a cold start until n images are done, for the arms that have a price.

    Open loops are left out: their rates are given, and are no measure of an arm's speed.
    """
    best: dict[str, float] = {}
    for point in summary.points:
        if point.load.type != "open" and point.images_per_s is not None and point.images_per_s.value > 0:
            best[point.arm] = max(best.get(point.arm, 0.0), point.images_per_s.value)
    arms = [price for price in summary.prices if price.arm in best]
    if len(arms) < 2:
        return None
    crossings = (price.break_even_images for price in summary.prices)
    crossing = max((images for images in crossings if images and math.isfinite(images)), default=None)
    images = np.linspace(0, 3 * crossing if crossing else 60 * max(best[price.arm] for price in arms), 60)
    colours = arm_colours(summary)
    traces = [
        {
            **line(price.arm, images, price.trace_s + price.compile_s + images / best[price.arm], colours[price.arm]),
            "hovertemplate": "%{x:,.0f} images after %{y:,.3~g} s<extra>%{fullData.name}</extra>",
        }
        for price in arms
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "images"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "s since the start"}, "rangemode": "tozero"},
    }
    if crossing:
        layout["shapes"] = [rule("x", crossing, EVENT)]
    return chart(
        "break-even",
        "When compiling pays for itself",
        "Lines start at the seconds that tracing and compiling took; the steeper a line, the slower the arm. To the "
        "right of a crossing, the arm that is lower has made up for its later start.",
        traces,
        layout,
        legend=[Key(price.arm, colours[price.arm], "solid") for price in arms],
    )
