"""Keypoints over gRPC and HTTP: peaks of heatmaps, and places that a model gives as numbers."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import Server, StartServer

from xlaserve_client import VisionClient

SIDE, CELL = 32, 4
COLOURS = ["red", "green", "blue"]


def save(folder: Path) -> dict[str, str]:
    """Saves a model whose heatmaps are the colours, and one that takes mean red and green for x and y."""
    from xlaserve.models.networks.keras_runtime import keras

    pixels = keras.Input((SIDE, SIDE, 3))
    maps = keras.layers.Rescaling(1 / 255)(keras.layers.AveragePooling2D(CELL)(pixels))
    keras.Model(pixels, maps).save(folder / "maps.keras")
    means = keras.layers.Rescaling(1 / 255)(keras.layers.GlobalAveragePooling2D()(pixels))
    keras.Model(pixels, means[:, :2]).save(folder / "means.keras")
    return {file.stem: str(file) for file in folder.iterdir()}


def photo() -> bytes:
    """An image of 128 x 64 pixels with a square of each colour, which a letterbox makes 32 x 16 from row 8 on."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    for channel, (x, y) in enumerate([(16, 16), (64, 32), (112, 48)]):
        pixels[y : y + 16, x : x + 16, channel] = 200
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def serving(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    sources = save(tmp_path_factory.mktemp("models"))
    common = {"task": "keypoints", "buckets": [1, 4]}
    return start_module_server(
        {
            "models": [
                {"name": "maps", "source": sources["maps"], **common, "labels": COLOURS},
                {"name": "means", "source": sources["means"], **common, "keypoint_format": "rel_xy", "fit": "resize"},
            ]
        }
    )


def post(serving: Server, path: str, accept: str = "application/json") -> bytes:
    request = urllib.request.Request(f"http://{serving.http}/v1/models/{path}", photo(), {"accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: bytes = answer.read()
        return found


def test_peaks_are_in_pixels_of_the_image(serving: Server) -> None:
    with VisionClient(serving.grpc) as client:
        (found, other) = client.locate([photo()] * 2, model="maps").results
        assert found == other
        assert (found.height, found.width) == (64, 128)
        assert [one.label for one in found.keypoints] == COLOURS
        places = np.array([(one.x, one.y) for one in found.keypoints])
        np.testing.assert_allclose(places, [(24, 24), (72, 40), (120, 56)], atol=1e-3)
        assert all(one.score is not None and 0.5 < one.score < 0.8 for one in found.keypoints)
        assert client.locate(photo(), model="maps", min_score=0.9).results[0].keypoints == ()
        assert client.infer(photo(), model="maps").outputs["keypoints"].shape == (1, 3, 3)


def test_places_that_a_model_gives_are_in_pixels_of_the_image(serving: Server) -> None:
    with VisionClient(serving.grpc) as client:
        (point,) = client.locate(photo(), model="means").results[0].keypoints
    share = 200 / 255 / 32
    assert (point.label, point.score) == ("0", None)
    assert [point.x, point.y] == pytest.approx([128 * share, 64 * share], abs=0.1)


def test_keypoints_come_over_http(serving: Server) -> None:
    answer: dict[str, Any] = json.loads(post(serving, "maps:locate?min_score=0.25"))
    (found,) = answer["results"]
    assert (answer["model"], found["height"], found["width"]) == ("maps", 64, 128)
    first = found["keypoints"][0]
    assert (first["index"], first["label"]) == (0, "red")
    assert [first["x"], first["y"]] == pytest.approx([24, 24], abs=1e-3)
    (point,) = json.loads(post(serving, "means:locate"))["results"][0]["keypoints"]
    assert point["score"] is None
    with Image.open(io.BytesIO(post(serving, "maps:locate", "image/png"))) as picture:
        drawn = np.asarray(picture.convert("RGB"))
    assert drawn.shape[1] >= 480
    x, y = round(24 / 128 * drawn.shape[1]), round(24 / 64 * drawn.shape[0])
    assert drawn[y, x].tolist() != [200, 0, 0], "a dot is on the red square"
