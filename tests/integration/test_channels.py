"""Models of grey images, of five channels, and with their channels first, from pictures and pixels to answers."""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import Server, StartServer
from tests.integration.rest import ask

from xlaserve_client import InvalidRequest, VisionClient

SIDES = (12, 10)
PICTURE = Image.fromarray(np.random.default_rng(2).integers(0, 256, (40, 30, 3), dtype=np.uint8))
SHAPES = {"grey": (*SIDES, 1), "flat": SIDES, "planes": (3, *SIDES), "bgr": (*SIDES, 3), "five": (*SIDES, 5)}


def png() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


def fitted(mode: str) -> Any:
    return np.asarray(PICTURE.convert(mode).resize(SIDES[::-1], Image.Resampling.BILINEAR))


def pixels(*shape: int) -> Any:
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Models of each shape, which give the mean of each channel times weights."""
    import tensorflow as tf

    from xlaserve.models.networks.keras_runtime import keras

    folder = tmp_path_factory.mktemp("channels")
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        channels = {"grey": 1, "flat": 1, "five": 5}.get(name, 3)
        weights = np.arange(1.0, 2 * channels + 1, dtype=np.float32).reshape(channels, 2)
        axes = (2, 3) if name == "planes" else (1, 2)
        module = tf.Module()
        module.weights = tf.Variable(weights)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, *shape), tf.float32, name="image")])
        def scores(image: tf.Tensor, module: Any = module, axes: Any = axes, channels: int = channels) -> Any:
            return {"scores": tf.reshape(tf.reduce_mean(image, axes), (-1, channels)) @ module.weights}

        tf.saved_model.save(module, str(folder / name), signatures={"serving_default": scores})
        found[name] = weights
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        anywhere = keras.Sequential([keras.Input((None, None, 1)), keras.layers.GlobalAveragePooling2D()])
        anywhere.save(folder / "anywhere.keras")
    return {"folder": folder, "weights": found}


@pytest.fixture(scope="module", params=[0, 1], ids=["one process", "a front"])
def server(
    request: pytest.FixtureRequest, start_module_server: StartServer, networks: dict[str, Any]
) -> Iterator[Server]:
    folder: Path = networks["folder"]
    models = [
        {"name": name, "source": str(folder / name), "buckets": [1, 4], "modes": ["xla", "graph"]} for name in SHAPES
    ]
    for model in models:
        if model["name"] == "bgr":
            model["color"] = "bgr"
    anywhere = {
        "name": "anywhere",
        "source": str(folder / "anywhere.keras"),
        "task": "embedding",
        "input_size": [8, 6],
        "buckets": [1, 2],
        "unmatched": "background",
    }
    yield start_module_server({"models": [*models, anywhere], "fronts": request.param})


@pytest.mark.parametrize("mode", ["xla", "graph"])
@pytest.mark.parametrize(("name", "as_mode"), [("grey", "L"), ("flat", "L"), ("planes", "RGB"), ("bgr", "RGB")])
def test_a_picture_becomes_what_the_model_takes(
    server: Server, networks: dict[str, Any], name: str, as_mode: str, mode: str
) -> None:
    means = fitted(as_mode).reshape(*SIDES, -1).mean(axis=(0, 1))
    expected = (means[::-1] if name == "bgr" else means) @ networks["weights"][name]
    with VisionClient(server.grpc) as client:
        scores = client.infer([png()] * 3, model=name, mode=mode).outputs["scores"]
    np.testing.assert_allclose(scores, np.tile(expected, (3, 1)), rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_pixels_are_taken_in_the_shape_that_metadata_show(server: Server, networks: dict[str, Any], name: str) -> None:
    status, metadata = ask(server, f"/v2/models/{name}")
    assert status == 200
    (declared,) = metadata["inputs"]
    assert declared["shape"] == [-1, *SHAPES[name]]
    given = pixels(3, *SHAPES[name])
    means = given.mean(axis=(2, 3) if name == "planes" else (1, 2)).reshape(3, -1)
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": given.shape, "data": given.ravel().tolist()}
    status, answer = ask(server, f"/v2/models/{name}/infer", {"inputs": [tensor]})
    assert status == 200
    got = np.reshape(answer["outputs"][0]["data"], (3, 2))
    np.testing.assert_allclose(got, means @ networks["weights"][name], rtol=1e-5)
    status, answer = ask(server, f"/v1/models/{name}:predict", {"instances": given.tolist()})
    assert status == 200
    np.testing.assert_allclose(answer["predictions"], got, rtol=1e-5)
    with VisionClient(server.grpc) as client:
        np.testing.assert_allclose(client.infer(given, model=name).outputs["scores"], got, rtol=1e-5)
        classified = client.classify(given, model=name).classifications
        assert [row.categories[0].score for row in classified] == pytest.approx(got.max(axis=1), rel=1e-5)


def test_models_are_listed_with_the_pixels_that_they_take(server: Server) -> None:
    with VisionClient(server.grpc) as client:
        listed = {model.name: model.pixels for model in client.models()}
    assert listed == {
        "grey": "[n, 12, 10, 1] grey",
        "flat": "[n, 12, 10] grey",
        "planes": "[n, 3, 12, 10] rgb",
        "bgr": "[n, 12, 10, 3] bgr",
        "five": "[n, 12, 10, 5] as they are",
        "anywhere": "[n, 8, 6, 1] grey",
    }


def test_a_picture_for_a_model_of_five_channels_is_refused(server: Server) -> None:
    with VisionClient(server.grpc) as client, pytest.raises(InvalidRequest, match="no pictures"):
        client.classify(png(), model="five")


@pytest.mark.parametrize(
    ("name", "shape"), [("grey", (1, *SIDES, 3)), ("planes", (1, 2, *SIDES)), ("five", (1, *SIDES))]
)
def test_pixels_of_other_channels_are_refused(server: Server, name: str, shape: tuple[int, ...]) -> None:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": shape, "data": [0] * int(np.prod(shape))}
    status, answer = ask(server, f"/v2/models/{name}/infer", {"inputs": [tensor]})
    assert status == 400
    assert answer["error"].startswith("pixels")


def test_grey_pixels_of_other_sizes_are_served(server: Server) -> None:
    given = pixels(2, 7, 9, 1)
    with VisionClient(server.grpc) as client:
        found = client.infer(given, model="anywhere").outputs["embedding"]
    np.testing.assert_allclose(found, given.mean(axis=(1, 2)), rtol=1e-5)


def test_an_answer_is_drawn_into_the_picture_in_its_own_colours(server: Server) -> None:
    connection = HTTPConnection(server.http, timeout=60)
    body = json.dumps({"images": [base64.b64encode(png()).decode()]})
    connection.request(
        "POST", "/v1/models/grey:classify", body, {"content-type": "application/json", "accept": "image/png"}
    )
    answer = connection.getresponse()
    drawn = Image.open(io.BytesIO(answer.read()))
    connection.close()
    assert answer.status == 200
    red, green, blue = np.asarray(drawn.convert("RGB")).T.astype(int)
    assert (abs(red - green) + abs(green - blue) > 20).mean() > 0.05
