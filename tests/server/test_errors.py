from __future__ import annotations

import pytest

from xlaserve import errors
from xlaserve.engine.causes import cause
from xlaserve.errors import InvalidArgument, XlaserveError, shown

CLASSES = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, Exception) and each.__module__ == errors.__name__
]


def test_every_class_says_what_it_means() -> None:
    assert CLASSES
    assert [error.__name__ for error in CLASSES if not vars(error).get("__doc__")] == []


def test_an_invalid_argument_names_its_field_the_expected_and_the_given() -> None:
    error = InvalidArgument("pixels", "values from 0 to 255", 256)
    assert error.field == "pixels"
    assert str(error) == "pixels: expected values from 0 to 255, got 256"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n\n  out of memory \nallocator", "out of memory"),
        (
            "Graph execution error:\n\nDetected at node module defined at (most recent call last):\n"
            "<stack traces unavailable>\nCannot deserialize computation: UNKNOWN\n\t [[{{node module}}]]",
            "Cannot deserialize computation: UNKNOWN",
        ),
        (
            "Graph execution error:\nDetected at node a defined at (most recent call last):\n"
            '  File "/x/run.py", line 3, in f\n    return shrink(pixels)\n\nNo OpKernel for ResizeBicubic',
            "No OpKernel for ResizeBicubic",
        ),
        (
            "Exception encountered when calling Dense.call().\n\n\x1b[1mMatrix size-incompatible: In[0]: [1,3]\x1b[0m\n"
            "\nArguments received by Dense.call():\n  • inputs=tf.Tensor",
            "Matrix size-incompatible: In[0]: [1,3]",
        ),
        ("Unable to open '/srv/secret models/a b.h5' or /srv/secret/c.h5", None),
        (
            "put the file into ~/.keras/models (or KERAS_HOME/models)",
            "put the file into ~/.keras/models (or KERAS_HOME/models)",
        ),
        (
            "<class 'Functional'> could not be deserialized.\n\nconfig={'name': 'a'}.\n\nException encountered:"
            " Error when deserializing class 'Rescaling'.\n\nException encountered: got an unexpected 'x'",
            "got an unexpected 'x'",
        ),
        ("First\nException encountered: ", "First"),
        ("Could not locate class 'A'. Full object config: {'module': None}", "Could not locate class 'A'"),
        ("x" * 9000, "x" * 500),
    ],
)
def test_the_cause_is_the_line_that_says_what_is_wrong(text: str, line: str | None) -> None:
    found = cause(ValueError(text))
    assert "secret" not in found
    assert line is None or found == line


def test_an_error_without_words_is_told_by_what_it_comes_from_or_its_type() -> None:
    error = RuntimeError("\n\t[[node]]\n")
    assert cause(error) == "RuntimeError"
    error.__cause__ = KeyError("dense")
    assert cause(error) == "'dense'"


def test_all_are_caught_as_the_root() -> None:
    assert [each.__name__ for each in CLASSES if not issubclass(each, XlaserveError)] == []


@pytest.mark.parametrize("value", [b"abc", bytearray(3), memoryview(b"abc")])
def test_a_long_text_of_json_is_called_one_where_another_value_is_expected(value: object) -> None:
    assert shown(value) == "a long text, taken for 3 bytes in base64"
