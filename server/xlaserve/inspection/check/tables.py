"""The results of a check, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.table import Table

from xlaserve.config import MIB, Mode
from xlaserve.inspection.check.record import DIFFERENCE_LIMIT, Checked, CheckedProgram

NOTHING: Final = "-"


def grid(checked: Sequence[Checked]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a header and a row for each model, with a column of milliseconds for each arm and batch that any model
    has."""
    arms = columns(checked)
    header = (
        "model",
        "input",
        "in order",
        "load s",
        "trace s",
        "compile s",
        *(f"{arm} {batch} ms" for arm, batch in arms),
        "difference",
        "lowered",
        "weights MiB",
        "temporaries MiB",
        "peak MiB",
    )
    return header, [_row(model, arms) for model in checked]


def rich_table(checked: Sequence[Checked]) -> Table:
    """Returns the table for a terminal."""
    header, rows = grid(checked)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(header):
        table.add_column(title, justify="right" if index > 2 else "left", overflow="fold", no_wrap=not index)
    for model, row in zip(checked, rows, strict=True):
        table.add_row(*row, style="red" if model.has_failed else None)
    return table


def failures(checked: Iterable[Checked]) -> list[str]:
    """Returns a line for each failure of a model or a program."""
    lines = []
    for model in checked:
        if model.failure:
            lines.append(f"{model.name}: {model.failure}")
        lines += [f"{model.name}: {_wrong(program)}" for program in model.programs if program.is_wrong]
    return lines


def notes(checked: Iterable[Checked]) -> list[str]:
    """Returns a line for each model whose task `auto` chose, and for each doubt about scores."""
    return [f"{model.name}: {note}" for model in checked for note in (model.reading, *model.doubts) if note]


def columns(checked: Iterable[Checked]) -> list[tuple[str, int]]:
    """Returns the arms and batches that any model has, in the order of the modes."""
    found = {(program.arm, program.batch) for model in checked for program in model.programs}
    modes = list(Mode)
    return sorted(found, key=lambda column: (modes.index(Mode(column[0].partition(" ")[0])), *column))


def _row(model: Checked, arms: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    programs = model.programs
    differences = [program.difference for program in programs if program.difference is not None]
    disagreements = [program.disagreement for program in programs if program.disagreement is not None]
    apart = [f"{max(differences):.1e}"] if differences else []
    apart += [f"{max(disagreements):.2%}"] if disagreements else []
    return (
        model.name,
        "x".join(map(str, model.size)) if model.size else NOTHING,
        "NO" if model.has_failed else "yes",
        _number(model.load_s, ".1f"),
        _number(_sum(program.trace_s for program in programs), ".1f"),
        _number(_sum(program.compile_s for program in programs), ".1f"),
        *(_milliseconds(model.find(arm, batch)) for arm, batch in arms),
        ", ".join(apart) or NOTHING,
        model.lowered or NOTHING,
        *(
            _number(_largest(sizes), ".0f", MIB)
            for sizes in (
                (program.parameter_bytes for program in programs),
                (program.temporary_bytes for program in programs),
                (program.peak_bytes for program in programs),
            )
        ),
    )


def _wrong(program: CheckedProgram) -> str:
    where = f"{program.arm} at batch {program.batch}"
    if (refusal := program.refusal) is None:
        return f"{where}: differs from eager by {program.difference:.1e}, more than {DIFFERENCE_LIMIT:g}"
    parts = [refusal.message]
    parts += [f"node {refusal.node}"] if refusal.node else []
    parts += [f"made by {refusal.line}"] if refusal.line else []
    return f"{where}: {'; '.join(parts)}"


def _milliseconds(program: CheckedProgram | None) -> str:
    if program is None:
        return NOTHING
    if program.refusal:
        return "fails"
    return "skipped" if program.run_ms is None else f"{program.run_ms:.1f}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return NOTHING if value is None else format(value / unit, form)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if present else None
