"""TensorFlow Serving's protocols over real sockets; its own stubs call in tests/clients."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import warnings
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import UNLIMITED, Server, StartServer

from xlaserve_proto import tensorflow_messages_pb2 as pb
from xlaserve_proto import vision_pb2 as vision_pb
from xlaserve_proto.tensorflow_serving_pb2_grpc import ModelServiceStub, PredictionServiceStub
from xlaserve_proto.vision_pb2_grpc import VisionStub

GRAPH: dict[str, Any] = {"modes": ["graph"], "buckets": [1, 2, 4]}
CONFIG: dict[str, Any] = {
    "models": [
        {"name": "digits", "source": "builtin:digits", **GRAPH},
        {"name": "detector", "source": "builtin:shapes-detector", **GRAPH},
        {"name": "segmenter", "source": "builtin:shapes-segmenter", "metadata_input": "image", **GRAPH},
    ]
}
SHAPES = Path(__file__).parents[2] / "scripts" / "samples" / "shapes" / "circle_square_triangle.jpg"
KEYS = {"reader": "a-key-of-a-reader", "operator": "a-key-of-an-operator"}


@pytest.fixture(scope="module")
def serving(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("models")
    names = folder / "names.txt"
    names.write_text("\n".join(f"digit {number}" for number in range(10)))
    digits, *others = CONFIG["models"]
    brightness = {"name": "brightness", "source": save_brightness(folder), "preprocess": "none", **GRAPH}
    return start_module_server({"models": [{**digits, "labels": str(names)}, *others, brightness]})


def save_brightness(folder: Path) -> str:
    """Saves a model that answers an image with the mean of its pixels, and returns the path."""
    from xlaserve.models.networks.keras_runtime import keras

    third = keras.initializers.Constant(1 / 3)
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1, kernel_initializer=third, use_bias=False)]
    path = str(folder / "brightness.keras")
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        keras.Sequential([keras.Input((8, 8, 3)), *layers]).save(path)
    return path


@pytest.fixture(scope="module")
def prediction(serving: Server) -> Iterator[PredictionServiceStub]:
    with grpc.insecure_channel(serving.grpc, UNLIMITED) as channel:
        yield PredictionServiceStub(channel)


def ask(server: Server, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = HTTPConnection(server.http, timeout=60)
    try:
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def encoded(*images: bytes, model: str = "digits") -> pb.PredictRequest:
    request = pb.PredictRequest(model_spec=pb.ModelSpec(name=model))
    tensor = request.inputs["image"]
    tensor.dtype = pb.DT_STRING
    tensor.tensor_shape.dim.add(size=len(images))
    tensor.string_val.extend(images)
    return request


def values(tensor: pb.TensorProto) -> Any:
    listed = tensor.float_val if tensor.dtype == pb.DT_FLOAT else tensor.int_val
    return np.array(listed).reshape([dim.size for dim in tensor.tensor_shape.dim])


def b64(image: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(image).decode()}


def test_rest_answers_what_grpc_answers(
    serving: Server, prediction: PredictionServiceStub, scans: dict[str, bytes]
) -> None:
    response = prediction.Predict(encoded(*scans.values()))
    scores = values(response.outputs["scores"])
    assert scores.argmax(axis=1).tolist() == [*map(int, scans)]
    images = [b64(scan) for scan in scans.values()]
    _, rows = ask(serving, "/v1/models/digits:predict", {"instances": images})
    np.testing.assert_allclose(rows["predictions"], scores, rtol=1e-5)
    _, columns = ask(serving, "/v1/models/digits/versions/1:predict", {"inputs": {"image": images}})
    np.testing.assert_allclose(columns["outputs"], scores, rtol=1e-5)


def test_several_outputs_are_objects(serving: Server, prediction: PredictionServiceStub) -> None:
    photo = SHAPES.read_bytes()
    outputs = {
        name: values(tensor) for name, tensor in prediction.Predict(encoded(photo, model="detector")).outputs.items()
    }
    assert set(outputs) == {"boxes", "scores", "classes", "count"}
    _, rows = ask(serving, "/v1/models/detector:predict", {"instances": [b64(photo)]})
    _, columns = ask(serving, "/v1/models/detector:predict", {"inputs": [b64(photo)]})
    for name, expected in outputs.items():
        np.testing.assert_allclose(rows["predictions"][0][name], expected[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(columns["outputs"][name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("images", [1, 20])
def test_maps_are_integers_however_many(serving: Server, prediction: PredictionServiceStub, images: int) -> None:
    photo = SHAPES.read_bytes()
    tensor = prediction.Predict(encoded(*[photo] * images, model="segmenter")).outputs["class_map"]
    assert tensor.dtype == pb.DT_UINT8
    _, answered = ask(serving, "/v1/models/segmenter:predict", {"instances": [b64(photo)] * images})
    np.testing.assert_array_equal(answered["predictions"], values(tensor))


def test_large_pixels_in_json_are_read(serving: Server) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3))
    status, answered = ask(serving, "/v1/models/digits:predict", {"instances": pixels.tolist()})
    assert status == 200
    assert np.array(answered["predictions"]).shape == (200, 10)


def test_classes_have_their_labels(serving: Server, prediction: PredictionServiceStub, scans: dict[str, bytes]) -> None:
    request = pb.ClassificationRequest(model_spec=pb.ModelSpec(name="digits"))
    for scan in scans.values():
        entry = request.input.example_list.examples.add().features.feature.add(key="image")
        entry.value.bytes_list.value.append(scan)
    found = prediction.Classify(request).result.classifications
    assert [one.classes[0].label for one in found] == [f"digit {name}" for name in scans]
    examples = [{"image": b64(scan)} for scan in scans.values()]
    _, answered = ask(serving, "/v1/models/digits:classify", {"examples": examples})
    assert [row[0][0] for row in answered["results"]] == [f"digit {name}" for name in scans]
    assert answered["results"][0][0][1] == pytest.approx(found[0].classes[0].score, rel=1e-5)


def test_metadata_list_the_input_that_the_settings_name(serving: Server, prediction: PredictionServiceStub) -> None:
    for model, name, shape in (("digits", "pixels", [-1, 32, 32, 3]), ("segmenter", "image", [-1])):
        spec = pb.ModelSpec(name=model)
        response = prediction.GetModelMetadata(
            pb.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
        )
        held = response.metadata["signature_def"]
        assert held.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
        signature = pb.SignatureDefMap.FromString(held.value).signature_def["serving_default"]
        ((found, info),) = signature.inputs.items()
        assert (found, [dim.size for dim in info.tensor_shape.dim]) == (name, shape)
        _, described = ask(serving, f"/v1/models/{model}/metadata")
        assert described["model_spec"] == {"name": model, "signature_name": "", "version": "1"}
        listed = described["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert [int(dim["size"]) for dim in listed["inputs"][name]["tensor_shape"]["dim"]] == shape


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/models/unknown:predict", {"instances": [1]}, 404),
        ("/v1/models/digits/versions/7:predict", {"instances": [1]}, 404),
        ("/v1/models/digits/labels/stable:predict", {"instances": [1]}, 404),
        ("/v1/models/digits:predict", {"instances": [1]}, 400),
        ("/v1/models/digits:predict", {"instances": [[[[0.5, 0.5, 0.5]]]]}, 400),
        ("/v1/models/digits:regress", {"examples": [{}]}, 501),
        ("/v1/models/detector:classify", {"examples": [{"image": {"b64": "aGk="}}]}, 400),
        ("/v1/models/unknown", None, 404),
        ("/v1/models/digits/versions/7", None, 404),
        ("/v1/models/digits/labels/stable/metadata", None, 404),
    ],
)
def test_errors_over_rest_say_what_is_wrong(serving: Server, path: str, body: object, status: int) -> None:
    code, answered = ask(serving, path, body)
    assert code == status
    assert isinstance(answered["error"], str)


def test_what_is_not_spoken_is_unimplemented(prediction: PredictionServiceStub) -> None:
    large = pb.Input(example_list=pb.ExampleList(examples=[pb.Example()] * 3000))
    with pytest.raises(grpc.RpcError) as refused:
        prediction.Regress(pb.RegressionRequest(model_spec=pb.ModelSpec(name="digits"), input=large))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "one number, this has scores [-1, 10]" in str(refused.value.details())
    with pytest.raises(grpc.RpcError) as refused:
        prediction.MultiInference(pb.MultiInferenceRequest(input=large))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_requests_are_counted_as_those_of_other_protocols_are(serving: Server, scans: dict[str, bytes]) -> None:
    labels = {"model": "digits", "method": "predict", "status": "OK"}
    before = serving.metric("xlaserve_requests_total", **labels)
    ask(serving, "/v1/models/digits:predict", {"instances": [b64(scans["3"])]})
    assert serving.metric("xlaserve_requests_total", **labels) == before + 1


def test_models_are_reloaded_by_operators_alone(start_server: StartServer, tmp_path: Path) -> None:
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    callers = [
        {"name": "reader", "key_sha256": hashes["reader"], "roles": ["infer"]},
        {"name": "operator", "key_sha256": hashes["operator"], "roles": ["admin"]},
    ]
    access = tmp_path / "access.yaml"
    access.write_text(json.dumps({"callers": callers}))
    noop = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
    server = start_server({"models": [noop], "access": str(access)})
    bearer = {name: ("authorization", f"Bearer {key}") for name, key in KEYS.items()}

    with grpc.insecure_channel(server.grpc) as channel:
        models, prediction = ModelServiceStub(channel), PredictionServiceStub(channel)
        request = pb.ReloadConfigRequest()
        request.config.model_config_list.config.add(name="noop", model_platform="tensorflow")

        def reload(who: str) -> grpc.StatusCode:
            try:
                models.HandleReloadConfigRequest(request, metadata=(bearer[who],), timeout=60)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert reload("reader") is grpc.StatusCode.PERMISSION_DENIED
        assert reload("operator") is grpc.StatusCode.OK
        config = request.config.model_config_list.config[0]
        config.base_path = "/models/another"
        assert reload("operator") is grpc.StatusCode.INVALID_ARGUMENT
        config.base_path = ""
        config.version_labels["stable"] = 1
        assert reload("reader") is grpc.StatusCode.PERMISSION_DENIED
        config.version_labels.clear()
        config.name = "unknown"
        assert reload("operator") is grpc.StatusCode.NOT_FOUND

        spec = pb.ModelSpec(name="noop")
        status = models.GetModelStatus(pb.GetModelStatusRequest(model_spec=spec), metadata=(bearer["reader"],))
        assert [one.state for one in status.model_version_status] == [pb.ModelVersionStatus.AVAILABLE]
        with pytest.raises(grpc.RpcError) as refused:
            prediction.Predict(pb.PredictRequest(model_spec=spec))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ask(server, "/v1/models/noop:predict", {"instances": [1]})[0] == 401
    assert ask(server, "/v1/models/noop", headers=dict([bearer["reader"]]))[0] == 200


def test_a_reload_moves_labels_without_loading_and_checks_the_policy(start_server: StartServer) -> None:
    noop = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
    labelled = {**noop, "version": 1, "version_labels": {"stable": 1}}
    server = start_server({"models": [labelled, {**noop, "version": 2}]})
    with grpc.insecure_channel(server.grpc) as channel:
        models, vision = ModelServiceStub(channel), VisionStub(channel)

        def answering(label: str) -> str:
            pixels = vision_pb.Pixels(images=1, height=224, width=224, rgb=bytes(224 * 224 * 3))
            request = vision_pb.ClassifyRequest(model="noop", version=label, pixels=pixels)
            return str(vision.Classify(request, timeout=60).version)

        def reload(**settings: Any) -> tuple[grpc.StatusCode, str]:
            request = pb.ReloadConfigRequest()
            request.config.model_config_list.config.add(name="noop", **settings)
            try:
                models.HandleReloadConfigRequest(request, timeout=60)
            except grpc.RpcError as error:
                return error.code(), str(error.details())
            return grpc.StatusCode.OK, ""

        ok, invalid = (grpc.StatusCode.OK, ""), grpc.StatusCode.INVALID_ARGUMENT
        assert answering("") == "1"
        both = {"specific": {"versions": [1, 2]}}
        assert reload(version_labels={"stable": 2, "old": 1}, model_version_policy=both) == ok
        assert [answering(label) for label in ("", "stable", "old")] == ["2", "2", "1"]
        assert server.stderr.count("noop version 1: ready") == 1, "nothing was loaded again"
        for labels, said in (
            ({"stable": 3}, "version_labels.stable: expected a version that is ready (1, 2), got 3"),
            ({"2": 1}, "version_labels: expected labels such as stable, got '2'"),
            ({"": 1}, "version_labels: expected labels such as stable, got ''"),
        ):
            assert reload(version_labels=labels) == (invalid, said)
            assert answering("") == "2", "what is refused moves nothing"
        code, said = reload(model_version_policy={"specific": {"versions": [2]}})
        assert code is invalid
        assert "expected the versions that the server's file has (1, 2), got 2" in said
        code, said = reload(model_version_policy={"latest": {}})
        assert (code, "set `versions` in the server's file" in said) == (grpc.StatusCode.UNIMPLEMENTED, True)
        assert answering("") == "2"
        assert reload() == ok
        assert answering("") == "1", "the file has it so"


def test_the_state_of_a_model_that_failed_says_why(start_server: StartServer) -> None:
    broken = {"name": "broken", "source": "/nonexistent/secret/broken.keras"}
    noop = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
    server = start_server({"models": [noop, broken], "exit_on_model_failure": False})
    code, answered = ask(server, "/v1/models/broken")
    (version,) = answered["model_version_status"]
    assert (code, version["state"], version["status"]["error_code"]) == (200, "END", "FAILED_PRECONDITION")
    assert "secret" not in version["status"]["error_message"]


def test_a_model_of_one_number_for_an_image_answers_regressions(serving: Server) -> None:
    images = []
    for grey in (20, 200):
        held = io.BytesIO()
        Image.new("RGB", (16, 16), (grey, grey, grey)).save(held, "PNG")
        images.append(held.getvalue())
    examples = pb.ExampleList()
    for image in images:
        entry = examples.examples.add().features.feature.add(key="image/encoded")
        entry.value.bytes_list.value.append(image)
    request = pb.RegressionRequest(model_spec=pb.ModelSpec(name="brightness"), input=pb.Input(example_list=examples))
    with grpc.insecure_channel(serving.grpc, UNLIMITED) as channel:
        answered = PredictionServiceStub(channel).Regress(request)
    assert [one.value for one in answered.result.regressions] == pytest.approx([20, 200], abs=0.01)
    assert (answered.model_spec.name, answered.model_spec.version.value) == ("brightness", 1)
    body = {"examples": [{"image": b64(image)} for image in images]}
    code, listed = ask(serving, "/v1/models/brightness:regress", body)
    assert code == 200
    assert listed["results"] == pytest.approx([20, 200], abs=0.01)
    none, few = ask(serving, "/v1/models/brightness:regress", {"examples": []})
    assert (none, "at least one and at most" in few["error"]) == (400, True)
