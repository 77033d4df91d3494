"""Figures formatted for people."""

from __future__ import annotations

from typing import Final

_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float, unit: str, digits: int = 1) -> str:
    """Returns `value` with a decimal prefix: 231.0 MFLOP."""
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{value / factor:.{digits}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def seconds(value: float) -> str:
    """Returns a duration in the unit that suits it."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"
