from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors import InvalidArgument
from xlaserve.wire.grpc.infer_message import MAX_KNOWN, SHARED_PREFIX, InferMessage, InferMessages
from xlaserve.wire.grpc.open_inference_tensors import infer_request
from xlaserve.wire.grpc.wire_format import LARGE_BYTES, MAX_FIELDS, MAX_REST_BYTES
from xlaserve.wire.shared.input_tensors import MAX_INPUTS, SHARED_MEMORY
from xlaserve_proto import open_inference_pb2 as pb

LARGE = bytes(range(256)) * (LARGE_BYTES // 256)


def parse(data: bytes) -> InferMessage | None:
    """Parses a message twice, the second of which may be known."""
    messages = InferMessages()
    first, second = messages.parse(data), messages.parse(data)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert put_together(first) == put_together(second)
    return first


def request(*raw: bytes) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="digits", model_version="1", id="a")
    message.parameters["mode"].string_param = "xla"
    message.parameters["timeout"].int64_param = 2**40
    message.inputs.add(name="pixels", datatype="UINT8", shape=(1, 32, -1, 3))
    message.outputs.add(name="scores")
    message.raw_input_contents.extend(raw)
    return message


def put_together(parsed: InferMessage) -> pb.ModelInferRequest:
    whole = pb.ModelInferRequest()
    whole.CopyFrom(parsed.head.fields)
    del whole.raw_input_contents[:]
    whole.raw_input_contents.extend(map(bytes, parsed.raw))
    return whole


@pytest.mark.parametrize("raw", [(), (b"",), (b"small",), (LARGE,), (LARGE, b"", LARGE, b"x")])
def test_a_message_is_what_protobuf_makes_of_it(raw: tuple[bytes, ...]) -> None:
    parsed = parse(request(*raw).SerializeToString())
    assert isinstance(parsed, InferMessage)
    assert put_together(parsed) == request(*raw)


def test_large_tensors_are_viewed_and_not_copied() -> None:
    data = request(LARGE).SerializeToString()
    parsed = parse(data)
    assert isinstance(parsed, InferMessage)
    assert parsed.raw[0].obj is data
    assert not parsed.head.fields.raw_input_contents


def test_fields_behind_and_between_the_tensors_are_kept() -> None:
    data = b"".join(
        message.SerializeToString()
        for message in (
            pb.ModelInferRequest(raw_input_contents=[LARGE]),
            pb.ModelInferRequest(id="between"),
            pb.ModelInferRequest(raw_input_contents=[b"second"]),
            pb.ModelInferRequest(model_name="behind"),
        )
    )
    parsed = parse(data)
    assert isinstance(parsed, InferMessage)
    assert put_together(parsed) == pb.ModelInferRequest.FromString(data)


def test_unknown_fields_of_every_wire_type_are_passed_over() -> None:
    unknown = b"".join((b"\x98\x06\x96\x01", b"\xa1\x06", bytes(8), b"\xad\x06", bytes(4), b"\xb2\x06\x02hi"))
    parsed = parse(unknown + request(LARGE).SerializeToString() + unknown)
    assert isinstance(parsed, InferMessage)
    assert bytes(parsed.raw[0]) == LARGE
    assert parsed.head.fields.model_name == "digits"


@given(cut=st.integers(0, 64), flip=st.integers(0, 120), value=st.integers(0, 255))
def test_damaged_bytes_give_what_protobuf_gives_or_nothing(cut: int, flip: int, value: int) -> None:
    data = bytearray(request(LARGE, b"more").SerializeToString())
    data[flip] = value
    damaged = bytes(data[: len(data) - cut])
    parsed = parse(damaged)
    try:
        whole = pb.ModelInferRequest.FromString(damaged)
    except DecodeError:
        assert parsed is None
        return
    # Groups, which proto3 has not, are the one thing that protobuf passes over and this does not.
    if isinstance(parsed, InferMessage):
        assert list(map(bytes, parsed.raw)) == list(whole.raw_input_contents)
        assert parsed.head.fields.model_name == whole.model_name
        assert list(parsed.head.fields.inputs) == list(whole.inputs)


def test_endless_varints_are_refused() -> None:
    assert parse(b"\xff" * LARGE_BYTES) is None


def typed(**contents: Any) -> pb.ModelInferRequest:
    message = request()
    message.inputs[0].contents.MergeFrom(pb.InferTensorContents(**contents))
    return message


