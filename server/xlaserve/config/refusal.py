"""Words for what is wrong with settings, for those who wrote them: pydantic speaks to those who wrote the model."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from xlaserve.config.frozen import Frozen

Place = tuple[int | str, ...]
"""Names of fields and indexes of lists that lead to a value."""
LineOf = Callable[[Place], int | None]
"""Returns the line of the file in which a value stands, from 1; None where it is of no file."""

_EXPECTED: Final = {
    "extra_forbidden": "no such field",
    "tuple_type": "expected a list",
    "named_tuple_type": "expected a whole number or a list",
    "path_type": "expected a path",
    "model_type": "expected a mapping of fields",
}
_PYDANTIC: Final = re.compile("^(Input should be|(Tuple|String) should have|String should match)")
_ALTERNATIVE: Final = re.compile(r"(literal|tuple|function-\w+)\[|constrained-|(str|int|float)$")
"""How pydantic names the types of which a value may be one, in the place of an error."""
_CHOICE: Final = re.compile("'([^']*)'")


def reasons(
    error: ValidationError,
    kind: type[Frozen],
    line_of: LineOf = lambda place: None,
    *,
    whole: str = "settings",
    shows_values: bool = True,
) -> str:
    """Returns one line that names each wrong field of settings of this kind, its value and what was expected.

    Names that are nearly right are suggested. `whole` is what all fields together are called. Values may be left out,
    as they may be secrets.
    """
    details: dict[Place, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        details.setdefault(_place(detail), []).append(detail)
    found = []
    for place, of_place in details.items():
        is_other = of_place[0]["type"] == "too_short" or of_place[0]["loc"] != place  # of the types that it may have
        if is_other and any(_is_within(other, place) for other in details):
            continue  # only without its values that are wrong
        line = line_of(place)
        where = "" if line is None else f" (line {line})"
        field = ".".join(map(str, place)) or whole
        found.append(f"{field}: {_reason(of_place, kind, shows_values=shows_values)}{where}")
    return "; ".join(found)


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """Returns a question for the known name that is nearest to what came; nothing where none is near."""
    near = get_close_matches(str(got), [*known], n=1)
    return f", did you mean {near[0]}?" if near else ""


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


def _reason(details: Sequence[ErrorDetails], kind: type[Frozen], *, shows_values: bool) -> str:
    """Returns what is wrong with a value: as each of the types that it may have, where these are several."""
    detail, *others = details
    place, value = _place(detail), detail["input"]
    text = " or ".join([_text(detail), *(_text(other).removeprefix("expected ") for other in others)])
    if detail["type"] == "extra_forbidden":
        return text + did_you_mean(place[-1], _fields_at(kind, place[:-1]))
    is_of_several_fields = detail["type"] == "value_error" and isinstance(value, Mapping)
    if is_of_several_fields or not shows_values:
        return text
    choices = _CHOICE.findall(str(detail.get("ctx", {}).get("expected", "")))
    return f"{text}, got {reprlib.repr(value)}{did_you_mean(value, choices)}"


def _text(detail: ErrorDetails) -> str:
    return _EXPECTED.get(detail["type"]) or _PYDANTIC.sub("expected", detail["msg"]).removeprefix("Value error, ")


def _fields_at(kind: type[Frozen], place: Place) -> Iterable[str]:
    """Returns the names of the fields that settings have at a place."""
    kinds: Iterable[object] = [kind]
    for part in place:
        if isinstance(part, str):
            fields = fields_of(kinds)
            kinds = leaves(fields[part].annotation) if part in fields else ()
    return fields_of(kinds)


def _is_within(place: Place, other: Place) -> bool:
    return len(place) > len(other) and place[: len(other)] == other
