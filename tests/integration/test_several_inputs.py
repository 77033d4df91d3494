"""Models of two images, of an image and numbers, and of numbers alone, over every protocol."""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
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

SIDES = (12, 10)
MODES = ("xla", "graph", "eager", "openvino")
KINDS = {"": ".keras", "-saved": "-saved", "-lite": ".tflite"}
"""Ends of models' names, and of the names of their files."""
DATATYPES = {"uint8": "UINT8", "float32": "FP32", "int32": "INT32"}
Inputs = Mapping[str, Any]


class World(NamedTuple):
    folder: Path
    models: Mapping[str, Any]
    """The Keras models, by their names."""

    def expected(self, name: str, inputs: Inputs) -> Any:
        """Returns what Keras answers."""
        model = self.models[name.removesuffix("-saved").removesuffix("-lite")]
        given = [np.asarray(inputs[tensor.name], tensor.dtype) for tensor in model.inputs]
        return np.asarray(model(given if len(given) > 1 else given[0], training=False))


def siamese(keras: Any) -> Any:
    left, right = (keras.Input((*SIDES, 3), name=name) for name in ("left", "right"))
    shared = keras.Sequential(
        [
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(6, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    apart = keras.layers.Subtract()([shared(left), shared(right)])
    return keras.Model([left, right], keras.layers.Dense(4, name="difference")(apart))


def with_numbers(keras: Any) -> Any:
    numbers, photo = keras.Input((5,), name="numbers"), keras.Input((*SIDES, 3), name="photo")
    place = keras.Input((), dtype="int32", name="place")
    means = keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255)(photo))
    known = keras.layers.Embedding(7, 3)(place)
    return keras.Model(
        [numbers, photo, place],
        keras.layers.Dense(3, name="scores")(keras.layers.Concatenate()([means, numbers, known])),
    )


def alone(keras: Any) -> Any:
    return keras.Sequential([keras.Input((6,), name="features"), keras.layers.Dense(2, name="scores")])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import tensorflow as tf

    from xlaserve.models.networks.keras_runtime import keras

    keras.utils.set_random_seed(5)
    folder = tmp_path_factory.mktemp("inputs")
    models = {"siamese": siamese(keras), "with-numbers": with_numbers(keras), "alone": alone(keras)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        for name, model in models.items():
            model.save(folder / f"{name}.keras")
            model.export(str(folder / f"{name}-saved"), verbose=False)
            (folder / f"{name}.tflite").write_bytes(tf.lite.TFLiteConverter.from_keras_model(model).convert())
    return World(folder, models)


@pytest.fixture(scope="module", params=[0, 1], ids=["one process", "a front"])
def server(request: pytest.FixtureRequest, start_module_server: StartServer, world: World) -> Server:
    common = {"buckets": [1, 4], "modes": [*MODES], "task": "tensors", "preprocess": "none"}
    models = [
        {"name": base + kind, "source": str(world.folder / f"{base}{suffix}"), **common}
        for base in world.models
        for kind, suffix in KINDS.items()
    ]
    return start_module_server(
        {"models": models, "fronts": request.param, "compile_cache": str(world.folder / "cache")}
    )


def rows(name: str, count: int, seed: int = 0) -> Inputs:
    random = np.random.default_rng(seed)
    if name.startswith("siamese"):
        return {side: random.integers(0, 256, (count, *SIDES, 3), np.uint8) for side in ("left", "right")}
    if name.startswith("alone"):
        return {"features": random.normal(size=(count, 6)).astype(np.float32)}
    return {
        "photo": random.integers(0, 256, (count, *SIDES, 3), np.uint8),
        "numbers": random.normal(size=(count, 5)).astype(np.float32),
        "place": random.integers(0, 7, count).astype(np.int32),
    }


def listed(inputs: Inputs) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": DATATYPES[str(one.dtype)], "shape": [*one.shape], "data": one.tolist()}
        for name, one in inputs.items()
    ]


def over_rest(server: Server, name: str, inputs: Inputs, **parameters: str) -> Any:
    return infer(server, name, listed(inputs), **parameters)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("name", ["siamese", "with-numbers", "alone"])
def test_answers_are_those_of_keras(server: Server, world: World, name: str, kind: str, mode: str) -> None:
    for count in (1, 3, 6):  # alone, padded, and in two batches
        inputs = rows(name, count, seed=count)
        got = over_rest(server, name + kind, inputs, mode=mode)
        np.testing.assert_allclose(got, world.expected(name, inputs), atol=1e-4)


@pytest.mark.parametrize("name", ["siamese", "with-numbers"])
def test_each_client_gets_the_answer_to_its_own_rows(server: Server, world: World, name: str) -> None:
    asked = [rows(name, 1 + seed % 3, seed) for seed in range(40)]
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda inputs: over_rest(server, name, inputs), asked)]
    for inputs, got in zip(asked, answers, strict=True):
        np.testing.assert_allclose(got, world.expected(name, inputs), atol=1e-4)


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("name", ["siamese", "with-numbers", "alone"])
def test_tensors_come_raw_or_listed_over_grpc(server: Server, world: World, name: str, is_raw: bool) -> None:
    inputs = rows(name, 3)
    fields = {"UINT8": "uint_contents", "FP32": "fp32_contents", "INT32": "int_contents"}
    request = pb.ModelInferRequest(model_name=name)
    for key, one in inputs.items():
        tensor = request.inputs.add(name=key, datatype=DATATYPES[str(one.dtype)], shape=one.shape)
        if is_raw:
            request.raw_input_contents.append(one.tobytes())
        else:
            getattr(tensor.contents, fields[tensor.datatype]).extend(one.ravel().tolist())
    with grpc.insecure_channel(server.grpc) as channel:
        answer = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    expected = world.expected(name, inputs)
    if is_raw:
        got = np.frombuffer(answer.raw_output_contents[0], np.float32)
    else:
        got = np.array(answer.outputs[0].contents.fp32_contents)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=1e-4)


