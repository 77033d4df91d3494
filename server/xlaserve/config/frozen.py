"""What all settings share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

KeyT = TypeVar("KeyT", bound=str)


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, Mapping) else value


Pairs = Annotated[tuple[tuple[KeyT, str], ...], BeforeValidator(_pairs), PlainSerializer(dict)]
"""A mapping to text as it is written, and pairs as it is kept: settings can be hashed."""


class Frozen(BaseModel):
    """Settings that never change once they are read; the text under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
