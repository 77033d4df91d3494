"""The optimised program as a graph for Graphviz, with a box for each fusion, convolution and matrix product.

XLA's own graph shows every operation and weight, thousands of boxes for a vision model. Here, bitcasts and tuples are
edges, weights are left out, and of instructions that read weights alone only the number is shown.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from xlaserve.inspection.explanation import Explanation, Row
from xlaserve.inspection.hlo import NO_OPERATION, Computation, Module

DRAWING_TIMEOUT_S: Final = 60
_SHADES: Final = ("#ffffff", "#fff3c4", "#fcd68a", "#f7a35c", "#e8643c")
_SHARES: Final = (0.005, 0.02, 0.05, 0.10)
"""Shares of the time from which the next shade is used."""


def dot(module: Module, explanation: Explanation) -> str:
    """Returns the graph in Graphviz's language, with name, layer, shape, cost and time in each box."""
    drawn, hidden = _from_images(module)
    total_s = explanation.traced_s or explanation.bound_s
    lines = [
        "digraph program {",
        '  graph [rankdir=TB, nodesep=0.25, ranksep=0.3, fontname="Helvetica", labelloc=t, '
        f'label="{_quoted(_title(explanation, hidden))}"]',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10, margin="0.12,0.06"]',
        '  edge [color="#888888", arrowsize=0.6]',
        f'  "images" [label="images\\n{explanation.bucket}x3", fillcolor="#d9e8fb"]',
    ]
    rows = {row.name: row for row in explanation.rows if row.name in drawn}
    for row in rows.values():
        share = (row.measured_s if explanation.traced_s else row.bound_s) or 0.0
        shade = _SHADES[sum(share >= limit * total_s for limit in _SHARES)]
        lines.append(f'  "{_quoted(row.name)}" [label="{_label(row)}", fillcolor="{shade}"]')
    for name in rows:
        lines += [f'  "{_quoted(source)}" -> "{_quoted(name)}"' for source in drawn[name]]
    return "\n".join([*lines, "}", ""])


def draw(text: str, file: Path) -> bool:
    """Draws a graph as `file`, an SVG or PNG by its suffix. Returns False where Graphviz is not installed or fails."""
    if (binary := shutil.which("dot")) is None:
        return False
    command = [binary, f"-T{file.suffix.removeprefix('.')}", "-o", str(file)]
    try:
        done = subprocess.run(
            command, input=text, text=True, capture_output=True, timeout=DRAWING_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


class _Value(NamedTuple):
    """The drawn instructions that a result depends on; of a tuple also the values of its elements."""

    sources: list[str]
    elements: tuple[_Value, ...] = ()


def _from_images(module: Module) -> tuple[dict[str, list[str]], int]:
    """Returns each instruction that depends on the images, with the names that it depends on, and the number of all
    others.

    A loop is drawn as one round.
    """
    drawn: dict[str, list[str]] = {}
    hidden = 0

    def walk(computation: Computation, arguments: Sequence[_Value]) -> _Value:
        nonlocal hidden
        values: dict[str, _Value] = {}
        value = _Value([])
        for name, instruction in computation.instructions.items():
            operands = [values[operand] for operand in instruction.operands]
            sources = list(dict.fromkeys(source for operand in operands for source in operand.sources))
            match instruction.opcode:
                case "parameter":
                    value = arguments[int(instruction.literal)]
                case "tuple":
                    value = _Value(sources, tuple(operands))
                case "get-tuple-element" if operands[0].elements:
                    value = operands[0].elements[int(instruction.attributes["index"])]
                case "while":
                    value = walk(module.computations[instruction.attributes["body"].lstrip("%")], operands)
                case opcode if opcode in NO_OPERATION:
                    value = _Value(sources)
                case _ if sources:
                    drawn[name] = sources
                    value = _Value([name])
                case _:
                    hidden += 1
                    value = _Value([])
            values[name] = value
        return value

    walk(module.entry, [_Value(["images"]), *[_Value([])] * len(module.entry.parameters[1:])])
    return drawn, hidden


def _title(explanation: Explanation, hidden: int) -> str:
    title = f"{explanation.model} {explanation.bucket}: what XLA runs, darker where it takes longer"
    return f"{title}\n{hidden} instructions that read weights alone are not drawn" if hidden else title


def _label(row: Row) -> str:
    took = "" if row.measured_s is None else f", {row.measured_s * 1e6:,.0f} µs"
    cost = f"{row.cost.flops / 1e6:,.2f} MFLOP, {row.cost.bytes / 1e6:,.2f} MB{took}"
    return "\\n".join(_quoted(line) for line in (f"{row.name}: {row.opcode}", row.layer, row.shape, cost) if line)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