def test_binary_tensors_lie_one_behind_the_other_over_rest(server: Server, world: World) -> None:
    inputs = rows("with-numbers", 2)
    tensors = listed(inputs)
    for tensor, one in zip(tensors, inputs.values(), strict=True):
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": one.nbytes}
    head = json.dumps({"inputs": tensors}).encode()
    connection = HTTPConnection(server.http, timeout=60)
    body = head + b"".join(one.tobytes() for one in inputs.values())
    connection.request(
        "POST", "/v2/models/with-numbers/infer", body, {"inference-header-content-length": str(len(head))}
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    np.testing.assert_allclose(
        np.reshape(answer["outputs"][0]["data"], (2, 3)), world.expected("with-numbers", inputs), atol=1e-4
    )


def test_programs_come_from_the_compile_cache(start_server: StartServer, world: World) -> None:
    """Programs of the first start are loaded at the second; a model that is loaded again answers as before."""
    cache = world.folder / "kept"
    models = [
        {"name": name, "source": str(world.folder / f"{name}.keras"), "buckets": [1, 4], "modes": ["xla", "graph"]}
        for name in world.models
    ]
    config = {"models": models, "compile_cache": str(cache), "model_control": True}
    for is_kept in (False, True):
        server = start_server(config)
        for name in world.models:
            inputs = rows(name, 3, seed=9)
            for mode in ("xla", "graph"):
                np.testing.assert_allclose(
                    over_rest(server, name, inputs, mode=mode), world.expected(name, inputs), atol=1e-4
                )
        if is_kept:
            assert " compiled in " not in server.stderr
            assert server.stderr.count(" loaded in ") > 0
            assert ask(server, "/v2/repository/models/siamese/load", {})[0] == 200
            inputs = rows("siamese", 2, seed=3)
            np.testing.assert_allclose(
                over_rest(server, "siamese", inputs), world.expected("siamese", inputs), atol=1e-4
            )
        server.stop()


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_encoded_images_are_decoded_beside_tensors(server: Server, world: World) -> None:
    inputs = dict(rows("with-numbers", 3))
    tensors = listed({name: inputs[name] for name in ("numbers", "place")})
    encoded = [base64.b64encode(png(one)).decode() for one in inputs["photo"]]
    tensors.append({"name": "photo", "datatype": "BYTES", "shape": [3], "data": encoded})
    status, answer = ask(server, "/v2/models/with-numbers/infer", {"inputs": tensors})
    assert status == 200, answer
    got = np.reshape(answer["outputs"][0]["data"], (3, 3))
    np.testing.assert_allclose(got, world.expected("with-numbers", inputs), atol=1e-4)


def test_one_of_two_images_may_be_encoded_and_the_other_pixels(server: Server, world: World) -> None:
    inputs = rows("siamese", 2)
    for name in ("left", "right"):
        tensors = [tensor for tensor in listed(inputs) if tensor["name"] != name]
        encoded = [base64.b64encode(png(one)).decode() for one in inputs[name]]
        tensors.append({"name": name, "datatype": "BYTES", "shape": [2, 1], "data": encoded})
        status, answer = ask(server, "/v2/models/siamese/infer", {"inputs": tensors})
        assert status == 200, answer
        got = np.reshape(answer["outputs"][0]["data"], (2, 4))
        np.testing.assert_allclose(got, world.expected("siamese", inputs), atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (SIDES[0], 1), (SIDES[0], SIDES[1] + 1)])
