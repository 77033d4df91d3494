from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from xlaserve import config
from xlaserve.commands import inspect
from xlaserve.commands.command import Invocation
from xlaserve.config import ModelSettings, Settings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.task import Classification

layers = keras.layers
# Of Keras, as it saves weights.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def write(file: Path) -> Path:
    pixels = keras.Input((8, 8, 3), name="photo")
    x = layers.GlobalAveragePooling2D()(layers.Rescaling(1 / 255)(pixels))
    keras.Model(pixels, layers.Dense(4, activation="softmax", name="scores")(x)).save(file)
    return file


def run(file: Path, *, is_json: bool = False) -> int:
    return inspect.run(Invocation(argparse.Namespace(file=file, json=is_json), Settings(), Settings))


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_what_is_printed_is_a_configuration_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    assert run(write(tmp_path / f"flowers{suffix}")) == 0
    parsed: Any = config.parse(capsys.readouterr().out)
    (model,) = parsed["models"]
    assert model == {"name": "flowers", "source": str(tmp_path / f"flowers{suffix}")}
    assert catalog.load(ModelSettings(**model)).task == Classification(4)


def test_a_graph_of_two_placeholders_loads_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v1 = tf.compat.v1
    with v1.Graph().as_default() as graph:
        left, right = (v1.placeholder(tf.float32, (None, 8, 8, 3), name=name) for name in ("left", "right"))
        tf.identity(tf.reduce_sum(left - right, (1, 2)), name="scores")
    (tmp_path / "two.pb").write_bytes(graph.as_graph_def().SerializeToString())
    assert run(tmp_path / "two.pb") == 0
    parsed: Any = config.parse(capsys.readouterr().out)
    (model,) = parsed["models"]
    assert model["input_tensor"] == ["left:0", "right:0"]
    assert catalog.load(ModelSettings(**model)).names == ("left", "right")


def test_json_is_printed_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path / "flowers.keras"), is_json=True) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 3 * 4 + 4


def test_a_model_that_cannot_be_served_is_described_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "net.weights.h5"
    keras.Sequential([keras.Input((4,)), layers.Dense(2)]).save_weights(file)
    with pytest.raises(ModelFailed, match="architecture"):
        run(file)
    assert "parameters 10" in capsys.readouterr().out


def test_nothing_of_tensorflow_or_keras_is_imported(tmp_path: Path) -> None:
    file = write(tmp_path / "flowers.keras")
    code = (
        "import atexit, os, sys; from xlaserve import cli; leave = os._exit\n"
        "os._exit = lambda status: leave(status or 10 * bool({'tensorflow', 'keras'} & sys.modules.keys()))\n"
        "cli.main(['inspect', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
