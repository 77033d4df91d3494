"""A match in words and as a configuration: YAML, with everything but the settings in comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from xlaserve.config.base import Frozen
from xlaserve.inspection.match import reasons
from xlaserve.inspection.match.answers import Answers
from xlaserve.inspection.match.choices import Changes, Part, combinations
from xlaserve.inspection.match.search import Found, Result

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


def report(result: Result, answers: Answers, most: float) -> Report:
    """Returns the report of a search; answers are near up to a largest difference of `most`, and less where expected
    answers are hardly apart."""
    best, most = result.nearest[0], most * min(1.0, SPREADS * answers.spread)
    difference = best.compared.difference
    tried = f"{result.tried} of {result.total} combinations tried"
    nearest = [f"nearest: {_in_words(found)}" for found in result.nearest]
    if best.is_exact:
        lines = [f"these settings give the expected outputs exactly: {difference}", tried, *_undecided(result)]
        return Report(lines, _entry(answers, best.changes))
    if difference.largest <= most and (1.0 if difference.agreement is None else difference.agreement) >= MIN_AGREEMENT:
        lines = [f"these settings give the expected outputs nearly: {difference}", tried, *nearest]
        return Report(lines, _entry(answers, best.changes))
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


def _entry(answers: Answers, changes: Changes) -> dict[str, Any]:
    """Returns the fields to write: the settings that are not what the model has without them, and the examples."""
    settings = answers.model.settings
    own = {choice.field: choice.own for choice in answers.choices}
    return {
        "name": settings.name,
        "source": settings.source,
        **{name: _plain(value) for name, value in changes.items() if value != own[name]},
        "examples": {"folder": str(answers.examples.folder)},
    }


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
