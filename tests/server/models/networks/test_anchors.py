from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.config import BoxDecoding, BoxFormat
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.anchors import anchors


def decoding(kind: str, **fields: Any) -> BoxDecoding:
    return BoxDecoding.model_validate({"kind": kind, **fields})


def test_anchors_of_ssd_are_those_of_the_object_detection_api() -> None:
    """Facts: SSD MobileNet of TensorFlow's Object Detection API has 1917 anchors for 300x300 pixels (19x19 cells with 3
    each, then 10, 5, 3, 2 and 1 to the square with 6 each), of scales 0.1 and from 0.2 to 0.95."""
    found = anchors(decoding("ssd"), 300, 300)
    assert found.shape == (1917, 4)
    assert found.dtype == np.float32
    cell = 300 / 19
    root = math.sqrt(2)
    np.testing.assert_allclose(found[0], [cell / 2, cell / 2, 30, 30], rtol=1e-6)
    np.testing.assert_allclose(found[1], [cell / 2, cell / 2, 60 * root, 60 / root], rtol=1e-6)
    np.testing.assert_allclose(found[2], [cell / 2, cell / 2, 60 / root, 60 * root], rtol=1e-6)
    np.testing.assert_allclose(found[3, :2], [cell * 1.5, cell / 2], rtol=1e-6, err_msg="columns before rows")
    second = 19 * 19 * 3
    np.testing.assert_allclose(found[second], [15, 15, 105, 105], rtol=1e-6)
    np.testing.assert_allclose(found[second + 3, 2:], [105 * math.sqrt(3), 105 / math.sqrt(3)], rtol=1e-6)
    np.testing.assert_allclose(found[second + 5, 2:], [300 * math.sqrt(0.35 * 0.5)] * 2, rtol=1e-6)
    np.testing.assert_allclose(found[-6], [150, 150, 285, 285], rtol=1e-6)
    np.testing.assert_allclose(found[-1, 2:], [300 * math.sqrt(0.95)] * 2, rtol=1e-6)


def test_scales_of_ssd_are_of_the_shorter_side() -> None:
    fields = {"strides": [8], "scales": [0.25, 1.0], "aspect_ratios": [4.0], "reduce_first_layer": False}
    found = anchors(decoding("ssd", **fields), 16, 32)
    assert found.shape == (2 * 4 * 2, 4)
    assert found[:3].tolist() == [[4, 4, 8, 2], [4, 4, 8, 8], [12, 4, 8, 2]]


@pytest.mark.parametrize(("height", "width"), [(128, 256), (200, 136)])
def test_anchors_of_retinanet_are_those_of_keras_cv(height: int, width: int) -> None:
    from keras_cv.models import RetinaNet

    theirs = RetinaNet.default_anchor_generator("center_xywh")(image_shape=(height, width, 3))
    wanted = np.concatenate([np.asarray(level) for level in theirs.values()])
    found = anchors(decoding("retinanet", scales_first=True, clip_anchors=True), height, width)
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    by_ratio = anchors(decoding("retinanet"), height, width)
    by_scale = anchors(decoding("retinanet", scales_first=True), height, width)
    cells = (by_ratio.reshape(-1, 3, 3, 4), by_scale.reshape(-1, 3, 3, 4).swapaxes(1, 2))
    np.testing.assert_array_equal(*cells)


@pytest.mark.parametrize("side", [128, 256])
def test_anchors_of_blazeface_are_two_for_each_layer_of_a_stride(side: int) -> None:
    """Facts: MediaPipe's face detectors for short ranges have 896 anchors: 2 in each of 16x16 cells, then 6 in each of
    8x8 (modules/face_detection)."""
    found = anchors(decoding("blazeface"), side, side)[:, :2] / side
    wanted = [((x + 0.5) / 16, (y + 0.5) / 16) for y in range(16) for x in range(16) for _ in range(2)]
    wanted += [((x + 0.5) / 8, (y + 0.5) / 8) for y in range(8) for x in range(8) for _ in range(6)]
    np.testing.assert_allclose(found, wanted)
    assert len(anchors(decoding("blazeface", strides=[4], anchors_per_layer=1), 192, 192)) == 2304


def test_cells_of_yolo_are_centres_and_strides() -> None:
    found = anchors(decoding("yolov8"), 64, 32)
    assert len(found) == 8 * 4 + 4 * 2 + 2
    assert found[[0, 1, 4, 32, -1]].tolist() == [
        [4, 4, 8, 8],
        [12, 4, 8, 8],
        [4, 12, 8, 8],
        [8, 8, 16, 16],
        [16, 48, 32, 32],
    ]


@pytest.mark.parametrize(
    ("how", "values"),
    [
        ("xyxy", [20, 10, 60, 30]),
        ("yxyx", [10, 20, 30, 60]),
        ("xywh", [20, 10, 40, 20]),
        ("center_xywh", [40, 20, 40, 20]),
        ("rel_center_xywh", [0.4, 0.4, 0.4, 0.4]),
    ],
)
def test_anchors_may_come_from_a_file(tmp_path: Path, how: BoxFormat, values: list[float]) -> None:
    file = tmp_path / "anchors.npy"
    np.save(file, np.array([values]))
    found = anchors(decoding("ssd", anchors=file, anchor_format=how), 50, 100)
    np.testing.assert_allclose(found, [[40, 20, 40, 20]])


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_a_file_without_anchors_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "anchors.npy"
    if content is None:
        np.save(file, np.zeros((3, 5)))
    else:
        file.write_bytes(content)
    with pytest.raises(ModelFailed, match=r"box_decoding.anchors: .*anchors\.npy"):
        anchors(decoding("retinanet", anchors=file), 50, 100)
