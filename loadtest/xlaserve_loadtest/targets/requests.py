"""Contents of a serialised ModelInferRequest, from which requests of other protocols are rewritten once."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.schedule.payload import PayloadError, Request
from xlaserve_loadtest.schedule.tensors import BYTES, DTYPES
from xlaserve_proto import open_inference_pb2 as oip

_LENGTH: Final = struct.Struct("<I")


class Input(NamedTuple):
    """An input of a request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes
    """Its elements as the binary tensor extension has them."""

    def elements(self) -> list[bytes]:
        """Returns the elements of BYTES."""
        return [*_elements(self.raw)]

    def numbers(self) -> list[Any]:
        """Returns the numbers, row after row."""
        numbers: list[Any] = self._array().tolist()
        return numbers

    def rows(self) -> list[Any]:
        """Returns what each row holds: of BYTES bytes, of other types numbers, in lists where it is no scalar."""
        array = np.array(self.elements(), dtype=object) if self.datatype == BYTES else self._array()
        rows: list[Any] = array.reshape(self.shape).tolist()
        return rows

    def _array(self) -> NDArray[Any]:
        return np.frombuffer(self.raw, DTYPES[self.datatype])


def inputs_of(request: Request) -> Sequence[Input]:
    """Returns the inputs of a request."""
    message = oip.ModelInferRequest.FromString(request.data)
    return [
        Input(tensor.name, tensor.datatype, tuple(tensor.shape), raw)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    ]


def check_modeless(request: Request, protocol: str) -> None:
    """Raises PayloadError for a request that names a mode, which a protocol has no place for."""
    if request.mode:
        raise PayloadError(f"{protocol} has no modes: leave out the mode {request.mode}")


def _elements(raw: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(raw):
        (length,) = _LENGTH.unpack_from(raw, place)
        place += _LENGTH.size + length
        yield raw[place - length : place]