def test_typed_lists_are_viewed_where_the_message_is_large() -> None:
    parsed = parse(typed(fp32_contents=[1.5] * LARGE_BYTES).SerializeToString())
    assert isinstance(parsed, InferMessage)
    ((values,),) = (of_input["fp32_contents"] for of_input in parsed.contents)
    assert values.cast("f").tolist() == [1.5] * LARGE_BYTES
    assert parsed.head.fields.inputs == typed(fp32_contents=[]).inputs
    assert parsed.head.fields.inputs[0].HasField("contents")


def test_encoded_images_among_typed_contents_are_viewed() -> None:
    parsed = parse(typed(bytes_contents=[LARGE, b"", b"more"]).SerializeToString())
    assert isinstance(parsed, InferMessage)
    (of_input,) = parsed.contents
    assert list(map(bytes, of_input["bytes_contents"])) == [LARGE, b"", b"more"]


def test_typed_contents_of_several_inputs_are_viewed_apart() -> None:
    message = pb.ModelInferRequest(model_name="pairs")
    for name in ("left", "right"):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=(2,))
        tensor.contents.bytes_contents.extend([LARGE + name.encode(), name.encode()])
    numbers = message.inputs.add(name="numbers", datatype="FP32", shape=(2, LARGE_BYTES))
    numbers.contents.fp32_contents.extend([1.5] * (2 * LARGE_BYTES))
    message.inputs.add(name="none", datatype="FP32", shape=(0,))
    parsed = parse(message.SerializeToString())
    assert isinstance(parsed, InferMessage)
    assert not any(tensor.contents.ListFields() for tensor in parsed.head.fields.inputs)
    left, right, listed, none = infer_request(parsed, None).inputs
    assert list(map(bytes, left.elements())) == [LARGE + b"left", b"left"]
    assert list(map(bytes, right.elements())) == [LARGE + b"right", b"right"]
    values = listed.numbers((2, LARGE_BYTES), np.dtype(np.float32))
    np.testing.assert_array_equal(values, np.full((2, LARGE_BYTES), 1.5, np.float32))
    assert none.elements() == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pb.ModelInferRequest(id="i" * MAX_REST_BYTES).SerializeToString(), "bytes in addition to images and tensors"),
        (b"\x2a\x00" * (LARGE_BYTES + 1), f"at most {MAX_FIELDS} fields"),
        (typed(bytes_contents=[b""] * LARGE_BYTES).SerializeToString(), f"at most {MAX_FIELDS} fields"),
        (typed(int64_contents=[1] * MAX_REST_BYTES).SerializeToString(), "bytes in addition to images and tensors"),
    ],
    ids=["a name", "empty inputs", "empty elements", "another type"],
)
def test_messages_that_would_block_the_interpreter_are_refused_unparsed(data: bytes, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(data)


def of_level(level: int, side: int = 100, **fields: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="digits", **fields)
    message.inputs.add(name="pixels", datatype="UINT8", shape=(1, side, side, 3))
    message.raw_input_contents.append(bytes([level]) * (side * side * 3))
    return message


@pytest.mark.parametrize("side", [8, 100])
def test_requests_that_differ_in_their_pixels_alone_share_a_head(side: int) -> None:
    messages = InferMessages()
    parsed = [messages.parse(of_level(level, side).SerializeToString()) for level in range(4)]
    assert all(isinstance(message, InferMessage) for message in parsed)
    assert [put_together(message) for message in parsed if message] == [of_level(level, side) for level in range(4)]
    assert len({id(message.head) for message in parsed[1:] if message}) == 1


def test_requests_of_several_raw_tensors_share_a_head_as_well() -> None:
    def of_two(level: int, id: str = "") -> pb.ModelInferRequest:
        message = pb.ModelInferRequest(model_name="two", id=id)
        message.inputs.add(name="photo", datatype="UINT8", shape=(1, 8, 8, 3))
        message.inputs.add(name="age", datatype="FP32", shape=(1, 2))
        message.raw_input_contents.extend([bytes([level]) * 192, bytes([level + 1]) * 8])
        return message

    messages = InferMessages()
    parsed = [messages.parse(of_two(level).SerializeToString()) for level in range(4)]
    assert [put_together(message) for message in parsed if message] == [of_two(level) for level in range(4)]
    assert len({id(message.head) for message in parsed[1:] if message}) == 1
    other = of_two(5)
    other.raw_input_contents[:] = [bytes(190), bytes(10)]  # as large in all
    got = messages.parse(other.SerializeToString())
    assert got is not None
    assert put_together(got) == other


def test_requests_of_one_size_that_differ_are_told_apart() -> None:
    messages = InferMessages()
    sent = [of_level(level, model_version=version) for level, version in enumerate("1221")]
    for message in sent:
        parsed = messages.parse(message.SerializeToString())
        assert parsed is not None
        assert put_together(parsed) == message


def test_models_asked_in_turn_with_requests_of_one_size_are_all_kept() -> None:
    messages = InferMessages()
    heads = set()
    for level in range(6):
        for name in ("efficientnetv2-b0", "efficientnetv2-b1"):
            message = of_level(level)
            message.model_name = name
            parsed = messages.parse(message.SerializeToString())
            assert parsed is not None
            assert parsed.head.model == name
            heads.add(id(parsed.head) if level else 0)
    assert len(heads) == 3


def test_ids_are_not_kept() -> None:
    messages = InferMessages()
    for number in range(4):
        parsed = messages.parse(of_level(1, id=f"{number}").SerializeToString())
        assert parsed is not None
        assert parsed.head.fields.id == f"{number}"
    assert not messages._known


def test_encoded_images_are_not_kept_and_drop_nothing() -> None:
    messages = InferMessages()
    hot = of_level(1).SerializeToString()
    for size in range(3 * MAX_KNOWN):
        message = pb.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(size)])
        message.inputs.add(name="image", datatype="BYTES", shape=(1,))
        messages.parse(message.SerializeToString())
        messages.parse(hot)
    assert len(messages._known) == 1


