"""Model files in words: YAML whose comments say what is in a file, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.inspection.model_file.reading import Line
from xlaserve.inspection.model_file.serving import Plan


def as_yaml(found: Description, plan: Plan) -> str:
    """Returns a configuration that serves a model, below comments that describe it; comments alone where none does."""
    lines = [f"# {heading:<10} {text}" for heading, text in [*_facts(found), *plan.facts]]
    if plan.lines:
        lines.append("models:")
        for index, line in enumerate(plan.lines):
            lines.append(f"{'  - ' if index == 0 else '    '}{_field(line)}")
    return "\n".join(lines) + "\n"


def as_json(found: Description, plan: Plan) -> dict[str, Any]:
    """Returns the same as values of JSON."""
    return {
        "path": str(found.path),
        "format": found.format,
        "written_by": found.written_by,
        "saved": found.saved,
        "size_bytes": found.size_bytes,
        "parameters": found.parameters,
        "inputs": [_tensor(one) for one in found.inputs],
        "outputs": [{**_tensor(one), "activation": one.activation} for one in found.outputs],
        "layers": list(found.layers),
        "notes": list(found.notes),
        **dict(plan.facts),
        "settings": {line.field: line.value for line in plan.lines if not line.is_open},
        "questions": {line.field: _question(line) for line in plan.lines if line.is_open},
        "refusal": plan.refusal,
    }


def _facts(found: Description) -> Iterator[tuple[str, str]]:
    written = f", written by {found.written_by}" if found.written_by else ""
    saved = f" on {found.saved}" if found.saved else ""
    yield "file", f"{found.path}: {found.format}, {found.size_bytes:,} bytes{written}{saved}"
    for tensor in found.inputs:
        yield "input", f"{tensor.name}: {tensor.text}"
    for tensor in found.outputs:
        activation = f", {tensor.activation}" if tensor.activation else ""
        yield "output", f"{tensor.name}: {tensor.text}{activation}"
    if found.layers:
        yield "layers", ", ".join(found.layers)
    if found.parameters is not None:
        yield "parameters", f"{found.parameters:,}"
    for note in found.notes:
        yield "note", note


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": None if tensor.shape is None else list(tensor.shape), "dtype": tensor.dtype}


def _question(line: Line) -> dict[str, Any]:
    return {"value": line.value, "comment": line.comment}


def _field(line: Line) -> str:
    value = yaml.safe_dump(line.value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    value = value.removesuffix("...\n").strip()  # the end of a document
    comment = f"  # {line.comment}" if line.comment else ""
    return f"{'# ' if line.is_open else ''}{line.field}: {value}{comment}"
