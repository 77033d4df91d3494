"""Requests and tensors of the Open Inference Protocol over HTTP: in JSON, or in binary behind it.

In the binary tensor extension a header says how many bytes of the body are JSON, and the tensors that have a
`binary_data_size` there follow, one after the other. Listed and binary tensors may be mixed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Value
from xlaserve.errors import InvalidArgument, shown
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Datatype
from xlaserve.pipeline.request_inputs import Readable
from xlaserve.wire.http import fields
from xlaserve.wire.http.base64_text import EXPECTED, NotBase64, decoded
from xlaserve.wire.http.json_numbers import NumberArray
from xlaserve.wire.http.message import HttpRequest, Json, to_json
from xlaserve.wire.shared.inference import InferRequest, RequestedOutput, check_parameters
from xlaserve.wire.shared.input_tensors import MAX_INPUTS, PIXEL_DTYPES, check_count
from xlaserve.wire.shared.named_inputs import cast
from xlaserve.wire.shared.parts import Part

OCTETS: Final = "application/octet-stream"
JSON_LENGTH: Final = "inference-header-content-length"
BINARY_SIZE: Final = "binary_data_size"
BINARY: Final = "binary_data"
MAX_DIGITS: Final = 20
ALL_BINARY: Final = "binary_data_output"
ADDRESS: Final = re.compile(r"(https?|file|s3|gs)://", re.IGNORECASE)
_LISTED: Final = {list, int, float, NumberArray, np.ndarray}
"""Types of which lists of numbers are."""
US_PER_VALUE: Final = 0.3
"""Time to list a number."""
STEP_VALUES: Final = 2**14
"""Numbers that are listed at once, in up to 5 ms."""


class JsonInput:
    """An input tensor of a request, for `wire.shared.input_tensors.images_of`."""

    __slots__ = ("_data", "_raw", "datatype", "name", "parameters", "shape")
    bytes_field = BINARY_SIZE
    values_field = "data"
    states_datatype = True

    def __init__(self, tensor: Json, raw: memoryview | None) -> None:
        self.name: str = fields.text(tensor, "name", "inputs")
        where = f"inputs.{self.name[:64]}"
        self.datatype: str = fields.text(tensor, "datatype", where)
        self.shape: Sequence[int] = fields.integers(tensor, "shape", where)
        self.parameters: Iterable[str] = [key for key in fields.object_of(tensor, "parameters") if key != BINARY_SIZE]
        self._data = tensor.get("data")
        self._raw = raw
        if (raw is None) == (self._data is None):
            got = "neither" if raw is None else "both"
            raise InvalidArgument(where, f"data, or {BINARY_SIZE} among its parameters", got)

    def raw(self) -> memoryview | None:
        """Returns its bytes, None where it was sent as a list."""
        return self._raw

    def values(self, shape: tuple[int, ...]) -> NDArray[Any] | Readable:
        """Returns the listed pixels; nested lists and flat ones mean the same."""
        pixels, count = ListedPixels(self._data, self.datatype, shape), _long_numbers(self._data)
        if isinstance(self._data, NumberArray) or count > math.prod(shape):
            check_count(count, shape, "data")
        return pixels if count else np.asarray(pixels)

    def elements(self) -> list[Encoded]:
        """Returns the listed images, which stand in base64."""
        return images(self._data, f"data of {self.name}")

    def numbers(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array of the listed numbers; nested lists and flat ones mean the same."""
        return listed_numbers(self._data, shape, dtype, f"data of {self.name[:64]}")


