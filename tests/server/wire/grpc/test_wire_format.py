from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xlaserve.wire.grpc import wire_format
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import vision_pb2

FIELDS: wire_format.Fields = {
    vision_pb2.ClassifyRequest.IMAGES_FIELD_NUMBER: "images",
    vision_pb2.ClassifyRequest.PIXELS_FIELD_NUMBER: {vision_pb2.Pixels.RGB_FIELD_NUMBER: "rgb"},
}
INT_CONTENTS = pb.InferTensorContents.INT_CONTENTS_FIELD_NUMBER
UINT_CONTENTS = pb.InferTensorContents.UINT_CONTENTS_FIELD_NUMBER


@given(hnp.arrays(np.int32, st.integers(1, 40), elements=st.integers(-(2**31), 2**31 - 1)))
def test_integers_are_packed_as_protobuf_packs_them(values: np.ndarray) -> None:
    for array in (values, values & 0x7F, values & 0xFFFF):
        data = b"".join(wire_format.record(INT_CONTENTS, wire_format.packed(array)))
        assert data == pb.InferTensorContents(int_contents=array.tolist()).SerializeToString()


def test_many_integers_are_packed_in_steps() -> None:
    values = np.arange(-70_000, 70_000, dtype=np.int32).reshape(2, -1)
    data = b"".join(wire_format.record(INT_CONTENTS, wire_format.packed(values)))
    assert list(pb.InferTensorContents.FromString(data).int_contents) == values.ravel().tolist()


def unpacked(data: bytes) -> list[int] | None:
    """The numbers, None where `data` is no packed list."""
    try:
        return list(map(int, wire_format.unpacked(np.frombuffer(data, np.uint8))))
    except DecodeError:
        return None


OCTETS = st.lists(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0x81, 0xFF, *[0x80] * 4]), max_size=60).map(bytes)


@given(OCTETS | st.binary(max_size=60))
@example(b"\x80" * 9 + b"\x01")
@example(b"\x80" * 10 + b"\x01")
@example(b"\x01" + b"\x80" * 10)
def test_a_packed_list_has_the_integers_that_protobuf_finds_in_it(data: bytes) -> None:
    try:
        whole = pb.InferTensorContents.FromString(b"".join(wire_format.record(UINT_CONTENTS, data)))
    except DecodeError:
        assert unpacked(data) is None
        return
    assert unpacked(data) == list(whole.uint_contents)


@given(
    seed=st.integers(0, 99),
    widths=st.lists(st.sampled_from([7, 8, 14, 20, 31]), min_size=1, max_size=3),
    cut=st.integers(0, 1),
)
def test_many_integers_are_unpacked_in_steps_wherever_these_end(seed: int, widths: list[int], cut: int) -> None:
    random = np.random.default_rng(seed)
    values = np.concatenate([random.integers(0, 2**width, 30_011) for width in widths])
    data = wire_format.packed(values)
    assert unpacked(data) == values.tolist()
    assert unpacked(data + b"\x80" * cut + b"\x80" * 10) is None


@given(st.lists(st.binary(max_size=300), max_size=6), st.binary(max_size=300), st.integers(0, 9))
def test_a_message_is_viewed_and_what_is_left_of_it_parsed(images: list[bytes], rgb: bytes, height: int) -> None:
    pixels = vision_pb2.Pixels(height=height, rgb=rgb)
    whole = vision_pb2.ClassifyRequest(model="m", images=images, pixels=pixels, top_k=3)
    rest, views = wire_format.split(vision_pb2.ClassifyRequest, whole.SerializeToString(), FIELDS)
    assert list(map(bytes, views["images"])) == images
    assert list(map(bytes, views["rgb"])) == ([rgb] if rgb else [])
    pixels.rgb = b""
    expected = vision_pb2.ClassifyRequest(model="m", pixels=pixels, top_k=3)
    assert vision_pb2.ClassifyRequest.FromString(rest) == expected


@pytest.mark.parametrize("data", [b"\x1a\x05\x22\x7fabc", b"\x1a\x02\x22", b"\x1a\x03\x25ab", b"\x22\x7f"])
def test_a_field_that_reaches_beyond_the_one_that_holds_it_is_none(data: bytes) -> None:
    with pytest.raises(DecodeError):
        wire_format.split(vision_pb2.ClassifyRequest, data, {3: {4: "rgb"}})


def test_a_message_in_parts_is_the_message_on_the_wire() -> None:
    whole = vision_pb2.EmbedResponse(model="m", embeddings=[vision_pb2.Embedding(values=[1, 2])])
    wire = wire_format.record(1, *wire_format.record(1, np.array([1, 2], "<f4").tobytes()))
    wire.append(memoryview(vision_pb2.EmbedResponse(model="m").SerializeToString()))
    assert vision_pb2.EmbedResponse.FromString(b"".join(wire)) == whole
    assert wire_format.wire_bytes(wire) == len(b"".join(wire))


async def test_a_large_message_is_put_together_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    as_bytes = wire_format._as_bytes

    def watched(wire: wire_format.Wire) -> Iterator[bytes]:
        threads.append(threading.current_thread())
        return as_bytes(wire)

    monkeypatch.setattr(wire_format, "_as_bytes", watched)
    for size in (10, wire_format.MAX_INLINE_BYTES, 3_000_000):
        data = np.random.default_rng(0).bytes(size)
        wire: wire_format.Wire = [b"first", memoryview(data), data]
        assert await wire_format.join(wire, wire_format.wire_bytes(wire)) == b"first" + data + data
    assert len(threads) == 2, "the large ones"
    assert threading.current_thread() not in threads
