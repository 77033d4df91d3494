from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.engine.program import Value
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.task import DATATYPES, Datatype
from xlaserve.pipeline.request_inputs import Pending
from xlaserve.wire.grpc import infer_message, open_inference_tensors, packed_lists, wire_format
from xlaserve.wire.grpc.open_inference_tensors import LISTING
from xlaserve.wire.shared import input_tensors
from xlaserve.wire.shared.input_tensors import raw_bytes
from xlaserve.wire.shared.output_tensors import OutputTensor, raw_part
from xlaserve.wire.shared.parts import Part
from xlaserve_proto import open_inference_pb2 as pb

FIELDS = {"UINT8": ("uint_contents", "u1"), "INT32": ("int_contents", "<i4"), "FP32": ("fp32_contents", "<f4")}
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.just(3))
LARGE_SHAPE = (2, 64, 64, 3)


def read_images(
    message: infer_message.InferMessage, *ranges: PixelRange | None, input_name: str = "", is_strict: bool = False
) -> np.ndarray | Pending | list[Encoded]:
    """The request that a message holds, by the checks of all wires; the message's shape is known from then on."""
    request = open_inference_tensors.infer_request(message)
    if request.known_images is not None:
        return request.known_images
    default_range, *asked = ranges or (PixelRange.LEVELS,)
    assert default_range is not None
    images = input_tensors.images_of(request.inputs, default_range, *asked, input_name=input_name, is_strict=is_strict)
    open_inference_tensors.learn_shape(message, images)
    return images


def images_of(request: pb.ModelInferRequest) -> np.ndarray | Pending | list[Encoded]:
    """What comes out of the bytes that a client sends."""
    message = infer_message.InferMessages().parse(request.SerializeToString())
    assert message is not None
    return read_images(message)


def pixels_request(levels: np.ndarray, datatype: str, raw: bool) -> pb.ModelInferRequest:
    # A name of odd length, so that raw data need not lie at a multiple of its size.
    request = pb.ModelInferRequest(model_name="odd")
    tensor = request.inputs.add(name="pixels", datatype=datatype, shape=levels.shape)
    field, dtype = FIELDS[datatype]
    if raw:
        request.raw_input_contents.append(levels.astype(dtype).tobytes())
    else:
        getattr(tensor.contents, field).extend(levels.astype(dtype).ravel().tolist())
    return request


def test_a_name_of_another_server_is_that_of_either_input() -> None:
    pixels = pixels_request(np.zeros((1, 2, 2, 3)), "UINT8", raw=True)
    image = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"\3\0\0\0abc"])
    image.inputs.add(datatype="BYTES", shape=[1])
    for request, expected in ((pixels, [bytes(12)]), (image, [b"abc"])):
        request.inputs[0].name = "input_1"
        message = infer_message.InferMessages().parse(request.SerializeToString())
        assert message is not None
        with pytest.raises(InvalidArgument, match="inputs: expected one tensor, 'pixels' or 'image', got 'input_1'"):
            read_images(message)
        found = read_images(message, input_name="input_1")
        assert not isinstance(found, Pending)
        assert [*map(bytes, found)] == [*map(bytes, expected)]


@given(
    levels=SHAPES.flatmap(lambda shape: arrays.arrays(np.uint8, shape)),
    datatype=st.sampled_from(sorted(FIELDS)),
    raw=st.booleans(),
)
def test_pixels_come_out_as_they_were_sent_whatever_their_type_and_manner(
    levels: np.ndarray, datatype: str, raw: bool
) -> None:
    images = images_of(pixels_request(levels, datatype, raw))
    assert isinstance(images, np.ndarray)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, levels)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("datatype", FIELDS)
def test_large_pixels_come_out_as_they_were_sent(datatype: str, raw: bool) -> None:
    levels = np.random.default_rng(0).integers(0, 256, LARGE_SHAPE, np.uint8)
    np.testing.assert_array_equal(images_of(pixels_request(levels, datatype, raw)), levels)


@pytest.mark.parametrize("datatype", ["INT32", "UINT8"])
def test_many_typed_integers_are_left_to_a_thread_unread(datatype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3), np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(wire_format, "unpacked", None)
        pending = images_of(pixels_request(levels, datatype, raw=False))
    assert isinstance(pending, Pending)
    assert (pending.shape, pending.nbytes) == (levels.shape, levels.size * 4)
    assert isinstance(pending.pixels, packed_lists.ListedPixels)
    assert isinstance(pending.pixels.numbers, packed_lists.PackedIntegers)
    assert pending.pixels.numbers.octets.base is not None, "they are viewed where they lie"
    for one in (pending, pickle.loads(pickle.dumps(pending))):
        np.testing.assert_array_equal(one.check(), levels)


