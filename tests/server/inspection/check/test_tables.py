from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from xlaserve.config import Mode
from xlaserve.inspection.check import tables
from xlaserve.inspection.check.record import Checked, CheckedProgram
from xlaserve.programs.xla_refusal import Refusal

Make = Callable[..., Checked]
PROGRAMS = (
    CheckedProgram(arm=Mode.XLA, batch=8, refusal=Refusal(message="no kernel", node="a/b|c", line="m.py:3 in call: x")),
    CheckedProgram(arm=Mode.EAGER, batch=1, run_ms=12.34, trace_s=0.0, compile_s=0.0, peak_bytes=0),
    CheckedProgram(
        arm=Mode.XLA, batch=1, run_ms=4.56, trace_s=0.25, compile_s=1.5, difference=2e-6, peak_bytes=3 << 20
    ),
    CheckedProgram(arm="xla without depthwise", batch=1, run_ms=9.0, temporary_bytes=5 << 20, parameter_bytes=0),
    CheckedProgram(arm=Mode.GRAPH, batch=8, skipped="a smaller batch took 30 s"),
)


def test_a_model_has_a_row_with_a_column_for_each_mode_and_batch(checked: Make) -> None:
    header, (row, other) = tables.grid([checked("a", PROGRAMS, size=(32, 48)), checked("b", failure="not built")])
    cells = dict(zip(header, row, strict=True))
    assert [title for title in header if title.endswith(" ms")] == [
        *("eager 1 ms", "graph 8 ms", "xla 1 ms", "xla 8 ms"),
        "xla without depthwise 1 ms",
    ]
    assert (cells["weights MiB"], cells["temporaries MiB"]) == ("0", "5")
    assert (cells["eager 1 ms"], cells["graph 8 ms"], cells["xla 1 ms"], cells["xla 8 ms"]) == (
        *("12.3", "skipped", "4.6"),
        "fails",
    )
    assert (cells["input"], cells["in order"], cells["peak MiB"]) == ("32x48", "NO", "3")
    assert (cells["trace s"], cells["compile s"], cells["difference"]) == ("0.2", "1.5", "2.0e-06")
    assert set(other) == {"b", "NO", "-"}


def test_readings_and_doubts_are_told(checked: Make) -> None:
    models = checked("a", PROGRAMS, reading="task tensors, as it is so"), checked("b", PROGRAMS, doubts=("one", "two"))
    assert tables.notes(models) == ["a: task tensors, as it is so", "b: one", "b: two"]


def test_what_fails_is_told_with_the_operation_and_the_line(checked: Make) -> None:
    far = CheckedProgram(arm=Mode.GRAPH, batch=1, difference=0.25)
    lines = tables.failures([checked("a", PROGRAMS), checked("b", [far]), checked("c", failure="killed by SIGSEGV")])
    assert lines == [
        "a: xla at batch 8: no kernel; node a/b|c; made by m.py:3 in call: x",
        "b: graph at batch 1: differs from eager by 2.5e-01, more than 0.001",
        "c: killed by SIGSEGV",
    ]


def test_the_terminal_gets_the_same_cells(checked: Make) -> None:
    console = Console(width=200)
    model = checked("model-a", PROGRAMS)
    with console.capture() as capture:
        console.print(tables.rich_table([model]))
    _, (row,) = tables.grid([model])
    assert capture.get().splitlines()[1].split() == " ".join(row).split()
