"""Fields of JSON objects, checked for their types. All raise InvalidArgument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from xlaserve.errors import InvalidArgument, shown

Json = dict[str, Any]
MAX_LISTED: Final = 64
"""Inputs or outputs: no honest request has more."""
_REQUIRED: Final = object()


def text(fields: Mapping[str, Any], key: str, where: str, default: object = _REQUIRED) -> str:
    """Returns a string."""
    value = fields.get(key, default)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{key}", "a string", _kind(value))
    return value


def integers(fields: Mapping[str, Any], key: str, where: str) -> Sequence[int]:
    """Returns a list of integers of 64 bits."""
    value = fields.get(key, _REQUIRED)
    if not isinstance(value, list):
        raise InvalidArgument(f"{where}.{key}", "a list of integers", _kind(value))
    for one in value:
        if type(one) is not int or not -(2**63) <= one < 2**63:
            raise InvalidArgument(f"{where}.{key}", "a list of integers of 64 bits", f"{shown(one)} in it")
    return value


def flag(fields: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Returns a boolean."""
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameters.{key}", "true or false", _kind(value))
    return value


def object_of(fields: Mapping[str, Any], key: str) -> Json:
    """Returns an object, an empty one where there is none."""
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(key, "a JSON object", _kind(value))
    return value


def objects(fields: Mapping[str, Any], key: str, most: int = MAX_LISTED) -> Sequence[Json]:
    """Returns a list of at most `most` objects, an empty one where there is none."""
    value = fields.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgument(key, "a list of JSON objects", shown(value))
    if len(value) > most:
        raise InvalidArgument(key, f"at most {most} JSON objects", len(value))
    for index, one in enumerate(value):
        if not isinstance(one, dict):
            raise InvalidArgument(f"{key}[{index}]", "a JSON object", shown(one))
    return value


def _kind(value: object) -> str:
    return "nothing" if value is _REQUIRED else shown(value)
