"""What a client sends wrong, by mistake or on purpose: a clear status, no internals in the message, and the server
serves on. The server takes messages of up to 16 MiB."""

from __future__ import annotations

import io
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import MakeRequest, Server
from tests.required import required

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import vision_pb2
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from xlaserve_proto.vision_pb2_grpc import VisionStub

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_DETAILS = 1000
# What no message may tell: paths, traces, names of classes and libraries.
INSIDE = re.compile(r"/\w+/|\.py\b|0x[0-9a-f]{4}|Traceback|<class|object at|Exception|Error\b|numpy|PIL|tensorflow")
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO |WARN |ERROR) |    |WARNING: All log messages before|[IWE]\d{4} ")

Change = Callable[[pb.ModelInferRequest], None]


def label(value: object) -> str:
    """A short name for a case: its values may be of megabytes."""
    return value[:60] if isinstance(value, str) else ""


def ask(oip: GRPCInferenceServiceStub, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    """The status and the message that a wrong request gets."""
    with pytest.raises(grpc.RpcError) as caught:
        oip.ModelInfer(request, timeout=60)
    return caught.value.code(), required(caught.value.details())


@pytest.fixture(autouse=True)
def serves_on(server: Server, vision: VisionStub, scans: dict[str, bytes]) -> Iterator[None]:
    """After each test the server still gives correct answers, and has logged nothing that a client made up."""
    yield
    response = vision.Classify(vision_pb2.ClassifyRequest(model="digits", images=list(scans.values()), top_k=1))
    assert [row.categories[0].label for row in response.classifications] == list(scans)
    assert server.metric("xlaserve_in_flight_requests") == 0
    assert server.metric("xlaserve_in_flight_images", model="digits") == 0
    lines = server.stderr.splitlines()
    assert [line for line in lines if not LOG_LINE.match(line)] == []
    assert "\x1b" not in server.stderr


# Around the tensor.


def named(**fields: Any) -> Change:
    return lambda request: request.MergeFrom(pb.ModelInferRequest(**fields))


def parameter(key: str, **value: Any) -> Change:
    return lambda request: request.parameters[key].MergeFrom(pb.InferParameter(**value))


def no_inputs(request: pb.ModelInferRequest) -> None:
    del request.inputs[:], request.raw_input_contents[:]


def both_inputs(request: pb.ModelInferRequest) -> None:
    request.inputs.add(name="image", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", 3) + b"png")


def the_input_twice(request: pb.ModelInferRequest) -> None:
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])


def raw_and_contents(request: pb.ModelInferRequest) -> None:
    request.inputs[0].contents.uint_contents.append(1)


def two_raw_contents(request: pb.ModelInferRequest) -> None:
    request.raw_input_contents.append(b"more")


def another_input(request: pb.ModelInferRequest) -> None:
    request.inputs[0].name = "pixels\nimage"