@pytest.mark.parametrize("name", ["left", "right"])
def test_pixels_of_another_size_beside_encoded_images_are_refused(
    server: Server, name: str, shape: tuple[int, int]
) -> None:
    encoded = base64.b64encode(png(rows("siamese", 1)["left"][0])).decode()
    other = "right" if name == "left" else "left"
    tensors = listed({name: np.zeros((1, *shape, 3), np.uint8)})
    tensors.append({"name": other, "datatype": "BYTES", "shape": [1], "data": [encoded]})
    status, answer = ask(server, "/v2/models/siamese/infer", {"inputs": tensors})
    assert (status, answer["error"]) == (
        400,
        f"{name}: expected shape [n, 12, 10, 3], got [1, {shape[0]}, {shape[1]}, 3]",
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["left", "right"])
def test_a_broken_image_is_named_by_its_input_and_its_row(server: Server, name: str, count: int) -> None:
    images = [png(one) for one in rows("siamese", count)["left"]]
    sent = {"left": images, "right": [*images]}
    sent[name][-1] = images[-1][:40]
    tensors = [
        {"name": key, "datatype": "BYTES", "shape": [count], "data": [base64.b64encode(one).decode() for one in files]}
        for key, files in sent.items()
    ]
    status, answer = ask(server, "/v2/models/siamese/infer", {"inputs": tensors})
    field, _, _ = answer["error"].partition(": ")
    assert (status, field) == (400, name if count == 1 else f"{name}[{count - 1}]")


@pytest.mark.parametrize("name", ["siamese", "with-numbers", "alone"])
def test_rows_and_columns_of_tensorflow_serving_name_the_inputs(server: Server, world: World, name: str) -> None:
    inputs = rows(name, 3)
    expected = world.expected(name, inputs)
    lists = {key: one.tolist() for key, one in inputs.items()}
    status, answer = ask(server, f"/v1/models/{name}:predict", {"inputs": lists})
    assert status == 200, answer
    np.testing.assert_allclose(answer["outputs"], expected, atol=1e-4)
    instances = [{key: one[row] for key, one in lists.items()} for row in range(3)]
    status, answer = ask(server, f"/v1/models/{name}:predict", {"instances": instances})
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], expected, atol=1e-4)


