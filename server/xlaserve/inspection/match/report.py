"""A match in words and as a configuration: YAML, with everything but the settings in comments."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from xlaserve.config import Fit, ModelSettings
from xlaserve.config.base import Frozen
from xlaserve.config.version_names import SHARED
from xlaserve.inspection.match import reasons
from xlaserve.inspection.match.answers import Answers
from xlaserve.inspection.match.choices import Changes, Part, combinations
from xlaserve.inspection.match.search import Found, Result
from xlaserve.models import example_files
from xlaserve.models.examples import MAX_DIFFERENCE

SPREADS: Final = 5.0
"""Expected answers that are less than a fifth of the largest number apart make the limit smaller, in proportion."""
USUAL: Final = 4
"""Values of each setting that are looked at where outputs may be in another order."""
MIN_AGREEMENT: Final = 0.95
"""The least agreement of settings that are near."""


@dataclass(frozen=True)
class Report:
    """The report on a search."""

    lines: Sequence[str]
    entry: Mapping[str, Any] | None
    """The fields of the model to paste; None where no settings are near."""

    def __str__(self) -> str:
        said = "".join(f"# {line}\n" for line in self.lines)
        if self.entry is None:
            return said
        return said + yaml.safe_dump({"models": [dict(self.entry)]}, sort_keys=False, allow_unicode=True)


def report(
    result: Result, answers: Answers, limit: float, settings: ModelSettings, expected: Path | None = None
) -> Report:
    """Returns the report of a search; answers are near up to a largest difference of `limit`, and less where expected
    answers are hardly apart. `settings` are the model's own, `expected` a file of outputs that was named."""
    best, most = result.nearest[0], limit * min(1.0, SPREADS * answers.spread)
    difference = best.compared.difference
    tried = f"{result.tried} of {result.total} combinations tried"
    nearest = [f"nearest: {_in_words(found)}" for found in result.nearest]
    is_near = difference.largest <= most and (difference.agreement is None or difference.agreement >= MIN_AGREEMENT)
    if best.is_exact or is_near:
        how, more = ("exactly", _undecided(result)) if best.is_exact else ("nearly", nearest)
        lines = [f"these settings give the expected outputs {how}: {difference}", tried, *more]
        entry = _entry(answers, best.changes, settings)
        folder = answers.examples.folder
        if to_copy := _to_copy(expected, folder):
            return Report([*lines, to_copy], entry)
        return Report(lines, {**entry, "examples": _examples(folder, settings, difference.largest, limit)})
    lines = ["no settings give the expected outputs", tried, *nearest]
    order = reasons.other_order(answers, [*(found.changes for found in result.nearest), *_usual(answers)])
    if order is None:
        return Report([*lines, *reasons.reasons(best, answers.examples, most)], None)
    lines.append(
        f"with {_shown(order)}, the answers are the expected ones of other images: the outputs are in another order"
        " than the files, as where a data set was shuffled (shuffle=False keeps its order)"
    )
    return Report(lines, None)


def _usual(answers: Answers) -> Iterator[Changes]:
    """Yields every scale, colour and activation with the most usual places of pixels."""
    usual = next(combinations(answers.choices))
    of_places = [choice for choice in answers.choices if choice.part is Part.PLACE]
    places = [{choice.field: value} for choice in of_places for value in choice.values[1:USUAL]]
    levels = [*combinations(tuple(choice for choice in answers.choices if choice.part is not Part.PLACE))]
    for place in ({}, *places):
        yield from ({**usual, **place, **one} for one in levels)


def _entry(answers: Answers, changes: Changes, settings: ModelSettings) -> dict[str, Any]:
    """Returns the fields to write, without examples: those of the model, with the settings that were found instead of
    its own, apart from settings that it has without them."""
    base = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude=set(SHARED))
    own = {choice.field: choice.own for choice in answers.choices}
    found = {name: _plain(value) for name, value in changes.items() if value != own[name] or name in base}
    if found.get("fit", Fit.CENTER_CROP) != Fit.CENTER_CROP:
        found["shorter_side"] = None
    return {name: value for name, value in {**base, **found}.items() if value is not None}


def _examples(folder: Path, settings: ModelSettings, largest: float, limit: float) -> dict[str, Any]:
    """Returns the examples of `folder`, which allow a difference of `limit` where the largest one needs it."""
    own = settings.examples
    kept = {} if own is None else own.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    allowed = MAX_DIFFERENCE if own is None or own.max_difference is None else own.max_difference
    return {**kept, "folder": str(folder), **({"max_difference": limit} if largest > allowed else {})}


def _to_copy(expected: Path | None, folder: Path) -> str:
    """Returns how a file of expected outputs becomes that of `folder`, which examples read; empty where it is that."""
    if expected is None:
        return ""
    own = next((path for name in example_files.NAMES if (path := folder / name).is_file()), None)
    if own is not None:
        return "" if own.samefile(expected) else f"no examples, as they would read {own} instead of {expected}"
    copy = folder / example_files.NAMES[expected.suffix.lower() == ".csv"]
    return f"to have these as examples: cp {shlex.quote(str(expected))} {shlex.quote(str(copy))}"


def _plain(value: object) -> object:
    """Returns the value of a setting as YAML has it."""
    if isinstance(value, Frozen):
        return value.model_dump(mode="json", exclude_none=True)
    return str(value) if isinstance(value, str) else value


def _undecided(result: Result) -> Iterator[str]:
    for name, values in result.undecided.items():
        yield f"undecided: {name}, as {', '.join(map(_value, values))} give the same for these images"


def _in_words(found: Found) -> str:
    return f"{_shown(found.changes)}: {found.compared.difference}"


def _shown(changes: Changes) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in changes.items())


def _value(value: object) -> str:
    return "none" if value is None else str(value)
