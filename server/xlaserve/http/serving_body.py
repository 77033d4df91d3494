"""Bodies of TensorFlow Serving's requests: rows or columns of JSON, to the input that they hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument, shown
from xlaserve.http import fields
from xlaserve.http.json_numbers import NumberArray
from xlaserve.http.message import HttpRequest, Json
from xlaserve.http.tensors import ListedPixels, image, to_array
from xlaserve.image import Encoded
from xlaserve.pipeline import Readable
from xlaserve.protocol.serving import check_signature
from xlaserve.protocol.tensors import IMAGE, MAX_IMAGES, PIXELS

ROWS: Final = "instances"
COLUMNS: Final = "inputs"
B64: Final = "b64"
_LOOKED_AT_BYTES: Final = 4096
_EXAMPLES: Final = re.compile(rb'"examples"\s*:')


class PredictBody(NamedTuple):
    """What a request to predict holds."""

    inputs: Sequence[JsonTensor]
    is_rows: bool
    """Whether it is in rows, as its answer is then."""


class JsonTensor:
    """An input of a request, for `protocol.tensors.images_of`.

    Whole numbers are pixels from 0 to 255; where one has a fraction, all are FP32.
    """

    __slots__ = ("_value", "datatype", "name", "parameters", "shape")
    bytes_field = "values"
    values_field = "values"

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.parameters: Iterable[str] = ()
        self._value: Any = value if name == IMAGE else _arrays(value, name)
        self.datatype: str
        self.shape: Sequence[int]
        self.datatype, self.shape = ("BYTES", [len(value)]) if name == IMAGE else _kind_of(self._value, name)

    def raw(self) -> memoryview | None:
        """Returns None: everything is listed."""
        return None

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | Readable:
        """Returns the listed pixels."""
        pixels = ListedPixels(self._value, self.datatype, shape)
        return np.asarray(pixels) if isinstance(self._value, np.ndarray) else pixels

    def elements(self) -> list[Encoded]:
        """Returns the listed images."""
        return [image(one, f"{self.name}[{index}].{B64}") for index, one in enumerate(self._value)]


def parse(body: Json, input_name: str = "") -> PredictBody:
    """Returns what the body of a request to predict holds. Raises InvalidArgument.

    `input_name` is another name of either input.
    """
    check_signature(fields.text(body, "signature_name", "body", ""))
    if (ROWS in body) == (COLUMNS in body):
        got = "both" if ROWS in body else "neither"
        raise InvalidArgument("body", f"either {ROWS} or {COLUMNS}", got)
    is_rows = ROWS in body
    value = body[ROWS] if is_rows else body[COLUMNS]
    given = _columns_of(value) if is_rows else _named(value)
    if input_name and given.keys() == {input_name}:
        given = _named(given[input_name])
    return PredictBody([_tensor(name, one) for name, one in given.items()], is_rows)


def has_examples(request: HttpRequest) -> bool:
    """Whether a request to classify is TensorFlow Serving's, whatever it says of its type: no image begins so."""
    begin = bytes(request.body[:_LOOKED_AT_BYTES]).lstrip()
    return begin.startswith(b"{") and _EXAMPLES.search(begin) is not None


def examples(body: Json) -> list[Encoded]:
    """Returns the images of a request to classify. Raises InvalidArgument."""
    check_signature(fields.text(body, "signature_name", "body", ""))
    listed = fields.objects(body, "examples")
    if not 1 <= len(listed) <= MAX_IMAGES:
        raise InvalidArgument("examples", f"at least one and at most {MAX_IMAGES}", len(listed))
    for one in listed:
        if not _is_encoded(one.get(IMAGE)):
            raise InvalidArgument("examples", f'{{"{IMAGE}": {{"{B64}": ...}}}} in each', shown(one))
    return [image(one[IMAGE], f"examples[{index}].{IMAGE}") for index, one in enumerate(listed)]


def _columns_of(rows: object) -> Mapping[str, object]:
    """Returns the inputs of a request in rows, by their names."""
    if isinstance(rows, NumberArray):
        return {PIXELS: rows}
    if not isinstance(rows, list) or not rows:
        raise InvalidArgument(ROWS, "a list of at least one image", shown(rows))
    first = rows[0]
    if not isinstance(first, dict) or _is_encoded(first):
        return _named(rows)
    for row in rows:
        if not isinstance(row, dict) or row.keys() != first.keys():
            raise InvalidArgument(ROWS, "objects that have the same keys", shown(row))
    return {name: [row[name] for row in rows] for name in first}


def _named(value: object) -> Mapping[str, object]:
    """Returns inputs by their names: a model's only one needs none."""
    if isinstance(value, dict) and not _is_encoded(value):
        return value
    one = value
    while isinstance(one, list) and one:
        one = one[0]
    return {IMAGE if isinstance(one, dict) else PIXELS: value}


def _tensor(name: str, value: object) -> JsonTensor:
    if name != IMAGE:
        return JsonTensor(name, value)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise InvalidArgument(IMAGE, f'a list of {{"{B64}": ...}}', shown(value))
    value = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in value]
    for one in value:
        if not _is_encoded(one):
            raise InvalidArgument(IMAGE, f'{{"{B64}": ...}} for each image', shown(one))
    return JsonTensor(name, value)


def _arrays(value: Any, name: str) -> NumberArray | NDArray[Any] | list[NumberArray | NDArray[Any]]:
    """Returns listed numbers: as they stand in JSON where they are many, else as an array."""
    if isinstance(value, NumberArray):
        return value
    if isinstance(value, list) and any(isinstance(one, NumberArray) for one in value):
        return [one if isinstance(one, NumberArray) else _array(one, name) for one in value]
    return _array(value, name)


def _array(value: object, name: str) -> NDArray[Any]:
    return to_array(value, name[:64], "nested lists of numbers, of one length at each level")


def _kind_of(value: NumberArray | NDArray[Any] | list[Any], name: str) -> tuple[str, Sequence[int]]:
    """Returns the datatype and the shape of listed numbers."""
    arrays = value if isinstance(value, list) else [value]
    shape = arrays[0].shape
    if any(one.shape != shape for one in arrays):
        raise InvalidArgument(name[:64], "images of one shape", "several")
    is_integer = all(one.is_integer if isinstance(one, NumberArray) else one.dtype.kind in "iu" for one in arrays)
    return "INT32" if is_integer else "FP32", [len(arrays), *shape] if isinstance(value, list) else shape


def _is_encoded(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {B64}
