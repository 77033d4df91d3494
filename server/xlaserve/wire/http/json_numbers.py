"""Reads JSON that holds tensors or images, without holding the interpreter's lock for long.

`json.loads` holds it until all is read: a second for tensors of 64 MiB. Here NumPy finds what is long, arrays of
numbers and strings in base64, in steps that let other threads run, and `json` reads the little that is left.
"""

from __future__ import annotations

import json
import math
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument
from xlaserve.wire.http.base64_text import EXPECTED, NotBase64, decoded, most_bytes, string_begin
from xlaserve.wire.http.broken_arrays import MOST_LEFT, among_numbers, around
from xlaserve.wire.http.nesting import Nesting

MAX_REST_BYTES: Final = 2**18
"""Bytes of a text outside what is long in it."""
MAX_REST_VALUES: Final = 2**14
"""Commas and opening brackets there: as many as `json` reads in a few milliseconds."""
MIN_LONG_BYTES: Final = 2**10
"""Shorter arrays become lists, and shorter strings strings."""
MAX_NUMBER_BYTES: Final = 64

_SCAN_BYTES: Final = 2**18
_STEP_BYTES: Final = 2**15
"""Bytes of an array that are read at once."""
_COMMA, _POINT, _OPEN, _CLOSE, _QUOTE, _BACKSLASH = b',.[]"\\'

Octets = NDArray[np.uint8]


def _table(letters: bytes) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(letters)] = True
    return table


_OF_NUMBERS: Final = _table(b"[]0123456789+-.eE, \t\r\n")
# Of both alphabets, wrapped into lines, and with what JSON's writers escape, such as "\/" and "\u002b":
_OF_BASE64: Final = _table(string.ascii_letters.encode() + string.digits.encode() + b"+/=-_ \\")


@dataclass(frozen=True, slots=True, eq=False)
class NumberArray:
    """A rectangular array of numbers as it stands in JSON, for `pipeline.Pending`."""

    octets: Octets
    shape: tuple[int, ...]
    """Lengths of the lists, the outermost first."""
    is_integer: bool
    """Whether all numbers are written without a fraction and an exponent."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * 8

    def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
        """Returns the values as int64 or, unless `is_integer`, as float64. Raises InvalidArgument."""
        values = np.empty(math.prod(self.shape), np.int64 if self.is_integer else np.float64)
        count = 0
        for step in _steps(self.octets):
            numbers = step.tobytes().translate(None, b"[] \t\r\n").rstrip(b",").split(b",")
            if max(map(len, numbers)) > MAX_NUMBER_BYTES:
                raise InvalidArgument("body", f"numbers of at most {MAX_NUMBER_BYTES} digits", "more")
            try:
                values[count : count + len(numbers)] = np.array(numbers, "S")
            except (ValueError, OverflowError):
                raise InvalidArgument("body", f"numbers as JSON has them, within {values.dtype}", "others") from None
            count += len(numbers)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class LongText:
    """A text of JSON, and what is long in it."""

    rest: bytes
    """The text with a name in place of each of `long`."""
    long: Mapping[str, NumberArray | Octets]
    """Arrays of numbers, and what stands in strings in base64, by names that nothing else in the text has."""

    @property
    def decoded_bytes(self) -> int:
        """Bytes at most of what stands in base64."""
        return sum(most_bytes(len(one)) for one in self.long.values() if isinstance(one, np.ndarray))

    def read(self) -> Any:
        """Returns what `read_strictly` does, with a NumberArray for each long array of numbers and bytes for base64.

        A long array is rectangular and not empty. Numbers are checked when a NumberArray is read. Raises
        InvalidArgument.
        """
        left = dict(self.long)
        try:
            value = _put_back(read_strictly(self.rest), left)
        except RecursionError:
            raise InvalidArgument("body", "JSON of some hundred levels", "more") from None
        except NotBase64 as error:
            raise InvalidArgument(error.path or "body", EXPECTED, error) from None
        except ValueError as error:  # no positions: they are not those of the text that came
            raise InvalidArgument(
                "body", "JSON in UTF-8", f"other text ({getattr(error, 'msg', 'not UTF-8')})"
            ) from None
        if left:
            raise InvalidArgument("body", "lists as values alone", "one that is the key of an object")
        return value


def find_long(data: bytes | bytearray | memoryview) -> LongText:
    """Finds what is long in a text, which has to stay as it is.

    Raises InvalidArgument, also where more than MAX_REST_BYTES or MAX_REST_VALUES are outside of what is long.
    """
    octets = np.frombuffer(data, np.uint8)
    secret = secrets.token_hex(8)  # so that nothing in the text can pass for what was taken out of it
    long: dict[str, NumberArray | Octets] = {}
    rest, read, broken = bytearray(), 0, ""
    left: list[bytes] = []  # the text around runs that are no arrays
    for begin, end in _long_runs(octets):
        if begin < read:
            continue
        if len(rest) + begin - read > MAX_REST_BYTES:
            _refuse_rest([bytes(rest), *left], secret, broken)
        taken = _take(octets, begin, end)
        if taken is None:
            broken = broken or _broken(octets, begin, end)
            if len(left) < MOST_LEFT:
                left += [around(octets, place) for place in (begin, end)]
        else:
            value, first, last = taken
            name = f"{secret}.{len(long)}"
            long[name] = value
            rest += octets[read:first].tobytes() + f'"{name}"'.encode()
            read = last
    rest += octets[read : read + MAX_REST_BYTES + 1].tobytes()
    if len(rest) > MAX_REST_BYTES or sum(map(rest.count, b",[{")) > MAX_REST_VALUES:
        _refuse_rest([bytes(rest), *left], secret, broken)
    return LongText(bytes(rest), long)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Returns what `LongText.read` does. Raises InvalidArgument."""
    return find_long(data).read()


