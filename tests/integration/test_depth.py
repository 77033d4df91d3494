"""Models of pixels of more than 8 bits, and of tensors that have the shape of images, compared with Keras."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import Server, StartServer
from tests.integration.rest import ask, infer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import tensorflow_messages_pb2 as tfs_pb
from xlaserve_proto import tensorflow_serving_pb2_grpc as tfs_grpc

SIZE = (24, 20)
MODES = ("xla", "graph", "eager", "openvino")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "heights": {"depth": "float"},
    "scan": {},
    "scan-of-floats": {"depth": 16, "resize": {"library": "tensorflow"}},
    "photo": {"depth": "float", "resize": {"library": "tensorflow"}, "decode": "tensorflow", "fit": "resize"},
    "unit": {"depth": "float", "preprocess": "unit"},
    "series": {"layout": "none"},
    "features": {"layout": "none"},
}
DATATYPES = {"uint8": "UINT8", "uint16": "UINT16", "int32": "INT32", "float16": "FP16", "float32": "FP32"}


class World(NamedTuple):
    folder: Path
    models: Mapping[str, Any]
    """The Keras models, by their names."""

    def expected(self, name: str, values: Any) -> Any:
        """Returns what Keras predicts."""
        (declared,) = self.models[name].inputs
        return self.models[name].predict(np.asarray(values, declared.dtype), verbose=0)


def maps(keras: Any, shape: tuple[int, ...], scale: float, dtype: str = "float32") -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape, dtype=dtype, name="given"),
            layers.Rescaling(scale),
            layers.Conv2D(6, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, name="numbers"),
        ]
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from xlaserve.models.networks.keras_runtime import keras

    keras.utils.set_random_seed(7)
    folder = tmp_path_factory.mktemp("depth")
    layers = [keras.layers.LSTM(5), keras.layers.Dense(3, name="numbers")]
    series = keras.Sequential([keras.Input((50, 32), name="steps"), *layers])
    models = {
        "heights": maps(keras, (*SIZE, 1), 0.1),
        "scan": maps(keras, (*SIZE, 1), 1 / 4095, "uint16"),
        "scan-of-floats": maps(keras, (*SIZE, 1), 1 / 65535),
        "photo": maps(keras, (*SIZE, 3), 1 / 255),
        "unit": maps(keras, (*SIZE, 3), 1.0),
        "series": series,
        "features": maps(keras, (7, 6, 16), 1.0),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        for name, model in models.items():
            model.save(folder / f"{name}.keras")
    return World(folder, models)


@pytest.fixture(scope="module", params=[0, 1], ids=["one process", "a front"])
def server(request: pytest.FixtureRequest, start_module_server: StartServer, world: World) -> Server:
    common = {"buckets": [1, 4], "modes": [*MODES], "task": "tensors"}
    models = [
        {"name": name, "source": str(world.folder / f"{name}.keras"), **common, **settings}
        for name, settings in SETTINGS.items()
    ]
    return start_module_server(
        {"models": models, "fronts": request.param, "compile_cache": str(world.folder / "cache")}
    )


def rows(name: str, count: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    if name == "series":
        return random.normal(size=(count, 50, 32)).astype(np.float32)
    if name == "features":
        return random.normal(size=(count, 7, 6, 16)).astype(np.float32)
    if name == "heights":
        return random.normal(30, 200, (count, *SIZE, 1)).astype(np.float32)
    if name.startswith("scan"):
        return random.integers(0, 4096 if name == "scan" else 65536, (count, *SIZE, 1)).astype(np.uint16)
    return random.uniform(0, 255, (count, *SIZE, 3)).astype(np.float32)


def known(name: str, values: Any) -> Any:
    """Returns what the program's preprocessing makes of the rows."""
    return values / np.float32(255) if name == "unit" else values


def input_of(name: str) -> str:
    return {"series": "steps", "features": "given"}.get(name, "pixels")


def over_rest(server: Server, name: str, tensor: Mapping[str, Any], **parameters: str) -> Any:
    return infer(server, name, [tensor], **parameters)


def listed(name: str, values: Any) -> Mapping[str, Any]:
    datatype = DATATYPES[str(values.dtype)]
    return {"name": input_of(name), "datatype": datatype, "shape": [*values.shape], "data": values.tolist()}


def encoded(files: list[bytes]) -> Mapping[str, Any]:
    data = [base64.b64encode(one).decode() for one in files]
    return {"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}


def over_grpc(server: Server, name: str, values: Any, *, shape: Any = None) -> Any:
    request = pb.ModelInferRequest(model_name=name)
    request.inputs.add(name=input_of(name), datatype=DATATYPES[str(values.dtype)], shape=shape or values.shape)
    request.raw_input_contents.append(values.tobytes())
    with grpc.insecure_channel(server.grpc) as channel:
        answer = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*SETTINGS])
def test_answers_are_those_of_keras_in_every_mode(server: Server, world: World, name: str, mode: str) -> None:
    for count in (1, 3, 6):  # alone, padded, and in two batches
        values = rows(name, count, seed=count)
        got = over_rest(server, name, listed(name, values), mode=mode)
        expected = world.expected(name, known(name, values))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 4, 400])
@pytest.mark.parametrize("name", [*SETTINGS])
def test_raw_tensors_pass_as_they_are(server: Server, world: World, name: str, count: int) -> None:
    values = rows(name, count)
    for _ in range(2):  # the second with a head that is known
        got = over_grpc(server, name, values)
        np.testing.assert_allclose(got, world.expected(name, known(name, values)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "float32"])
