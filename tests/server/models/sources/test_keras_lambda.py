from __future__ import annotations

import base64
import marshal
import struct
from types import CodeType
from typing import Any

import pytest

from xlaserve.models.sources import keras_lambda

WITHOUT_REFERENCES = 2
"""A version of marshal's format."""


def encoded(data: bytes) -> str:
    return base64.encodebytes(data).decode()


def of_older_python(code: CodeType, ints: int) -> bytes:
    """Returns a function as Python 3.7, with 5 `ints`, or 3.8 to 3.10, with 6, marshal it."""
    numbers = b"c" + struct.pack(f"<{ints}i", *[1, 0, 1, 2, 67, 67][:ints])
    parts: list[Any] = [b"code", code.co_consts, code.co_names, code.co_varnames, (), (), "<stdin>", "<lambda>"]
    dumped = b"".join(marshal.dumps(part, WITHOUT_REFERENCES) for part in parts)
    return numbers + dumped + struct.pack("<i", 1) + marshal.dumps(b"lines", WITHOUT_REFERENCES)


def shrink(x: Any) -> Any:
    return tf.image.resize(x, (224, 160)) / 127.5 - 1  # type: ignore[name-defined]  # noqa: F821


USED = "tf, image, resize, 224, 160, 127.5, 1"


def test_names_and_constants_of_a_function_are_told() -> None:
    assert set(keras_lambda.uses(encoded(marshal.dumps(shrink.__code__))).split(", ")) == set(USED.split(", "))


@pytest.mark.parametrize("ints", [5, 6])
def test_a_function_of_an_older_python_is_read_too(ints: int) -> None:
    assert set(keras_lambda.uses(encoded(of_older_python(shrink.__code__, ints))).split(", ")) == set(USED.split(", "))


def test_functions_within_a_function_count() -> None:
    code = (lambda x: [one.mean() * 3 for one in x]).__code__
    assert {"mean", "3"} <= set(keras_lambda.uses(encoded(marshal.dumps(code))).split(", "))


@pytest.mark.parametrize(
    "data", [b"", b"c", b"\xff\xff", b"(\xff\xff\xff\x7f", marshal.dumps(shrink.__code__)[:60], b"[\x01\0\0\0" * 5000]
)
def test_what_is_no_function_tells_nothing(data: bytes) -> None:
    assert keras_lambda.uses(encoded(data)) == ""


def test_tuples_that_are_referred_to_often_are_read_once() -> None:
    depth = 60
    constants = b"\xa9\x01i" + struct.pack("<i", 7)  # a tuple of 7 that others may refer to
    for place in reversed(range(depth)):
        constants = b"\xa9\x02" + constants + b"r" + struct.pack("<i", place + 1)
    rest: list[Any] = [(), (), b"", "<stdin>", "<lambda>", "<lambda>"]
    dumped = [marshal.dumps(b"", WITHOUT_REFERENCES), constants]
    dumped += [marshal.dumps(part, WITHOUT_REFERENCES) for part in rest]
    end = struct.pack("<i", 1) + 2 * marshal.dumps(b"", WITHOUT_REFERENCES)
    assert keras_lambda.uses(encoded(b"c" + bytes(20) + b"".join(dumped) + end)) == "7"


def test_text_that_is_not_base64_tells_nothing() -> None:
    assert keras_lambda.uses("é") == ""
