from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.sources import keras2
from xlaserve.models.sources.conversions import FOLDER, Conversions

pytest.importorskip("tf_keras")

WRITER = "tests.server.models.sources.keras2_writer"
SIDE = 8
NONE_KEPT = Conversions()
THEIRS = "def centre(x):\n    return x * 2 - 1\n"


class Written:
    """Files that Keras 2 wrote, and its answers to `pixels`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with np.load(folder / "answers.npz") as answers:
            self.answers: Mapping[str, NDArray[Any]] = dict(answers)

    def check(self, name: str, conversions: Conversions = NONE_KEPT, **fields: Any) -> None:
        settings = ModelSettings(
            name="it",
            source=str(self.folder / name),
            **{"buckets": (BucketSettings(2),), "task": "embedding", **fields},
        )
        model = catalog.load(settings, conversions=conversions)
        for mode in (Mode.XLA, Mode.GRAPH):
            (answer,) = model.program.compile(mode, Bucket(2, SIDE, SIDE)).executable(self.answers["pixels"])
            np.testing.assert_allclose(answer, self.answers[name], rtol=1e-4, atol=1e-5)

    def reason(self, name: str, **fields: Any) -> str:
        with pytest.raises(ModelFailed) as failure:
            self.check(name, **fields)
        assert "\n" not in str(failure.value)
        assert str(self.folder) not in str(failure.value)
        return str(failure.value)


@pytest.fixture(scope="module")
def keras_2(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("keras-2")
    environment = {**os.environ, **keras2.ENVIRONMENT}
    subprocess.run([sys.executable, "-m", WRITER, str(folder)], env=environment, check=True, capture_output=True)
    return Written(folder)


@pytest.fixture
def no_keras_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Keras 2 was started")

    monkeypatch.setattr(keras2, "export", refuse)


@pytest.mark.usefixtures("no_keras_2")
def test_keras_3_reads_whole_models_in_hdf5(keras_2: Written) -> None:
    keras_2.check("whole.h5")


def test_keras_2_reads_nested_models_and_a_read_only_cache_keeps_nothing(keras_2: Written, tmp_path: Path) -> None:
    keras_2.check("machine.h5", Conversions(tmp_path, is_filling=False))
    assert not [*tmp_path.iterdir()]


def test_keras_2_reads_zip_archives_and_frees_their_batch(keras_2: Written) -> None:
    keras_2.check("eight.keras")


def test_keras_2_reads_zip_archives_that_were_written_on_windows(keras_2: Written) -> None:
    keras_2.check("windows.keras")


def test_what_keras_2_made_of_a_file_of_2_14_is_kept_and_used_again(
    keras_2: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras_2.check("old.keras", Conversions(tmp_path))
    assert len([*(tmp_path / FOLDER).iterdir()]) == 1
    monkeypatch.setattr(keras2, "PROCESS", (sys.executable, "-c", "raise SystemExit(1)"))
    keras_2.check("old.keras", Conversions(tmp_path))
    assert "its process ended with status 1" in keras_2.reason("old.keras")


def test_without_keras_2_the_reason_says_what_to_install(keras_2: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, version in (("old.keras", "2.14.0"), ("machine.h5", "2.")):
        said = keras_2.reason(name)
        assert f"{name} was written by Keras {version}" in said
        assert said.endswith("; pip install --no-deps 'tf_keras>=2.21,<2.22'")


@pytest.mark.usefixtures("no_keras_2")
def test_weights_alone_are_loaded_into_the_architecture_that_is_named(keras_2: Written, tmp_path: Path) -> None:
    keras_2.check("weights.h5", architecture=str(keras_2.folder / "weights.json"))
    assert "architecture: my_package.my_module:build" in keras_2.reason("weights.h5")
    other = tmp_path / "other.json"
    config = (keras_2.folder / "weights.json").read_text()
    other.write_text(config.replace('"filters": 4', '"filters": 5').replace('"2.21.0"', '"3.0.0"'))
    assert keras_2.reason("weights.h5", architecture=str(other)).startswith(
        "architecture: expected the model whose weights are in weights.h5, got other.json, which they do not fit: "
    )


def test_a_sequential_of_keras_2_1_is_a_list_of_layers(keras_2: Written) -> None:
    keras_2.check("plain_weights.h5", architecture=str(keras_2.folder / "plain_weights.json"))
    keras_2.check("plain.h5")


@pytest.mark.parametrize("written", ['{"class_name": "Sequential"}', "[]", "{"])
def test_an_architecture_that_is_no_configuration_is_refused(keras_2: Written, tmp_path: Path, written: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(written)
    assert keras_2.reason("weights.h5", architecture=str(other)).startswith(
        "architecture: expected a file that model.to_json() wrote, got other.json: "
    )


def test_a_function_replaces_the_code_of_a_lambda_layer(
    keras_2: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_functions.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    keras_2.check("lambdas.h5", custom_objects={"centre": "their_functions:centre"})
    assert "custom_objects: {centre: my_package.my_module:centre}" in keras_2.reason("lambdas.h5")
    keras_2.check("lambdas.h5", safe_mode=False)


def test_code_of_another_python_is_refused_and_not_run(keras_2: Written, edited: Edited) -> None:
    def as_of_python_3_8(config: str) -> str:
        before, _, rest = config.partition('"function": ["')
        code, _, after = rest.partition('"')
        return f'{before}"function": ["{code[: len(code) // 2]}"{after}'

    name = edited(keras_2.folder / "lambdas.h5", as_of_python_3_8)
    said = keras_2.reason(name, safe_mode=False)
    assert "lambdas-edited.h5 holds code of another version of Python in the Lambda layer centre" in said


Edited = Callable[[Path, Callable[[str], str]], str]


@pytest.fixture
def edited() -> Edited:
    """Makes a copy of a `.h5` file with another configuration, and returns its name."""

    def edit(file: Path, change: Callable[[str], str]) -> str:
        copied = file.with_stem(f"{file.stem}-edited")
        copied.write_bytes(file.read_bytes())
        with h5py.File(copied, "r+") as opened:
            config = change(opened.attrs["model_config"])
            opened.attrs["model_config"] = config
        return copied.name

    return edit


@pytest.mark.usefixtures("no_keras_2")
def test_arguments_that_keras_has_dropped_are_left_out(keras_2: Written, edited: Edited) -> None:
    before = '"class_name": "BatchNormalization", "config": {'
    name = edited(
        keras_2.folder / "whole.h5",
        lambda config: config.replace(before, before.replace('tion"', 'tionV1"') + '"renorm": false, "fused": true, '),
    )
    keras_2.answers = {**keras_2.answers, name: keras_2.answers["whole.h5"]}
    keras_2.check(name)


def test_the_reason_names_a_class_that_neither_keras_knows(keras_2: Written, edited: Edited) -> None:
    name = edited(keras_2.folder / "whole.h5", lambda config: config.replace('"Dropout"', '"Quiet"'))
    assert "write custom_objects: {Quiet: my_package.my_module:Quiet}" in keras_2.reason(name)