def typed_request(datatype: str, shape: tuple[int, ...], *lists: bytes, others: tuple[int, ...] = ()) -> bytes:
    """A request whose contents are these lists as they stand on the wire, and these values one by one."""
    number = pb.InferTensorContents.DESCRIPTOR.fields_by_name[FIELDS[datatype][0]].number
    packed = [part for octets in lists for part in wire_format.record(number, octets)]
    single = [bytes([number << 3, value]) for value in others]
    tensor = pb.ModelInferRequest.InferInputTensor(name="pixels", datatype=datatype, shape=shape).SerializeToString()
    contents = wire_format.record(pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER, *packed, *single)
    return b"".join(wire_format.record(pb.ModelInferRequest.INPUTS_FIELD_NUMBER, tensor, *contents))


def read(data: bytes) -> np.ndarray:
    """The pixels of a request, once a thread has read them."""
    message = infer_message.InferMessages().parse(data)
    assert message is not None
    images = read_images(message)
    return images.check() if isinstance(images, Pending) else np.asarray(images)


@given(seed=st.integers(0, 99), cuts=st.sets(st.integers(0, 120 * 80 * 3), max_size=4), times=st.sampled_from([1, 4]))
@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_pixels_may_be_sent_in_several_lists(datatype: str, seed: int, cuts: set[int], times: int) -> None:
    levels = np.random.default_rng(seed).integers(0, 256, (times, 120, 80, 3), np.uint8)
    values = levels.ravel().astype(np.float32 if datatype == "FP32" else np.int64)
    lists = [wire_format.packed(part) if len(part) else b"" for part in np.split(values, sorted(cuts))]
    data = typed_request(datatype, levels.shape, *lists)
    np.testing.assert_array_equal(read(data), levels)
    whole = pb.ModelInferRequest.FromString(data)
    assert getattr(whole.inputs[0].contents, FIELDS[datatype][0]) == values.tolist()


@pytest.mark.parametrize("datatype", ["INT32", "UINT8"])
def test_typed_integers_may_be_sent_one_by_one(datatype: str) -> None:
    levels = np.random.default_rng(0).integers(0, 128, (2, 10, 10, 3), np.uint8)
    np.testing.assert_array_equal(read(typed_request(datatype, levels.shape, others=tuple(levels.ravel()))), levels)


@pytest.mark.parametrize("side", [128, 256])
@pytest.mark.parametrize("datatype", ["INT32", "UINT8"])
def test_varints_longer_than_they_need_be_are_read(datatype: str, side: int) -> None:
    shape = (1, side, side, 3)
    one = b"\x87" + b"\x80" * 8 + b"\x00"
    data = typed_request(datatype, shape, one + b"\x05" * (side * side * 3 - 1))
    assert read(data).ravel()[:3].tolist() == [7, 5, 5]


@pytest.mark.parametrize("side", [96, 256])
@pytest.mark.parametrize(
    ("lists", "others", "says"),
    [
        ((b"\x81",), (), "packed values in {field}, got other bytes"),
        ((b"\x81", b"\x01\x01"), (), "packed values in {field}, got other bytes"),
        ((b"\x80" * 10 + b"\x01",), (), "packed values in {field}, got other bytes"),
        ((), (1,), "packed values in {field}, got other bytes"),
        ((b"\x01",), (), r"{count} values in {field} for {shape}, got {more} values"),
    ],
    ids=["cut off", "cut in two", "a varint of 11 bytes", "some one by one", "one too many"],
)
@pytest.mark.parametrize("datatype", ["INT32", "UINT8"])
def test_typed_integers_that_are_none_are_refused_on_whichever_thread(
    datatype: str, lists: tuple[bytes, ...], others: tuple[int, ...], says: str, side: int
) -> None:
    count = side * side * 3
    shape = (1, side, side, 3)
    first, *rest = lists or (b"",)
    good = bytes(count - (1 if first.startswith(b"\x80") or rest else 0))
    data = typed_request(datatype, shape, good + first, *rest, others=others)
    field = FIELDS[datatype][0]
    expected = says.format(field=field, count=count, more=count + 1, shape=list(shape))
    with pytest.raises(InvalidArgument, match=re.escape(f"contents of pixels: expected {expected}")):
        read(data)


@pytest.mark.parametrize(("datatype", "got"), [("INT32", "-1"), ("UINT8", "2147483647")])
@pytest.mark.parametrize("side", [128, 256])
def test_typed_integers_beyond_the_levels_are_refused(datatype: str, got: str, side: int) -> None:
    shape = (1, side, side, 3)
    data = typed_request(datatype, shape, bytes(side * side * 3 - 1) + b"\xff\xff\xff\xff\x0f")
    with pytest.raises(InvalidArgument, match=f"pixels: expected values from 0 to 255, got {got}"):
        read(data)