def outputs(*names: str, **parameters: int) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        for name in names:
            output = request.outputs.add(name=name)
            for key, value in parameters.items():
                output.parameters[key].int64_param = value

    return change


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (named(model_name="nope"), NOT_FOUND, "no model 'nope'; there are: broken, digits, noop"),
        (named(model_name="digits "), NOT_FOUND, "no model 'digits '"),
        (named(model_name="../etc"), NOT_FOUND, "no model"),
        (named(model_name="a\nb\x1b[31m\r\n12:00:00 ERROR forged"), NOT_FOUND, "no model 'a\\nb\\x1b[31m\\r\\n12"),
        (named(model_name="n" * 60_000), NOT_FOUND, "no model 'nnnn"),
        (named(model_version="2"), NOT_FOUND, "version"),
        (named(model_version="one\n12:00:00 ERROR forged"), NOT_FOUND, "version"),
        (named(model_version="1" * 60_000), NOT_FOUND, "version"),
        (parameter("mode", string_param="turbo"), INVALID, "mode: expected one of xla, graph, eager, got 'turbo'"),
        (parameter("mode", string_param="XLA"), INVALID, "mode: expected one of xla, graph, eager, got 'XLA'"),
        (parameter("mode", string_param="m" * 60_000), INVALID, "mode: expected one of"),
        (parameter("mode", int64_param=1), INVALID, "parameters.mode: expected a string, got 1"),
        (parameter("mode"), INVALID, "parameters.mode: expected a string"),
        (parameter("timeout", int64_param=0), INVALID, "parameters.timeout: expected an int64 of at least 1"),
        (parameter("timeout", int64_param=-(2**63)), INVALID, "parameters.timeout: expected an int64 of at least 1"),
        (parameter("timeout", string_param="1s"), INVALID, "parameters.timeout: expected an int64"),
        (parameter("timeout", double_param=1.0), INVALID, "parameters.timeout: expected an int64"),
        (
            parameter("pixel_range", string_param="0-1"),
            INVALID,
            "parameters.pixel_range: expected a string, 0..255",
        ),
        (
            parameter("pixel_range", double_param=1),
            INVALID,
            "parameters.pixel_range: expected a string, 0..255",
        ),
        (parameter("pixel_range", string_param="0..1"), INVALID, "parameters.pixel_range: expected 0..1 with FP16 or"),
        (no_inputs, INVALID, "inputs: expected one tensor, 'pixels' or 'image', got none"),
        (both_inputs, INVALID, "inputs: expected one tensor, 'pixels' or 'image', got 'pixels', 'image'"),
        (the_input_twice, INVALID, "inputs: expected one tensor, 'pixels' or 'image', got 'pixels', 'pixels'"),
        (another_input, INVALID, "inputs: expected one tensor, 'pixels' or 'image', got 'pixels\\nimage'"),
        (raw_and_contents, INVALID, "inputs.contents: expected nothing alongside raw_input_contents"),
        (two_raw_contents, INVALID, "raw_input_contents: expected one entry"),
        (outputs("nope"), INVALID, "outputs: expected scores, each at most once, got 'nope'"),
        (outputs(""), INVALID, "outputs: expected scores, each at most once, got ''"),
        (outputs("scores", "scores"), INVALID, "outputs: expected scores, each at most once, got 'scores'"),
        (outputs(*["scores"] * 5_000), INVALID, "outputs: expected scores, each at most once"),
        (outputs(*["scores"] * 500_000), INVALID, "message: expected at most 8192 fields, got more"),
        (named(model_name="n" * 10_000_000), INVALID, "message: expected at most 65536 bytes in addition to images"),
        (outputs("scores", classification=0), INVALID, "outputs.scores.classification: expected an int64 of at least"),
        (outputs("scores", classification=-5), INVALID, "outputs.scores.classification: expected an int64 of at least"),
    ],
    ids=label,
)
def test_a_wrong_request_is_refused_with_a_reason(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, change: Change, code: grpc.StatusCode, says: str
) -> None:
    request = valid()
    change(request)
    got, message = ask(oip, request)
    assert got is code
    assert says in message
    assert len(message) < MAX_DETAILS
    assert not INSIDE.search(message)


# Pixels.


def shape(*dims: int) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[0].shape[:] = dims

    return change


def datatype(name: str) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[0].datatype = name

    return change


def raw(data: bytes) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.raw_input_contents[:] = [data]

    return change


