from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidArgument
from xlaserve.rpc.wire import MAX_FIELDS, memory_bytes, shape_of
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import vision_pb2

SHAPE = shape_of(pb.ModelInferRequest.DESCRIPTOR)
Tensor = pb.ModelInferRequest.InferInputTensor
Contents = pb.InferTensorContents


def with_contents(**contents: object) -> bytes:
    tensor = Tensor(name="pixels", contents=Contents(**contents))  # type: ignore[arg-type]
    return pb.ModelInferRequest(model_name="m", inputs=[tensor]).SerializeToString()


def test_bytes_take_what_they_are() -> None:
    data = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(1000), bytes(5)]).SerializeToString()
    assert memory_bytes(data, SHAPE) == len(data)
    data = vision_pb2.ClassifyRequest(images=[bytes(1000)] * 3).SerializeToString()
    assert memory_bytes(data, shape_of(vision_pb2.ClassifyRequest.DESCRIPTOR)) == len(data)


@pytest.mark.parametrize(
    ("field", "times"),
    [
        ("int_contents", 4),
        ("uint_contents", 4),
        ("int64_contents", 8),
        ("uint64_contents", 8),
        ("bool_contents", 1),
        ("fp32_contents", 1),
        ("fp64_contents", 1),
    ],
)
def test_packed_numbers_take_what_they_become(field: str, times: int) -> None:
    data = with_contents(**{field: [1] * 1000})
    packed = len(data) - len(with_contents())
    assert memory_bytes(data, SHAPE) == pytest.approx(len(data) + (times - 1) * packed, abs=64)


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a\x00" * MAX_FIELDS,
        b"\x78\x00" * MAX_FIELDS,
        pb.ModelInferRequest(inputs=[Tensor()] * MAX_FIELDS).SerializeToString(),
        with_contents(bytes_contents=[b""] * MAX_FIELDS),
        b"\x2a\xc0\x3e" + b"\x22\x00" * 4000 + pb.ModelInferRequest(inputs=[Tensor()] * 5000).SerializeToString(),
    ],
)
def test_too_many_fields_are_refused_at_any_depth(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="message: expected at most 8192 fields, got more"):
        memory_bytes(data, SHAPE)


def test_as_many_images_as_a_queue_takes_are_not_too_many() -> None:
    memory_bytes(with_contents(bytes_contents=[b"png"] * 4000), SHAPE)


@pytest.mark.parametrize("data", [b"\x0b", b"\x0a\x05abc", b"\x0a", b"\xff" * 12, b"\x2a\x7f" + bytes(64)])
def test_what_is_no_message_is_none(data: bytes) -> None:
    with pytest.raises((DecodeError, IndexError)):
        memory_bytes(data, SHAPE)


@given(st.integers(0, 400), st.integers(0, 255))
def test_whatever_protobuf_takes_is_measured(place: int, value: int) -> None:
    message = pb.ModelInferRequest(model_name="m", id="i", inputs=[Tensor(name="n" * 90, shape=[1, 2, 3])] * 3)
    message.parameters["timeout"].int64_param = 2**40
    data = bytearray(message.SerializeToString())
    data[place % len(data)] = value
    try:
        pb.ModelInferRequest.FromString(bytes(data))
    except DecodeError:
        return
    try:
        assert memory_bytes(bytes(data), SHAPE) >= len(data)
    except DecodeError:
        assert any(byte & 7 in (3, 4) for byte in data)  # groups, which no message of ours has
