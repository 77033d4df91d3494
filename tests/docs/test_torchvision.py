"""The page of torchvision's models, which a script makes of what was tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripts.torchvision_models import page, record
from scripts.torchvision_models.record import Tried

TRIED = Tried(
    name="resnet18",
    side=224,
    at="2026-11-28T10:00:00+00:00",
    machine="CPU, 2 cores",
    parameters=11_689_512,
    spread=0.5,
    differences={"xla": 3e-7, "graph": 4e-7},
    compiled_s={"xla": 2.0, "graph": 1.0},
    outputs={"output": [1000]},
    versions={"torch": "2.12.1"},
)


def lines(*tried: Tried) -> list[str]:
    return [*page.lines({one.name: one for one in tried})]


@pytest.mark.parametrize(
    ("changed", "is_right"),
    [
        ({}, True),
        ({"differences": {"xla": 3e-4, "graph": 0.0}}, False),
        ({"differences": {"xla": 3e-4, "graph": 0.0}, "rounding": 2e-4}, True),
        ({"spread": 0.0}, False),
        ({"failed": "export: no"}, False),
    ],
)
def test_a_model_is_right_up_to_rounding_where_its_answers_differ(changed: dict[str, object], is_right: bool) -> None:
    assert replace(TRIED, **changed).is_right is is_right  # type: ignore[arg-type]


def test_the_page_says_what_was_tried_with_which_versions() -> None:
    found = lines(TRIED)
    assert "1 of 1 models of torchvision are served and answer as PyTorch does. Made by" in found
    assert "- torch 2.12.1" in found
    assert "- CPU, 2 cores" in found
    (row,) = [line for line in found if line.startswith("| `resnet18` | 224x224 | 11.7 M | yes | 3.0e-07 |")]
    assert "output [1000]" in row


def test_the_page_names_what_failed_and_what_was_not_tried() -> None:
    found = lines(TRIED, replace(TRIED, name="alexnet", failed="export: not done in 120 s"))
    assert "- `alexnet`: export: not done in 120 s" in found
    (left, *_) = [line for line in found if line.startswith("Not tried: ")]
    assert "resnet34" in left
    assert "alexnet" not in left


def test_records_are_kept_and_the_last_of_a_model_counts(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    assert record.read(file) == {}
    for one in (TRIED, replace(TRIED, name="alexnet"), replace(TRIED, side=96)):
        record.add(file, one)
    assert record.read(file) == {"alexnet": replace(TRIED, name="alexnet"), "resnet18": replace(TRIED, side=96)}
