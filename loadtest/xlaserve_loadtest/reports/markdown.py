"""The report as Markdown, for a comment on a pull request or the summary of a CI job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.printable import one_line
from xlaserve_loadtest.reports.table import Table, narrow
from xlaserve_loadtest.reports.tables import latency, ratios, tables, throughput

MAX_CHARACTERS: Final = 60_000
"""Characters of a report at most. GitHub takes comments of 65,536; the rest is for text that a workflow adds."""

_MAX_WARNINGS: Final = 10


def render_all(summaries: Sequence[Summary], judged: Sequence[Sequence[Judged]]) -> str:
    """Returns the runs one below the other, each with its conditions."""
    limit = MAX_CHARACTERS // max(len(summaries), 1)
    return "\n---\n\n".join(render(*each, limit) for each in zip(summaries, judged, strict=True))


def render(summary: Summary, judged: Sequence[Judged] = (), limit: int = MAX_CHARACTERS) -> str:
    """Returns a run as GitHub's Markdown: the verdict, the conditions, the main tables; other tables are folded.

    Tables that would make the text longer than `limit` characters are left out; a note names them.
    """
    text = "\n".join(_head(summary, judged)) + "\n"
    details: list[str] = []
    left_out: list[str] = []
    shown = [table for table in (ratios(summary), throughput(summary), latency(summary)) if table.columns]
    titles = {table.title for table in shown}
    for table in [*shown, *(table for table in tables(summary) if table.title not in titles)]:
        block = "\n".join([f"{plain(table.title)}:", "", *lines(table), "", ""])
        if len(text) + sum(map(len, details)) + len(block) > limit:
            left_out.append(table.title)
        elif table.title in titles:
            text += block
        else:
            details.append(block)
    notes = "\n".join(_foot(summary, left_out)) + "\n"
    if not details:
        return text + notes
    return f"{text}<details><summary>More figures</summary>\n\n{''.join(details)}</details>\n\n{notes}"


def lines(table: Table) -> Iterator[str]:
    """Yields a table as GitHub's Markdown, without its title."""
    yield _row(map(plain, table.columns))
    yield "|" + "|".join("--:" if is_numeric else "---" for is_numeric in table.numeric()) + "|"
    yield from (_row(plain(narrow(cell)) for cell in row) for row in table.rows())


def condition_lines(judged: Sequence[Judged]) -> Iterator[str]:
    """Yields the conditions as a table; conditions that are met or can't be judged come first."""
    yield _row(("condition", "result", "found"))
    yield "|---|---|---|"
    for each in sorted(judged, key=lambda each: not each.is_met):
        result = "passed" if not each.is_met else "**failed**" if each.is_judged else "**can't be judged**"
        yield _row((plain(each.condition.text), result, plain(each.found)))


def _head(summary: Summary, judged: Sequence[Judged]) -> Iterator[str]:
    yield f"**{plain(summary.verdict)}**"
    yield ""
    if judged:
        yield from condition_lines(judged)
        yield ""
    if summary.warnings:
        more = len(summary.warnings) - _MAX_WARNINGS
        warnings = [*summary.warnings[:_MAX_WARNINGS], *([f"And {more} more."] if more > 0 else [])]
        yield "> [!WARNING]"
        yield "\n>\n".join(f"> {plain(warning)}" for warning in warnings)
        yield ""


def _foot(summary: Summary, left_out: Sequence[str]) -> Iterator[str]:
    yield from (f"- {plain(note)}" for note in summary.notes)
    if left_out:
        yield f"- Left out, as a comment may not be longer: {plain('; '.join(left_out))}."
    environment = summary.header.environment
    where = [environment.cpu, f"{environment.cores} cores", *environment.gpus, environment.system]
    yield f"- {plain(', '.join(where))}; {plain(summary.path.name)}, {summary.header.started_at}."


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plain(text: str) -> str:
    """Returns text escaped for Markdown and HTML, in one line and without mentions of users."""
    escaped = re.sub(r"([\\`*_<>|\[\]~#&])", r"\\\1", one_line(text))
    return re.sub(r"(?<!\w)@(?=\w)", "@\N{ZERO WIDTH SPACE}", escaped)
