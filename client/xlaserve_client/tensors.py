"""NumPy arrays to and from the tensors of the Open Inference Protocol."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_client.errors import InvalidReply
from xlaserve_proto import open_inference_pb2 as oip

BYTES: Final = "BYTES"
"""The datatype of encoded images."""
_DTYPES: Final = {
    "BOOL": np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_CONTENTS: Final = (
    ("BOOL", "bool_contents"),
    ("INT64", "int64_contents"),
    ("INT", "int_contents"),
    ("UINT64", "uint64_contents"),
    ("UINT", "uint_contents"),
    ("FP32", "fp32_contents"),
    ("FP64", "fp64_contents"),
    ("BYTES", "bytes_contents"),
)
"""Fields of typed data: the first entry whose name is a prefix of the datatype's."""


def dtype(datatype: str) -> np.dtype[Any]:
    """Returns the dtype of a datatype of the protocol. Raises TypeError for one that has none."""
    try:
        return _DTYPES[datatype]
    except KeyError:
        raise TypeError(f"no dtype for the protocol's datatype {datatype}") from None


def datatype(array: NDArray[Any]) -> str:
    """Returns the protocol's name of an array's dtype. Raises TypeError when it has none."""
    try:
        return _NAMES[array.dtype.newbyteorder("<")]
    except KeyError:
        raise TypeError(f"no datatype of the protocol for {array.dtype}") from None


def to_raw(array: NDArray[Any]) -> bytes:
    """Returns an array in the form of `raw_input_contents`: row-major, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def bytes_to_raw(elements: Iterable[bytes]) -> bytes:
    """Returns a BYTES tensor in the form of `raw_input_contents`: each element after its length."""
    return b"".join(part for element in elements for part in (struct.pack("<I", len(element)), element))


def outputs(response: oip.ModelInferResponse) -> dict[str, NDArray[Any]]:
    """Returns a response's output tensors by name; raw ones as read-only views. Raises InvalidReply."""
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        raise InvalidReply(f"expected {len(response.outputs)} raw outputs, got {len(raw)}")
    return {
        output.name: _array(output, raw[position] if raw else None) for position, output in enumerate(response.outputs)
    }


def _array(output: oip.ModelInferResponse.InferOutputTensor, raw: bytes | None) -> NDArray[Any]:
    try:
        if raw is None:
            flat = _typed(output)
        elif output.datatype == "BYTES":
            flat = np.array(_split(raw), dtype=object)
        else:
            flat = np.frombuffer(raw, _DTYPES[output.datatype])
        return flat.reshape(tuple(output.shape))
    except (KeyError, ValueError, struct.error) as error:
        shape = list(output.shape)
        raise InvalidReply(f"output {output.name}, {output.datatype} {shape}, can't be read: {error!r}") from None


def _typed(output: oip.ModelInferResponse.InferOutputTensor) -> NDArray[Any]:
    field = next((field for prefix, field in _CONTENTS if output.datatype.startswith(prefix)), None)
    if field is None:
        raise KeyError(output.datatype)
    return np.array(getattr(output.contents, field), dtype=_DTYPES.get(output.datatype, np.dtype(object)))


def _split(raw: bytes) -> list[bytes]:
    elements, offset = [], 0
    while offset < len(raw):
        (length,) = struct.unpack_from("<I", raw, offset)
        end = offset + 4 + length
        if end > len(raw):
            raise ValueError("a BYTES element is cut short")
        elements.append(raw[offset + 4 : end])
        offset = end
    return elements
