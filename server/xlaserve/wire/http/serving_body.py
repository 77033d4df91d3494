"""Bodies of TensorFlow Serving's requests: rows or columns of JSON, to the input that they hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument, shown
from xlaserve.images.decoder import Encoded
from xlaserve.pipeline.request_inputs import Readable
from xlaserve.wire.http import fields
from xlaserve.wire.http.json_numbers import NumberArray
from xlaserve.wire.http.json_tensors import ListedPixels, image, listed_numbers, to_array
from xlaserve.wire.http.message import HttpRequest, Json
from xlaserve.wire.shared.input_tensors import IMAGE, MAX_IMAGES, MAX_SHOWN, PIXELS
from xlaserve.wire.shared.tensorflow_serving_models import check_signature

ROWS: Final = "instances"
COLUMNS: Final = "inputs"
B64: Final = "b64"
_ENCODED: Final = f'{{"{B64}": ...}}'
"""How an encoded image is written, for messages."""
NO_INPUTS: Final[Mapping[str, bool]] = {}
_MAX_KEY: Final = 64
"""Characters of a key that a refusal shows."""
_LOOKED_AT_BYTES: Final = 4096
_EXAMPLES: Final = re.compile(rb'"examples"\s*:')


class PredictBody(NamedTuple):
    """The body of a request to predict."""

    inputs: Sequence[JsonTensor]
    is_rows: bool
    """Whether it is in rows, as its answer is then."""


class Place(NamedTuple):
    """Where an input stands in its request, for messages: `instances[2].image`, `inputs.image[2]`."""

    list: str
    """The field that lists the images."""
    key: str = ""
    """The input's field in each of them, where they are objects."""

    @property
    def whole(self) -> str:
        """The field of all images."""
        return self.list + self.key

    def of(self, index: int) -> str:
        """Returns the field of one image."""
        return f"{self.list}[{index}]{self.key}"