def test_what_is_kept_is_bounded() -> None:
    messages = InferMessages()
    for side in range(1, 3 * MAX_KNOWN):
        messages.parse(of_level(1, side).SerializeToString())
        assert len(messages._known) <= MAX_KNOWN
    messages.parse(of_level(1, model_version="v" * 2000).SerializeToString())
    assert max(len(known.beginning) for known in messages._known.values()) < 2000


LITTLE = st.binary(max_size=3)


@st.composite
def pieces(draw: st.DrawFn) -> bytes:
    """Some of what a message can be made of: its tensor first, last or in between, next to look-alikes of it."""
    piece = st.one_of(
        LITTLE.map(lambda data: pb.ModelInferRequest(raw_input_contents=[data]).SerializeToString()),
        LITTLE.map(lambda data: b"\xb2\x06" + bytes([len(data) + 2]) + b"\x3a" + bytes([len(data)]) + data),
        st.sampled_from([b"", b"\x0a\x01m", b"\x12\x011", b"\x2a\x00", b"\x3a", b"\x3a\x00"]),
    )
    return b"".join(draw(st.lists(piece, max_size=4)))


@given(st.lists(pieces(), max_size=8))
def test_whatever_was_parsed_before_a_message_is_what_protobuf_makes_of_it(data: list[bytes]) -> None:
    messages = InferMessages()
    for one in data:
        parsed = messages.parse(one)
        try:
            whole = pb.ModelInferRequest.FromString(one)
        except DecodeError:
            assert parsed is None
            continue
        assert parsed is not None
        assert put_together(parsed).SerializePartialToString(deterministic=True) == whole.SerializePartialToString(
            deterministic=True
        )


@pytest.mark.parametrize("key", SHARED_MEMORY)
@pytest.mark.parametrize("size_bytes", [100, 100_000])
def test_tensors_in_shared_memory_are_told_from_what_looks_like_them(key: str, size_bytes: int) -> None:
    raw = (SHARED_PREFIX * size_bytes)[:size_bytes]
    for of_output in (False, True):
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[raw])
        tensor = message.inputs.add(name="pixels")
        output = message.outputs.add(name="scores")
        for is_shared in (False, True):
            if is_shared:
                (output if of_output else tensor).parameters[key].int64_param = 1
            parsed = InferMessages().parse(message.SerializeToString())
            assert parsed is not None
            assert parsed.head.has_shared is is_shared
            assert parsed.wants_raw


def test_more_tensors_than_are_read_are_not_kept() -> None:
    messages = InferMessages()
    for count in (MAX_INPUTS, MAX_INPUTS + 1):
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(1)] * count)
        for _ in range(count):
            message.inputs.add()
        messages.parse(message.SerializeToString())
        assert len(messages._known) == 1
