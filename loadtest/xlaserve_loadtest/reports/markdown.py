"""The report as Markdown, for pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.tables import Grid, grids


def render(summary: Summary) -> str:
    """Returns a run as GitHub's Markdown."""
    return "\n".join(_lines(summary)) + "\n"


def _lines(summary: Summary) -> Iterator[str]:
    yield f"**{_plain(summary.verdict)}**"
    yield ""
    if summary.warnings:
        yield from (f"> [!WARNING]\n> {_plain(warning)}" for warning in summary.warnings[:1])
        yield from (f">\n> {_plain(warning)}" for warning in summary.warnings[1:])
        yield ""
    for grid in grids(summary):
        yield from _table(grid)
        yield ""
    yield from (f"- {_plain(note)}" for note in summary.notes)
    environment = summary.header.environment
    where = [environment.cpu, f"{environment.cores} cores", *environment.gpus, environment.system]
    yield f"- {_plain(', '.join(where))}; {_plain(summary.path.name)}, {summary.header.started_at}."


def _table(grid: Grid) -> Iterator[str]:
    yield f"{_plain(grid.title)}:"
    yield ""
    yield _row(grid.headings)
    yield "|" + "|".join("---" if place < grid.words else "--:" for place in range(len(grid.headings))) + "|"
    yield from map(_row, grid.rows)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Returns text that Markdown and HTML show as it is, in one line."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", " ".join(text.split()))
