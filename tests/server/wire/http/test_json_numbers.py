"""JSON that holds tensors reads as with the standard library, and hostile text is refused early."""

from __future__ import annotations

import base64
import json
import pickle
import re
import tracemalloc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument
from xlaserve.wire.http import json_numbers
from xlaserve.wire.http.json_numbers import (
    MAX_REST_BYTES,
    MAX_REST_VALUES,
    MIN_LONG_BYTES,
    NumberArray,
    loads,
)
from xlaserve.wire.http.nesting import MAX_DIMENSIONS

MIB = 2**20
INTEGERS = st.one_of(st.integers(0, 255), st.integers(-(2**63), 2**63 - 1)).map(str)
FLOATS = st.floats(allow_nan=False, allow_infinity=False).map(repr)
DECIMALS = st.from_regex(r"-?(0|[1-9][0-9]{0,11})(\.[0-9]{1,22})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
NUMBER_OF_OTHERS = re.compile(r"\+\d|(?<![\d.])0\d|\.(?!\d)|(?<!\d)\.")
"""What NumPy takes for a number and JSON does not: `+1`, `01`, `1.` and `.1`."""
SPACES = st.sampled_from(["", "", "", " ", "\n ", "\t\r"])


@st.composite
def arrays(draw: st.DrawFn) -> str:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    numbers = draw(st.sampled_from([INTEGERS, FLOATS, st.one_of(INTEGERS, FLOATS, DECIMALS)]))

    def write(lengths: list[int]) -> str:
        space = draw(SPACES)
        if not lengths:
            return space + draw(numbers) + draw(SPACES)
        return f"{space}[" + ",".join(write(lengths[1:]) for _ in range(lengths[0])) + f"]{draw(SPACES)}"

    return write(shape).strip()


@st.composite
def broken_arrays(draw: st.DrawFn) -> str:
    """Arrays with some characters taken out, put in or exchanged."""
    text = draw(arrays())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.text("[]0159+-.eE, ", max_size=2)) + text[place + draw(st.integers(0, 2)) :]
    return text


def read_by_json(text: str) -> NDArray[Any] | None:
    """Returns the array that the text is. None where it is no array of numbers."""
    try:
        value = json.loads(text)
        values = np.array(value, np.float64 if set(text) & set(".eE") else np.int64)
    except (ValueError, TypeError, OverflowError):
        return None
    return values if values.size and isinstance(value, list) else None


def read(text: str, step_bytes: int = 64) -> NDArray[Any] | None:
    """Reads an array, however short, in small steps."""
    with patch.multiple(json_numbers, MIN_LONG_BYTES=1, _STEP_BYTES=step_bytes):
        try:
            value = loads(text.encode())
            return np.asarray(value) if isinstance(value, NumberArray) else None
        except InvalidArgument:
            return None


def assert_same(values: NDArray[Any] | None, expected: NDArray[Any] | None) -> None:
    assert (values is None) == (expected is None)
    if values is not None and expected is not None:
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected, strict=True)


def message(data: bytes) -> str:
    with pytest.raises(InvalidArgument) as refused:
        np.asarray(loads(data))
    return str(refused.value)


def long_array(number: str = "7") -> str:
    return "[" + ",".join([number] * MIN_LONG_BYTES) + "]"


@given(arrays())
def test_arrays_have_the_values_that_json_reads(text: str) -> None:
    expected = read_by_json(text)
    assert expected is not None
    assert_same(read(text), expected)
    assert_same(read(text, 2**15), expected)


@given(broken_arrays())
@example("[1,2.3.4]")
@example("[1e1e1]")
@example("[1-2]")
@example("[-]")
@example("[1,.5]")
@example("[1,5.]")
@example("[01]")
@example("[-01,1]")
@example("[00.5]")
@example("[1 2]")
@example("[1,,2]")
@example("[1,]")
@example("[,1]")
@example("[[1][2]]")
@example("[[1]2]")
@example("[1[2]]")
@example("[[1],2]")
@example("[[1,2],[3]]")
@example("[[1,2],[3,4,5]]")
@example("[[[1],[2]],[[3]]]")
@example("[[1],[[2]]]")
@example("[[],[]]")
@example("[+1]")
@example("[1,--1]")
@example("[9223372036854775808]")
@example("[-9223372036854775808]")
@example("[1.5,9223372036854775808]")
def test_text_is_refused_where_json_refuses_it_or_it_is_no_array(text: str) -> None:
    expected, got = read_by_json(text), read(text)
    if expected is None and NUMBER_OF_OTHERS.search(text):
        return
    assert_same(got, expected)


