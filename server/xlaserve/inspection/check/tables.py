"""The results of a check, as a table for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from statistics import geometric_mean
from typing import Final

from rich.table import Table

from xlaserve.config import MIB, Mode
from xlaserve.inspection.check.record import DIFFERENCE_LIMIT, Checked, CheckedProgram

NOTHING: Final = "-"


def grid(checked: Sequence[Checked]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a header and a row for each model, with a column of milliseconds for each arm and batch that any model
    has."""
    columns = _columns(checked)
    header = (
        "model",
        "input",
        "in order",
        "load s",
        "trace s",
        "compile s",
        *(f"{arm} {batch} ms" for arm, batch in columns),
        "difference",
        "lowered",
        "weights MiB",
        "temporaries MiB",
        "peak MiB",
    )
    return header, [_row(model, columns) for model in checked]


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


def markdown(checked: Sequence[Checked], command: str) -> str:
    """Returns the page that documents a check; `command` is the command line that made it."""
    failed = [model for model in checked if model.has_failed]
    machines = list(dict.fromkeys(str(model.machine) for model in checked if model.machine))
    days = sorted({model.at[:10] for model in checked})
    lines = [
        "# The zoo",
        "",
        f"{len(checked)} models, {len(checked) - len(failed)} of them in order in every mode tried. Made by",
        "",
        f"    {command}",
        "",
        f"on {' to '.join(dict.fromkeys((days[0], days[-1]))) if days else 'no day'}, with",
        "",
        *(f"- {machine}" for machine in machines),
        "",
        *_comparison(checked),
        *_LEGEND,
        "",
    ]
    header, rows = grid(checked)
    lines += _table(header, rows, left=3)
    if failed:
        lines += ["", "## What is not in order", "", *(f"- {line}" for line in failures(failed))]
    return "\n".join(lines) + "\n"


_LEGEND: Final = (
    "Each model is checked in a process of its own, one after the other, with one lane that has all cores. *ms* is",
    "the median of at most five runs of a batch. *trace s* and *compile s* are the sums over all programs of a model;",
    "Python walks the model once for all of them. *difference* is the largest of any mode's float32 outputs from",
    f"eager's, over the largest magnitude of that output; above {DIFFERENCE_LIMIT:g} the model is not in order. Of a",
    "detector only scores are compared, since of two almost equal boxes either may come first; of integers (classes,",
    "class maps) the share that differs is given; there is none where a detector with random weights finds nothing.",
    "*lowered* says what XLA runs in another form, and how often. *weights* and *temporaries* are what XLA",
    "assigns to the weights and to one run of the largest batch, *peak* what the process grew by, at most, while one",
    "program was made and run. Weights are random where nothing else is said: speed and memory do not depend on them.",
)


def _comparison(checked: Sequence[Checked]) -> Iterator[str]:
    """Yields the lines of a table that compares the modes among which `auto` chooses, over all models; no line where
    fewer than two of them ran."""
    columns = _columns(checked)
    pairs = list(combinations([mode for mode in Mode.AUTO.traits.choice if mode in {arm for arm, _ in columns}], 2))
    if not pairs:
        return
    batches = sorted({batch for _, batch in columns})
    yield "Images/s of one mode over those of another: the geometric mean over the models that both run, and in how"
    yield "many of them the first is faster."
    yield ""
    rows = [(f"{one} / {other}", *(_faster(checked, one, other, batch) for batch in batches)) for one, other in pairs]
    yield from _table(["", *(f"batch {batch}" for batch in batches)], rows, left=1)
    yield ""


def _faster(checked: Iterable[Checked], one: Mode, other: Mode, batch: int) -> str:
    programs = ((model.find(one, batch), model.find(other, batch)) for model in checked)
    times = [(first.run_ms, second.run_ms) for first, second in programs if first and second]
    ratios = [second_ms / first_ms for first_ms, second_ms in times if first_ms and second_ms]
    if not ratios:
        return NOTHING
    return f"{geometric_mean(ratios):.2f}, {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def _columns(checked: Iterable[Checked]) -> list[tuple[str, int]]:
    found = {(program.arm, program.batch) for model in checked for program in model.programs}
    modes = list(Mode)
    return sorted(found, key=lambda column: (modes.index(Mode(column[0].partition(" ")[0])), *column))


def _row(model: Checked, columns: Iterable[tuple[str, int]]) -> tuple[str, ...]:
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
        *(_milliseconds(model.find(arm, batch)) for arm, batch in columns),
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


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Iterator[str]:
    """Yields the lines of a table, whose first `left` columns are text and the others numbers."""
    yield _cells(header)
    yield _cells(["---" if index < left else "--:" for index in range(len(header))])
    yield from map(_cells, rows)


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
