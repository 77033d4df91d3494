from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xlaserve.config import Mode
from xlaserve.errors import ConfigError
from xlaserve.inspection.check import record
from xlaserve.inspection.check.record import Checked, CheckedProgram
from xlaserve.programs.xla_refusal import Refusal

Make = Callable[..., Checked]
FINE = CheckedProgram(arm=Mode.XLA, batch=1, run_ms=1.5, difference=1e-6)
REFUSED = CheckedProgram(arm=Mode.XLA, batch=8, refusal=Refusal(message="no"))
FAR = CheckedProgram(arm=Mode.GRAPH, batch=1, run_ms=1.0, difference=0.5)


def test_what_is_written_is_what_is_read(checked: Make, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    records = (checked("a", [FINE, REFUSED], size=(32, 32)), checked("b", failure="gone"))
    record.write(file, records)
    assert record.read(file) == records
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("programs", "fails"), [((FINE,), False), ((FINE, REFUSED), True), ((FAR,), True)])
def test_a_program_that_fails_or_is_far_from_eager_fails_its_model(
    checked: Make, programs: tuple[CheckedProgram, ...], fails: bool
) -> None:
    assert checked(programs=programs).has_failed is fails


def test_a_model_is_checked_again_only_if_that_can_tell_more(checked: Make) -> None:
    whole = checked("m", [FINE])
    assert whole.answers((Mode.XLA,), (8,), lowerings=False)
    assert not whole.answers((Mode.XLA,), (8,), lowerings=True)
    assert checked("m", [FINE], lowerings=True).answers((Mode.XLA,), (8,), lowerings=False)
    assert not checked("m", [FINE], modes=(Mode.XLA,)).answers((Mode.GRAPH,), (8,), lowerings=False)
    assert not whole.answers((Mode.XLA,), (16,), lowerings=False)
    assert not checked("m", [REFUSED]).answers((Mode.XLA,), (8,), lowerings=False)
    assert not checked("m", failure="not done").answers((Mode.XLA,), (8,), lowerings=False)


@pytest.mark.parametrize("text", ["", "[{}]", "{", '[{"name": 1}]'])
def test_a_file_that_holds_something_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--json: expected the records of a check in .*other\.json"):
        record.read(file)


def test_a_place_that_cannot_be_written_is_said_and_left_clean(checked: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.json can't be written: No such file"):
        record.write(tmp_path / "none" / "x.json", [checked()])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="can't be written"):
        record.write(tmp_path / "folder", [checked()])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