@pytest.mark.parametrize("datatype", FIELDS)
def test_too_many_typed_values_are_refused_however_few_bytes_they_take(datatype: str) -> None:
    side = 837
    assert side * side * 3 > packed_lists.MAX_LISTED_VALUES
    with pytest.raises(InvalidArgument, match="contents of pixels: expected at most 2097152 values"):
        images_of(pixels_request(np.ones((1, side, side, 3), np.uint8), datatype, raw=False))


def test_raw_uint8_pixels_are_viewed_and_not_copied() -> None:
    request = pixels_request(np.ones(LARGE_SHAPE, np.uint8), "UINT8", raw=True)
    message = infer_message.InferMessages().parse(request.SerializeToString())
    assert message is not None
    images = read_images(message)
    assert isinstance(images, np.ndarray)
    assert np.shares_memory(images, np.frombuffer(message.raw[0], np.uint8))


def test_float_levels_are_rounded() -> None:
    levels = np.full((1, 1, 1, 3), [0.4, 0.6, 254.5], np.float32)
    images = images_of(pixels_request(levels, "FP32", raw=True))
    assert isinstance(images, np.ndarray)
    assert images.ravel().tolist() == [0, 1, 254]


@given(
    elements=st.lists(st.binary(max_size=300), min_size=1, max_size=9),
    raw=st.booleans(),
    is_column=st.booleans(),
)
def test_encoded_images_come_out_as_they_were_sent(elements: list[bytes], raw: bool, is_column: bool) -> None:
    request = pb.ModelInferRequest()
    shape = [len(elements), 1] if is_column else [len(elements)]
    tensor = request.inputs.add(name="image", datatype="BYTES", shape=shape)
    if raw:
        request.raw_input_contents.append(raw_bytes(elements))
    else:
        tensor.contents.bytes_contents.extend(elements)
    assert images_of(request) == elements


@given(elements=st.lists(st.binary(max_size=20), min_size=1, max_size=5), cut=st.integers(1, 30), more=st.booleans())
def test_framing_that_is_cut_off_or_goes_on_is_refused(elements: list[bytes], cut: int, more: bool) -> None:
    data = raw_bytes(elements)
    data = data + bytes(cut) if more else data[: max(0, len(data) - cut)]
    request = pb.ModelInferRequest(raw_input_contents=[data])
    request.inputs.add(name="image", datatype="BYTES", shape=[len(elements)])
    with pytest.raises(InvalidArgument, match=r"^raw_input_contents of image: expected \d+ elements"):
        images_of(request)


@given(shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), size_bytes=st.integers(0, 100))
def test_no_shape_however_absurd_is_taken_for_another(shape: list[int], size_bytes: int) -> None:
    request = pb.ModelInferRequest(raw_input_contents=[bytes(size_bytes)])
    request.inputs.add(name="pixels", datatype="UINT8", shape=shape)
    fits = len(shape) == 4 and min(shape) > 0 and shape[3] == 3 and np.prod(np.array(shape, object)) == size_bytes
    if fits:
        images = images_of(request)
        assert isinstance(images, np.ndarray)
        assert images.shape == tuple(shape)
    else:
        with pytest.raises(InvalidArgument):
            images_of(request)


def test_unknown_tensor_parameters_are_refused_by_strict_models_alone() -> None:
    request = pixels_request(np.zeros((1, 1, 1, 3), np.uint8), "UINT8", raw=True)
    request.inputs[0].parameters["binary_data_size"].int64_param = 3
    parse = infer_message.InferMessages().parse
    for is_strict in (False, True, False):
        message = parse(request.SerializeToString())
        assert message is not None
        if is_strict:
            with pytest.raises(
                InvalidArgument, match=r"^inputs\.pixels\.parameters: expected .* got 'binary_data_size'"
            ):
                read_images(message, is_strict=True)
        else:
            assert len(read_images(message)) == 1


def test_half_precision_is_read_raw_and_of_either_range() -> None:
    levels = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    for values, pixel_range in ((levels, PixelRange.LEVELS), (levels / 255, PixelRange.UNIT)):
        request = pb.ModelInferRequest(raw_input_contents=[values.astype("<f2").tobytes()])
        request.inputs.add(name="pixels", datatype="FP16", shape=levels.shape)
        message = infer_message.InferMessages().parse(request.SerializeToString())
        assert message is not None
        np.testing.assert_array_equal(read_images(message, pixel_range), levels)
    listed = pb.ModelInferRequest()
    listed.inputs.add(name="pixels", datatype="FP16", shape=levels.shape).contents.fp32_contents.extend([0.0] * 12)
    with pytest.raises(InvalidArgument, match=r"^contents of pixels: expected FP16 as raw_input_contents"):
        images_of(listed)


