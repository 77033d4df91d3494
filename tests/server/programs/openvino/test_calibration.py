"""Calibrations that `xlaserve calibrate` writes, read: only for the model that each was made of.

The "models in int8" here are in float32: reading them is the same, and needs no NNCF.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode, Precision
from xlaserve.errors import ModelFailed
from xlaserve.programs.openvino import calibration
from xlaserve.programs.openvino.calibration import FILE, Calibrated, Calibration
from xlaserve.programs.openvino.openvino_program import ConvertedGraph, version
from xlaserve.programs.tf.lowered_function import Forward
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

BUCKET = Bucket(2, 8, 9)
SIZE = (8, 9)
IMAGES = np.random.default_rng(0).integers(0, 256, (*BUCKET, 3), np.uint8)


def network(*, weight: float = 1.0, stride: int = 1, name: str = "conv") -> Forward:
    kernel: NDArray[np.float32] = np.random.default_rng(1).normal(size=(3, 3, 3, 4)).astype(np.float32)
    kernel[0, 0, 0, 0] = weight

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.nn.conv2d(tf.cast(pixels, tf.float32), kernel, stride, "SAME", name=name)
        return (tf.reduce_mean(values, axis=(1, 2)),)

    return forward


def digest(forward: Forward) -> str:
    return TensorFlowProgram(forward).converted(BUCKET).digest


def written(folder: Path, forward: Forward, **changes: Any) -> Path:
    """Writes a calibration made of `forward`; returns its folder."""
    folder.mkdir()
    graph = TensorFlowProgram(forward).converted(BUCKET)
    facts = {"size": SIZE, "graph": graph.digest, "files": calibration.save(folder, SIZE, graph)}
    calibrated = Calibrated(**{**facts, "held_out": 20, "agreement": 0.9975, "difference": 0.01})
    given = {"source": "net", "images": 80, "least_agreement": 0.99, "xlaserve": "0.1.0", "nncf": "3"}
    made = Calibration(**{**given, "openvino": version(), "models": (calibrated,), **changes})
    (folder / FILE).write_text(made.model_dump_json())
    return folder


def load(folder: Path, forward: Forward, size: tuple[int, int] = SIZE) -> ConvertedGraph:
    program = TensorFlowProgram(forward, openvino_precision=Precision.INT8, calibration=calibration.read(folder))
    return program.converted(Bucket(1, *size))


def test_it_is_read_and_run_in_place_of_the_graph_that_it_was_made_of(tmp_path: Path) -> None:
    folder = written(tmp_path / "made", network())
    read = calibration.read(folder)
    program = TensorFlowProgram(network(), openvino_precision=Precision.INT8, calibration=read)
    compilation = program.compile(Mode.OPENVINO, BUCKET)
    (wanted,) = TensorFlowProgram(network()).compile(Mode.OPENVINO, BUCKET).executable(IMAGES)
    np.testing.assert_array_equal(compilation.executable(IMAGES)[0], wanted)
    assert compilation.warnings == ()
    assert program.in_openvino(BUCKET).precision is Precision.INT8
    assert str(read.calibration) == "agreement 0.9975 of 20 held-out images"


def test_it_serves_on_when_its_files_are_gone(tmp_path: Path) -> None:
    folder = written(tmp_path / "made", network())
    read = calibration.read(folder)
    model = TensorFlowProgram(network(), openvino_precision=Precision.INT8, calibration=read).in_openvino(BUCKET)
    (before,) = model(IMAGES)
    for file in folder.iterdir():
        file.write_bytes(b"\0" * 100)
    np.testing.assert_array_equal(model(IMAGES)[0], before)


def test_a_graph_is_known_by_what_it_computes_and_not_by_names() -> None:
    assert digest(network()) == digest(network(name="other"))
    assert len({digest(network()), digest(network(weight=1.0001)), digest(network(stride=2))}) == 3


def branching(weight: float, *, is_swapped: bool = False) -> Forward:
    kernels: list[NDArray[np.float32]] = [np.full((3, 3, 3, 4), factor * weight, np.float32) for factor in (1, 2)]
    first, second = reversed(kernels) if is_swapped else kernels

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.cast(pixels, tf.float32)
        branches = [lambda kernel=kernel: tf.nn.conv2d(values, kernel, 1, "SAME") for kernel in (first, second)]
        return (tf.reduce_mean(tf.cond(tf.reduce_mean(values) > 100, *branches), axis=(1, 2)),)

    return forward


def looping(weight: float, runs: int = 3) -> Forward:
    kernel: NDArray[np.float32] = np.full((3, 3, 3, 3), weight, np.float32)

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def step(run: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return run + 1, tf.nn.conv2d(values, kernel, 1, "SAME")

        first = tf.constant(0), tf.cast(pixels, tf.float32)
        return (tf.reduce_mean(tf.while_loop(lambda run, values: run < runs, step, first)[1], axis=(1, 2)),)

    return forward


def test_what_branches_and_loops_compute_counts_as_well() -> None:
    assert digest(branching(1.0)) == digest(branching(1.0))
    assert digest(looping(1.0)) == digest(looping(1.0))
    different = branching(1.0), branching(2.0), branching(1.0, is_swapped=True), looping(1.0), looping(2.0)
    assert len({*map(digest, different), digest(looping(1.0, runs=4))}) == 6


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "made", network(), source=str(tmp_path / "net.keras"))
    with pytest.raises(ModelFailed, match=r"made was made of another model than this one, of net\.keras perhaps") as e:
        load(folder, network(weight=2.0))
    assert "OpenVINO" not in str(e.value)
    assert str(tmp_path) not in str(e.value)


def test_another_version_of_openvino_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "made", network(), openvino="2025.1")
    with pytest.raises(ModelFailed, match=r"or by another version of OpenVINO \(2025\.1, this is 2026"):
        load(folder, network(weight=2.0))


def test_another_size_is_refused_before_the_model_is_traced(tmp_path: Path) -> None:
    folder = written(tmp_path / "made", network())

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        raise AssertionError

    with pytest.raises(ModelFailed, match="calibration: made is for images of 8x9, expected 16x9"):
        load(folder, forward, (16, 9))


def test_the_stated_agreement_is_that_of_the_size_with_the_least() -> None:
    facts: dict[str, Any] = {"graph": "", "files": {}, "difference": None}
    models = [
        Calibrated(size=(size, size), agreement=agreement, held_out=held_out, **facts)
        for size, agreement, held_out in ((8, 0.99, 20), (16, 0.97, 4), (24, 1.0, 20))
    ]
    made = Calibration(
        source="", images=80, least_agreement=0.9, xlaserve="", openvino="", nncf="", models=tuple(models)
    )
    assert str(made) == "agreement 0.9700 of 4 held-out images"


def remove(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def flip(file: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        contents = bytearray((folder / file).read_bytes())
        contents[len(contents) // 2] ^= 1
        (folder / file).write_bytes(contents)

    return change


def edit(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        change(kept := json.loads((folder / FILE).read_text()))
        (folder / FILE).write_text(json.dumps(kept))

    return changed


def replace(file: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove(FILE), r"made/calibration\.json can't be read: No such file"),
        (remove("8x9.bin"), r"made/8x9\.bin can't be read: No such file"),
        (flip("8x9.bin"), r"made/8x9\.bin is damaged"),
        (flip("8x9.xml"), r"made/8x9\.xml is damaged"),
        (replace(FILE, os.mkfifo), r"expected made/calibration\.json to be a file"),
        (replace(FILE, lambda file: file.symlink_to("/dev/zero")), r"expected made/calibration\.json to be a file"),
        (replace("8x9.bin", Path.mkdir), r"expected made/8x9\.bin to be a file"),
        (replace("8x9.bin", lambda file: file.symlink_to(file.name)), r"made/8x9\.bin can't be read: Too many levels"),
        (edit(lambda kept: kept["models"][0].update(agreement=float("nan"))), "expected what .*, got Input should be"),
        (edit(lambda kept: kept["models"].clear()), "expected what .*, got Tuple should have at least 1"),
        (
            edit(lambda kept: kept["models"][0].pop("graph")),
            r"expected what xlaserve calibrate wrote in made/calibration\.json, got Field required",
        ),
        (lambda folder: (folder / FILE).write_bytes(b"\xff{"), "expected what xlaserve calibrate wrote"),
        (lambda folder: (folder / FILE).write_text("[]"), "expected what xlaserve calibrate wrote"),
    ],
)
def test_what_is_missing_or_damaged_is_refused(change: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "made", network())
    change(folder)
    with pytest.raises(ModelFailed, match=f"calibration: {said}") as failed:
        load(folder, network())
    assert "\n" not in str(failed.value)
    assert str(tmp_path) not in str(failed.value)