def no_data(request: pb.ModelInferRequest) -> None:
    del request.raw_input_contents[:]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (datatype("FP64"), "pixels.datatype: expected UINT8 or INT32 or FP16 or FP32, got 'FP64'"),
        (datatype("BYTES"), "pixels.datatype: expected UINT8 or INT32 or FP16 or FP32, got 'BYTES'"),
        (datatype("uint8"), "pixels.datatype: expected UINT8 or INT32 or FP16 or FP32, got 'uint8'"),
        (datatype(""), "pixels.datatype: expected UINT8 or INT32 or FP16 or FP32, got ''"),
        (datatype("d" * 60_000), "pixels.datatype: expected UINT8 or INT32 or FP16 or FP32, got 'ddd"),
        (datatype("FP32"), "raw_input_contents of pixels: expected 12288 bytes for FP32 [1, 32, 32, 3], got 3072"),
        (shape(), "pixels.shape: expected [n, height, width, 3] with every dimension at least 1, got []"),
        (shape(3072), "pixels.shape: expected [n, height, width, 3]"),
        (shape(32, 32, 3), "pixels.shape: expected [n, height, width, 3]"),
        (shape(1, 1, 32, 32, 3), "pixels.shape: expected [n, height, width, 3]"),
        (shape(*[1] * 5_000_000), "message: expected at most 65536 bytes in addition to images and tensors"),
        (shape(*[1] * 60_000), "pixels.shape: expected [n, height, width, 3]"),
        (shape(1, 3, 32, 32), "pixels: expected shape [n, height, width, 3]"),
        (shape(1, 32, 32, 1), "raw_input_contents of pixels: expected 1024 bytes"),
        (shape(3, 32, 32, 1), "pixels: expected shape [n, height, width, 3]"),
        (shape(1, 16, 64, 3), "pixels: expected shape [n, 32, 32, 3], got [1, 16, 64, 3]"),
        (shape(0, 32, 32, 3), "pixels.shape: expected [n, height, width, 3] with every dimension at least 1, got [0, "),
        (shape(1, 0, 32, 3), "with every dimension at least 1, got [1, 0, 32, 3]"),
        (shape(-1, 32, 32, 3), "with every dimension at least 1, got [-1, 32, 32, 3]"),
        (shape(-1, -1, 1024, 3), "with every dimension at least 1"),
        (shape(2**62, 4, 1, 3), "raw_input_contents of pixels: expected 55340232221128654848 bytes"),
        (shape(2**62, 2**62, 2**62, 3), "raw_input_contents of pixels: expected "),
        (shape(2**32, 2**32, 1, 3), "raw_input_contents of pixels: expected "),
        (shape(-(2**63), 2, 32, 3), "with every dimension at least 1"),
        (raw(b""), "raw_input_contents of pixels: expected 3072 bytes for UINT8 [1, 32, 32, 3], got 0 bytes"),
        (raw(bytes(3071)), "raw_input_contents of pixels: expected 3072 bytes for UINT8 [1, 32, 32, 3], got 3071 byte"),
        (raw(bytes(3073)), "raw_input_contents of pixels: expected 3072 bytes for UINT8 [1, 32, 32, 3], got 3073 byte"),
        (no_data, "contents of pixels: expected 3072 values in uint_contents for [1, 32, 32, 3], got 0 values"),
    ],
    ids=label,
)
def test_wrong_pixels_are_refused_with_what_was_expected_and_what_came(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, change: Change, says: str
) -> None:
    request = valid()
    change(request)
    code, message = ask(oip, request)
    assert code is INVALID
    assert says in message
    assert len(message) < MAX_DETAILS
    assert not INSIDE.search(message)


@pytest.mark.parametrize(
    ("kind", "value", "got"),
    [
        ("FP32", np.nan, "nan"),
        ("FP32", np.inf, "inf"),
        ("FP32", -np.inf, "-inf"),
        ("FP32", -1, "-1.0"),
        ("FP32", 255.5, "255.5"),
        ("FP32", 256, "256.0"),
        ("INT32", -1, "-1"),
        ("INT32", 256, "256"),
        ("INT32", -(2**31), "-2147483648"),
    ],
    ids=label,
)
def test_one_pixel_that_is_no_level_is_refused(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, kind: str, value: float, got: str
) -> None:
    dtype, field = {"FP32": ("<f4", "fp32_contents"), "INT32": ("<i4", "int_contents")}[kind]
    image = np.zeros(32 * 32 * 3, dtype)
    image[1234] = value
    raw, listed = valid(datatype=kind), valid(datatype=kind, raw=False)
    raw.raw_input_contents[:] = [image.tobytes()]
    getattr(listed.inputs[0].contents, field)[:] = image.tolist()
    for request in (raw, listed):
        assert ask(oip, request) == (INVALID, f"pixels: expected values from 0 to 255, got {got}")


