from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.loadtest.study.conftest import MakeSweep
from tests.loadtest.study.fake_loadtest import fake_loadtest

from xlaserve_loadtest.study import catalog
from xlaserve_loadtest.study import sweep as command
from xlaserve_loadtest.study.measure import measure
from xlaserve_loadtest.study.record import FILE_NAME, Cell, ModeResult, Sweep, SweepFile, SweepFileError, read
from xlaserve_loadtest.study.sweep import Plan

GOOD = ModeResult(images_per_s=10.0, images_per_s_interval=(9.0, 11.0), ratio=1.0)


@pytest.fixture
def plan() -> Plan:
    return Plan(catalog.find(["VGG"]), ("xla", "graph"), (1, 8), (224,))


def measure_all(
    plan: Plan,
    folder: Path,
    fresh: Sweep,
    measure_cell: Callable[[Cell], dict[str, ModeResult]],
    *,
    retry_failed: bool = False,
) -> Sweep:
    with SweepFile(folder, fresh) as file:
        command.run(plan, file, measure_cell, retry_failed=retry_failed)
    return read(folder)


def test_every_cell_is_measured_once_and_kept(plan: Plan, sweep: MakeSweep, tmp_path: Path) -> None:
    seen = []

    def measure_cell(cell: Cell) -> dict[str, ModeResult]:
        seen.append(cell)
        return dict.fromkeys(plan.modes, GOOD)

    found = measure_all(plan, tmp_path, sweep(), measure_cell)
    assert seen == [cell for _, cell in plan.cells()] == list(found.entries)
    assert len(seen) == 4
    assert found.entries[seen[0]].results["xla"] == GOOD
    measure_all(plan, tmp_path, sweep(), measure_cell)
    assert len(seen) == 4


def test_an_interrupted_sweep_goes_on_where_it_stopped(plan: Plan, sweep: MakeSweep, tmp_path: Path) -> None:
    seen: list[Cell | None] = []

    def measure_cell(cell: Cell) -> dict[str, ModeResult]:
        if len(seen) == 2:
            seen.append(None)
            raise KeyboardInterrupt
        seen.append(cell)
        return dict.fromkeys(plan.modes, GOOD)

    with pytest.raises(KeyboardInterrupt):
        measure_all(plan, tmp_path, sweep(), measure_cell)
    assert len(read(tmp_path).entries) == 2
    assert len(measure_all(plan, tmp_path, sweep(), measure_cell).entries) == 4
    assert [cell for cell in seen if cell] == [cell for _, cell in plan.cells()]


def test_a_line_that_a_kill_cut_off_is_measured_again(plan: Plan, sweep: MakeSweep, tmp_path: Path) -> None:
    measure_all(plan, tmp_path, sweep(), lambda cell: dict.fromkeys(plan.modes, GOOD))
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:-30])
    assert len(read(tmp_path).entries) == 3
    seen = []

    def measure_cell(cell: Cell) -> dict[str, ModeResult]:
        seen.append(cell)
        return dict.fromkeys(plan.modes, GOOD)

    again = measure_all(plan, tmp_path, sweep(), measure_cell)
    assert len(seen) == 1
    assert len(again.entries) == 4


def test_a_failed_cell_is_kept_with_its_reason_and_retried_only_when_asked(
    plan: Plan, sweep: MakeSweep, tmp_path: Path
) -> None:
    failed = {"xla": ModeResult(reason="does not compile"), "graph": GOOD}
    found = measure_all(plan, tmp_path, sweep(), lambda cell: failed)
    assert {entry.results["xla"].reason for entry in found.entries.values()} == {"does not compile"}
    measure_all(plan, tmp_path, sweep(), lambda cell: pytest.fail("it is done"))
    again = measure_all(plan, tmp_path, sweep(), lambda cell: {"xla": GOOD, "graph": GOOD}, retry_failed=True)
    assert len(again.entries) == 4
    assert all(entry.results["xla"] == GOOD for entry in again.entries.values())