class ListedPixels(NamedTuple):
    """Pixels as JSON lists them, for `pipeline.Pending`."""

    data: Any
    datatype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * 4

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
        """Returns int32 or float32. Raises InvalidArgument."""
        where, expected = "data of pixels", f"a list of numbers, flat or of shape {list(self.shape)}"
        values = to_array(self.data, where, expected)
        check_count(values.size, self.shape, "data")
        if values.ndim > 1 and values.shape != self.shape:
            raise InvalidArgument(where, expected, f"shape {list(values.shape)}")
        if PIXEL_DTYPES[self.datatype].kind == "f":
            with np.errstate(over="ignore"):  # infinity is refused, as all that is no pixel's value
                as_floats: NDArray[np.float32] = values.astype(np.float32)
                return as_floats.reshape(self.shape)
        if values.dtype.kind == "f":
            raise InvalidArgument(where, f"integers, as the datatype is {self.datatype}", "fractions")
        int32 = np.iinfo(np.int32)
        integers: NDArray[np.int32] = np.clip(values, int32.min, int32.max).astype(np.int32)
        return integers.reshape(self.shape)


def listed_numbers(data: object, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Returns an input that holds no images, as JSON lists it. Raises InvalidArgument."""
    expected = f"a list of {dtype.name}, flat or of shape {list(shape)}"
    if (count := _long_numbers(data)) > math.prod(shape):  # before they are read, which takes a time by their number
        raise InvalidArgument(where, expected, f"{count} values")
    values = to_array(data, where, expected, has_flags=dtype.kind == "b")
    if values.shape != shape and (values.ndim > 1 or values.size != math.prod(shape)):
        raise InvalidArgument(where, expected, f"shape {list(values.shape)}")
    return cast(values, dtype, where).reshape(shape)


def _long_numbers(data: object) -> int:
    """Returns how many numbers the long arrays of a list hold, which are not yet read."""
    count, left = 0, [data]
    while left:
        one = left.pop()
        if isinstance(one, NumberArray):
            count += math.prod(one.shape)
        elif isinstance(one, list):
            left += one
    return count


def to_array(value: object, where: str, expected: str, *, has_flags: bool = False) -> NDArray[Any]:
    """Returns numbers as JSON lists them, nested or flat; true and false too where it `has_flags`.

    Raises InvalidArgument for all else.
    """
    known = _LISTED | {bool} if has_flags else _LISTED
    for stranger in _strangers(value, known):  # of strings NumPy would make all as long as the longest
        raise InvalidArgument(where, expected, shown(stranger))
    try:
        values = np.asarray(value)
    except ValueError:
        raise InvalidArgument(where, expected, "lists of several lengths") from None
    if values.dtype.kind not in ("iufb" if has_flags else "iuf"):
        raise InvalidArgument(where, expected, "numbers of more than 64 bits")
    if values.dtype.kind == "f" and np.isinf(values).any():  # JSON has no infinity
        raise InvalidArgument(where, expected, "numbers beyond 1.8e308")
    return values


def _strangers(value: object, known: Set[type]) -> Iterator[object]:
    """Yields values that are neither numbers nor lists of them, as soon as one is found."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list):
            kinds = {*map(type, one)}
            if not kinds <= known:
                yield next(inner for inner in one if type(inner) not in known)
            elif list in kinds:
                left += one
        elif not isinstance(one, (int, float, NumberArray, np.ndarray)):
            yield one


def parse(body: Json, binary: memoryview) -> InferRequest:
    """Returns an inference request whose JSON is `body`, and behind it `binary`.

    Raises InvalidArgument or UnsupportedFeature.
    """
    parameters = fields.object_of(body, "parameters")
    is_raw = fields.flag(parameters, ALL_BINARY)
    listed = fields.objects(body, "inputs")
    inputs = []
    for tensor in listed[:MAX_INPUTS]:
        size, raw = fields.object_of(tensor, "parameters").get(BINARY_SIZE), None
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary):
                raise InvalidArgument(BINARY_SIZE, f"at most the {len(binary)} bytes that are left", shown(size))
            raw, binary = binary[:size], binary[size:]
        inputs.append(JsonInput(tensor, raw))
    if binary and len(listed) <= MAX_INPUTS:
        raise InvalidArgument("body", f"what {BINARY_SIZE} says behind the JSON", f"{len(binary)} bytes more")
    outputs = [_output(output, is_raw) for output in fields.objects(body, "outputs")]
    others = check_parameters(_without(parameters, ALL_BINARY))
    return InferRequest(inputs, outputs, others, is_raw, fields.text(body, "id", "body", ""))


