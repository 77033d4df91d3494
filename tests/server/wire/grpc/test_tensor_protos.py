from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.config import PixelRange
from xlaserve.errors import InvalidArgument
from xlaserve.models.task import DATATYPES
from xlaserve.pipeline.request_inputs import Pending
from xlaserve.wire.grpc import serving_messages, tensor_protos, wire_format
from xlaserve.wire.grpc.tensor_protos import LISTING, TensorInput
from xlaserve.wire.shared.input_tensors import images_of
from xlaserve.wire.shared.output_tensors import OutputTensor
from xlaserve_proto import tensorflow_messages_pb2 as pb

SHAPE = (2, 4, 5, 3)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE)
DTYPES = {pb.DT_UINT8: np.uint8, pb.DT_INT32: np.int32, pb.DT_FLOAT: np.float32, pb.DT_HALF: np.float16}


def tensor(dtype: pb.DataType.ValueType, shape: tuple[int, ...], **fields: Any) -> pb.TensorProto:
    dims = [pb.TensorShapeProto.Dim(size=size) for size in shape]
    return pb.TensorProto(dtype=dtype, tensor_shape=pb.TensorShapeProto(dim=dims), **fields)


def images(name: str, value: pb.TensorProto, least: int) -> Any:
    """Returns the images of a request whose message is taken apart from `least` bytes on."""
    data = pb.PredictRequest(inputs={name: value}).SerializeToString()
    message = serving_messages._view_inputs(least, data)
    assert message is not None
    found = images_of(serving_messages.infer_request(message).inputs, PixelRange.LEVELS)
    return found.check() if isinstance(found, Pending) else found


