"""Messages on wrong settings for the people who wrote them, in place of pydantic's, which speak of our types."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from xlaserve.config.base import MAPPING, Frozen

Place = tuple[int | str, ...]
"""Names of fields and indexes of lists that lead to a value."""
LineOf = Callable[[Place], int | None]
"""Returns the line of the file in which a value stands, from 1; None where it is of no file."""

_EXPECTED: Final = {
    "extra_forbidden": "no such field",
    "missing": "expected a value, got none",
    "tuple_type": "expected a list",
    "named_tuple_type": "expected a whole number or a list",
    "path_type": "expected a path",
    "model_type": "expected a mapping of fields",
    "int_type": "expected a whole number{unit}",
    "int_parsing": "expected a whole number{unit}",
    "int_from_float": "expected a whole number{unit}",
    "float_type": "expected a number{unit}",
    "float_parsing": "expected a number{unit}",
    "finite_number": "expected a finite number{unit}",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected text",
    "greater_than_equal": "expected at least {ge:.12g}{unit}",
    "greater_than": "expected more than {gt:.12g}{unit}",
    "less_than_equal": "expected at most {le:.12g}{unit}",
    "less_than": "expected less than {lt:.12g}{unit}",
}
"""Expectations in words by pydantic's type of error, with places for its bounds."""
_UNITS: Final = {"bytes": "bytes", "mib": "MiB", "s": "seconds", "ms": "milliseconds"}
"""How the names of fields end, and the units that they are in."""
_VALUELESS: Final = ("extra_forbidden", "missing")
"""Types of errors that are not about a value."""
_WITH_EXAMPLE: Final = ("tuple_type", "named_tuple_type", "model_type", MAPPING, "string_pattern_mismatch")
"""Types of errors about how a value is written, which an example shows."""
_PYDANTIC: Final = re.compile("^(Input should be|(Tuple|String) should have|String should match)")
_ALTERNATIVE: Final = re.compile(
    r"(literal|tuple|function-\w+|lax-or-strict)\[|constrained-|(str|int|float)$|[A-Z]\w+Settings$"
)
"""How pydantic names the types of which a value may be one, in the place of an error."""
_MAX_NAME: Final = 128
_CHOICE: Final = re.compile("'([^']*)'")


def reasons(
    error: ValidationError,
    kind: type[Frozen],
    values: object = None,
    line_of: LineOf = lambda place: None,
    *,
    whole: str = "settings",
    shows_values: bool = True,
) -> str:
    """Returns one line that names each wrong field of settings of this kind, its value and what was expected.

    Names that are nearly right are suggested. `values` are what was validated, in which models have names. `whole` is
    what all fields together are called. Values may be left out, as they may be secrets.
    """
    details: dict[Place, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        details.setdefault(_place(detail), []).append(detail)
    found = []
    for place, of_place in details.items():
        is_other = of_place[0]["type"] == "too_short" or of_place[0]["loc"] != place  # of the types that it may have
        if is_other and any(_is_within(other, place) for other in details):
            continue  # only without its values that are wrong
        line = line_of(written := _written(place, values))
        where = "" if line is None else f" (line {line})"
        field = _field(written, values) or whole
        found.append(f"{field}: {_reason(of_place, kind, shows_values=shows_values)}{where}")
    return "; ".join(found)


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """Returns a question for the known name that is nearest to what came; nothing where none is near."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(str(got).lower(), names, n=1)
    return f", did you mean {names[near[0]]}?" if near else ""


def leaves(annotation: Any) -> Iterator[object]:
    """Yields the types that a field's type is made of: Path and None of `Path | None`."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from leaves(part)


def fields_of(kinds: Iterable[object]) -> dict[str, FieldInfo]:
    """Returns the fields of those types that are settings, by name."""
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Frozen)]
    return {name: field for model in models for name, field in model.model_fields.items()}


