"""A model with examples of a notebook: every interface shows how far it is from these, or it does not serve."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from PIL import Image
from scripts.shapes_data import HELD_OUT_SEED, scene
from tests.integration.conftest import Server, StartServer

from xlaserve_client import VisionClient
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

SIDE = 32
COUNT = 6


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, a model, and what a notebook has computed of them: with the model, and with pixels that it scaled."""
    from xlaserve.models.networks.keras_runtime import keras

    folder = tmp_path_factory.mktemp("notebook")
    keras.utils.set_random_seed(0)
    pixels = keras.Input((SIDE, SIDE, 3))
    x = keras.layers.Conv2D(8, 3, strides=2, activation="relu")(pixels)
    scores = keras.layers.Dense(5, activation="softmax")(keras.layers.Flatten()(x))
    network = keras.Model(pixels, scores)
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        network.save(folder / "model.keras")
    images = []
    for number in range(COUNT):
        path = folder / f"{number}.png"
        Image.fromarray(scene(HELD_OUT_SEED, number, height=SIDE, width=SIDE).pixels).save(path)
        images.append(keras.utils.img_to_array(keras.utils.load_img(path)))
    files = [f"{number}.png" for number in range(COUNT)]
    np.savez(folder / "predictions.npz", files=files, scores=network.predict(np.stack(images) / 255, verbose=0))
    return folder


def models(notebook: Path) -> list[dict[str, Any]]:
    model = {
        "source": str(notebook / "model.keras"),
        "modes": ["xla", "graph"],
        "buckets": [1, 4],
        "examples": {"folder": str(notebook)},
    }
    return [model | {"name": "scaled", "preprocess": "unit"}, model | {"name": "unscaled", "preprocess": "none"}]


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, notebook: Path) -> Server:
    return start_module_server({"models": models(notebook), "exit_on_model_failure": False})


def test_the_difference_from_the_notebook_is_in_lists_metrics_and_log(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        scaled, unscaled = pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest()).models
        request = oip.ModelMetadataRequest(name="scaled")
        metadata = oip_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(request)
    assert [(found.mode, found.agreement, found.images) for found in scaled.examples] == [
        ("graph", 1.0, COUNT),
        ("xla", 1.0, COUNT),
    ]
    assert max(found.largest for found in scaled.examples) < 1e-5
    text = metadata.properties["examples"]
    assert text.startswith("graph: largest difference ")
    assert f"model scaled: examples {text}" in server.stderr
    assert server.metric("xlaserve_model_examples_difference", model="scaled", mode="xla") < 1e-5
    assert server.metric("xlaserve_model_examples_agreement", model="scaled", mode="graph") == 1.0
    with urllib.request.urlopen(f"http://{server.http}/v1/status/models/scaled/versions/1", timeout=30) as reply:
        assert json.load(reply)["examples"] == text
    assert (unscaled.state, len(unscaled.examples)) == (pb.Model.STATE_FAILED, 0)


def test_a_model_that_is_fed_otherwise_than_in_the_notebook_does_not_serve(server: Server) -> None:
    with VisionClient(server.grpc) as client:
        assert client.ready("scaled")
        found = {model.name: model for model in client.models()}["unscaled"]
    assert found.state == "failed"
    assert found.reason.startswith("examples: mode graph: largest difference ")
    assert f" of {COUNT} images" in found.reason
    assert ".png the expected answer is " in found.reason


def from_notebook(path: Path) -> Any:
    """A notebook's own way: Keras's `load_img`, which resizes to the nearest pixel, and then OpenCV's colours."""
    from xlaserve.models.networks.keras_runtime import keras

    return keras.utils.img_to_array(keras.utils.load_img(path, target_size=(SIDE, SIDE)))[..., ::-1] / 255


def test_what_match_prints_serves_and_answers_as_the_notebook_did(
    notebook: Path, start_server: StartServer, tmp_path: Path
) -> None:
    from xlaserve.models.networks.keras_runtime import keras

    photos = [tmp_path / f"{number}.jpg" for number in range(COUNT)]
    for number, photo in enumerate(photos):
        Image.fromarray(scene(HELD_OUT_SEED, number, height=60 + 9 * number, width=90).pixels).save(photo)
    network = keras.saving.load_model(notebook / "model.keras")
    outputs = network.predict(np.stack([from_notebook(photo) for photo in photos]), verbose=0)
    VisionClient.save_examples(tmp_path, photos, outputs)

    command = [sys.executable, "-m", "xlaserve", "match", str(notebook / "model.keras"), str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    (model,) = yaml.safe_load(printed)["models"]
    assert (model["preprocess"], model["color"], model["resize"]["filter"]) == ("unit", "bgr", "nearest")
    server = start_server({"models": [model]})
    with VisionClient(server.grpc) as client:
        answered = client.infer(photos, model=model["name"]).outputs["scores"]
    np.testing.assert_allclose(answered, outputs, atol=1e-5)
    assert f"model {model['name']}: examples xla: largest difference" in server.stderr
