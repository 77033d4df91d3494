"""Writes docs/zoo.md from what `xlaserve check --json` has recorded: `python -m scripts.zoo RECORDS`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean
from typing import Final

from xlaserve.config import Mode
from xlaserve.inspection.check import record, tables
from xlaserve.inspection.check.record import DIFFERENCE_LIMIT, Checked

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "zoo.md"
COMMANDS: Final = (
    "xlaserve check --all --modes eager,graph,xla,openvino --batches 1,8 --json build/zoo.json --resume --timeout 900",
    "python -m scripts.zoo build/zoo.json",
)


def page(checked: Sequence[Checked]) -> str:
    """Returns the page of the zoo."""
    failed = [model for model in checked if model.has_failed]
    machines = list(dict.fromkeys(str(model.machine) for model in checked if model.machine))
    days = sorted({model.at[:10] for model in checked})
    lines = [
        "# The zoo",
        "",
        f"{len(checked)} models, {len(checked) - len(failed)} of them in order in every mode tried. Made by",
        "",
        *(f"    {line}" for line in COMMANDS),
        "",
        f"on {' to '.join(dict.fromkeys((days[0], days[-1]))) if days else 'no day'}, with",
        "",
        *(f"- {machine}" for machine in machines),
        "",
        *_comparison(checked),
        *_LEGEND,
        "",
    ]
    header, rows = tables.grid(checked)
    lines += _table(header, rows, left=3)
    if failed:
        lines += ["", "## What is not in order", "", *(f"- {line}" for line in tables.failures(failed))]
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
    columns = tables.columns(checked)
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
        return tables.NOTHING
    return f"{geometric_mean(ratios):.2f}, {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Iterator[str]:
    """Yields the lines of a table, whose first `left` columns are text and the others numbers."""
    yield _cells(header)
    yield _cells(["---" if index < left else "--:" for index in range(len(header))])
    yield from map(_cells, rows)


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.zoo", description=__doc__)
    parser.add_argument("records", type=Path, help="the file that `xlaserve check --json` has written")
    PAGE.write_text(page(record.read(parser.parse_args().records)))


if __name__ == "__main__":
    main()