def _place(detail: ErrorDetails) -> Place:
    """Returns where a value stands, without the type that it was tried as."""
    return tuple(part for part in detail["loc"] if isinstance(part, int) or not _ALTERNATIVE.match(part))


def _written(place: Place, values: object) -> Place:
    """Returns a place as it is written: what is kept as pairs is a mapping there."""
    found: list[int | str] = []
    parts = iter(place)
    for part in parts:
        if isinstance(part, int) and isinstance(values, Mapping):
            part = next(islice(values, part, None))  # noqa: PLW2901
            next(parts, None)  # whether the key is wrong or the value
        found.append(part)
        values = _inner(values, part)
    return tuple(found)


def _field(place: Place, values: object) -> str:
    """Returns what a field is called: `model a: modes` where `models.0.modes` is one of a model that has a name."""
    match place:
        case ("models", int(index), *rest):
            name = _inner(_inner(_inner(values, "models"), index), "name")
            if isinstance(name, str) and name.isprintable():
                return ": ".join([f"model {name[:_MAX_NAME]}", *([".".join(map(str, rest))] if rest else [])])
    return ".".join(map(str, place))


def _inner(values: object, part: int | str) -> object:
    """Returns a value of a list or a mapping; None where there is none."""
    if isinstance(values, Mapping):
        return values.get(part)
    is_there = isinstance(values, Sequence) and isinstance(part, int) and part < len(values)
    return values[part] if is_there else None  # type: ignore[index]


def _reason(details: Sequence[ErrorDetails], kind: type[Frozen], *, shows_values: bool) -> str:
    """Returns what is wrong with a value: as each of the types that it may have, where these are several."""
    detail, *others = details
    place, value = _place(detail), detail["input"]
    text = " or ".join([_text(detail), *(_text(other).removeprefix("expected ") for other in others)])
    if detail["type"] == "extra_forbidden":
        return text + did_you_mean(place[-1], _fields_at(kind, place[:-1]))
    if detail["type"] in _WITH_EXAMPLE:
        text += _example(kind, place)
    is_of_several_fields = detail["type"] == "value_error" and isinstance(value, Mapping)
    if is_of_several_fields or not shows_values or detail["type"] in _VALUELESS:
        return text
    choices = _CHOICE.findall(str(detail.get("ctx", {}).get("expected", "")))
    return f"{text}, got {reprlib.repr(value)}{did_you_mean(value, choices)}"


def _text(detail: ErrorDetails) -> str:
    if (expected := _EXPECTED.get(detail["type"])) is None:
        return _PYDANTIC.sub("expected", detail["msg"]).removeprefix("Value error, ")
    name = next((part for part in reversed(_place(detail)) if isinstance(part, str)), "")
    _, has_unit, unit = name.rpartition("_")
    of = " of" if "number" in expected else ""
    return expected.format(**detail.get("ctx", {}), unit=f"{of} {_UNITS[unit]}" if has_unit and unit in _UNITS else "")


def _example(kind: type[Frozen], place: Place) -> str:
    """Returns how the innermost field at a place is written, where its `examples` say so."""
    names = [index for index, part in enumerate(place) if isinstance(part, str)]
    if not names:
        return ""
    field = _fields_at(kind, place[: names[-1]]).get(name := str(place[names[-1]]))
    if field is None or not field.examples:
        return ""
    text = yaml.safe_dump({name: field.examples[0]}, default_flow_style=True, sort_keys=False, width=math.inf)
    return f", as in {text.strip()[1:-1]}"


def _fields_at(kind: type[Frozen], place: Place) -> Mapping[str, FieldInfo]:
    """Returns the fields that settings have at a place, by name."""
    kinds: Iterable[object] = [kind]
    for part in place:
        if isinstance(part, str):
            fields = fields_of(kinds)
            kinds = leaves(fields[part].annotation) if part in fields else ()
    return fields_of(kinds)


def _is_within(place: Place, other: Place) -> bool:
    return len(place) > len(other) and place[: len(other)] == other