def test_a_further_mode_makes_a_cell_undone(plan: Plan, sweep: MakeSweep, tmp_path: Path) -> None:
    measure_all(plan, tmp_path, sweep(), lambda cell: {"xla": GOOD, "graph": GOOD})
    wider = Plan(plan.models, (*plan.modes, "eager"), plan.batches, plan.resolutions)
    found = measure_all(wider, tmp_path, sweep(), lambda cell: dict.fromkeys(wider.modes, GOOD))
    assert [set(entry.results) for entry in found.entries.values()] == [{"xla", "graph", "eager"}] * 4


def test_native_resolution_is_the_models_own() -> None:
    cells = Plan(catalog.find(["VGG16", "Xception"]), ("xla",), (1,), (None, 224)).cells()
    assert [(cell.source.partition(":")[2], cell.resolution) for _, cell in cells] == [
        ("VGG16", 224),
        ("Xception", 299),
        ("Xception", 224),
    ]


def test_figures_of_two_machines_do_not_mix(plan: Plan, sweep: MakeSweep, tmp_path: Path) -> None:
    measure_all(plan, tmp_path, sweep(), lambda cell: dict.fromkeys(plan.modes, GOOD))
    other = sweep()
    other.environment = {**other.environment, "gpus": ("NVIDIA H200",)}
    with pytest.raises(SweepFileError, match="another machine"):
        measure_all(plan, tmp_path, other, lambda cell: {})


def changed(sweep: Sweep, name: str, value: object) -> Sweep:
    if name in sweep.environment:
        sweep.environment = {**sweep.environment, name: value}
    elif name == "baseline":
        sweep.baseline = str(value)
    else:
        sweep.options = {**sweep.options, name: value}
    return sweep


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("packages", {"keras": "3.16.0"}, "packages.keras: 3.15.1 became 3.16.0"),
        ("duration", 10.0, "duration: nothing became 10.0"),
        ("concurrency", 8, "concurrency: nothing became 8"),
        ("in_process", True, "in_process: nothing became True"),
        ("no_control", True, "no_control: nothing became True"),
        ("baseline", "xla", "baseline: graph became xla"),
    ],
)
def test_results_measured_with_other_settings_are_replaced_or_left_out(
    plan: Plan, sweep: MakeSweep, tmp_path: Path, *, name: str, value: object, said: str
) -> None:
    first = measure_all(plan, tmp_path, sweep(), lambda cell: dict.fromkeys(plan.modes, GOOD))
    half = Plan(plan.models, plan.modes, (1,), plan.resolutions)
    told: list[str] = []
    better = dataclasses.replace(GOOD, images_per_s=20.0)
    with SweepFile(tmp_path, changed(sweep(), name, value)) as file:
        command.run(half, file, lambda cell: dict.fromkeys(plan.modes, better), tell=told.append)
    assert told[0] == f"4 results are left out: they were not measured as this sweep measures ({said})"
    found = read(tmp_path)
    assert {entry.results["xla"].images_per_s for entry in found.entries.values()} == {20.0}
    assert {cell.batch for cell in found.entries} == {1}
    assert {cell.batch for cell in found.left_out} == {8}
    # Nothing is lost: a sweep that measures as the first did goes on from what that one found.
    again = measure_all(plan, tmp_path, sweep(), lambda cell: pytest.fail("it is done"))
    assert again.entries == first.entries


@pytest.mark.parametrize("name", ["models", "batch", "timeout", "retry_failed"])
def test_options_that_change_no_figure_leave_nothing_out(
    plan: Plan, sweep: MakeSweep, tmp_path: Path, name: str
) -> None:
    measure_all(plan, tmp_path, sweep(), lambda cell: dict.fromkeys(plan.modes, GOOD))
    other = changed(sweep(), name, [1])
    found = measure_all(plan, tmp_path, other, lambda cell: pytest.fail("it is done"))
    assert (len(found.entries), found.left_out, found.options[name]) == (4, {}, [1])


