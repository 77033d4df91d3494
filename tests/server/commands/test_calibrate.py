"""`xlaserve calibrate` with what it makes stood in for: what it refuses, and what it leaves behind."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
import pytest
import yaml
from PIL import Image

from xlaserve.commands import calibrate, subject
from xlaserve.commands.calibrate import COMMAND
from xlaserve.commands.command import Invocation
from xlaserve.commands.subject import Subject
from xlaserve.config import Mode, ModelSettings, Precision, Settings
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.models import catalog, int8
from xlaserve.models.catalog import Model
from xlaserve.models.int8 import ImageFolder, Int8, Speed
from xlaserve.programs.openvino import quantize
from xlaserve.programs.openvino.calibration import read
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.telemetry import console

DIGITS = ModelSettings(name="mine", source="builtin:digits")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (images := tmp_path / "images").mkdir()
    for number in range(50):
        levels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(levels).save(images / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has NNCF be there, whether or not it is."""
    real = importlib.util.find_spec
    found = ModuleSpec("nncf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "nncf" else real(name))
    monkeypatch.setattr(quantize, "version", lambda: "3.4.0")


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads digits without configuring TensorFlow, which this process has done."""

    def load(settings: Settings, name: str, bucket: object, mode: Mode, changes: Mapping[str, object]) -> Subject:
        model = catalog.load(settings.models[0].model_copy(update={**changes, "modes": (mode,)}))
        return Subject(model, model.buckets[0], cast(Device, None))

    monkeypatch.setattr(subject, "load", load)


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how well int8, which is float32 here, agrees with float32."""

    def set_agreement(agreement: float) -> None:
        def make(model: Model, folder: ImageFolder) -> Iterator[Int8]:
            assert isinstance(model.program, TensorFlowProgram)
            graph = model.program.converted(bucket := model.buckets[0])
            speeds = {Precision.FLOAT32: Speed(0.2, 0.4), Precision.INT8: Speed(0.1, 0.1)}
            yield Int8((32, 32), graph, graph.digest, len(folder.held_out), agreement, 0.25, bucket, speeds)

        monkeypatch.setattr(int8, "make", make)

    return set_agreement


def run(*words: str, model: ModelSettings = DIGITS) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.add_options(parser)
    settings = Settings(models=(model,))
    own = parser.parse_args(["mine", "--images", "images", *words])
    return COMMAND.run(Invocation(own, settings, lambda: settings))


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_what_agrees_is_written_with_what_was_measured_and_how_to_serve_it(
    agree: Callable[[float], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agree(0.995)
    assert run() == 0
    made = read(folder / "mine-int8").calibration
    (model,) = made.models
    assert (made.source, made.images, model.held_out, model.agreement) == ("builtin:digits", 40, 10, 0.995)
    assert left(folder / "mine-int8") == ["32x32.bin", "32x32.xml", "calibration.json"]
    assert left(folder) == ["images", "mine-int8"]
    table, said, fields = capsys.readouterr().out.split("\n\n")
    assert "4.00" in table.splitlines()[-1]
    assert said == "agreement 0.9950 of 10 held-out images; written: mine-int8"
    given = {"name": "mine", "source": "builtin:digits", **yaml.safe_load(fields)}
    assert ModelSettings.model_validate(given).calibration == folder / "mine-int8"  # wherever the configuration is


def test_what_agrees_too_little_is_shown_and_not_written(
    agree: Callable[[float], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agree(0.95)
    with pytest.raises(
        ModelFailed, match=r"int8 agrees with float32 on 0\.9500 .* at least 0\.99 .*nothing is written"
    ):
        run()
    assert left(folder) == ["images"]
    assert "0.9500" in capsys.readouterr().out
    assert run("--least-agreement", "0.95", "--out", "made") == 0
    assert left(folder) == ["images", "made"]


def test_it_is_written_where_nobody_reads_what_is_said_of_it(
    agree: Callable[[float], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(width: int) -> NoReturn:
        raise BrokenPipeError

    agree(1.0)
    monkeypatch.setattr(console, "stdout", refuse)
    with pytest.raises(BrokenPipeError):
        run()
    assert left(folder) == ["images", "mine-int8"]


def test_what_is_there_is_not_overwritten(folder: Path) -> None:
    (folder / "mine-int8").mkdir()
    with pytest.raises(ConfigError, match="--out: expected a folder that is to be made, got mine-int8, which exists"):
        run()


def test_a_link_to_nothing_is_not_overwritten_either(folder: Path) -> None:
    (folder / "mine-int8").symlink_to("nothing")
    with pytest.raises(ConfigError, match="--out: expected a folder that is to be made, got mine-int8, which exists"):
        run()


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--out: x+ can't be written: File name too long"):
        run("--out", "x" * 300)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_was_begun_is_removed_where_it_is_told_to_end(
    number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> Iterator[Int8]:
        assert len(left(folder)) == 2
        os.kill(os.getpid(), number)
        yield from ()

    # What starts the tests may have them ignore it, as nohup does.
    before = signal.signal(number, handler := signal.default_int_handler)
    monkeypatch.setattr(int8, "make", make)
    monkeypatch.setattr(os, "_exit", sys.exit)
    try:
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 128 + number
        assert left(folder) == ["images"]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_to_be_ignored_is(folder: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with calibrate._removed(folder / "some"):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_another_process_of_the_same_number_has_begun_is_left_alone(folder: Path) -> None:
    (begun := folder / f".mine-int8.{os.getpid()}.partial").mkdir()
    with pytest.raises(ConfigError, match="--out: mine-int8 can't be written: File exists"):
        run()
    assert begun.is_dir()


def test_a_place_that_can_not_be_written_is_refused_before_the_work(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--out: no/made can't be written: No such file"):
        run("--out", "no/made")


def test_a_model_that_computes_in_less_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision: expected float32, which int8 is made of, got bfloat16"):
        run(model=DIGITS.model_copy(update={"precision": Precision.BFLOAT16}))


def test_without_nncf_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nncf" else ModuleSpec(name, None))
    with pytest.raises(ConfigError, match=r"calibrating needs nncf; install xlaserve\[calibrate\]"):
        run()
