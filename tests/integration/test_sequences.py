"""Texts over gRPC and HTTP, by a made model: each column of an image is a step, whose grey level is its class."""

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

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

HEIGHT, STEPS = 4, 8
LEVELS = (0, 80, 160, 255)
"""Of the classes; the last is the blank."""
TEXTS = {"aab": "aa-abb--", "": "--------", "cab": "c-aaabbb", "bb": "b--b----"}
"""Images, as a letter or a blank for each column, by the text in them."""


def save(file: Path) -> str:
    from xlaserve.models.networks.keras_runtime import keras

    pixels = keras.Input((HEIGHT, STEPS, 1))
    columns = keras.layers.Reshape((STEPS, 1))(keras.layers.AveragePooling2D((HEIGHT, 1))(pixels))
    scores = keras.layers.Dense(len(LEVELS), "softmax", name="scores")
    model = keras.Model(pixels, scores(columns))
    # The closer a level is to a class's own, the likelier the class: -(x - level)^2, less what all have in common.
    levels = np.array(LEVELS, np.float32)
    scores.set_weights([2 * levels[None] / 1000, -(levels**2) / 1000])
    model.save(file)
    return str(file)


def drawn(columns: str) -> bytes:
    levels = np.array([LEVELS["abc-".index(letter)] for letter in columns], np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.broadcast_to(levels, (HEIGHT, STEPS)).copy()).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def serving(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    source = save(tmp_path_factory.mktemp("models") / "texts.keras")
    common = {"source": source, "buckets": [1, 4]}
    return start_module_server(
        {
            "models": [
                {"name": "texts", **common, "task": "sequence", "labels": ["a", "b", "c"]},
                {"name": "heads", **common, "outputs": {"scores": {"task": "sequence", "blank": "last"}}},
            ]
        }
    )


def post(serving: Server, model: str, body: bytes, accept: str = "application/json") -> bytes:
    request = urllib.request.Request(f"http://{serving.http}/v1/models/{model}:transcribe", body, {"accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: bytes = answer.read()
        return found


def test_texts_are_read_over_grpc(serving: Server) -> None:
    with VisionClient(serving.grpc) as client:
        found = client.transcribe([*map(drawn, TEXTS.values())] * 20, model="texts")
        assert [one.text for one in found.transcriptions] == [*TEXTS] * 20
        first = found.transcriptions[0]
        assert [(one.index, one.label) for one in first.categories] == [(0, "a"), (0, "a"), (1, "b")]
        assert first.score == pytest.approx(1, abs=0.05)
        assert client.transcribe(drawn("aa-abb--"), model="heads").transcriptions[0].text == "0 0 1"
        scores = client.infer(drawn("c-aaabbb"), model="texts").outputs["scores"]
        assert scores.shape == (1, STEPS, len(LEVELS))
        assert scores[0].argmax(axis=1).tolist() == [2, 3, 0, 0, 0, 1, 1, 1]


def test_texts_are_read_over_http(serving: Server) -> None:
    answer: dict[str, Any] = json.loads(post(serving, "texts", drawn("c-aaabbb")))
    (found,) = answer["transcriptions"]
    assert (answer["model"], found["text"]) == ("texts", "cab")
    assert [(one["index"], one["label"]) for one in found["categories"]] == [(2, "c"), (0, "a"), (1, "b")]
    with Image.open(io.BytesIO(post(serving, "texts", drawn("b--b----"), "image/png"))) as picture:
        assert picture.format == "PNG"
        assert picture.width >= 480
