"""ONNX files whose shapes leave open the size of images, or the axis of their batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.server.models.sources.onnx_writer import model, node, tensor

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.inspection.model_file.serving import plan
from xlaserve.models import catalog

pytest.importorskip("openvino")

SIDE = 8
PIXELS = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
RANDOM = np.random.default_rng(1)


def weights(*shape: int) -> NDArray[np.float32]:
    return RANDOM.uniform(-1, 1, shape).astype(np.float32)


def settings(source: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=str(source), **({"buckets": (BucketSettings(3),)} | fields))


def run(model: ModelSettings, mode: Mode, images: int = 3) -> Any:
    (answer,) = catalog.load(model).program.compile(mode, Bucket(images, SIDE, SIDE)).executable(PIXELS[:images])
    return answer


@pytest.mark.parametrize("batch", [1, None])
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.OPENVINO])
def test_a_file_of_any_size_is_translated_for_the_configured_one(tmp_path: Path, batch: int | None, mode: Mode) -> None:
    file, matrix = tmp_path / "scores.onnx", weights(3 * (2 * SIDE) ** 2, 2)
    file.write_bytes(enlarging(batch, matrix))
    enlarged = PIXELS.astype(np.float32).repeat(2, axis=1).repeat(2, axis=2)
    expected = enlarged.transpose(0, 3, 1, 2).reshape(3, -1) @ matrix
    for size in ({"input_size": (SIDE, SIDE)}, {"resolutions": ((SIDE, SIDE),)}):
        np.testing.assert_allclose(run(settings(file, **size), mode), expected, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize(("batch", "field"), [(1, "input_size: expected a size"), (None, "source: scores.onnx can't")])
def test_a_file_translated_for_one_size_alone_needs_that_size(tmp_path: Path, batch: int | None, field: str) -> None:
    file = tmp_path / "scores.onnx"
    file.write_bytes(enlarging(batch, weights(3 * (2 * SIDE) ** 2, 2)))

    def reason(**fields: Any) -> str:
        with pytest.raises(ModelFailed) as failure:
            catalog.load(settings(file, **fields))
        assert "\n" not in str(failure.value)
        assert str(tmp_path) not in str(failure.value)
        return str(failure.value)

    assert re.match(r"input_size: .* got none; write input_size: \[224, 224\]", reason())
    sizes = ((SIDE, SIDE), (16, 16))
    assert re.match(r"resolutions: .* got 2 sizes; write input_size: \[8, 8\]", reason(resolutions=sizes))
    assert reason(input_size=(9, 9)).startswith(field)
    assert "the model's only size, 8x8" in reason(input_size=(SIDE, SIDE), buckets=(BucketSettings(1, 16, 16),))


def enlarging(batch: int | None, matrix: NDArray[np.float32]) -> bytes:
    """Returns a file for images of any size, whose sides are doubled before they are multiplied by a matrix."""
    nodes = [
        node("Resize", ["pixels", "", "scales"], ["enlarged"]),
        node("Flatten", ["enlarged"], ["row"]),
        node("MatMul", ["row", "matrix"], ["scores"]),
    ]
    known = [tensor("scales", np.array([1, 1, 2, 2], np.float32)), tensor("matrix", matrix)]
    return model(nodes, pixels=("pixels", [batch, 3, None, None]), scores=("scores", [batch, 2]), weights=known)


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.OPENVINO])
def test_outputs_of_one_image_get_an_axis_for_it(tmp_path: Path, mode: Mode) -> None:
    file, matrix = tmp_path / "boxes.onnx", weights(3, 5)
    file.write_bytes(boxes(matrix))
    of_one = settings(file, task="tensors", buckets=(BucketSettings(1),))
    assert catalog.load(of_one).batch == 1
    expected = PIXELS[:1].astype(np.float32).reshape(1, SIDE * SIDE, 3) @ matrix
    np.testing.assert_allclose(run(of_one, mode, images=1), expected, rtol=1e-4, atol=1e-2)
    with pytest.raises(ModelFailed, match=r"batches of 1 only; write buckets: \[1\], got 3"):
        catalog.load(settings(file, task="tensors"))


def test_inspect_tells_that_outputs_are_of_one_image(tmp_path: Path) -> None:
    file = tmp_path / "boxes.onnx"
    file.write_bytes(boxes(weights(3, 5)))
    assert dict(plan(formats.describe(file)).facts)["batch"].endswith(
        "have no axis for images, and get one; buckets: [1]"
    )


def boxes(matrix: NDArray[np.float32]) -> bytes:
    """Returns a file for one image, which gives a row for each pixel and no axis for the image."""
    nodes = [
        node("Transpose", ["pixels"], ["last"], perm=[0, 2, 3, 1]),
        node("Reshape", ["last", "sides"], ["rows"]),
        node("MatMul", ["rows", "matrix"], ["boxes"]),
    ]
    known = [tensor("sides", np.array([-1, 3], np.int64)), tensor("matrix", matrix)]
    shape = [SIDE * SIDE, matrix.shape[1]]
    return model(nodes, pixels=("pixels", [1, 3, SIDE, SIDE]), scores=("boxes", shape), weights=known)