@pytest.mark.parametrize("value", [256, 300, 2**31, 2**32 - 1])
def test_a_uint8_value_wider_than_a_byte_is_refused_and_not_wrapped(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, value: int
) -> None:
    request = valid(raw=False)
    request.inputs[0].contents.uint_contents[7] = value
    code, message = ask(oip, request)
    assert (code, message.partition(", got ")[0]) == (INVALID, "pixels: expected values from 0 to 255")


@pytest.mark.parametrize(
    "fields",
    [
        {"int_contents": [0] * 3072},
        {"fp32_contents": [0.0] * 3072},
        {"bytes_contents": [bytes(3072)]},
        {"uint_contents": [0] * 3071},
        {"uint_contents": [0] * 3073},
        {"uint64_contents": [0] * 3072},
    ],
    ids=label,
)
def test_contents_in_the_wrong_field_or_number_are_refused(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, fields: dict[str, list[Any]]
) -> None:
    request = valid(raw=False)
    request.inputs[0].contents.CopyFrom(pb.InferTensorContents(**fields))
    code, message = ask(oip, request)
    assert code is INVALID
    assert "contents of pixels: expected 3072 values in uint_contents for [1, 32, 32, 3], got " in message


# Encoded images.


def encoded(*images: bytes, count: int | None = None) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="digits")
    request.inputs.add(name="image", datatype="BYTES", shape=[len(images) if count is None else count])
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(image)) + image for image in images))
    return request