def test_a_model_file_that_changed_is_measured_again(sweep: MakeSweep, tmp_path: Path) -> None:
    model = tmp_path / "model.keras"
    model.write_bytes(b"one")
    plan = Plan(catalog.find([str(model)]), ("xla",), (1,), (None,))
    seen: list[Cell] = []

    def measure_cell(cell: Cell) -> dict[str, ModeResult]:
        seen.append(cell)
        return {"xla": GOOD}

    for content, times in ((b"one", 1), (b"other", 2)):
        model.write_bytes(content)
        os.utime(model, ns=(1, len(content)))
        measure_all(plan, tmp_path / "out", sweep(), measure_cell)
        measure_all(plan, tmp_path / "out", sweep(), measure_cell)
        assert len(seen) == times


def test_two_sweeps_do_not_share_a_folder(sweep: MakeSweep, tmp_path: Path) -> None:
    with SweepFile(tmp_path, sweep()), pytest.raises(SweepFileError, match="in use"), SweepFile(tmp_path, sweep()):
        pass


def test_an_entry_that_lacks_a_field_is_refused_by_its_name(sweep: MakeSweep, tmp_path: Path) -> None:
    with SweepFile(tmp_path, sweep()):
        pass
    head = (tmp_path / FILE_NAME).read_text()
    for line, name in (('{"cell": {"source": "x", "batch": 1}}', r"cell\.resolution"), ("[]", "entry")):
        (tmp_path / FILE_NAME).write_text(f"{head}{line}\n")
        with pytest.raises(SweepFileError, match=f"not the state of a sweep: {name}: "):
            read(tmp_path)


def test_a_file_that_is_no_sweep_is_refused(sweep: MakeSweep, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"schema": "something else"}\n')
    with pytest.raises(SweepFileError, match="expected schema"):
        read(tmp_path)
    (tmp_path / FILE_NAME).write_text("not json\n")
    with pytest.raises(SweepFileError, match="not the state of a sweep"), SweepFile(tmp_path, sweep()):
        pass
    with pytest.raises(SweepFileError, match="No such file"):
        read(tmp_path / "nowhere")


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalog.applications())
    assert lines[-1].split() == ["Xception", "Xception", "299"]


def test_the_command_reports_what_it_measured_and_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", lambda cell, how: dict.fromkeys(how.modes, GOOD))
    arguments = ["--models", "VGG16", "--batch", "1,8", "--resolution", "64", "--out", str(tmp_path / "out")]
    assert command.main(arguments) == 0
    assert "VGG16 64 b8" in capsys.readouterr().out
    assert "VGG16 64 b8" in (tmp_path / "out" / "report.html").read_text()
    monkeypatch.setattr(command, "measure", lambda cell, how: pytest.fail("it is done"))
    assert command.main(arguments) == 0
    assert "2 of 2 are done already" in capsys.readouterr().err
    (tmp_path / "out" / "report.html").unlink()
    assert command.main(["--report", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_stops_what_it_started_and_still_reports(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    script = f"""
import os
pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
os.kill(os.getppid(), {int(number)})
time.sleep(600)
"""
    fake = fake_loadtest(tmp_path, script)
    monkeypatch.setattr(command, "measure", lambda cell, how: measure(cell, how, fake))
    assert command.main(["--models", "VGG16", "--out", str(tmp_path)]) == 130
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert (tmp_path / "report.html").exists()


def test_outputs_that_differ_are_kept_and_the_sweep_ends_with_a_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = {"xla": dataclasses.replace(GOOD, outputs_agree=False), "graph": GOOD}
    monkeypatch.setattr(command, "measure", lambda cell, how: differs)
    words = ["--models", "VGG16", "--batch", "1", "--out", str(tmp_path)]
    assert command.main(words) == 3
    (entry,) = read(tmp_path).entries.values()
    assert entry.results["xla"].images_per_s == GOOD.images_per_s
    assert f"outputs differ from the baseline's: {entry.cell}, xla" in capsys.readouterr().err


def test_a_sweep_in_which_nothing_ran_does_not_succeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "measure", lambda cell, how: dict.fromkeys(how.modes, ModeResult(reason="broken")))
    assert command.main(["--models", "VGG16", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--batch", "0"], ["--resolution", "x"], ["--mode", ""], ["--duration", "-1"], ["--baseline", "no"]),
        ["--in-process", "--processes", "2"],
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--out", str(tmp_path)])