def json_bytes(request: HttpRequest) -> int:
    """Returns how many bytes of an inference request are JSON. Raises InvalidArgument."""
    size, body_bytes = request.headers.get(JSON_LENGTH), len(request.body)
    if size is None:
        return body_bytes
    if not (size.isascii() and size.isdecimal() and len(size) <= MAX_DIGITS) or int(size) > body_bytes:
        raise InvalidArgument(JSON_LENGTH, f"at most the body's {body_bytes} bytes", repr(size[:32]))
    return int(size)


def _output(output: Json, is_raw: bool) -> RequestedOutput:
    parameters = fields.object_of(output, "parameters")
    is_raw = fields.flag(parameters, BINARY, is_raw)
    return RequestedOutput(fields.text(output, "name", "outputs"), _without(parameters, BINARY), is_raw)


def _without(parameters: Json, ours: str) -> list[tuple[str, object]]:
    """Returns parameters without the one that REST alone has."""
    return [(key, value) for key, value in parameters.items() if key != ours]


def images(data: object, where: str) -> list[Encoded]:
    """Returns images that stand in base64, in a list or a list of lists. Raises InvalidArgument."""
    if not isinstance(data, list):
        raise InvalidArgument(where, "a list of images in base64", shown(data))
    flat = chain.from_iterable(data) if all(isinstance(one, list) for one in data) else data
    return [image(one, f"{where}[{index}]") for index, one in enumerate(flat)]


def image(value: object, where: str) -> Encoded:
    """Returns an image that stands in base64, or as `{"b64": ...}`. Raises InvalidArgument."""
    text = value["b64"] if isinstance(value, dict) and "b64" in value else value
    if isinstance(text, memoryview):  # decoded already, as it is long
        return text
    if not isinstance(text, str):
        raise InvalidArgument(where, "an image in base64", shown(text))
    if ADDRESS.match(text):
        raise InvalidArgument(where, EXPECTED, f"an address, and the server fetches none: {shown(text)}")
    try:
        return decoded(text.encode("latin-1", "replace"))
    except NotBase64 as error:
        raise InvalidArgument(where, EXPECTED, error) from None


@dataclass(frozen=True, slots=True)
class JsonListing:
    """Lists of JSON, for `wire.shared.output_tensors`: one part for some rows, without brackets."""

    is_nested: bool = False
    """Whether each row is a list of its own."""

    def us_per_value(self, datatype: Datatype) -> float:
        """Returns the same for all."""
        return US_PER_VALUE

    def numbers(self, values: NDArray[Value]) -> list[Part]:
        """Returns some rows of numbers; no part where there is none, as parts are joined by commas."""
        if not self.is_nested:
            values = values.reshape(-1)
        return [listed(values)] if len(values) else []

    def elements(self, elements: Sequence[bytes]) -> list[Part]:
        """Returns elements, which are never nested."""
        return [to_json([one.decode() for one in elements])[1:-1]]


def listed(values: NDArray[Value]) -> bytes:
    """Returns an array in JSON, without the outer brackets; what is no number is null.

    In steps, between which other threads run: the interpreter's lock is held throughout each.
    """
    return b",".join(_listed(values))


def _listed(values: NDArray[Any]) -> Iterator[bytes]:
    """Yields the elements of an array along its first axis in JSON, with commas within what it yields."""
    size = max(1, math.prod(values.shape[1:]))
    if size > STEP_VALUES:
        for row in values:
            yield b"[%b]" % listed(row)
        return
    step = STEP_VALUES // size
    for start in range(0, max(1, len(values)), step):
        yield _at_once(values[start : start + step])


def _at_once(values: NDArray[Any]) -> bytes:
    try:
        return to_json(values.tolist())[1:-1]
    except ValueError:
        numbers = values.astype(object)
        numbers[~np.isfinite(values)] = None
        return to_json(numbers.tolist())[1:-1]