def jpeg() -> bytes:
    data = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(data, "JPEG")
    return data.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A valid PNG image of one bit a pixel, all black: a few hundred kilobytes at most."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = bytes(1 + (width + 7) // 8)
    pack = zlib.compressobj(9)
    data = b"".join([*(pack.compress(row * 100) for _ in range(height // 100)), pack.flush()])
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (b"", "image: expected JPEG, PNG or WebP, got no bytes"),
        (b"\x00", "image: expected JPEG, PNG or WebP, got 1 bytes"),
        (b"Dear server,\nplease classify my cat.\n", "image: expected JPEG, PNG or WebP, got 37 bytes that start with"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "image: expected JPEG, PNG or WebP, got an SVG drawing (41 bytes)",
        ),
        (b"GIF89a" + bytes(100), "image: expected JPEG, PNG or WebP, got a GIF (106 bytes)"),
        (b"\0\0\0\x18ftypheic" + bytes(99), "image: expected JPEG, PNG or WebP, got a HEIC image (111 bytes)"),
        (b"\x1b[31m\n\n\n\n", "image: expected JPEG, PNG or WebP, got 9 bytes that start with '.[31m...'"),
        (jpeg()[:500], "image: expected a whole JPEG image, got 500 bytes that are cut off"),
        (jpeg()[:-700], "image: expected a whole JPEG image"),
        (jpeg()[:20], "image: expected a whole JPEG image"),
        (b"\xff\xd8\xff" + bytes(2000), "image: expected a whole JPEG image"),
        (b"\x89PNG\r\n\x1a\n", "image: expected a whole PNG image"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image: expected a whole WebP image"),
        (png_of(30_000, 30_000), "image: expected at most 64000000 pixels (max_image_pixels), got 900000000 (30000 x"),
    ],
    ids=label,
)
def test_what_is_no_image_is_refused_with_a_reason(oip: GRPCInferenceServiceStub, image: bytes, says: str) -> None:
    code, message = ask(oip, encoded(image))
    assert code is INVALID
    assert says in message
    assert len(message) < MAX_DETAILS
    assert not INSIDE.search(message)


def test_a_decompression_bomb_costs_no_time_and_no_memory(oip: GRPCInferenceServiceStub, server: Server) -> None:
    bomb = png_of(30_000, 30_000)
    assert len(bomb) < 200_000
    before = server.metric("process_resident_memory_bytes")
    began = time.monotonic()
    for _ in range(20):
        assert ask(oip, encoded(bomb))[0] is INVALID
    assert time.monotonic() - began < 5
    # Decoded, each would take 900 MB.
    assert server.metric("process_resident_memory_bytes") - before < 300e6


FRAMED = struct.pack("<I", 4) + b"four"


@pytest.mark.parametrize(
    ("data", "count", "says"),
    [
        (b"", 1, "raw_input_contents of image: expected 1 elements"),
        (b"\x01", 1, "raw_input_contents of image: expected 1 elements"),
        (b"\x04\x00\x00", 1, "got 3 bytes, which end within element 0"),
        (FRAMED[:-1], 1, "got 7 bytes, which end within element 0"),
        (FRAMED + b"\x00", 1, "raw_input_contents of image: expected 1 elements, got 1 bytes more"),
        (FRAMED + FRAMED, 1, "raw_input_contents of image: expected 1 elements, got 8 bytes more"),
        (FRAMED, 2, "got 8 bytes, which end within element 1"),
        (FRAMED + b"\xff\xff\xff\xff", 2, "got 12 bytes, which end within element 1"),
        (b"\xff\xff\xff\xff" + bytes(100), 1, "got 104 bytes, which end within element 0"),
        (b"\x00\x00\x00\x80", 1, "got 4 bytes, which end within element 0"),
        (bytes(16_000_000), 4_000_000, "image.shape: expected at most 4096 images, got [4000000]"),
        (bytes(16_000_000), 4096, "raw_input_contents of image: expected 4096 elements, got 15983616 bytes more"),
        (FRAMED, 2**62, "image.shape: expected at most 4096 images"),
    ],
    ids=label,
)
def test_wrong_framing_is_refused_with_a_reason(
    oip: GRPCInferenceServiceStub, data: bytes, count: int, says: str
) -> None:
    request = encoded(count=count)
    request.raw_input_contents[:] = [data]
    began = time.monotonic()
    code, message = ask(oip, request)
    assert time.monotonic() - began < 5
    assert code is INVALID
    assert says in message
    assert not INSIDE.search(message)


@pytest.mark.parametrize("dims", [[], [0], [-1], [1, 2], [1, 0], [1, 1, 1], [-(2**63)]])
def test_a_wrong_shape_of_encoded_images_is_refused(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, dims: list[int]
) -> None:
    request = valid("image")
    request.inputs[0].shape[:] = dims
    code, message = ask(oip, request)
    assert code is INVALID
    assert message.startswith("image.shape: expected [n] or [n, 1]")


@pytest.mark.parametrize("kind", ["UINT8", "FP32", ""])
def test_encoded_images_of_another_type_are_refused(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, kind: str
) -> None:
    request = valid("image")
    request.inputs[0].datatype = kind
    assert ask(oip, request) == (INVALID, f"image.datatype: expected BYTES, got {kind!r}")


@pytest.mark.parametrize("count", [0, 2, 4_000])
def test_encoded_contents_in_another_number_are_refused(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, count: int
) -> None:
    request = valid("image", raw=False)
    request.inputs[0].contents.bytes_contents[:] = [b""] * count
    assert ask(oip, request) == (INVALID, f"contents of image: expected 1 elements for [1], got {count} elements")


# The message.


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady", "RepositoryModelLoad", "ModelStreamInfer"])
@pytest.mark.parametrize("size_bytes", [MAX_MESSAGE_BYTES + 1, 3 * MAX_MESSAGE_BYTES])
def test_a_message_over_the_limit_is_refused_with_the_limit_and_counted(
    channel: grpc.Channel, server: Server, method: str, size_bytes: int
) -> None:
    def unreceived() -> float:
        return server.metric("xlaserve_requests_total", method=method, status="CANCELLED")

    before = unreceived()
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(bytes(size_bytes), timeout=60)
    assert caught.value.code() is EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in required(caught.value.details())
    if method != "ModelStreamInfer":  # gRPC tells of it as of the end of a stream
        server.wait_for(lambda: unreceived() == before + 1, "it was not counted", timeout_s=10)
        assert f"max_message_bytes {MAX_MESSAGE_BYTES}" in server.stderr


def test_a_compressed_message_counts_as_what_it_unpacks_to(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, server: Server
) -> None:
    request = valid()
    request.raw_input_contents[:] = [bytes(200_000_000)]
    before = server.metric("process_resident_memory_bytes")
    with pytest.raises(grpc.RpcError) as caught:
        oip.ModelInfer(request, compression=grpc.Compression.Gzip, timeout=60)
    assert caught.value.code() is EXHAUSTED
    assert server.metric("process_resident_memory_bytes") - before < 150e6


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff",
        b"\x0a\x02\xff\xfe",  # a model's name that is not UTF-8
        b"\x0a\xff\xff\xff\xff\x0f",  # a length beyond the end
        b"\x0b" * 1000,  # groups within groups
        bytes(100),
    ],
    ids=label,
)
def test_bytes_that_are_no_message_are_refused_without_repeating_them(
    channel: grpc.Channel, server: Server, data: bytes
) -> None:
    before = len(server.stderr)
    for method in ("ModelInfer", "ModelReady", "RepositoryIndex", "ModelStatistics"):
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}"
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(data, timeout=60)
        assert caught.value.code() is INVALID
        assert required(caught.value.details()).startswith("message: expected the protobuf message of this method")
    for line in server.stderr[before:].splitlines():
        assert re.fullmatch(
            r"[\d:]{8} INFO  (?:left out the lines of [\w ,:]+|method=\w+ status=INVALID_ARGUMENT "
            r'reason="message: expected the protobuf message of this method, its text in UTF-8, got other bytes" '
            r"caller=anybody \[request [0-9a-f]{32}\])",
            line,
        )


