"""The explanation of a program as one HTML file that needs no network and no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from xlaserve.inspection.explanation import GROUP_COLUMNS, Explanation, Row, amount, seconds

HEAVIEST: Final = 25
"""Instructions that the bar chart shows."""
_STYLE: Final = """
:root { color-scheme: light dark; --soft: #777; --line: #8884; --took: #3b78c4; --bound: #e8643c; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { max-width: 60rem; }
.soft { color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: .8rem 2rem; margin: 1.2rem 0; }
.figures div { border-top: 2px solid var(--line); padding-top: .3rem; }
.figures b { display: block; font-size: 1.25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { position: sticky; top: 0; background: Canvas; }
.text { text-align: left; }
.scroll { overflow: auto; max-height: 46rem; border: 1px solid var(--line); }
.chart text { font: 12px system-ui, sans-serif; fill: CanvasText; }
.took { fill: var(--took); }
.bound { fill: var(--bound); }
.rule { stroke: var(--line); }
.roof { stroke: var(--bound); fill: none; }
"""
_LABEL_PX: Final = 330
_BAR_PX: Final = 560
_ROW_PX: Final = 22


def render(explanation: Explanation) -> str:
    """Returns the page."""
    title = f"{explanation.model} {explanation.bucket}"
    subtitle = f"{explanation.source} · {explanation.device} · {explanation.versions}"
    sections = [
        ("Where the time goes", _bars(explanation) + _html_table(GROUP_COLUMNS, explanation.group_cells())),
        ("The roofline", _roofline(explanation)),
        ("Memory", _memory(explanation)),
        ("Every instruction", _table(explanation.rows)),
    ]
    body = "".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>xlaserve explain: {escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(subtitle)}</p>'
        f"{_figures(explanation)}{body}</html>\n"
    )


def _figures(explanation: Explanation) -> str:
    cost, machine, took_s = explanation.cost, explanation.machine, explanation.measured_s
    kinds = ", ".join(f"{count} {kind}" for kind, count in explanation.fusions.items()) or "none"
    figures = [
        (seconds(took_s), f"a run, {explanation.bucket.batch / took_s:,.0f} images/s"),
        (
            seconds(explanation.bound_s),
            f"at best by the roofline, {explanation.bound_s / took_s:.0%} of the run",
        ),
        (amount(cost.flops, "FLOP"), f"{amount(cost.flops / took_s, 'FLOP/s')} reached"),
        (amount(cost.bytes, "B"), f"moved; {cost.intensity:.1f} FLOPs a byte"),
        (
            f"{explanation.operations_before:,} → {explanation.operations_after:,}",
            "operations before and after optimisation",
        ),
        (f"{len(explanation.rows):,}", f"instructions run; fusions: {kinds}"),
        (amount(machine.flops_per_s, "FLOP/s"), f"peak of this machine, {_peak_origin(explanation)}"),
        (amount(machine.bytes_per_s, "B/s"), f"memory bandwidth, {_peak_origin(explanation)}"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in figures)
    return f'<div class="figures">{cells}</div>'


def _peak_origin(explanation: Explanation) -> str:
    return "measured" if explanation.machine_is_measured else "as given"


def _bars(explanation: Explanation) -> str:
    rows = explanation.heaviest(lambda row: row.measured_s or row.bound_s, HEAVIEST)
    longest = max((max(row.measured_s or 0.0, row.bound_s) for row in rows), default=1.0)
    bars = []
    for index, row in enumerate(rows):
        top = index * _ROW_PX
        took, bound = ((second or 0.0) / longest * _BAR_PX for second in (row.measured_s, row.bound_s))
        end = _LABEL_PX + max(took, bound) + 6
        hover = f"{row.name}: {row.opcode} {row.shape}, {amount(row.cost.flops, 'FLOP')}, {amount(row.cost.bytes, 'B')}"
        bars.append(
            f"<g><title>{escape(hover)}</title>"
            f'<text x="{_LABEL_PX - 8}" y="{top + 15}" text-anchor="end">{escape(_short(row))}</text>'
            f'<rect class="took" x="{_LABEL_PX}" y="{top + 3}" width="{took:.1f}" height="10"/>'
            f'<rect class="bound" x="{_LABEL_PX}" y="{top + 13}" width="{max(bound, 0.5):.1f}" height="4"/>'
            f'<text x="{end:.1f}" y="{top + 14}">{seconds(row.measured_s or 0.0)}</text></g>'
        )
    width, height = _LABEL_PX + _BAR_PX + 90, len(rows) * _ROW_PX
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="100%" role="img">{"".join(bars)}</svg>'
        '<p class="soft">The instructions that take longest: in blue what they took in a trace, in orange what the '
        "roofline allows at best. Where orange is far shorter than blue, XLA leaves the machine idle. Instructions "
        "may run at the same time, so that their sum can be more than a run.</p>"
    )


def _short(row: Row) -> str:
    text = f"{row.layer or row.name} · {row.opcode}"
    return text if len(text) <= 50 else f"…{text[-49:]}"


def _table(rows: Sequence[Row]) -> str:
    lines = ((row.name, row.layer, row.opcode, row.shape, *row.figures) for row in rows)
    titles = ("instruction", "layer", "opcode", "result", "FLOPs", "bytes", "FLOPs/byte", "roofline", "took")
    return f'<div class="scroll">{_html_table(titles, lines, text_columns=4)}</div>'


def _html_table(titles: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        marks = (' class="text"' if index < text_columns else "" for index in range(len(cells)))
        return f"<tr>{''.join(f'<{tag}{mark}>{escape(cell)}</{tag}>' for mark, cell in zip(marks, cells, strict=True))}"

    return f"<table>{row(titles, 'th')}{''.join(row(line, 'td') for line in lines)}</table>"


def _memory(explanation: Explanation) -> str:
    memory = explanation.memory
    lines = (
        ("weights, handed over at each call", amount(memory.parameters, "B")),
        ("constants in the program", amount(memory.constants, "B")),
        ("images", amount(memory.input, "B")),
        ("temporaries of a run", amount(memory.temporaries, "B")),
        ("outputs", amount(memory.outputs, "B")),
    )
    return _html_table(("what", "size"), lines) + (
        f'<p class="soft">Weights are there once; each concurrent run takes another {amount(memory.run, "B")}.</p>'
    )


def _roofline(explanation: Explanation) -> str:
    """Draws each instruction by its intensity and the FLOP/s it reached, under the machine's roof, in decades."""
    machine = explanation.machine
    points = [
        (row.cost.intensity, row.cost.flops / row.measured_s, row)
        for row in explanation.rows
        if row.measured_s and row.cost.flops and row.cost.bytes
    ]
    if not points:
        return "<p>No instruction was traced.</p>"
    width, height, left, bottom = 900, 380, 70, 40
    low_x = math.floor(math.log10(min(*(x for x, _, _ in points), machine.balance)))
    high_x = math.ceil(math.log10(max(*(x for x, _, _ in points), machine.balance * 3)))
    low_y = math.floor(math.log10(min(y for _, y, _ in points)))
    high_y = math.ceil(math.log10(max(*(y for _, y, _ in points), machine.flops_per_s * 1.5)))

    def at(intensity: float, flops_per_s: float) -> tuple[float, float]:
        x = left + (math.log10(intensity) - low_x) / (high_x - low_x) * (width - left - 20)
        y = height - bottom - (math.log10(flops_per_s) - low_y) / (high_y - low_y) * (height - bottom - 10)
        return round(x, 1), round(y, 1)

    parts = []
    for decade in range(low_x, high_x + 1):
        x, _ = at(10.0**decade, 10.0**low_y)
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="10" y2="{height - bottom}"/>')
        parts.append(f'<text x="{x}" y="{height - bottom + 16}" text-anchor="middle">{10.0**decade:g}</text>')
    for decade in range(low_y, high_y + 1):
        _, y = at(10.0**low_x, 10.0**decade)
        parts.append(f'<line class="rule" x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{amount(10.0**decade, "", 0)}</text>')
    start_x = max(10.0**low_x, 10.0**low_y / machine.bytes_per_s)
    corners = [(start_x, start_x * machine.bytes_per_s), (machine.balance, machine.flops_per_s)]
    roof = [at(*corner) for corner in (*corners, (10.0**high_x, machine.flops_per_s))]
    parts.append(f'<polyline class="roof" stroke-width="2" points="{" ".join(f"{x},{y}" for x, y in roof)}"/>')
    longest = max(row.measured_s or 0.0 for _, _, row in points)
    for intensity, flops_per_s, row in points:
        x, y = at(intensity, flops_per_s)
        radius = 2.5 + 9 * math.sqrt((row.measured_s or 0.0) / longest)
        hover = escape(f"{row.name} ({row.layer}): {amount(flops_per_s, 'FLOP/s')} in {seconds(row.measured_s or 0.0)}")
        place = f'cx="{x}" cy="{y}" r="{radius:.1f}"'
        parts.append(f'<circle class="took" fill-opacity="0.55" {place}><title>{hover}</title></circle>')
    middle = (left + width) / 2
    parts.append(f'<text x="{middle}" y="{height - 4}" text-anchor="middle">arithmetic intensity, FLOPs a byte</text>')
    parts.append(f'<text x="{left + 6}" y="22">FLOP/s</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="100%" role="img">{"".join(parts)}</svg>'
        '<p class="soft">A circle is an instruction, larger where it took longer. The line is what the machine allows: '
        "rising where memory is the limit, level where arithmetic is. Far below the line is time lost; above it, "
        "the data came from a cache, or the machine was busy when it was measured.</p>"
    )