def _put_back(value: Any, long: dict[str, NumberArray | Octets]) -> Any:
    if isinstance(value, str):
        found = long.pop(value, value)
        return decoded(found.data) if isinstance(found, np.ndarray) else found
    if isinstance(value, list):
        return [_put_back_into(index, one, long) for index, one in enumerate(value)]
    if isinstance(value, dict):
        return {key: _put_back_into(key, one, long) for key, one in value.items()}
    return value


def read_strictly(text: bytes) -> Any:
    """Returns what `json.loads` does of UTF-8, with no NaN, no Infinity and no key twice in an object.

    Raises InvalidArgument for those, and ValueError or RecursionError for what is no JSON.
    """
    return json.loads(text.decode(), parse_constant=_refuse, object_pairs_hook=_object)


def _put_back_into(place: int | str, value: Any, long: dict[str, NumberArray | Octets]) -> Any:
    try:
        return _put_back(value, long)
    except NotBase64 as error:
        raise error.within(place) from None


def _refuse(constant: str) -> NoReturn:
    raise InvalidArgument("body", "numbers as JSON has them", constant)


def _object(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) != len(members):
        raise InvalidArgument("body", "objects that have each key once", "one that has a key twice")
    return value


def _refuse_rest(texts: Iterable[bytes], secret: str, broken: str) -> NoReturn:
    """Raises InvalidArgument for a text of which too much is not long, with the cause where that is known.

    `texts` are parts of it that are not long, and `broken` is what to say of base64 in them.
    """
    if other := among_numbers(texts, secret):
        raise InvalidArgument("body", "numbers alone in long arrays", f"{other} among them")
    limits = f"at most {MAX_REST_BYTES} bytes and {MAX_REST_VALUES} values"
    raise InvalidArgument("body", f"{limits} outside long arrays of numbers and images in base64", f"more{broken}")


def _broken(octets: Octets, begin: int, end: int) -> str:
    """Returns what to say of a string that begins as base64 and goes on otherwise; nothing of anything else."""
    if end == len(octets) or octets[end] == _QUOTE or string_begin(octets.data, begin, end) is None:
        return ""
    return f"; base64 is interrupted by {chr(octets[end])!r} at byte {end + 1}"


def _long_runs(octets: Octets) -> Iterator[tuple[int, int]]:
    """Yields where letters of numbers alone, or of base64 alone, stand for long, in their order."""
    runs = [run for table in (_OF_NUMBERS, _OF_BASE64) for run in _runs_of(octets, table)]
    yield from sorted(runs)


