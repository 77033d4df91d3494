"""docs/torchvision.md, of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from scripts.torchvision_models.record import KINDS, ROUNDINGS, TOLERANCE, Tried, in_order

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "torchvision.md"
COLUMNS: Final = (
    *("model", "images", "parameters", "served", "difference in xla", "in graph", "rounding", "spread", "outputs"),
    *("export s", "import s", "compile s", "lowered"),
)
LEFT: Final = (0, 3, 8, 12)
"""Columns of text."""
MOST_SHOWN: Final = 160
"""Letters of an error."""


def write(records: Mapping[str, Tried]) -> None:
    """Writes the page."""
    PAGE.write_text("\n".join(lines(records)) + "\n")


def lines(records: Mapping[str, Tried]) -> Iterator[str]:
    """Yields the lines of the page."""
    tried = [record for group in KINDS.values() for record in in_order(records, group)]
    right = [record for record in tried if record.is_right]
    versions = {name: version for record in tried for name, version in record.versions.items()}
    days = sorted({record.at[:10] for record in tried})
    yield from (
        "# Models of torchvision",
        "",
        f"{len(right)} of {len(tried)} models of torchvision are served and answer as PyTorch does. Made by",
        "",
        "    pip install 'xlaserve[cpu,torch]' torchvision",
        "    python -m scripts.torchvision_models build/torchvision.jsonl",
        "",
        f"on {' to '.join(dict.fromkeys((days[0], days[-1]))) if days else 'no day'}, with",
        "",
        *(f"- {machine}" for machine in dict.fromkeys(record.machine for record in tried)),
        f"- {', '.join(f'{name} {version}' for name, version in versions.items())}",
        "",
        *_LEGEND,
    )
    for kind, group in KINDS.items():
        found = in_order(records, group)
        yield from ("", f"## {kind.capitalize()}", "")
        if untried := [name for name in group if name not in records]:
            yield from (f"Not tried: {', '.join(untried)}.", "")
        if done := [record for record in found if not record.failed]:
            yield from _table(COLUMNS, map(_row, done))
        failed = [record for record in found if record.failed]
        for heading, ran_out in (("Not served:", False), ("Given up, so that it is not known:", True)):
            if named := [record for record in failed if record.failed.endswith(" s") == ran_out]:
                yield from ("", heading, "")
                yield from (f"- `{record.name}`: {_shortened(record.failed)}" for record in named)


_LEGEND: Final = (
    "Each model has random weights; batch normalization has the mean and variance of the images, and no",
    "weights are zero, as numbers in random networks vanish otherwise. It is exported as [Models of JAX and",
    "PyTorch](jax-and-pytorch.md#pytorch) says, imported by `xlaserve import`, and loaded with `preprocess:",
    "torch`. *Difference* is the largest from PyTorch's answers to two random images, over the largest",
    f"magnitude of the output; the model is served right up to {TOLERANCE:g}, or {ROUNDINGS} times PyTorch's",
    "own *rounding*, which is the difference of its answers from those that it computes in float64 (`-`:",
    "not measured). *Spread* is the difference of PyTorch's own answers to these images, by the same",
    "measure: without any, every program would be right. *Images* says height and width: small ones, as",
    "models take the size that they are exported for. *Outputs* are those of one image, as PyTorch gives",
    "them; of detectors of one stage the boxes and scores before non-maximum suppression, which the server",
    "does: the class `Candidates` in `scripts/torchvision_models/export.py` shows how to export them. A",
    "model that `stays StableHLO` is run by XLA in every mode.",
)


def _row(record: Tried) -> Iterator[str]:
    stays = f"yes; stays StableHLO: {_shortened(record.stays)}" if record.stays else "yes"
    yield f"`{record.name}`"
    yield f"{record.side}x{record.side}"
    yield f"{record.parameters / 1e6:.1f} M"
    yield stays if record.is_right else "NO"
    yield from (f"{record.differences[mode]:.1e}" for mode in ("xla", "graph"))
    yield f"{record.rounding:.1e}" if record.rounding else "-"
    yield f"{record.spread:.2g}"
    yield ", ".join(f"{name} {shape}" for name, shape in record.outputs.items())
    yield from (f"{seconds:.0f}" for seconds in (record.exported_s, record.imported_s, sum(record.compiled_s.values())))
    yield record.lowerings


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = [*header]
    yield _cells(names)
    yield _cells("---" if index in LEFT else "--:" for index in range(len(names)))
    yield from map(_cells, rows)


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _shortened(text: str) -> str:
    line = " ".join(text.split()).replace("<", "&lt;")
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}..."