@pytest.mark.parametrize(
    "field",
    [
        b"\x3a\x00",  # an empty raw tensor
        b"\x2a\x00",  # an empty input
        b"\x78\x00",  # a field that there is not
    ],
)
def test_a_message_of_millions_of_fields_stops_nobody_else(channel: grpc.Channel, server: Server, field: bytes) -> None:
    infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer"
    )
    message = pb.ModelInferRequest(model_name="digits").SerializeToString()
    before = server.metric("process_resident_memory_bytes")
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        infer(message + field * 8_000_000, timeout=60)
    assert time.monotonic() - began < 5
    assert caught.value.code() is INVALID
    assert server.metric("process_resident_memory_bytes") - before < 2e8


def test_refused_requests_leave_no_memory_behind(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, server: Server
) -> None:
    request = valid()
    request.raw_input_contents[:] = [bytes(10_000_000)]
    for _ in range(5):
        ask(oip, request)
    sizes = []
    for _ in range(20):
        ask(oip, request)
        sizes.append(server.metric("process_resident_memory_bytes"))
    # Five of them would be enough to fail, were they left to the garbage collector.
    assert max(sizes) - sizes[0] < 60e6


def test_wrong_and_right_requests_at_the_same_time_do_not_meet(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, scans: dict[str, bytes]
) -> None:
    wrong = [encoded(jpeg()[:500]), encoded(png_of(30_000, 30_000)), valid(), valid()]
    wrong[2].inputs[0].shape[0] = 2**62
    wrong[3].parameters["mode"].string_param = "turbo"

    def refused(number: int) -> bool:
        return ask(oip, wrong[number % len(wrong)])[0] is INVALID

    def right(number: int) -> bool:
        digit = str(number % 10)
        response = oip.ModelInfer(encoded(scans[digit]))
        return int(np.frombuffer(response.raw_output_contents[0], "<f4").argmax()) == number % 10

    with ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(refused if number % 2 else right, number) for number in range(200)]
        assert all(outcome.result() for outcome in outcomes)


@pytest.mark.parametrize("name", ["nope\n12:00:00 ERROR forged", "\x1b[31mred", "n" * 60_000, "", "../digits"])
def test_a_made_up_name_is_not_found_by_any_method(oip: GRPCInferenceServiceStub, server: Server, name: str) -> None:
    assert not oip.ModelReady(pb.ModelReadyRequest(name=name)).ready
    for call in (
        lambda: oip.ModelMetadata(pb.ModelMetadataRequest(name=name)),
        lambda: oip.ModelConfig(pb.ModelConfigRequest(name=name)),
        lambda: oip.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name)),
        lambda: oip.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is NOT_FOUND
        assert len(required(caught.value.details())) < MAX_DETAILS
    assert not re.search(r"^12:00:00 ERROR forged", server.stderr, re.MULTILINE)
