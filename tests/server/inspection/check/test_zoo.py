"""The page of the zoo, which a script makes of what was checked."""

from __future__ import annotations

from collections.abc import Callable

from scripts.zoo import page
from tests.server.inspection.check.test_tables import PROGRAMS

from xlaserve.config import Mode
from xlaserve.inspection.check.record import Checked, CheckedProgram
from xlaserve.programs.xla_refusal import Refusal

Make = Callable[..., Checked]


def test_the_page_names_the_command_the_machine_and_the_day(checked: Make) -> None:
    found = page([checked("a|b", PROGRAMS[1:])])
    assert "1 models, 1 of them in order" in found
    assert "    xlaserve check --all" in found
    assert "- CPU, 2 cores, Python 3.11, keras 3" in found
    assert "on 2026-11-21" in found
    assert "| a&#124;b |" in found
    assert "not in order\n" not in found
    assert "## What is not in order" in page([checked("a", PROGRAMS)])


def test_the_page_compares_every_two_modes_over_the_models_that_both_run(checked: Make) -> None:
    def programs(graph_ms: float, xla_ms: float | None, batch: int = 1) -> list[CheckedProgram]:
        return [
            CheckedProgram(arm=Mode.EAGER, batch=batch, run_ms=100.0),
            CheckedProgram(arm=Mode.GRAPH, batch=batch, run_ms=graph_ms),
            CheckedProgram(arm=Mode.XLA, batch=batch, run_ms=xla_ms),
            CheckedProgram(arm="xla without depthwise", batch=batch, run_ms=50.0),
            CheckedProgram(arm=Mode.OPENVINO, batch=batch, refusal=Refusal(message="not known")),
        ]

    models = [
        checked("a", [*programs(8.0, 2.0), *programs(8.0, None, batch=8)]),
        checked("b", programs(1.0, 1.0)),
        checked("c", programs(2.0, None)),
        checked("d", failure="not built"),
    ]
    found = page(models)
    begin = found.index("|  | batch 1 | batch 8 |")
    assert found[begin:].split("\n\n")[0].splitlines() == [
        *("|  | batch 1 | batch 8 |", "| --- | --: | --: |"),
        "| xla / graph | 2.00, 1 of 2 | - |",
        *("| xla / openvino | - | - |", "| graph / openvino | - | - |"),
    ]


def test_the_page_of_a_single_mode_compares_nothing(checked: Make) -> None:
    assert "geometric mean" not in page([checked("a", PROGRAMS[1:3])])