@pytest.mark.parametrize("name", ["heights", "scan", "scan-of-floats"])
def test_numbers_of_any_type_are_taken(server: Server, world: World, name: str, dtype: str) -> None:
    values = np.random.default_rng(1).integers(0, 256, (3, *SIZE, 1)).astype(dtype)
    expected = world.expected(name, values)
    np.testing.assert_allclose(over_grpc(server, name, values), expected, rtol=1e-4, atol=1e-4)
    if dtype != "float16" and not (name.startswith("scan") and dtype == "float32"):
        np.testing.assert_allclose(over_rest(server, name, listed(name, values)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["heights", "scan", "photo"])
def test_tensorflow_servings_predict_takes_them(server: Server, world: World, name: str) -> None:
    values = rows(name, 3)
    expected = world.expected(name, values)
    status, answer = ask(server, f"/v1/models/{name}:predict", {"instances": values.tolist()})
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], expected, rtol=1e-4, atol=1e-4)
    request = tfs_pb.PredictRequest(model_spec=tfs_pb.ModelSpec(name=name))
    tensor = request.inputs["pixels"]
    tensor.dtype = tfs_pb.DT_UINT16 if values.dtype == np.uint16 else tfs_pb.DT_FLOAT
    for side in values.shape:
        tensor.tensor_shape.dim.add(size=side)
    tensor.tensor_content = values.tobytes()
    with grpc.insecure_channel(server.grpc) as channel:
        got = tfs_grpc.PredictionServiceStub(channel).Predict(request, timeout=60)
    (output,) = got.outputs.values()
    np.testing.assert_allclose(np.reshape(output.float_val, expected.shape), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["heights", "scan", "scan-of-floats"])
def test_grey_pngs_of_16_bits_keep_them(server: Server, world: World, name: str) -> None:
    values = np.random.default_rng(2).integers(0, 65536, (3, *SIZE, 1)).astype(np.uint16)
    got = over_rest(server, name, encoded([png(one[..., 0]) for one in values]))
    np.testing.assert_allclose(got, world.expected(name, values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_unrounded_pixels_of_image_dataset_from_directory(
    start_server: StartServer, world: World, tmp_path: Path, interpolation: str
) -> None:
    from xlaserve.models.networks.keras_runtime import keras

    pytest.importorskip("simplejpeg")
    random = np.random.default_rng(3)
    files = []
    (tmp_path / "one").mkdir()
    for index in range(5):
        image = Image.fromarray(random.integers(0, 256, (6, 5, 3), np.uint8)).resize((61 + index, 57), 3)
        path = tmp_path / "one" / f"{index}.jpg"
        image.save(path, quality=92)
        files.append(path.read_bytes())
    dataset = keras.utils.image_dataset_from_directory(
        tmp_path, labels=None, image_size=SIZE, batch_size=8, shuffle=False, interpolation=interpolation, verbose=False
    )
    (images,) = (np.asarray(batch) for batch in dataset)
    assert np.abs(images - np.rint(images)).max() > 0.1
    model = {
        "name": "photo",
        "source": str(world.folder / "photo.keras"),
        "task": "tensors",
        "buckets": [1, 4],
        **SETTINGS["photo"],
        "resize": {"library": "tensorflow", "filter": interpolation},
    }
    got = over_rest(start_server({"models": [model]}), "photo", encoded(files))
    np.testing.assert_allclose(got, world.expected("photo", images), rtol=0, atol=1e-5)


def test_metadata_show_the_type_of_pixels(server: Server) -> None:
    types = {}
    for name in SETTINGS:
        _, metadata = ask(server, f"/v2/models/{name}")
        (described,) = metadata["inputs"]
        types[name] = described["name"], described["datatype"], described["shape"]
    size = [*SIZE]
    assert types == {
        "heights": ("pixels", "FP32", [-1, *size, 1]),
        "scan": ("pixels", "UINT16", [-1, *size, 1]),
        "scan-of-floats": ("pixels", "UINT16", [-1, *size, 1]),
        "photo": ("pixels", "FP32", [-1, *size, 3]),
        "unit": ("pixels", "FP32", [-1, *size, 3]),
        "series": (input_of("series"), "FP32", [-1, 50, 32]),
        "features": ("given", "FP32", [-1, 7, 6, 16]),
    }


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("heights", np.full((1, *SIZE, 1), np.nan, np.float32), "pixels"),
        ("heights", np.full((1, *SIZE, 1), -np.inf, np.float32), "pixels"),
        ("heights", np.zeros((1, *SIZE, 2), np.float32), "pixels"),
        ("scan", np.full((1, *SIZE, 1), 65536, np.int32), "pixels"),
        ("scan", np.full((1, *SIZE, 1), -1, np.float32), "pixels"),
        ("features", np.zeros((1, 7, 6, 3), np.float32), "given.shape"),
    ],
)
def test_what_a_model_cannot_take_is_refused(server: Server, name: str, values: Any, field: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        over_grpc(server, name, values)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith(field)


def test_a_range_of_pixels_is_refused_where_numbers_pass_as_they_are(server: Server) -> None:
    body = {"inputs": [listed("heights", rows("heights", 1))], "parameters": {"pixel_range": "0..1"}}
    status, answer = ask(server, "/v2/models/heights/infer", body)
    assert status == 400
    assert answer["error"].startswith("parameters.pixel_range")