class JsonTensor:
    """An input of a request, for `wire.shared.input_tensors.images_of`.

    Whole numbers are pixels from 0 to 255; where one has a fraction, all are FP32.
    """

    __slots__ = ("_place", "_value", "datatype", "name", "parameters", "shape")
    bytes_field = "values"
    values_field = "values"
    states_datatype = False

    def __init__(self, name: str, value: Any, place: Place, *, is_encoded: bool, has_flags: bool = False) -> None:
        self.name = name
        self.parameters: Iterable[str] = ()
        self._place = place
        self._value: Any = value if is_encoded else _arrays(value, place.whole, has_flags)
        self.datatype: str
        self.shape: Sequence[int]
        self.datatype, self.shape = ("BYTES", [len(value)]) if is_encoded else _kind_of(self._value, place.whole)

    def raw(self) -> memoryview | None:
        """Returns None: everything is listed."""
        return None

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | Readable:
        """Returns the listed pixels."""
        pixels = ListedPixels(self._value, self.datatype, shape)
        return np.asarray(pixels) if isinstance(self._value, np.ndarray) else pixels

    def elements(self) -> list[Encoded]:
        """Returns the listed images."""
        return [image(one, f"{self._place.of(index)}.{B64}") for index, one in enumerate(self._value)]

    def numbers(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array of the listed numbers."""
        return listed_numbers(self._value, shape, dtype, self._place.whole)


def parse(body: Json, input_name: str = "", inputs: Mapping[str, bool] = NO_INPUTS) -> PredictBody:
    """Returns what the body of a request to predict holds. Raises InvalidArgument.

    `input_name` is another name of either input. `inputs` are the names of a model's inputs where it takes others than
    one image, each with whether it takes true and false.
    """
    check_signature(fields.text(body, "signature_name", "body", ""))
    if (ROWS in body) == (COLUMNS in body):
        got = "both" if ROWS in body else "neither"
        raise InvalidArgument("body", f"either {ROWS} or {COLUMNS}", got)
    is_rows = ROWS in body
    value = body[ROWS] if is_rows else body[COLUMNS]
    given, has_names = _columns_of(value) if is_rows else _named(value)
    if not given:
        raise InvalidArgument(ROWS if is_rows else COLUMNS, f"{PIXELS!r} or {IMAGE!r} by name", shown({}))
    if inputs and not has_names:  # a model's only input needs no name
        given = {next(iter(inputs)): next(iter(given.values()))}
    key = ""
    if not inputs and input_name and given.keys() == {input_name}:
        key = input_name
        given, _ = _named(given[input_name])
    tensors = []
    for name, one in given.items():
        field = f".{(key or name)[:_MAX_KEY]}" if has_names else ""
        place = Place(ROWS, field) if is_rows else Place(COLUMNS + field)
        # Among the names of a model's own, neither name tells what was sent.
        is_encoded = _has_encoded(one) if inputs or name not in (PIXELS, IMAGE) else name == IMAGE
        if is_encoded:
            tensors.append(_encoded(name, one, place))
        else:
            has_flags = inputs.get(name, False)
            tensors.append(JsonTensor(name, one, place, is_encoded=False, has_flags=has_flags))
    return PredictBody(tensors, is_rows)


def has_examples(request: HttpRequest) -> bool:
    """Whether a request to classify is TensorFlow Serving's, whatever it says of its type: no image begins so."""
    begin = bytes(request.body[:_LOOKED_AT_BYTES]).lstrip()
    return begin.startswith(b"{") and _EXAMPLES.search(begin) is not None


def examples(body: Json) -> list[Encoded]:
    """Returns the images of a request to classify. Raises InvalidArgument."""
    check_signature(fields.text(body, "signature_name", "body", ""))
    listed = fields.objects(body, "examples", MAX_IMAGES)
    if not listed:
        raise InvalidArgument("examples", f"at least one and at most {MAX_IMAGES}", "none")
    for index, one in enumerate(listed):
        if not _is_encoded(one.get(IMAGE)):
            got = shown(one[IMAGE]) if IMAGE in one else f"{shown(one)} without {IMAGE}"
            raise InvalidArgument(f"examples[{index}].{IMAGE}", _ENCODED, got)
    return [image(one[IMAGE], f"examples[{index}].{IMAGE}") for index, one in enumerate(listed)]


def _columns_of(rows: object) -> tuple[Mapping[str, object], bool]:
    """Returns the inputs of a request in rows by their names, and whether the rows name them."""
    if isinstance(rows, NumberArray):
        return {PIXELS: rows}, False
    if not isinstance(rows, list) or not rows:
        raise InvalidArgument(ROWS, "a list of at least one image", shown(rows))
    first = rows[0]
    if not isinstance(first, dict) or _is_encoded(first):
        return _named(rows)
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != first.keys():
            got = _keys(row) if isinstance(row, dict) else shown(row)
            raise InvalidArgument(f"{ROWS}[{index}]", f"{_keys(first)}, as in {ROWS}[0]", got)
    return {name: [row[name] for row in rows] for name in first}, True


def _keys(row: Json) -> str:
    listed = ", ".join(repr(key[:_MAX_KEY]) for key in islice(row, MAX_SHOWN))
    return f"an object of {listed}" if listed else shown(row)


def _named(value: object) -> tuple[Mapping[str, object], bool]:
    """Returns inputs by their names, and whether they have them: a model's only one needs none."""
    if isinstance(value, dict) and not _is_encoded(value):
        return value, True
    one = value
    while isinstance(one, list) and one:
        one = one[0]
    return {IMAGE if isinstance(one, dict) else PIXELS: value}, False


def _encoded(name: str, value: object, place: Place) -> JsonTensor:
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise InvalidArgument(place.whole, f"a list of {_ENCODED}", shown(value))
    value = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in value]
    for index, one in enumerate(value):
        if not _is_encoded(one):
            raise InvalidArgument(place.of(index), _ENCODED, _keys(one) if isinstance(one, dict) else shown(one))
    return JsonTensor(name, value, place, is_encoded=True)


def _arrays(value: Any, field: str, has_flags: bool) -> NumberArray | NDArray[Any] | list[NumberArray | NDArray[Any]]:
    """Returns listed numbers: as they stand in JSON where they are many, else as an array."""
    if isinstance(value, NumberArray):
        return value
    if isinstance(value, list) and any(isinstance(one, NumberArray) for one in value):
        return [one if isinstance(one, NumberArray) else _array(one, field, has_flags) for one in value]
    return _array(value, field, has_flags)


def _array(value: object, field: str, has_flags: bool) -> NDArray[Any]:
    expected = f"nested lists of numbers, of one length at each level, or images as {_ENCODED}"
    return to_array(value, field, expected, has_flags=has_flags)


def _kind_of(value: NumberArray | NDArray[Any] | list[Any], field: str) -> tuple[str, Sequence[int]]:
    """Returns the datatype and the shape of listed numbers."""
    arrays = value if isinstance(value, list) else [value]
    shape = arrays[0].shape
    if any(one.shape != shape for one in arrays):
        raise InvalidArgument(field, "images of one shape", "several")
    is_integer = all(one.is_integer if isinstance(one, NumberArray) else one.dtype.kind in "iu" for one in arrays)
    return "INT32" if is_integer else "FP32", [len(arrays), *shape] if isinstance(value, list) else shape


def _has_encoded(value: object) -> bool:
    """Returns whether a value begins with an encoded image."""
    while isinstance(value, list) and value:
        value = value[0]
    return _is_encoded(value)


def _is_encoded(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {B64}
