"""What users of TensorFlow Serving call: its stubs and TensorFlow's tensors, and its REST with requests.

In an environment of its own: prints how each call ended, as JSON.

python tensorflow_serving_calls.py GRPC_HOST:PORT HTTP_HOST:PORT IMAGE.png
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import requests
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

MODEL = "digits"
TIMEOUT_S = 30
SHAPE = (2, 32, 32, 3)
TARGET, HTTP, IMAGE = sys.argv[1:]
PNG = Path(IMAGE).read_bytes()
URL = f"http://{HTTP}/v1/models/{MODEL}"
CHANNEL = grpc.insecure_channel(TARGET)
PREDICTION = prediction_service_pb2_grpc.PredictionServiceStub(CHANNEL)
MODELS = model_service_pb2_grpc.ModelServiceStub(CHANNEL)


def predict(name: str, tensor: tf.TensorProto, *outputs: str, signature: str = "serving_default") -> Any:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = MODEL
    request.model_spec.signature_name = signature
    request.inputs[name].CopyFrom(tensor)
    request.output_filter.extend(outputs)
    return PREDICTION.Predict(request, TIMEOUT_S)


def scores(response: Any) -> Any:
    found = tf.make_ndarray(response.outputs["scores"])
    assert found.shape == (2, 10)
    np.testing.assert_array_equal(found.reshape(-1), np.array(response.outputs["scores"].float_val, np.float32))
    assert response.model_spec.version.value == 1
    return found


def metadata() -> None:
    """`GetModelMetadata` with `signature_def`, unpacked into a SignatureDefMap"""
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = MODEL
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert PREDICTION.GetModelMetadata(request, TIMEOUT_S).metadata["signature_def"].Unpack(signatures)
    signature = signatures.signature_def["serving_default"]
    assert signature.method_name == tf.compat.v1.saved_model.signature_constants.PREDICT_METHOD_NAME
    assert tf.as_dtype(signature.inputs["pixels"].dtype) == tf.uint8
    assert [dim.size for dim in signature.inputs["pixels"].tensor_shape.dim] == [-1, 32, 32, 3]
    assert tf.as_dtype(signature.outputs["scores"].dtype) == tf.float32


def status() -> None:
    """`GetModelStatus`; NOT_FOUND for an unknown model"""
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = MODEL
    (version,) = MODELS.GetModelStatus(request, TIMEOUT_S).model_version_status
    assert version.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
    request.model_spec.name = "unknown"
    refused(MODELS.GetModelStatus, request, grpc.StatusCode.NOT_FOUND)


def pixels_of_all_types() -> None:
    """`Predict` with `pixels` by `tf.make_tensor_proto`: uint8, int32, float16 and float32"""
    for dtype in (np.uint8, np.int32, np.float16, np.float32):
        pixels = np.random.default_rng(0).integers(0, 256, SHAPE).astype(dtype)
        scores(predict("pixels", tf.make_tensor_proto(pixels)))


def listed_pixels() -> None:
    """`Predict` with `int_val`, `float_val` and `half_val`, one value for all pixels among them"""
    shape = tf.TensorShape(SHAPE).as_proto()
    nines = np.full(SHAPE, 9, np.uint8)
    expected = scores(predict("pixels", tf.make_tensor_proto(nines)))
    tensor_type = type(tf.make_tensor_proto(0))
    size = nines.size
    half = int(np.float16(9).view(np.uint16))
    for dtype, values in (
        (tf.uint8, {"int_val": [9] * size}),
        (tf.int32, {"int_val": [9] * size}),
        (tf.float32, {"float_val": [9.0] * size}),
        (tf.float16, {"half_val": [half] * size}),
        (tf.float32, {"float_val": [9.0]}),
        (tf.uint8, {"int_val": [9]}),
    ):
        listed = tensor_type(dtype=dtype.as_datatype_enum, tensor_shape=shape, **values)
        np.testing.assert_array_equal(scores(predict("pixels", listed)), expected)


def images() -> None:
    """`Predict` with `image`, a tensor of encoded images; `output_filter`; `Predict.future`"""
    expected = scores(predict("image", tf.make_tensor_proto([PNG, PNG])))
    assert expected.argmax(axis=1).tolist() == [3, 3]
    np.testing.assert_array_equal(scores(predict("image", tf.make_tensor_proto([PNG] * 2), "scores")), expected)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = MODEL
    request.model_spec.version.value = 1
    request.inputs["image"].CopyFrom(tf.make_tensor_proto([PNG, PNG], shape=[2]))
    np.testing.assert_array_equal(scores(PREDICTION.Predict.future(request, TIMEOUT_S).result()), expected)


def many_images() -> None:
    """`Predict` with a large message of pixels, and of encoded images"""
    pixels = np.random.default_rng(0).integers(0, 256, (512, *SHAPE[1:]), np.uint8)
    assert tf.make_ndarray(predict("pixels", tf.make_tensor_proto(pixels)).outputs["scores"]).shape == (512, 10)
    response = predict("image", tf.make_tensor_proto([PNG] * 512))
    assert set(tf.make_ndarray(response.outputs["scores"]).argmax(axis=1)) == {3}


def errors() -> None:
    """Wrong inputs, outputs and signatures: INVALID_ARGUMENT; unknown versions and labels: NOT_FOUND"""
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    image = tf.make_tensor_proto([PNG])
    refused(partial(predict, "other", image), code=invalid)
    refused(partial(predict, "image", image, "other"), code=invalid)
    refused(partial(predict, "image", image, signature="other"), code=invalid)
    refused(partial(predict, "pixels", tf.make_tensor_proto(np.zeros(SHAPE))), code=invalid)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = MODEL
    request.inputs["image"].CopyFrom(image)
    request.model_spec.version_label = "stable"
    refused(PREDICTION.Predict, request, grpc.StatusCode.NOT_FOUND)
    request.model_spec.version.value = 7
    refused(PREDICTION.Predict, request, grpc.StatusCode.NOT_FOUND)


def refused(call: Callable[..., Any], request: Any = None, code: Any = None) -> None:
    try:
        call(request, TIMEOUT_S) if request is not None else call()
    except grpc.RpcError as error:
        assert error.code() == code, error
    else:
        raise AssertionError("not refused")


def example(**features: Any) -> Any:
    return tf.train.Example(features=tf.train.Features(feature=features))


def of_bytes(value: bytes) -> Any:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def names() -> None:
    """`Predict` and `:predict` with names that another server gave its tensors (`input_name`, `output_name`)"""
    request = predict_pb2.PredictRequest(output_filter=["probs"])
    request.model_spec.name = "digits-named"
    request.inputs["input_1"].CopyFrom(tf.make_tensor_proto(np.full(SHAPE, 9, np.float32)))
    assert tf.make_ndarray(PREDICTION.Predict(request, TIMEOUT_S).outputs["probs"]).shape == (2, 10)
    encoded = {"b64": base64.b64encode(PNG).decode()}
    answer = requests.post(f"{URL}-named:predict", json={"instances": [{"input_1": encoded}]}, timeout=TIMEOUT_S)
    assert np.argmax(answer.json()["predictions"], axis=1).tolist() == [3]


def several_inputs() -> None:
    """`Predict` and `:predict` of a model of several inputs: two images, as pixels and encoded, and numbers"""
    values = {"before": np.full(SHAPE, 3, np.uint8), "after": np.full(SHAPE, 9, np.uint8), "weight": [[0.5], [2.0]]}
    expected = [[3] * 3, [12] * 3]
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "change"
    for name, value in values.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    np.testing.assert_allclose(tf.make_ndarray(PREDICTION.Predict(request, TIMEOUT_S).outputs["change"]), expected)
    request.inputs["after"].CopyFrom(tf.make_tensor_proto([PNG, PNG]))
    assert tf.make_ndarray(PREDICTION.Predict(request, TIMEOUT_S).outputs["change"]).shape == (2, 3)
    columns = {name: np.asarray(value).tolist() for name, value in values.items()}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(2)]
    for body, key in (({"inputs": columns}, "outputs"), ({"instances": rows}, "predictions")):
        response = requests.post(f"http://{HTTP}/v1/models/change:predict", json=body, timeout=TIMEOUT_S)
        response.raise_for_status()
        np.testing.assert_allclose(response.json()[key], expected)


def classify() -> None:
    """`Classify` with `tf.train.Example`s; `Regress` of a classifier is UNIMPLEMENTED"""
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name = MODEL
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))
    others = {"image/format": of_bytes(b"png"), "image/class/label": label}
    for count in (1, 200):
        del request.input.example_list.examples[:]
        request.input.example_list.examples.extend([example(**others, **{"image/encoded": of_bytes(PNG)})] * count)
        found = PREDICTION.Classify(request, TIMEOUT_S).result.classifications
        assert [one.classes[0].label for one in found] == ["3"] * count
        assert 0 < found[0].classes[0].score <= 1
    regression = regression_pb2.RegressionRequest(model_spec=request.model_spec, input=request.input)
    refused(PREDICTION.Regress, regression, grpc.StatusCode.UNIMPLEMENTED)


def reload() -> None:
    """`HandleReloadConfigRequest` with a model that is configured; NOT_FOUND for another"""
    request = model_management_pb2.ReloadConfigRequest()
    request.config.model_config_list.config.add(name=MODEL, model_platform="tensorflow")
    assert MODELS.HandleReloadConfigRequest(request, TIMEOUT_S).status.error_code == 0
    request.config.model_config_list.config[0].name = "unknown"
    refused(MODELS.HandleReloadConfigRequest, request, grpc.StatusCode.NOT_FOUND)


def rest_rows() -> None:
    """REST: `:predict` with `instances`, nested lists or `{"b64": ...}`, bare or by the input's name"""
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE)
    encoded = {"b64": base64.b64encode(PNG).decode()}
    for instances in (
        pixels.tolist(),
        pixels.astype(float).tolist(),
        [{"pixels": one.tolist()} for one in pixels],
        [encoded, encoded],
        [{"image": encoded}] * 2,
    ):
        body = json.dumps({"signature_name": "serving_default", "instances": instances})
        response = requests.post(f"{URL}:predict", data=body, timeout=TIMEOUT_S)
        response.raise_for_status()
        assert np.array(response.json()["predictions"]).shape == (2, 10)
    assert np.argmax(response.json()["predictions"][0]) == 3


