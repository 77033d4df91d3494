"""The report as Markdown, for pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.table import Table, narrow
from xlaserve_loadtest.reports.tables import tables


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
    for table in tables(summary):
        yield f"{_plain(table.title)}:"
        yield ""
        yield from lines(table)
        yield ""
    yield from (f"- {_plain(note)}" for note in summary.notes)
    environment = summary.header.environment
    where = [environment.cpu, f"{environment.cores} cores", *environment.gpus, environment.system]
    yield f"- {_plain(', '.join(where))}; {_plain(summary.path.name)}, {summary.header.started_at}."


def lines(table: Table) -> Iterator[str]:
    """Yields a table as GitHub's Markdown, without its title."""
    yield _row(table.columns)
    yield "|" + "|".join("--:" if is_numeric else "---" for is_numeric in table.numeric()) + "|"
    yield from (_row(map(narrow, row)) for row in table.rows())


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """Returns text that Markdown and HTML show as it is, in one line."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", " ".join(text.split()))