def listed(dtype: pb.DataType.ValueType, pixels: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
    flat = pixels.astype(DTYPES[dtype]).reshape(-1)
    if dtype == pb.DT_HALF:
        return {"half_val": flat.view(np.uint16).tolist()}
    return {"float_val" if dtype == pb.DT_FLOAT else "int_val": flat.tolist()}


WHOLE, APART = 10**9, 0


@pytest.mark.parametrize("least", [WHOLE, APART], ids=["whole", "apart"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_are_the_same_in_content_and_in_lists(dtype: pb.DataType.ValueType, least: int) -> None:
    content = PIXELS.astype(DTYPES[dtype]).tobytes()
    np.testing.assert_array_equal(images("pixels", tensor(dtype, SHAPE, tensor_content=content), least), PIXELS)
    np.testing.assert_array_equal(images("pixels", tensor(dtype, SHAPE, **listed(dtype, PIXELS)), least), PIXELS)


@pytest.mark.parametrize("least", [WHOLE, APART], ids=["whole", "apart"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_list_is_filled_up_with_its_last_value(dtype: pb.DataType.ValueType, least: int) -> None:
    short = listed(dtype, np.array([7, 9]))
    found = images("pixels", tensor(dtype, SHAPE, **short), least)
    assert found.reshape(-1).tolist() == [7] + [9] * (found.size - 1)


@pytest.mark.parametrize(
    ("dtype", "field", "numpy_dtype"),
    [
        (pb.DT_FLOAT, "float_val", np.float32),
        (pb.DT_INT64, "int64_val", np.int64),
        (pb.DT_BOOL, "bool_val", np.bool_),
        (pb.DT_HALF, "half_val", np.float16),
    ],
)
def test_numbers_are_filled_up_with_the_last_one(
    dtype: pb.DataType.ValueType, field: str, numpy_dtype: type[Any]
) -> None:
    given = TensorInput("x", tensor(dtype, (2, 3), **{field: [0, 1]}), {})
    numbers = given.numbers((2, 3), np.dtype(numpy_dtype))
    last = np.array([1], np.uint16).view(np.float16)[0] if field == "half_val" else 1
    np.testing.assert_array_equal(numbers, np.array([[0, last, last], [last] * 3], numpy_dtype))
    assert numbers.dtype == numpy_dtype


def test_filling_up_makes_no_list_of_numbers() -> None:
    """A list of numbers would take a hundred times as long, and hold the interpreter's lock for it."""
    shape = (4, 2**18)
    given = TensorInput("x", tensor(pb.DT_FLOAT, shape, float_val=[1]), {})
    tracemalloc.start()
    try:
        numbers = given.numbers(shape, np.dtype(np.float32))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1.5 * numbers.nbytes


def test_what_is_filled_up_takes_no_memory_before_it_is_read() -> None:
    found = TensorInput("pixels", tensor(pb.DT_UINT8, (10**6, 10**4, 10**4, 3), int_val=[1]), {})
    pixels = found.values((10**6, 10**4, 10**4, 3))
    assert pixels.nbytes == 12 * 10**14


@pytest.mark.parametrize("least", [WHOLE, APART], ids=["whole", "apart"])
def test_encoded_images_are_those_that_were_sent(least: int) -> None:
    found = images("image", tensor(pb.DT_STRING, (2,), string_val=[b"one", b"two"]), least)
    assert [*map(bytes, found)] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("name", "sent", "field"),
    [
        ("pixels", tensor(pb.DT_UINT8, SHAPE), "int_val of pixels"),
        ("pixels", tensor(pb.DT_UINT8, SHAPE, int_val=[0] * 121), "int_val of pixels"),
        ("pixels", tensor(pb.DT_UINT8, SHAPE, tensor_content=b"too short"), "tensor_content of pixels"),
        ("pixels", tensor(pb.DT_UINT8, SHAPE, int_val=[256]), "pixels"),
        ("pixels", tensor(pb.DT_INT32, SHAPE, int_val=[-1]), "pixels"),
        ("pixels", tensor(pb.DT_INT64, SHAPE), "pixels.datatype"),
        ("pixels", pb.TensorProto.FromString(b"\x08\x4d"), "pixels.datatype"),
        ("pixels", tensor(pb.DT_UINT8, (-1, 4, 5, 3)), "pixels.shape"),
        ("pixels", tensor(pb.DT_UINT8, ()), "pixels.shape"),
        ("image", tensor(pb.DT_STRING, (1,), tensor_content=b"\3abc"), "tensor_content of image"),
        ("image", tensor(pb.DT_STRING, (2,), string_val=[b"one"]), "string_val of image"),
        ("other", tensor(pb.DT_STRING, (1,), string_val=[b"one"]), "inputs"),
    ],
)
@pytest.mark.parametrize("least", [WHOLE, APART], ids=["whole", "apart"])
def test_what_is_wrong_is_named(name: str, sent: pb.TensorProto, field: str, least: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        images(name, sent, least)
    assert refused.value.field == field


def test_pixels_that_are_still_to_be_read_can_be_pickled() -> None:
    sent = tensor(pb.DT_INT32, (20, 40, 40, 3), int_val=[3] * 96_000)
    data = pb.PredictRequest(inputs={"pixels": sent}).SerializeToString()
    message = serving_messages.PARSERS["PredictRequest"](data)
    assert isinstance(message, serving_messages.ServingMessage)
    (given,) = serving_messages.infer_request(message).inputs
    pixels = given.values((20, 40, 40, 3))
    assert not isinstance(pixels, np.ndarray)
    assert (np.asarray(pickle.loads(pickle.dumps(pixels))) == 3).all()


def output_parts(values: np.ndarray[Any, Any]) -> wire_format.Wire:
    tensor = OutputTensor("name", DATATYPES[values.dtype], values.shape, LISTING.numbers(values), is_raw=False)
    return tensor_protos.output_parts(tensor)


@given(st.sampled_from([*DATATYPES]), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_outputs_stand_in_the_list_of_their_type(dtype: np.dtype[Any], shape: list[int]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    response = pb.PredictResponse.FromString(b"".join(output_parts(values)))
    found = response.outputs["name"]
    assert [dim.size for dim in found.tensor_shape.dim] == shape
    tf = pytest.importorskip("tensorflow")
    same = tf.make_tensor_proto(values)
    listed = {field.name: [*numbers] for field, numbers in found.ListFields() if field.name.endswith("_val")}
    assert [*listed.values()] == ([values.reshape(-1).tolist()] if values.size else [])
    assert found.dtype == same.dtype
    read = tf.make_ndarray(type(same).FromString(found.SerializeToString()))
    np.testing.assert_array_equal(read, values)
    assert read.dtype == dtype


def test_large_outputs_are_not_copied_before_the_response_is_joined() -> None:
    values = np.zeros((100, 1000), np.float32)
    wire = output_parts(values)
    assert any(isinstance(part, memoryview) and part.nbytes == values.nbytes for part in wire)
    assert wire_format.wire_bytes(wire) == len(b"".join(wire))


def test_the_messages_are_those_of_tensorflow() -> None:
    tensor_pb2 = pytest.importorskip("tensorflow.core.framework.tensor_pb2")
    types_pb2 = pytest.importorskip("tensorflow.core.framework.types_pb2")
    meta_graph_pb2 = pytest.importorskip("tensorflow.core.protobuf.meta_graph_pb2")
    feature_pb2 = pytest.importorskip("tensorflow.core.example.feature_pb2")
    for original in (
        tensor_pb2.TensorProto,
        meta_graph_pb2.TensorInfo,
        meta_graph_pb2.SignatureDef,
        feature_pb2.Feature,
        feature_pb2.BytesList,
        feature_pb2.FloatList,
        feature_pb2.Int64List,
    ):
        fields = {field.name: (field.number, field.type) for field in original.DESCRIPTOR.fields}
        ours = getattr(pb, original.DESCRIPTOR.name).DESCRIPTOR.fields
        assert ours
        assert {field.name: (field.number, field.type) for field in ours}.items() <= fields.items()
    assert dict(pb.DataType.items()).items() <= dict(types_pb2.DataType.items()).items()


INTEGERS_THAT_ARE_NONE = bytes([0x80] * 20 + [1])


def test_integers_that_are_none_are_refused_by_the_input_s_name() -> None:
    views = {"int_val": [memoryview(INTEGERS_THAT_ARE_NONE + bytes(3))]}
    sent = TensorInput("counts", tensor(pb.DT_INT32, (1, 4)), views)
    with pytest.raises(InvalidArgument) as refused:
        sent.numbers((1, 4), np.dtype(np.int32))
    assert refused.value.field == "int_val of counts"


def test_numbers_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(wire_format, "unpacked")
    sent = TensorInput("counts", tensor(pb.DT_INT32, (1, 4)), {"int_val": [memoryview(bytes(10**5))]})
    with pytest.raises(InvalidArgument, match="got 100000 values") as refused:
        sent.numbers((1, 4), np.dtype(np.int32))
    assert refused.value.field == "int_val of counts"


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [(pb.DT_FLOAT, np.float32), (pb.DT_INT32, np.int32)])
def test_large_messages_are_filled_up_as_small_ones_are(dtype: pb.DataType.ValueType, numpy_dtype: type[Any]) -> None:
    short = listed(dtype, np.array([7, 9]))
    data = pb.PredictRequest(inputs={"x": tensor(dtype, (2, 3), **short)}).SerializeToString()
    found = []
    for least in (WHOLE, APART):
        message = serving_messages._view_inputs(least, data)
        assert message is not None
        (given,) = serving_messages.infer_request(message).inputs
        found.append(given.numbers((2, 3), np.dtype(numpy_dtype)))
    for numbers in found:
        assert numbers.dtype == numpy_dtype
        np.testing.assert_array_equal(numbers, [[7, 9, 9], [9, 9, 9]])