@pytest.mark.parametrize("as_raw", [True, False])
@pytest.mark.parametrize(("dtype", "datatype"), DATATYPES.items())
def test_outputs_are_written_in_the_manner_that_was_asked_for(
    dtype: np.dtype[Any], datatype: Datatype, as_raw: bool
) -> None:
    lowest = np.iinfo(dtype).min if dtype.kind == "i" else 0
    values: NDArray[Value] = np.array([[lowest, 1, 2], [3, 4, 5]]).astype(dtype)
    sent = [raw_part(values)] if as_raw else LISTING.numbers(values)
    wire = open_inference_tensors.output_parts(OutputTensor("it", datatype, values.shape, sent, as_raw))
    response = pb.ModelInferResponse.FromString(b"".join(wire))
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("it", datatype, [2, 3])
    if as_raw:
        assert list(response.raw_output_contents) == [values.tobytes()]
        assert not output.HasField("contents")
    else:
        ((_, numbers),) = output.contents.ListFields()
        assert list(numbers) == values.ravel().tolist()
        assert not response.raw_output_contents


@pytest.mark.parametrize("as_raw", [True, False])
def test_bytes_are_written_in_the_manner_that_was_asked_for(as_raw: bool) -> None:
    sent: list[Part] = []
    for row in ([b"a", b""], [b"bcd", b"e"]):
        sent += [raw_bytes(row)] if as_raw else LISTING.elements(row)
    wire = open_inference_tensors.output_parts(OutputTensor("scores", "BYTES", (2, 2), sent, as_raw))
    response = pb.ModelInferResponse.FromString(b"".join(wire))
    (output,) = response.outputs
    assert (output.datatype, list(output.shape)) == ("BYTES", [2, 2])
    if as_raw:
        expected = b"\x01\0\0\0a" + b"\0\0\0\0" + b"\x03\0\0\0bcd" + b"\x01\0\0\0e"
        assert list(response.raw_output_contents) == [expected]
    else:
        assert list(output.contents.bytes_contents) == [b"a", b"", b"bcd", b"e"]


def test_requests_and_models_may_say_that_pixels_are_from_0_to_1() -> None:
    levels = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    request = pb.ModelInferRequest(raw_input_contents=[(levels / np.float32(255)).tobytes()])
    request.inputs.add(name="pixels", datatype="FP32", shape=levels.shape)
    message = infer_message.InferMessages().parse(request.SerializeToString())
    assert message is not None
    unit, whole = PixelRange.UNIT, PixelRange.LEVELS
    for ranges in ((whole, unit), (unit, None), (unit, unit)):
        np.testing.assert_array_equal(read_images(message, *ranges), levels)
    for ranges in ((whole, None), (unit, whole)):
        with pytest.raises(InvalidArgument, match="fractions from 0 to"):
            read_images(message, *ranges)


@pytest.mark.parametrize("datatype", ["UINT8", "INT32"])
def test_a_range_of_0_to_1_goes_with_fp32_alone(datatype: str) -> None:
    message = infer_message.InferMessages().parse(
        pixels_request(np.ones((1, 2, 2, 3)), datatype, raw=True).SerializeToString()
    )
    assert message is not None
    with pytest.raises(InvalidArgument, match=rf"^parameters\.pixel_range: expected .* FP32 .* got {datatype}"):
        read_images(message, PixelRange.LEVELS, PixelRange.UNIT)
    assert read_images(message, PixelRange.UNIT) is not None


def test_a_shape_is_not_known_to_a_model_of_another_layout() -> None:
    pixels = np.arange(2 * 3 * 5 * 3, dtype=np.uint8).reshape(2, 3, 5, 3)
    messages = infer_message.InferMessages()
    for axes in ("NHWC", "NCHW", "NHWC"):  # a model that is loaded again, as its clients go on
        image = ImageInput(3, axes=axes)
        for _ in range(2):  # the second one is known, where the first one could be
            message = messages.parse(pixels_request(pixels, "UINT8", raw=True).SerializeToString())
            assert message is not None
            request = open_inference_tensors.infer_request(message, image)
            images: object = request.known_images
            if images is None:
                images = input_tensors.images_of(request.inputs, PixelRange.LEVELS, image=image)
            assert isinstance(images, np.ndarray)
            np.testing.assert_array_equal(images, image.arranged(pixels))
            open_inference_tensors.learn_shape(message, images, image)


def test_a_shape_is_not_known_to_a_model_of_other_inputs() -> None:
    pixels = np.zeros((2, 3, 5, 3), np.uint8)
    messages = infer_message.InferMessages()
    data = pixels_request(pixels, "UINT8", raw=True).SerializeToString()
    known = []
    for image in (RGB, RGB, RGB, None, RGB):  # a model that is loaded again, as its clients go on
        message = messages.parse(data)
        assert message is not None
        known.append(open_inference_tensors.infer_request(message, image).known_images is not None)
        open_inference_tensors.learn_shape(message, pixels, image)
    assert known == [False, False, True, False, True]
