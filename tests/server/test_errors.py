from __future__ import annotations

import re

import pytest

from xlaserve import errors
from xlaserve.errors import InvalidArgument, XlaserveError, cause


def tree(root: type[Exception], depth: int = 0) -> list[tuple[int, str]]:
    """Each class below and including `root` with its depth, as a drawing lists them."""
    below = [
        line
        for child in root.__subclasses__()
        if child.__module__ == errors.__name__
        for line in tree(child, depth + 1)
    ]
    return [(depth, root.__name__), *below]


def drawn() -> list[tuple[int, str]]:
    assert errors.__doc__ is not None
    lines = re.findall(r"^    ([│ ]*(?:[├└]── )?)(\w+)(?: |$)", errors.__doc__, re.MULTILINE)
    return [(len(branch) // 4, name) for branch, name in lines]


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    assert drawn() == tree(XlaserveError)


def test_every_class_says_what_it_means() -> None:
    classes = [getattr(errors, name) for _, name in drawn()]
    assert [error.__name__ for error in classes if "__doc__" not in vars(error) or not error.__doc__] == []


def test_an_invalid_argument_names_the_field_what_was_expected_and_what_came() -> None:
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
    defined = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]
    assert len(defined) == len(drawn())
    assert [each.__name__ for each in defined if not issubclass(each, XlaserveError)] == []
