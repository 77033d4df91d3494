from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """Returns `value`, which a test needs to be there."""
    assert value is not None
    return value