@given(st.lists(st.floats(-1, 1).map(lambda value: f"{value:.17g}"), min_size=1, max_size=50))
@example(["0.50000000000000005551115123125783", "0.5", "-0.0"])
@example(["9007199254740993.0", "9007199254740992.9999999", "9007199254740993"])
@example(["999999999999999999.9", "9999999999999999999", "123456789012345678901234567890"])
def test_each_float_is_the_nearest(numbers: list[str]) -> None:
    text = "[1.5," + ",".join(numbers) + "]"
    assert_same(read(text), read_by_json(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_what_holds_no_long_array_is_what_json_reads(value: object) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()
        assert loads(text) == json.loads(text)


@given(st.binary())
@example(b"")
@example(b"{")
@example(b"\xff")
@example(b'{"a": 1} 2')
@example(b'"\n"')
def test_what_is_read_is_json(data: bytes) -> None:
    try:
        value = loads(data)
    except InvalidArgument:
        return
    assert value == json.loads(data)


def test_arrays_are_found_where_they_stand() -> None:
    data = f'{{"a": [null, {long_array()}, 1], "b": {{"c": {long_array("0.5")}}}, "d": [1.25, 3]}}'.encode()
    for text in (data, bytearray(data), memoryview(data)):
        value = loads(text)
        assert value["a"][0] is None and value["a"][2] == 1 and value["d"] == [1.25, 3]
        np.testing.assert_array_equal(np.asarray(value["a"][1]), np.full(MIN_LONG_BYTES, 7))
        np.testing.assert_array_equal(np.asarray(value["b"]["c"]), np.full(MIN_LONG_BYTES, 0.5))


def test_pixels_keep_their_shape_and_can_be_pickled() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 50, 40, 3))
    array = loads(json.dumps({"instances": pixels.tolist()}).encode())["instances"]
    assert (array.shape, array.nbytes, array.is_integer) == (pixels.shape, pixels.nbytes, True)
    copy = pickle.loads(pickle.dumps(array))
    np.testing.assert_array_equal(np.asarray(copy), pixels, strict=True)
    assert np.asarray(copy, np.float32).dtype == np.float32


def test_many_steps_read_as_one() -> None:
    pixels = np.random.default_rng(1).random((3, 40, 41, 3)) * 10.0 ** np.arange(-6, 6).repeat(1230).reshape(
        3, 40, 41, 3
    )
    text = json.dumps(pixels.tolist())
    assert len(text) > 5 * json_numbers._STEP_BYTES
    np.testing.assert_array_equal(np.asarray(loads(text.encode())), pixels, strict=True)


def test_short_arrays_stay_lists() -> None:
    assert loads(b'{"shape": [1, 2], "data": [[1], [2, 3]]}') == {"shape": [1, 2], "data": [[1], [2, 3]]}


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a": "{long_array()}"}}',
        f'{{"a": "b {long_array()} c"}}',
        f'["\\\\", "\\"{long_array()}"]',
        f'["{long_array()}", NaN]',
        f'["{long_array()}", 0.5]',
    ],
)
def test_an_array_in_a_string_is_refused(text: str) -> None:
    assert message(text.encode()).startswith("body: expected ")


@pytest.mark.parametrize("text", ["1{}", "-{}", "{}1", "{}.5", "{}e5", "[1.{}]", "{{{}: 1}}", "[{} {}]", "\\{}"])
def test_an_array_does_not_join_what_stands_next_to_it(text: str) -> None:
    data = text.replace("{}", long_array()).replace("{{", "{").replace("}}", "}").encode()
    with pytest.raises(ValueError):
        json.loads(data)
    assert message(data).startswith("body: expected ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[NaN]", "expected numbers as JSON has them, got NaN"),
        ("[-Infinity]", "expected numbers as JSON has them, got -Infinity"),
        ('{"a": 1, "a": 1}', "expected objects that have each key once"),
        ('{"a":' * 5000, "levels"),
        ("[1, 2", "expected JSON in UTF-8, got "),
        ("\ufeff[1]", "expected JSON in UTF-8, got "),
        ("1" * 5000, "expected JSON in UTF-8, got "),
        ("[" * 40 + long_array() + "]" * 40, f"expected arrays of at most {MAX_DIMENSIONS} dimensions, got 41"),
        (long_array("[1]").replace("[1]]", "[1,2]]"), "one length at each level"),
        (long_array("[]"), "expected a number or a list"),
        (long_array("1e1e1e"), "expected numbers as JSON has them, within float64"),
        (long_array("9223372036854775808"), "expected numbers as JSON has them, within int64"),
        ("[1.5," + "1" * 400 + "," * 1 + "2" * 1000 + "]", "expected numbers of at most 64 digits"),
    ],
)
def test_an_error_says_what_was_expected(text: str, expected: str) -> None:
    assert expected in message(text.encode())


