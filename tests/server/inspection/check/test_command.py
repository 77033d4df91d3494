"""`xlaserve check` with the processes that it really starts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xlaserve.commands.check import COMMAND
from xlaserve.commands.command import Invocation
from xlaserve.config import Mode, ModelSettings, Settings
from xlaserve.errors import ConfigError
from xlaserve.inspection.check import record, runner
from xlaserve.inspection.check.record import Checked
from xlaserve.models.networks.keras_runtime import keras

TIMEOUT_S = 120


def check(*arguments: object, settings: Settings = Settings()) -> int:  # noqa: B008 - it is frozen
    parser = argparse.ArgumentParser()
    COMMAND.add_options(parser)
    own = parser.parse_args([*map(str, arguments)])
    return COMMAND.run(Invocation(own, settings, lambda: settings))


def test_a_refused_model_is_explained_and_the_others_are_still_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [keras.Input((16, 16, 3)), keras.layers.Resizing(4, 4, "bicubic", name="shrink"), keras.layers.Flatten()]
    file = tmp_path / "bicubic.keras"
    keras.Sequential(layers).save(file)
    records = tmp_path / "check.json"
    assert check(file, "builtin:digits", "--batches", "1,2", "--json", records) == 1
    refused, fine = record.read(records)
    for batch in (1, 2):
        program = refused.find(Mode.XLA, batch)
        assert program is not None
        assert program.refusal is not None
        assert program.refusal.operation == "ResizeBicubic"
        assert "shrink" in (program.refusal.node or "")
        assert "keras/src/layers/preprocessing/image_preprocessing/resizing.py" in (program.refusal.line or "")
        graph = refused.find(Mode.GRAPH, batch)
        assert graph is not None
        assert graph.refusal is None
    assert not fine.has_failed
    assert fine.size == (32, 32)
    for program in fine.programs:
        assert program.run_ms is not None
        assert program.run_ms > 0
        assert program.arm == Mode.EAGER or (program.difference or 0.0) < 1e-5
        assert (program.parameter_bytes is None) is (program.arm != Mode.XLA)
    said = capsys.readouterr().out
    assert "XLA has no kernel for ResizeBicubic" in said
    assert refused.reading in said
    assert refused.reading.startswith("task classification, as output_0")
    of_pixels, of_scores = refused.doubts
    assert "preprocess" in of_pixels
    assert "no probabilities" in of_scores
    assert {of_pixels in said, of_scores in said} == {True}
    assert fine.doubts == ()


def test_a_run_that_is_resumed_checks_only_what_is_missing(tmp_path: Path) -> None:
    records = tmp_path / "check.json"
    assert check("builtin:noop", "--batches", "1", "--modes", "xla", "--json", records) == 0
    (first,) = record.read(records)
    check("builtin:noop", "--batches", "1", "--modes", "xla", "--json", records, "--resume")
    assert record.read(records) == (first,)
    check("builtin:noop", "--batches", "1,2", "--modes", "xla", "--json", records, "--resume")
    assert [program.batch for program in record.read(records)[0].programs] == [1, 2]
    assert json.loads(records.read_text())[0]["name"] == "builtin:noop"


def test_a_run_that_is_stopped_goes_on_with_what_is_new_before_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [ModelSettings(name=name, source="builtin:noop") for name in ("fails", "works", "new")]
    settings = Settings(models=(models[0].model_copy(update={"weights": "other"}), *models[1:]))
    options = ("--batches", "1", "--modes", "xla", "--json", tmp_path / "x.json", "--resume")
    check_one, tried = runner.check, []

    def stop_at_the_third(model: runner.Candidate, **options: Any) -> Checked:
        tried.append(model.name)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return check_one(model, **options)

    monkeypatch.setattr(runner, "check", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        check(*options, settings=settings)
    assert check(*options, settings=settings) == 1
    assert tried == ["fails", "works", "new", "new", "fails"]
    assert [model.name for model in record.read(tmp_path / "x.json")] == ["fails", "works", "new"]


def test_records_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    records = tmp_path / "check.json"
    records.write_text("[]")
    with pytest.raises(ConfigError, match=r"--json: expected a new file or --resume to go on with it, got .*check"):
        check("builtin:noop", "--json", records)
    assert records.read_text() == "[]"


def test_records_of_other_models_stay_in_the_file_of_a_resumed_run(tmp_path: Path) -> None:
    records = tmp_path / "check.json"
    check("builtin:noop", "--batches", "1", "--modes", "xla", "--json", records)
    settings = Settings(models=(ModelSettings(name="a", source="builtin:noop"),))
    options = ("--batches", "1", "--modes", "xla", "--json", records, "--resume")
    assert check(*options, settings=settings) == 0
    assert [model.name for model in record.read(records)] == ["builtin:noop", "a"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("no-such",),
            "model: expected a configured model (digits) or a source such as",
        ),
        (("--all", "digits"), "--all: expected no MODEL with it, got digits"),
        (("--resume",), "--resume: expected --json FILE with it"),
        (("--json", "/nonexistent/x.json"), "expected a file in a folder that can be written, got /nonexistent/x.json"),
    ],
)
def test_what_can_not_be_meant_is_said(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batches", "0,1"), "expected a number from 1 to 65536"),
        (("--batches", "many"), "expected a number from 1 to 65536"),
        (("--modes", "fast"), "expected some of eager, graph, autocluster, xla"),
        (("--timeout", "-1"), "got '-1'"),
        (("--timeout", "nan"), "got 'nan'"),
        (("--timeout", "1e300"), "expected at most 86400 seconds, got '1e300'"),
    ],
)
def test_options_are_checked(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check(*arguments)
    assert says in capsys.readouterr().err


def test_a_source_that_can_not_be_built_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    settings = Settings(models=(ModelSettings(name="a", source="builtin:noop", weights="other"),))
    assert check("a", "--json", tmp_path / "x.json", settings=settings) == 1
    (failed,) = record.read(tmp_path / "x.json")
    assert failed.failure == "weights: builtin:noop takes none, expected no weights, got other; leave weights out"


def test_the_process_of_a_check_ends_with_the_command_that_started_it() -> None:
    assignment = record.Assignment(settings=Settings(), modes=(Mode.XLA,), lowerings=False)
    with subprocess.Popen([sys.executable, "-m", "xlaserve.inspection.check.probe"], stdin=subprocess.PIPE) as probe:
        assert probe.stdin is not None
        probe.stdin.write(assignment.model_dump_json().encode() + b"\n")
        probe.stdin.close()
        assert probe.wait(TIMEOUT_S) == 1


def test_sources_are_checked_with_random_weights_and_any_score_counts(
    monkeypatch: pytest.MonkeyPatch, checked: Callable[..., Checked]
) -> None:
    asked: list[ModelSettings] = []

    def take(model: runner.Candidate, **options: object) -> Checked:
        asked.append(model.settings)
        return checked(model.name)

    monkeypatch.setattr(runner, "check", take)
    assert check("keras_cv:RetinaNet-ResNet18", "some/model.keras", "--batches", "1,3") == 0
    detector, own = asked
    assert (detector.weights, detector.score_threshold) == ("random", 0.0)
    assert (own.weights, own.score_threshold) == (None, ModelSettings.model_fields["score_threshold"].default)
    assert [bucket.batch for bucket in detector.buckets] == [1, 3]
