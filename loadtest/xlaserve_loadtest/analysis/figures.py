"""Figures as reports print them: short, and a dash for what is not known."""

from __future__ import annotations

from typing import Final

from xlaserve_loadtest.analysis.statistics import Estimate

NOTHING: Final = "\N{EN DASH}"


def number(value: float | None) -> str:
    """Returns three or four digits, more only for large numbers."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3g}"


def estimate(value: Estimate | None, form: str = ",.4g") -> str:
    """Returns a figure with its interval, both in the format `form`."""
    if value is None:
        return NOTHING
    figure = f"{value.value:{form}}"
    return figure if value.low is None or value.high is None else f"{figure} [{value.low:{form}}, {value.high:{form}}]"


def share(value: float | None) -> str:
    """Returns percent of a share from 0 to 1."""
    return NOTHING if value is None else f"{value:.1%}"


def mebibytes(value: float | None) -> str:
    """Returns MiB of a number of bytes."""
    return NOTHING if value is None else f"{value / 2**20:,.0f}"
