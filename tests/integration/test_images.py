"""Images over real sockets, by whatever protocol: `builtin:noop` answers with their pixels."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.integration.conftest import NOOP, UNLIMITED, Server, StartServer

from xlaserve_proto import open_inference_pb2 as oip_pb
from xlaserve_proto import tensorflow_messages_pb2 as serving_pb
from xlaserve_proto import vision_pb2
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from xlaserve_proto.tensorflow_serving_pb2_grpc import PredictionServiceStub
from xlaserve_proto.vision_pb2_grpc import VisionStub

WARNING: Final = "xlaserve-warning"
SIDE: Final = 224
TIMEOUT_S: Final = 60


def png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


GREY: Final = png(Image.new("L", (SIDE, SIDE), 15))
GREY16: Final = png(Image.fromarray(np.full((SIDE, SIDE), 4095, np.uint16)))


@pytest.fixture(scope="module")
def images(start_module_server: StartServer) -> Server:
    return start_module_server({"models": [NOOP, {**NOOP, "name": "chosen", "grey16": "largest"}]})


@pytest.fixture(scope="module")
def grpc_channel(images: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(images.grpc, UNLIMITED) as channel:
        yield channel


class Reply(NamedTuple):
    status: int
    warning: str | None
    body: Any


def post(server: Server, path: str, body: bytes | str, content_type: str = "application/json") -> Reply:
    host, port = server.http.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": content_type})
        response = connection.getresponse()
        return Reply(response.status, response.getheader(WARNING), json.loads(response.read()))
    finally:
        connection.close()


def infer_request(model: str, image: bytes) -> oip_pb.ModelInferRequest:
    request = oip_pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="image", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(image).to_bytes(4, "little") + image)
    return request


def in_metadata(call: Any) -> str | None:
    found: dict[str, str] = dict(call.trailing_metadata())
    return found.get(WARNING)


# Of 16-bit grey.


@pytest.mark.parametrize(
    ("model", "image", "warns"), [("noop", GREY16, True), ("chosen", GREY16, False), ("noop", GREY, False)]
)
def test_every_protocol_says_that_nobody_chose(
    model: str, image: bytes, warns: bool, images: Server, grpc_channel: grpc.Channel
) -> None:
    text = base64.b64encode(image).decode()
    said: dict[str, str | None] = {}

    _, call = VisionStub(grpc_channel).Classify.with_call(vision_pb2.ClassifyRequest(model=model, images=[image]))
    said["Vision"] = in_metadata(call)

    stub = GRPCInferenceServiceStub(grpc_channel)
    answer, call = stub.ModelInfer.with_call(infer_request(model, image))
    said["Open Inference, metadata"] = in_metadata(call)
    said["Open Inference"] = answer.parameters["warning"].string_param if "warning" in answer.parameters else None
    level = 255 if model == "chosen" else 15
    assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == level

    (streamed,) = stub.ModelStreamInfer(iter([infer_request(model, image)]))
    parameters = streamed.infer_response.parameters
    said["Open Inference, stream"] = parameters["warning"].string_param if "warning" in parameters else None

    request = serving_pb.PredictRequest(model_spec=serving_pb.ModelSpec(name=model))
    request.inputs["image"].dtype = serving_pb.DT_STRING
    request.inputs["image"].string_val.append(image)
    request.inputs["image"].tensor_shape.dim.add(size=1)
    _, call = PredictionServiceStub(grpc_channel).Predict.with_call(request)
    said["TensorFlow Serving"] = in_metadata(call)

    said[":classify"] = post(images, f"/v1/models/{model}:classify", image, "image/png").warning
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    reply = post(images, f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
    said["infer, header"] = reply.warning
    said["infer"] = reply.body["parameters"].get("warning")
    reply = post(images, f"/v1/models/{model}:predict", json.dumps({"instances": [{"b64": text}]}))
    said[":predict"] = reply.warning

    assert [way for way, warning in said.items() if (warning is not None) != warns] == []
    assert {warning for warning in said.values() if warning and "grey16" not in warning} == set()


# Which of them is broken.


def test_the_broken_one_of_several_images_is_named(images: Server, grpc_channel: grpc.Channel) -> None:
    heic = b"\0\0\0\x18ftypheic" + bytes(40)
    with pytest.raises(grpc.RpcError) as refusal:
        VisionStub(grpc_channel).Classify(vision_pb2.ClassifyRequest(model="noop", images=[GREY, GREY, heic]))
    expected = "images[2]: expected JPEG, PNG or WebP, got a HEIC image (52 bytes)"
    assert refusal.value.details() == expected
    listed = [base64.b64encode(one).decode() for one in (GREY, GREY, heic)]
    reply = post(images, "/v1/models/noop:classify", json.dumps({"image": listed}))
    assert (reply.status, reply.body) == (400, {"error": expected})


# Images in JSON.


def noise_png() -> bytes:
    """A file that is long even in JSON, so that its base64 is read in steps."""
    return png(Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)))


def wrapped(text: str) -> str:
    return "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))


TEXTS: Final[dict[str, Callable[[bytes], str]]] = {
    "url-safe": lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="),
    "wrapped": lambda data: wrapped(base64.b64encode(data).decode()),
    "data: URI": lambda data: "data:image/png;base64," + base64.b64encode(data).decode(),
}


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("image", [GREY, noise_png()], ids=["short", "long"])
def test_every_route_takes_every_form_of_base64(image: bytes, form: str, images: Server) -> None:
    plain, text = base64.b64encode(image).decode(), TEXTS[form](image)
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    for path, body in (
        ("/v1/models/noop:classify", lambda text: {"image": text}),
        ("/v1/models/noop:classify", lambda text: {"images": [text]}),
        ("/v1/models/noop:classify", lambda text: {"examples": [{"image": {"b64": text}}]}),
        ("/v1/models/noop:predict", lambda text: {"instances": [{"b64": text}]}),
        ("/v1/models/noop:predict", lambda text: {"inputs": {"image": {"b64": text}}}),
        ("/v2/models/noop/infer", lambda text: {"inputs": [{**tensor, "data": [text]}]}),
    ):
        (expected, got) = (post(images, path, json.dumps(body(one))) for one in (plain, text))
        assert got.status == expected.status == 200
        for reply in (expected, got):
            reply.body.pop("timings", None), reply.body.pop("parameters", None)
        assert got.body == expected.body


def test_what_is_not_base64_is_refused_with_its_place(images: Server) -> None:
    text = base64.b64encode(GREY).decode()
    broken = text[:-40] + "%" + text[-40:]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2], "data": [text, broken]}
    for path, body, place in (
        ("/v1/models/noop:classify", {"image": [text, broken]}, "image[1]"),
        ("/v1/models/noop:predict", {"instances": [{"b64": text}, {"b64": broken}]}, "instances[1].b64"),
        ("/v2/models/noop/infer", {"inputs": [tensor]}, "data of image[1]"),
    ):
        reply = post(images, path, json.dumps(body))
        assert (reply.status, reply.body["error"].partition(": ")[0]) == (400, place)
        assert reply.body["error"].endswith(f"got '%' as character {len(text) - 40 + 1}")


def test_long_text_that_is_not_base64_is_refused_with_its_place(images: Server) -> None:
    text = base64.b64encode(noise_png()).decode()
    body = json.dumps({"image": [text, text[:-2000] + "%" + text[-2000:]]})
    reply = post(images, "/v1/models/noop:classify", body)
    assert reply.status == 400
    assert reply.body["error"].endswith(f"got more; base64 is interrupted by '%' at byte {body.index('%') + 1}")
    reply = post(images, "/v1/models/noop:classify", json.dumps({"image": [text, text[:-1] + "A="]}))
    assert reply.status == 400
    assert reply.body["error"].startswith("image[1]: expected base64")


# Which way up.


def test_an_orientation_in_a_pngs_text_or_in_xmp_turns_the_image(images: Server, grpc_channel: grpc.Channel) -> None:
    upright = Image.new("L", (SIDE, SIDE), 9)
    upright.paste(200, (0, 0, SIDE, 8))  # a bright stripe at the top
    stored = upright.transpose(Image.Transpose.ROTATE_180)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x03\0\0\0" + bytes(4)
    profile = PngInfo()
    profile.add_text("Raw profile type exif", f"\nexif\n{len(exif):8}\n{exif.hex()}\n", zip=True)
    xmp = PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="3"/>')
    for info, level in ((None, 9), (profile, 200), (xmp, 200)):
        answer = GRPCInferenceServiceStub(grpc_channel).ModelInfer(infer_request("noop", png(stored, pnginfo=info)))
        assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == level
