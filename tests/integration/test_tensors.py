"""Models of any outputs over every protocol, behind a front: tensors of every type, and heads that are read."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.integration.conftest import UNLIMITED, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import tensorflow_messages_pb2 as tf_pb
from xlaserve_proto import vision_pb2 as vision_pb
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from xlaserve_proto.tensorflow_serving_pb2_grpc import PredictionServiceStub
from xlaserve_proto.vision_pb2_grpc import VisionStub

SIDE, WIDE = 8, 16
PIXELS = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
TYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
LISTS = {
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}
DTYPES = {"BOOL": "?", "FP32": "<f4", "FP64": "<f8"} | {
    f"{sign}INT{bits}": f"<{kind}{bits // 8}" for sign, kind in (("", "i"), ("U", "u")) for bits in (8, 16, 32, 64)
}
BUCKETS = {"buckets": [1, 4]}
OUTPUTS = {
    "age": {"task": "regression", "values": {"age": "years"}},
    "sex": {"task": "classification", "labels": ["female", "male"], "threshold": 0.25},
}


def save(folder: Path) -> dict[str, str]:
    """Saves the models, and returns their paths."""
    import tensorflow as tf

    from xlaserve.models.networks.keras_runtime import keras

    class AllTypes(tf.Module):
        @tf.function(autograph=False)
        def give(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
            means = tf.reduce_mean(photo, axis=(1, 2)) / 4.0
            given = {name: tf.cast(means, name) for name in TYPES}
            return {**given, "bool": means > 32.0, "row": tf.cast(photo[:, 0, 0, 0], tf.int64), "deep": photo[:, None]}

    module = AllTypes()
    spec = tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, name="photo")
    tf.saved_model.save(module, str(folder / "all"), signatures=module.give.get_concrete_function(spec))
    pixels = keras.Input((SIDE, SIDE, 3))
    mean = keras.layers.GlobalAveragePooling2D()(pixels)
    total = keras.ops.sum(mean, axis=-1, keepdims=True)
    age = keras.layers.Rescaling(1 / 3, name="age")(total)
    sex = keras.layers.Rescaling(1 / 765, name="sex")(total)
    keras.Model(pixels, [age, sex]).save(folder / "heads.keras")
    keras.Model(pixels, mean).save(folder / "logits.keras")
    images = keras.Input((None, None, 3))
    keras.Model(images, keras.layers.UpSampling2D(2, name="larger")(images)).save(folder / "larger.keras")
    keras.Model(pixels, 1.0 - pixels / 255.0).save(folder / "negative.keras")
    return {file.stem: str(file) for file in folder.iterdir()}


@pytest.fixture(scope="module")
def serving(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    sources = save(tmp_path_factory.mktemp("models"))
    larger = {"resolutions": [[SIDE, SIDE], [WIDE, WIDE]], "verification": "off"}
    levels = {"task": "image", "output_range": "0..255"}
    models = [
        {"name": "all", "source": sources["all"], **BUCKETS},
        {"name": "heads", "source": sources["heads"], "outputs": OUTPUTS, **BUCKETS},
        {"name": "logits", "source": sources["logits"], "preprocess": "none", **BUCKETS},
        {"name": "chances", "source": sources["logits"], "preprocess": "none", "activation": "softmax", **BUCKETS},
        {"name": "negative", "source": sources["negative"], "task": "image", **BUCKETS},
        {"name": "enlarged", "source": sources["larger"], **levels, **larger, **BUCKETS},
        {"name": "larger", "source": sources["larger"], **larger, **BUCKETS},
    ]
    return start_module_server({"models": models, "shared_memory": True, "fronts": 1})


@pytest.fixture(scope="module")
def channel(serving: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(serving.grpc, UNLIMITED) as channel:
        yield channel


@pytest.fixture(scope="module")
def wanted() -> dict[str, NDArray[Any]]:
    """Outputs of the model `all` for PIXELS."""
    means = PIXELS.astype(np.float32).mean(axis=(1, 2)) / np.float32(4)
    given = {name: means.astype(name) for name in TYPES}
    deep = PIXELS.astype(np.float32)[:, None]
    return {**given, "bool": means > 32, "row": PIXELS[:, 0, 0, 0].astype(np.int64), "deep": deep}


def request(model: str, pixels: Any = PIXELS, *outputs: str, is_raw: bool = True) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="pixels", datatype="UINT8", shape=pixels.shape)
    if is_raw:
        message.raw_input_contents.append(pixels.tobytes())
    else:
        tensor.contents.uint_contents.extend(pixels.reshape(-1).tolist())
    for name in outputs:
        message.outputs.add(name=name)
    return message


def read(response: pb.ModelInferResponse) -> dict[str, NDArray[Any]]:
    found = {}
    for index, output in enumerate(response.outputs):
        dtype = np.dtype(DTYPES[output.datatype])
        if response.raw_output_contents:
            values = np.frombuffer(response.raw_output_contents[index], dtype)
        else:
            values = np.array(getattr(output.contents, LISTS[output.datatype]), dtype)
        found[output.name] = values.reshape(tuple(output.shape))
    return found


def post(server: Server, path: str, body: object) -> tuple[Any, bytes]:
    """Returns the JSON of an answer, and the bytes behind it."""
    connection = HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        size = int(response.headers.get("inference-header-content-length") or len(data))
        return json.loads(data[:size]), data[size:]
    finally:
        connection.close()


def check(found: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]]) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("is_raw", [True, False])
def test_open_inference_over_grpc_gives_tensors_of_every_type(
    channel: grpc.Channel, wanted: dict[str, NDArray[Any]], is_raw: bool
) -> None:
    stub = GRPCInferenceServiceStub(channel)
    check(read(stub.ModelInfer(request("all", is_raw=is_raw))), wanted)
    some = ("bool", "deep", "uint64")
    check(read(stub.ModelInfer(request("all", PIXELS, *some, is_raw=is_raw))), {name: wanted[name] for name in some})
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request("all", PIXELS, "scores"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    described = stub.ModelMetadata(pb.ModelMetadataRequest(name="all"))
    assert {one.name: DTYPES[one.datatype] for one in described.outputs} == {
        name: values.dtype.str.replace("|", "<" if values.dtype.kind != "b" else "").replace("b1", "?")
        for name, values in wanted.items()
    }
    assert described.properties["task"] == "tensors"
    assert "several outputs" in described.properties["task_reason"]


@pytest.mark.parametrize("is_binary", [True, False])
def test_open_inference_over_rest_gives_tensors_of_every_type(
    serving: Server, wanted: dict[str, NDArray[Any]], is_binary: bool
) -> None:
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": PIXELS.shape, "data": PIXELS.tolist()}
    body = {"inputs": [pixels], "parameters": {"binary_data_output": is_binary}}
    answer, rest = post(serving, "/v2/models/all/infer", body)
    found = {}
    for output in answer["outputs"]:
        dtype = np.dtype(DTYPES[output["datatype"]])
        if is_binary:
            size = output["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        else:
            values = np.array(output["data"], dtype)
        found[output["name"]] = values.reshape(output["shape"])
    assert not rest
    check(found, wanted)


def test_tensors_go_through_shared_memory(channel: grpc.Channel, wanted: dict[str, NDArray[Any]]) -> None:
    stub = GRPCInferenceServiceStub(channel)
    names, place = ("bool", "float64", "row"), 0
    file = Path("/dev/shm") / f"xlaserve-tensors-{os.getpid()}"
    file.write_bytes(bytes(4096))
    try:
        register = pb.SystemSharedMemoryRegisterRequest(name="tensors", key=f"/{file.name}", byte_size=4096)
        stub.SystemSharedMemoryRegister(register)
        message = request("all", PIXELS, *names)
        for output in message.outputs:
            size_bytes = wanted[output.name].nbytes
            output.parameters["shared_memory_region"].string_param = "tensors"
            output.parameters["shared_memory_byte_size"].int64_param = size_bytes
            output.parameters["shared_memory_offset"].int64_param = place
            place += size_bytes
        stub.ModelInfer(message)
        written = file.read_bytes()
        for name in names:
            size_bytes = wanted[name].nbytes
            values, written = np.frombuffer(written[:size_bytes], wanted[name].dtype), written[size_bytes:]
            np.testing.assert_allclose(values.reshape(wanted[name].shape), wanted[name], rtol=1e-6)
    finally:
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        file.unlink()


def test_tensorflow_serving_gives_tensors_of_every_type(
    serving: Server, channel: grpc.Channel, wanted: dict[str, NDArray[Any]]
) -> None:
    import tensorflow as tf

    message = tf_pb.PredictRequest(model_spec=tf_pb.ModelSpec(name="all"))
    sent = tf.make_tensor_proto(PIXELS).SerializeToString()
    message.inputs["pixels"].MergeFromString(sent)
    response = PredictionServiceStub(channel).Predict(message)
    proto = type(tf.make_tensor_proto(0))
    check(
        {name: tf.make_ndarray(proto.FromString(one.SerializeToString())) for name, one in response.outputs.items()},
        wanted,
    )
    message.output_filter.extend(["uint16", "bool"])
    assert set(PredictionServiceStub(channel).Predict(message).outputs) == {"uint16", "bool"}
    answer, _ = post(serving, "/v1/models/all:predict", {"instances": PIXELS.tolist()})
    columns = {name: np.array([row[name] for row in answer["predictions"]]) for name in answer["predictions"][0]}
    check({name: values.astype(wanted[name].dtype) for name, values in columns.items()}, wanted)


def test_outputs_larger_than_the_images_pass_a_front_at_every_resolution(channel: grpc.Channel) -> None:
    stub = GRPCInferenceServiceStub(channel)
    for side in (SIDE, WIDE):
        pixels = np.random.default_rng(1).integers(0, 256, (4, side, side, 3), np.uint8)
        (larger,) = read(stub.ModelInfer(request("larger", pixels))).values()
        np.testing.assert_array_equal(larger, pixels.repeat(2, axis=1).repeat(2, axis=2))


def test_images_are_levels_over_every_protocol(serving: Server, channel: grpc.Channel) -> None:
    import tensorflow as tf

    stub = GRPCInferenceServiceStub(channel)
    check(read(stub.ModelInfer(request("negative"))), {"image": 255 - PIXELS})
    described = stub.ModelMetadata(pb.ModelMetadataRequest(name="negative"))
    assert [(one.name, one.datatype, [*one.shape]) for one in described.outputs] == [
        ("image", "UINT8", [-1, SIDE, SIDE, 3])
    ]
    assert (described.properties["task"], described.properties["output_color"]) == ("image", "rgb")
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": PIXELS.shape, "data": PIXELS.tolist()}
    answer, _ = post(serving, "/v2/models/negative/infer", {"inputs": [pixels]})
    (output,) = answer["outputs"]
    assert (output["datatype"], output["data"]) == ("UINT8", (255 - PIXELS).ravel().tolist())
    answer, _ = post(serving, "/v1/models/negative:predict", {"instances": PIXELS.tolist()})
    np.testing.assert_array_equal(answer["predictions"], 255 - PIXELS)
    message = tf_pb.PredictRequest(model_spec=tf_pb.ModelSpec(name="negative"))
    message.inputs["pixels"].MergeFromString(tf.make_tensor_proto(PIXELS).SerializeToString())
    (proto,) = PredictionServiceStub(channel).Predict(message).outputs.values()
    predicted = type(tf.make_tensor_proto(0)).FromString(proto.SerializeToString())
    np.testing.assert_array_equal(tf.make_ndarray(predicted), 255 - PIXELS)


def test_an_image_comes_back_in_the_size_that_was_sent(serving: Server) -> None:
    sent = np.full((20, 40, 3), 200, np.uint8)
    sent[:, 20:] = 50
    answer, _ = post(serving, "/v1/models/negative:transform", {"image": encoded(sent)})
    (image,) = answer["images"]
    assert (image["height"], image["width"]) == (20, 40)
    for file in (base64.b64decode(image["png"]), picture(serving, "negative", sent)):
        pixels = np.asarray(Image.open(io.BytesIO(file)))
        assert pixels.shape == sent.shape
        np.testing.assert_array_equal(pixels[:, :5], 55)
        np.testing.assert_array_equal(pixels[:, 35:], 205)


def test_an_image_that_the_model_enlarges_comes_back_larger(serving: Server) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(picture(serving, "enlarged", PIXELS[0]))))
    np.testing.assert_array_equal(pixels, PIXELS[0].repeat(2, axis=0).repeat(2, axis=1))


def test_models_that_make_no_image_have_none_to_give(serving: Server) -> None:
    status, body = transform(serving, "heads", PIXELS[0], "image/png")
    assert status == 400
    assert b"expected a model for image" in body


def encoded(pixels: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def transform(server: Server, model: str, pixels: NDArray[np.uint8], accept: str) -> tuple[int, bytes]:
    connection = HTTPConnection(server.http, timeout=60)
    try:
        body = base64.b64decode(encoded(pixels))
        headers = {"accept": accept, "content-type": "image/png"}
        connection.request("POST", f"/v1/models/{model}:transform", body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def picture(server: Server, model: str, pixels: NDArray[np.uint8]) -> bytes:
    status, body = transform(server, model, pixels, "image/png")
    assert status == 200, body
    return body


def test_methods_answer_from_the_head_of_their_task(serving: Server, channel: grpc.Channel) -> None:
    means = PIXELS.astype(np.float32).mean(axis=(1, 2, 3))
    tensors = read(GRPCInferenceServiceStub(channel).ModelInfer(request("heads")))
    np.testing.assert_allclose(tensors["age"], means[:, None], rtol=1e-5)
    np.testing.assert_allclose(tensors["sex"], np.stack((1 - means / 255, means / 255), axis=1), rtol=1e-5)
    asked = request("heads", PIXELS, "age", "sex")
    asked.outputs[1].parameters["classification"].int64_param = 1
    answered = GRPCInferenceServiceStub(channel).ModelInfer(asked)
    assert [(one.name, one.datatype, [*one.shape]) for one in answered.outputs] == [
        ("age", "FP32", [3, 1]),
        ("sex", "BYTES", [3, 1]),
    ]
    assert answered.raw_output_contents[1].count(b":1:male") == 3
    asked.outputs[0].parameters["classification"].int64_param = 1
    with pytest.raises(grpc.RpcError) as refused:
        GRPCInferenceServiceStub(channel).ModelInfer(asked)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    pixels = vision_pb.Pixels(images=3, height=SIDE, width=SIDE, rgb=PIXELS.tobytes())
    vision = VisionStub(channel)
    classified = vision.Classify(vision_pb.ClassifyRequest(model="heads", pixels=pixels)).classifications
    assert [[one.label for one in found.categories] for found in classified] == [["male", "female"]] * 3
    with pytest.raises(grpc.RpcError) as refused:
        vision.Embed(vision_pb.EmbedRequest(model="heads", pixels=pixels))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    described = GRPCInferenceServiceStub(channel).ModelMetadata(pb.ModelMetadataRequest(name="heads")).properties
    assert described["readings"] == "age: regression (age in years); sex: classification (female, male)"


def test_logits_are_warned_of_until_they_have_an_activation(channel: grpc.Channel) -> None:
    models = {one.name: one for one in VisionStub(channel).ListModels(vision_pb.ListModelsRequest()).models}
    assert {models[name].task for name in ("logits", "chances")} == {"classification"}
    (warning,) = models["logits"].warnings
    assert "activation: softmax" in warning
    assert not models["chances"].warnings
    (scores,) = read(GRPCInferenceServiceStub(channel).ModelInfer(request("chances"))).values()
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