HOSTILE = {
    "open brackets": b"[",
    "pairs of brackets": b"[],",
    "nested pairs": b"[[1],[1]],",
    "numbers outside an array": b"0,",
    "exponents": b"1e1e1e",
    "spaces": b" ",
    "spaces and brackets": b" [ ",
    "commas": b",",
    "other bytes": b"1a",
    "strings": b'"",',
    "objects": b"{},",
    "arrays that are a little too short": b'"a":' + b"[" + b"1," * 510 + b"1],",
}


@pytest.mark.parametrize("prefix", [b"", b"[", b'{"inputs":[{"data":['])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_in_little_memory(name: str, prefix: bytes) -> None:
    data = prefix + HOSTILE[name] * (4 * MIB // len(HOSTILE[name]))
    tracemalloc.start()
    try:
        assert "body: expected " in message(data)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("digits", [MIB, 2**15, 2**14])
def test_a_giant_number_is_refused(digits: int) -> None:
    for text in (b"[1,%b]", b"[%b]", b"%b", b"[0.%be,1]"):
        assert "body: expected " in message(text % (b"1" * digits))


def test_text_outside_arrays_is_bounded() -> None:
    assert loads(b'["' + b"~" * (MAX_REST_BYTES - 4) + b'"]')
    assert loads(b"[" + b"{}," * (MAX_REST_VALUES // 2 - 1) + b"{}]")
    spaces = b" " * (MAX_REST_BYTES // 4)
    for text in (
        b'["' + b"~" * (MAX_REST_BYTES - 3) + b'"]',
        b'["",' + (spaces + b'"",') * 4 + b"null]",
        b"[" + b"{}," * (MAX_REST_VALUES // 2) + b"{}]",
    ):
        json.loads(text)
        assert f"at most {MAX_REST_BYTES} bytes and {MAX_REST_VALUES} values outside" in message(text)


def test_an_array_takes_little_more_than_its_values() -> None:
    data = b"[" + b"0," * MIB + b"0]"
    array = loads(data)
    tracemalloc.start()
    try:
        values = np.asarray(array)
        assert tracemalloc.get_traced_memory()[1] < values.nbytes + 2 * MIB
    finally:
        tracemalloc.stop()


def test_long_strings_in_base64_become_bytes() -> None:
    image = bytes(range(256)) * 4096
    text = json.dumps({"a": base64.b64encode(image).decode(), "b": ["A" * 1023, "é" * 2000]})
    assert loads(text.encode()) == {"a": image, "b": ["A" * 1023, "é" * 2000]}


@pytest.mark.parametrize("text", ["A" * 1025, "A" * 1024 + "=" + "A" * 3, "=" * 2048])
def test_what_looks_like_base64_and_is_not_is_refused(text: str) -> None:
    assert "base64" in message(json.dumps([text]).encode())


@pytest.mark.parametrize("other", ["NaN", "-Infinity", "true", "null", '"12"', '"cat"'])
@pytest.mark.parametrize("place", [0, 1, 60_000, 149_999], ids=str)
def test_what_is_no_number_in_a_long_array_is_named(other: str, place: int) -> None:
    numbers = [str(index % 256) for index in range(150_000)]
    numbers[place] = other
    pixels = ["[" + ",".join(numbers[start : start + 3]) + "]" for start in range(0, len(numbers), 3)]
    text = f'{{"instances": [[[{",".join(pixels)}]]]}}'.encode()
    assert message(text) == f"body: expected numbers alone in long arrays, got {other} among them"