def _runs_of(octets: Octets, table: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    begun, is_in = 0, False
    for start in range(0, len(octets), _SCAN_BYTES):
        is_of = np.take(table, octets[start : start + _SCAN_BYTES])
        changes = np.flatnonzero(np.diff(is_of, prepend=is_in))
        places = start + changes
        if is_in and len(places):
            if places[0] - begun >= MIN_LONG_BYTES:
                yield begun, int(places[0])
            places = places[1:]
        starts, ends = places[::2], places[1::2]
        is_long = ends - starts[: len(ends)] >= MIN_LONG_BYTES
        yield from zip(starts[: len(ends)][is_long].tolist(), ends[is_long].tolist(), strict=True)
        if len(starts) > len(ends):
            begun = int(starts[-1])
        is_in = bool(is_of[-1])
    if is_in and len(octets) - begun >= MIN_LONG_BYTES:
        yield begun, len(octets)


def _take(octets: Octets, begin: int, end: int) -> tuple[NumberArray | Octets, int, int] | None:
    """Returns what is long within a run, and where it begins and ends; None where it is neither array nor base64."""
    # A quote behind a backslash is one of the string's letters.
    is_string_end = end < len(octets) and octets[end] == _QUOTE and octets[end - 1] != _BACKSLASH
    if is_string_end and (first := string_begin(octets.data, begin, end)) is not None:
        return octets[begin:end], first, end + 1
    opening = begin + int((octets[begin : min(end, begin + MAX_REST_BYTES)] == _OPEN).argmax())
    if octets[opening] != _OPEN:
        return None
    array = _read_array(octets[opening:end])
    return None if array is None else (array, opening, opening + len(array.octets))


def _steps(octets: Octets) -> Iterator[Octets]:
    """Cuts an array's text after commas, so that no number is cut."""
    begin = 0
    while begin < len(octets):
        step = octets[begin : begin + _STEP_BYTES]
        if begin + len(step) < len(octets):
            step = step[: step.tobytes().rfind(b",") + 1]
        if not len(step):
            raise InvalidArgument("body", f"a comma in any {_STEP_BYTES} bytes of an array of numbers", "none")
        yield step
        begin += len(step)


def _marks(text: Octets) -> NDArray[np.bool_]:
    is_mark: NDArray[np.bool_] = (text == _COMMA) | (text == _OPEN) | (text == _CLOSE)
    return is_mark


def _numbers(text: Octets, is_mark: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where the numbers begin and end: runs of anything but marks and whitespace."""
    is_number = np.zeros(len(text) + 2, np.bool_)
    is_number[1:-1] = (text > ord(" ")) & ~is_mark
    edges = np.flatnonzero(is_number[1:] != is_number[:-1])
    return edges[::2], edges[1::2]


def _read_array(octets: Octets) -> NumberArray | None:
    """Returns the array that `octets` begin with. None where it is short or does not end in them."""
    depth = size_bytes = 0
    nesting = None
    is_integer = True
    for step in _steps(octets):
        text, is_mark = step, _marks(step)
        places = np.flatnonzero(is_mark)
        marks = text[places]
        depths = depth + np.cumsum((marks == _OPEN).astype(np.int64) - (marks == _CLOSE))
        ends = np.flatnonzero(depths == 0)
        if len(ends):
            count = int(ends[0]) + 1
            places, marks, depths = places[:count], marks[:count], depths[:count]
            text, is_mark = text[: places[-1] + 1], is_mark[: places[-1] + 1]
        size_bytes += len(text)
        if size_bytes < MIN_LONG_BYTES if len(ends) else size_bytes == len(octets):
            return None
        after_numbers = _check_marks(marks, places, *_numbers(text, is_mark))
        # A bracket that closes a list has the depth outside it.
        levels = depths[after_numbers] + (marks[after_numbers] == _CLOSE)
        nesting = nesting or Nesting(int(levels[0]))
        nesting.add(levels, depths[marks == _COMMA])
        is_integer = is_integer and not ((text == _POINT) | (text | 0x20 == ord("e"))).any()
        if len(ends):
            return NumberArray(octets[:size_bytes], nesting.shape(), is_integer)
        depth = int(depths[-1])
    return None


def _check_marks(
    marks: Octets, places: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns which marks of a step have a number before them. Raises InvalidArgument where JSON has it otherwise."""
    # A step follows a comma; the first one, whose mark is an opening bracket, may as well.
    before = np.concatenate([np.array([_COMMA], np.uint8), marks[:-1]])
    after_numbers = np.flatnonzero((before != _CLOSE) & (marks != _OPEN))
    is_right = len(starts) == len(after_numbers) > 0 and not ((before == _CLOSE) & (marks == _OPEN)).any()
    if is_right:
        edges = np.concatenate([[-1], places])
        is_right = bool((edges[after_numbers] < starts).all() and (ends <= edges[after_numbers + 1]).all())
    if not is_right:
        raise InvalidArgument("body", "a number or a list of them between two commas or brackets", "something else")
    return after_numbers
