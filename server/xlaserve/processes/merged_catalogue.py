"""The models of several engines as those of one."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from xlaserve.models.catalog import Model
from xlaserve.models.listing import ORDER
from xlaserve.models.version import State
from xlaserve.processes.link.spread import Part, Spread
from xlaserve.processes.published import Catalogue, Facts, Loading

Value = TypeVar("Value")


class Remote(Part, Protocol):
    """A model in one of the engines."""

    async def drained(self) -> None:
        """Returns once all requests that this front has taken in for it are answered."""


class Shown(NamedTuple):
    """What an engine has."""

    catalogue: Catalogue
    models: Mapping[int, Remote]
    """Those that take requests, by the numbers of their loadings."""


@dataclass(eq=False)
class _Together:
    """Loadings of one version in several engines, one in each, that requests can't tell from each other."""

    number: int
    """That of the first of them."""
    facts: Facts
    spread: Spread
    loadings: dict[int, Loading] = field(default_factory=dict)
    """By engine."""
    takes_requests: bool = False

    @property
    def name(self) -> str:
        return self.facts.settings.name

    @property
    def best(self) -> Loading:
        return min(self.loadings.values(), key=lambda loading: ORDER.index(loading.state))

    @property
    def ready(self) -> list[int]:
        """The engines that have it ready."""
        return [engine for engine, loading in self.loadings.items() if loading.state is State.READY]

    def fits(self, facts: Facts) -> bool:
        """Returns whether requests that are made for the one can be run by the other."""
        if facts.settings != self.facts.settings:
            return False
        one, other = self.facts.model, facts.model
        return one is None or other is None or (one.task == other.task and _sizes(one) == _sizes(other))


