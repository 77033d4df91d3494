"""The base of all settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MAPPING: Final = "mapping_type"
"""The type of the error for what is no mapping."""
KeyT = TypeVar("KeyT", bound=str)
ValueT = TypeVar("ValueT")


def _pairs(value: Any) -> Any:
    if not isinstance(value, (Mapping, list, tuple)):
        raise PydanticCustomError(MAPPING, "expected a mapping")
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _holds_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, (list, tuple)) and any(map(_holds_bool, value)))


Pairs = Annotated[tuple[tuple[KeyT, ValueT], ...], BeforeValidator(_pairs), PlainSerializer(dict)]
"""A mapping as it is written, and pairs as it is kept: settings can be hashed."""


@dataclass(frozen=True)
class OrPath:
    """Marks text, in Annotated, that is a name or a path. Fields that are always paths have the type Path."""

    is_path: Callable[[str], bool]


class Frozen(BaseModel):
    """Settings that never change once they are read; the text under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _take_no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false where a number or text is meant: Python counts with them."""
        assert info.field_name is not None
        if cls.model_fields[info.field_name].annotation not in (bool, bool | None) and _holds_bool(value):
            raise ValueError("expected neither true nor false")
        return value