def test_the_only_input_needs_no_name_over_tensorflow_serving(server: Server, world: World) -> None:
    inputs = rows("alone", 2)
    status, answer = ask(server, "/v1/models/alone:predict", {"instances": inputs["features"].tolist()})
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], world.expected("alone", inputs), atol=1e-4)


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize(("name", "count"), [("siamese", 3), ("siamese", 400), ("with-numbers", 3), ("alone", 2)])
def test_predict_takes_several_tensors_over_grpc(
    server: Server, world: World, name: str, count: int, is_raw: bool
) -> None:
    inputs = rows(name, count)
    lists = {"uint8": "int_val", "float32": "float_val", "int32": "int_val"}
    request = tfs_pb.PredictRequest(model_spec=tfs_pb.ModelSpec(name=name))
    for key, one in inputs.items():
        tensor = request.inputs[key]
        tensor.dtype = {"uint8": tfs_pb.DT_UINT8, "float32": tfs_pb.DT_FLOAT, "int32": tfs_pb.DT_INT32}[str(one.dtype)]
        for side in one.shape:
            tensor.tensor_shape.dim.add(size=side)
        if is_raw:
            tensor.tensor_content = one.tobytes()
        else:
            getattr(tensor, lists[str(one.dtype)]).extend(one.ravel().tolist())
    with grpc.insecure_channel(server.grpc) as channel:
        answer = tfs_grpc.PredictionServiceStub(channel).Predict(request, timeout=60)
    (output,) = answer.outputs.values()
    expected = world.expected(name, inputs)
    np.testing.assert_allclose(np.reshape(output.float_val, expected.shape), expected, atol=1e-4)


def test_metadata_list_all_inputs(server: Server) -> None:
    _, metadata = ask(server, "/v2/models/with-numbers")
    assert sorted(metadata["inputs"], key=lambda one: str(one["name"])) == [
        {"name": "numbers", "datatype": "FP32", "shape": [-1, 5]},
        {"name": "photo", "datatype": "UINT8", "shape": [-1, *SIDES, 3]},
        {"name": "place", "datatype": "INT32", "shape": [-1]},
    ]
    _, metadata = ask(server, "/v2/models/alone")
    assert metadata["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, 6]}]
    _, metadata = ask(server, "/v1/models/siamese/metadata")
    inputs = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
    assert inputs.keys() == {"left", "right"}


def _wrong() -> Iterator[tuple[str, Inputs, str]]:
    given = rows("with-numbers", 2)
    yield "missing", {name: one for name, one in given.items() if name != "place"}, "no 'place'"
    yield "unknown", {**given, "mask": given["numbers"]}, "got 'mask'"
    yield "rows", {**given, "numbers": given["numbers"][:1]}, "numbers.shape: expected 2 in the first place"
    yield "type", {**given, "numbers": given["place"][:, None].repeat(5, 1)}, "numbers.datatype: expected FP32"
    yield "shape", {**given, "numbers": given["numbers"][:, :4]}, "numbers.shape: expected [n, 5]"
    yield "size", {**given, "photo": given["photo"][:, :5]}, "photo: expected shape [n, 12, 10, 3]"


@pytest.mark.parametrize(("inputs", "message"), [pytest.param(*one, id=name) for name, *one in _wrong()])
def test_a_wrong_request_is_told_which_input_is_meant(server: Server, inputs: Inputs, message: str) -> None:
    status, answer = ask(server, "/v2/models/with-numbers/infer", {"inputs": listed(inputs)})
    assert status == 400
    assert message in answer["error"]


def test_an_encoded_image_is_none_for_an_input_of_numbers(server: Server) -> None:
    body = {"inputs": [{"name": "features", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}]}
    status, answer = ask(server, "/v2/models/alone/infer", body)
    assert status == 400
    assert "features.datatype: expected FP32" in answer["error"]