class Merging:
    """Makes one catalogue of those of several engines. On the event loop.

    A loading in one engine and one in another are shown as one where they have the same settings, task and sizes of
    images; it keeps its number for as long as any of them is there. It is ready as soon as one of them is, unless
    more than twice as many engines have another version of the model ready: where engines change one after the other,
    requests that name no version don't all go to the first.
    """

    def __init__(self) -> None:
        self._together: list[_Together] = []
        self._facts: dict[int, tuple[bytes, Facts]] = {}
        """By the number of a loading, what was read of it."""
        self._retiring: dict[int, asyncio.Task[None]] = {}
        """By the number of a loading."""
        self.numbers: dict[int, dict[int, int]] = {}
        """By engine, for each of its loadings the number by which it is shown."""

    def merge(self, engines: Mapping[int, Shown]) -> tuple[Catalogue, Mapping[int, Spread]]:
        """Returns what all have together, and what runs the requests to each loading there."""
        there = {engine: {one.number: one for one in engines[engine].catalogue.loadings} for engine in sorted(engines)}
        self._read(one for of_engine in there.values() for one in of_engine.values())
        for together in self._together:
            self._keep(together, there)
        self._together = [together for together in self._together if together.loadings]
        self._place_others(there)
        self.numbers = {
            engine: {one.loadings[engine].number: one.number for one in self._together if engine in one.loadings}
            for engine in there
        }
        for together in self._together:
            together.facts = self._facts[together.best.number][1]
            self._bring_requests(together, engines)
        for number in self._retiring.keys() - self._facts.keys():
            self._retiring.pop(number).cancel()
        return self._catalogue(engines), {one.number: one.spread for one in self._together if one.takes_requests}

    def _read(self, loadings: Iterable[Loading]) -> None:
        read = {}
        for one in loadings:
            pickled, facts = self._facts.get(one.number, (b"", None))
            read[one.number] = one.facts, facts if facts and pickled == one.facts else pickle.loads(one.facts)
        self._facts = read

    def _keep(self, together: _Together, there: Mapping[int, Mapping[int, Loading]]) -> None:
        """Takes out what has gone, and what has turned out to be another model."""
        loadings = {
            engine: there[engine][before.number]
            for engine, before in together.loadings.items()
            if before.number in there.get(engine, ())
        }
        if loadings:
            first = min(loadings.values(), key=lambda loading: loading.number)
            together.facts = self._facts[first.number][1]
        together.loadings = {
            engine: one for engine, one in loadings.items() if together.fits(self._facts[one.number][1])
        }

    def _place_others(self, there: Mapping[int, Mapping[int, Loading]]) -> None:
        """Puts what is new to that which it can't be told from, newest first, where that engine has none there."""
        for engine, loadings in there.items():
            placed = {one.loadings[engine].number for one in self._together if engine in one.loadings}
            for number, loading in loadings.items():
                if number in placed:
                    continue
                facts = self._facts[number][1]
                fitting = (one for one in reversed(self._together) if engine not in one.loadings and one.fits(facts))
                if (together := next(fitting, None)) is None:
                    together = _Together(number, facts, Spread(()))
                    self._together.append(together)
                together.loadings[engine] = loading

    def _bring_requests(self, together: _Together, engines: Mapping[int, Shown]) -> None:
        """Has requests go where it is ready; where it is nowhere any more, those that found it to where it still runs.

        What an engine ends, while others serve it, is left to that once all requests there are answered.
        """
        ready = together.ready
        parts: dict[int, Remote] = {}
        for engine, loading in sorted(together.loadings.items()):
            if loading.takes_requests and (part := engines[engine].models.get(loading.number)) is not None:
                parts[engine] = part
        together.takes_requests = bool(parts)
        if parts:  # else those that were there say why they are no more
            together.spread.use([part for engine, part in parts.items() if engine in ready] or parts.values())
        for engine, part in parts.items():
            number = together.loadings[engine].number
            if ready and engine not in ready and number not in self._retiring:
                self._retiring[number] = asyncio.create_task(_retire(part))

    def _catalogue(self, engines: Mapping[int, Shown]) -> Catalogue:
        catalogues = [engines[engine].catalogue for engine in sorted(engines)]
        most: Counter[str] = Counter()
        for together in self._together:
            most[together.name] = max(most[together.name], len(together.ready))
        return Catalogue(
            any(catalogue.is_ready for catalogue in catalogues),
            tuple(_shown(one, most[one.name]) for one in self._in_order(engines)),
            _of_most([catalogue.labels for catalogue in catalogues]),
            _of_most([catalogue.shares for catalogue in catalogues]),
        )

    def _in_order(self, engines: Mapping[int, Shown]) -> Iterator[_Together]:
        """Yields models and their versions as the engines have them, of a version the newest last."""
        by_number = {one.number: one for one in self._together}
        by_model: dict[str, dict[str, dict[int, _Together]]] = {}
        for engine in sorted(engines):
            for loading in engines[engine].catalogue.loadings:
                one = by_number[self.numbers[engine][loading.number]]
                by_model.setdefault(one.name, {}).setdefault(one.facts.settings.version, {})[one.number] = one
        for versions in by_model.values():
            for each in versions.values():
                yield from (each[number] for number in sorted(each))


def _shown(together: _Together, most: int) -> Loading:
    best, ready = together.best, len(together.ready)
    if best.state is State.READY and 2 * ready < most:
        reason = f"ready in {ready} of {most} engines"
        return best._replace(number=together.number, state=State.LOADING, reason=reason, takes_requests=False)
    return best._replace(number=together.number, takes_requests=together.takes_requests)


def _of_most(each: Iterable[Mapping[str, Mapping[str, Value]]]) -> dict[str, Mapping[str, Value]]:
    """Returns for each model what most engines say, of as many the first."""
    said: dict[str, list[Mapping[str, Value]]] = {}
    for of_engine in each:
        for name, one in of_engine.items():
            said.setdefault(name, []).append(one)
    return {name: max(of_model, key=of_model.count) for name, of_model in said.items()}


def _sizes(model: Model) -> set[tuple[int, ...]]:
    return {bucket[1:] for bucket in model.buckets}


async def _retire(part: Remote) -> None:
    await part.drained()
    part.release()
