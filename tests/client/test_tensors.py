from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from xlaserve_client import InvalidReply, tensors
from xlaserve_proto import open_inference_pb2 as oip


def response(
    datatype: str, shape: list[int], raw: bytes | None = None, **contents: Iterable[object]
) -> oip.ModelInferResponse:
    message = oip.ModelInferResponse()
    output = message.outputs.add(name="out", datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_output_contents.append(raw)
    for field, values in contents.items():
        getattr(output.contents, field).extend(values)
    return message


@pytest.mark.parametrize("dtype", ["?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"])
def test_raw_tensors_come_back_as_they_went(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    out = tensors.outputs(response(tensors.datatype(array), [2, 3], tensors.to_raw(array)))["out"]
    np.testing.assert_array_equal(out, array)
    assert out.dtype == array.dtype


def test_big_endian_and_strided_arrays_travel_as_little_endian_rows() -> None:
    array = np.arange(6, dtype=">i4").reshape(3, 2).T
    assert tensors.to_raw(array) == np.ascontiguousarray(array).astype("<i4").tobytes()
    assert tensors.datatype(array) == "INT32"


def test_raw_bytes_elements_come_back_whole_even_when_empty() -> None:
    out = tensors.outputs(response("BYTES", [3], tensors.bytes_to_raw([b"abc", b"", b"\x00d"])))["out"]
    assert out.tolist() == [b"abc", b"", b"\x00d"]


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-1, 2]),
        ("INT64", "int64_contents", [-1, 2]),
        ("UINT8", "uint_contents", [1, 2]),
        ("UINT64", "uint64_contents", [1, 2]),
        ("FP32", "fp32_contents", [1.5, 2]),
        ("FP64", "fp64_contents", [1.5, 2]),
        ("BYTES", "bytes_contents", [b"a", b""]),
    ],
)
def test_typed_contents_are_read_as_well(datatype: str, field: str, values: list[object]) -> None:
    assert tensors.outputs(response(datatype, [2], None, **{field: values}))["out"].tolist() == values


@pytest.mark.parametrize(
    "message",
    [
        response("FP32", [2], b"\x00" * 4),
        response("FP32", [2], b"\x00" * 7),
        response("BF16", [1], b"\x00" * 2),
        response("BYTES", [1], b"\x05\x00\x00\x00abc"),
        response("BYTES", [1], b"\x05"),
        response("FP32", [3], fp32_contents=[1.0]),
        response("FP16", [1]),
    ],
)
def test_a_reply_that_contradicts_itself_is_named(message: oip.ModelInferResponse) -> None:
    with pytest.raises(InvalidReply, match="output out"):
        tensors.outputs(message)


def test_raw_outputs_must_match_the_outputs_in_number() -> None:
    message = response("FP32", [1], b"\x00" * 4)
    message.raw_output_contents.append(b"")
    with pytest.raises(InvalidReply, match="expected 1 raw outputs, got 2"):
        tensors.outputs(message)


def test_a_dtype_that_the_protocol_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="complex128"):
        tensors.datatype(np.zeros(1, complex))