def rest_columns() -> None:
    """REST: `:predict` with `inputs`, of a version"""
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE)
    encoded = {"b64": base64.b64encode(PNG).decode()}
    for inputs in (pixels.tolist(), {"pixels": pixels.tolist()}, {"image": [encoded] * 2}, [encoded] * 2):
        response = requests.post(f"{URL}/versions/1:predict", json={"inputs": inputs}, timeout=TIMEOUT_S)
        response.raise_for_status()
        assert np.array(response.json()["outputs"]).shape == (2, 10)


def rest_classify() -> None:
    """REST: `:classify` with `examples`"""
    examples = [{"image": {"b64": base64.b64encode(PNG).decode()}}]
    response = requests.post(f"{URL}:classify", data=json.dumps({"examples": examples}), timeout=TIMEOUT_S)
    response.raise_for_status()
    ((likeliest, *_),) = response.json()["results"]
    assert likeliest[0] == "3"


def rest_models() -> None:
    """REST: the status and the metadata of a model; errors"""
    found = requests.get(URL, timeout=TIMEOUT_S).json()
    good = {"error_code": "OK", "error_message": ""}
    assert found == {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": good}]}
    described = requests.get(f"{URL}/versions/1/metadata", timeout=TIMEOUT_S).json()
    signature = described["metadata"]["signature_def"]["signature_def"]["serving_default"]
    dims = signature["outputs"]["scores"]["tensor_shape"]["dim"]
    assert [dim["size"] for dim in dims] == ["-1", "10"]
    assert requests.get(f"{URL}/versions/7", timeout=TIMEOUT_S).status_code == 404
    wrong = requests.post(f"{URL}:predict", json={"instances": []}, timeout=TIMEOUT_S)
    assert wrong.status_code == 400
    assert wrong.json()["error"]


CALLS: tuple[Callable[[], None], ...] = (
    metadata,
    status,
    pixels_of_all_types,
    listed_pixels,
    images,
    many_images,
    errors,
    names,
    several_inputs,
    classify,
    reload,
    rest_rows,
    rest_columns,
    rest_classify,
    rest_models,
)


def outcome(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    json.dump({call.__name__: outcome(call) for call in CALLS}, sys.stdout)
