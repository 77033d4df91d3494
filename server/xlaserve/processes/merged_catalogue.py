"""One catalogue of the models of several engines."""

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


class RemotePart(Part, Protocol):
    """A model in one of the engines."""

    async def drained(self) -> None:
        """Returns once all requests that this front has accepted for the model are answered."""


class EngineModels(NamedTuple):
    """The models of one engine."""

    catalogue: Catalogue
    models: Mapping[int, RemotePart]
    """The models that take requests, by the numbers of their loadings."""


@dataclass(eq=False)
class _MergedLoading:
    """Loadings of one version, at most one in each engine, that can run the same requests."""

    number: int
    """The number by which they are shown, that of the first loading."""
    facts: Facts
    spread: Spread
    loadings: dict[int, Loading] = field(default_factory=dict)
    """Loadings by engine."""
    takes_requests: bool = False

    @property
    def name(self) -> str:
        return self.facts.settings.name

    @property
    def best(self) -> Loading:
        """The loading whose state is nearest to serving."""
        return min(self.loadings.values(), key=lambda loading: ORDER.index(loading.state))

    @property
    def ready(self) -> list[int]:
        """The engines where the version is ready."""
        return [engine for engine, loading in self.loadings.items() if loading.state is State.READY]

    def fits(self, facts: Facts) -> bool:
        """Returns whether a loading with these facts can run the requests that are made for these loadings."""
        if facts.settings != self.facts.settings:
            return False
        one, other = self.facts.model, facts.model
        return one is None or other is None or (one.task == other.task and _sizes(one) == _sizes(other))


class CatalogueMerger:
    """Makes one catalogue of those of several engines. On the event loop.

    Loadings in different engines are shown as one if they have the same settings, task and sizes of images. The merged
    loading keeps its number for as long as any of them is there. It is ready as soon as one of them is, unless more
    than twice as many engines have another version of the model ready: when engines change one after the other, the
    first one would otherwise get all requests without a version.
    """

    def __init__(self) -> None:
        self._merged: list[_MergedLoading] = []
        self._facts: dict[int, tuple[bytes, Facts]] = {}
        """By the number of a loading, its pickled facts and the facts."""
        self._retiring: dict[int, asyncio.Task[None]] = {}
        """By the number of a loading, the task that leaves it to its engine once its requests are answered."""
        self.numbers: dict[int, dict[int, int]] = {}
        """By engine and by the number of a loading there, the number by which the loading is shown."""

    def merge(self, engines: Mapping[int, EngineModels]) -> tuple[Catalogue, Mapping[int, Spread]]:
        """Returns the merged catalogue, and by number of a loading the spread that runs its requests."""
        there = {engine: {one.number: one for one in engines[engine].catalogue.loadings} for engine in sorted(engines)}
        self._read(one for of_engine in there.values() for one in of_engine.values())
        for merged in self._merged:
            self._keep(merged, there)
        self._merged = [merged for merged in self._merged if merged.loadings]
        self._place_new(there)
        self.numbers = {
            engine: {one.loadings[engine].number: one.number for one in self._merged if engine in one.loadings}
            for engine in there
        }
        for merged in self._merged:
            merged.facts = self._facts[merged.best.number][1]
            self._route_requests(merged, engines)
        for number in self._retiring.keys() - self._facts.keys():
            self._retiring.pop(number).cancel()
        return self._catalogue(engines), {one.number: one.spread for one in self._merged if one.takes_requests}

    def _read(self, loadings: Iterable[Loading]) -> None:
        read = {}
        for one in loadings:
            pickled, facts = self._facts.get(one.number, (b"", None))
            read[one.number] = one.facts, facts if facts and pickled == one.facts else pickle.loads(one.facts)
        self._facts = read

    def _keep(self, merged: _MergedLoading, there: Mapping[int, Mapping[int, Loading]]) -> None:
        """Takes out loadings that have ended, and those that have turned out to be of another model."""
        loadings = {
            engine: there[engine][before.number]
            for engine, before in merged.loadings.items()
            if before.number in there.get(engine, ())
        }
        if loadings:
            first = min(loadings.values(), key=lambda loading: loading.number)
            merged.facts = self._facts[first.number][1]
        merged.loadings = {engine: one for engine, one in loadings.items() if merged.fits(self._facts[one.number][1])}

    def _place_new(self, there: Mapping[int, Mapping[int, Loading]]) -> None:
        """Merges each new loading with the newest one that it fits and that has no loading of its engine yet."""
        for engine, loadings in there.items():
            placed = {one.loadings[engine].number for one in self._merged if engine in one.loadings}
            for number, loading in loadings.items():
                if number in placed:
                    continue
                facts = self._facts[number][1]
                fitting = (one for one in reversed(self._merged) if engine not in one.loadings and one.fits(facts))
                if (merged := next(fitting, None)) is None:
                    merged = _MergedLoading(number, facts, Spread(()))
                    self._merged.append(merged)
                merged.loadings[engine] = loading

    def _route_requests(self, merged: _MergedLoading, engines: Mapping[int, EngineModels]) -> None:
        """Sends requests to the engines where the version is ready; if there are none, to those where it still runs.

        A loading that its engine ends while other engines serve the version is left once its requests are answered.
        """
        ready = merged.ready
        parts: dict[int, RemotePart] = {}
        for engine, loading in sorted(merged.loadings.items()):
            if loading.takes_requests and (part := engines[engine].models.get(loading.number)) is not None:
                parts[engine] = part
        merged.takes_requests = bool(parts)
        if parts:  # else the spread keeps its last parts, which tell requests why they have ended
            merged.spread.use([part for engine, part in parts.items() if engine in ready] or parts.values())
        for engine, part in parts.items():
            number = merged.loadings[engine].number
            if ready and engine not in ready and number not in self._retiring:
                self._retiring[number] = asyncio.create_task(_retire(part))

    def _catalogue(self, engines: Mapping[int, EngineModels]) -> Catalogue:
        catalogues = [engines[engine].catalogue for engine in sorted(engines)]
        most: Counter[str] = Counter()
        for merged in self._merged:
            most[merged.name] = max(most[merged.name], len(merged.ready))
        return Catalogue(
            any(catalogue.is_ready for catalogue in catalogues),
            tuple(_shown(one, most[one.name]) for one in self._in_order(engines)),
            _most_frequent([catalogue.labels for catalogue in catalogues]),
            _most_frequent([catalogue.shares for catalogue in catalogues]),
        )

    def _in_order(self, engines: Mapping[int, EngineModels]) -> Iterator[_MergedLoading]:
        """Yields models and versions in the order of the engines' catalogues, of a version the newest loading last."""
        by_number = {one.number: one for one in self._merged}
        by_model: dict[str, dict[str, dict[int, _MergedLoading]]] = {}
        for engine in sorted(engines):
            for loading in engines[engine].catalogue.loadings:
                one = by_number[self.numbers[engine][loading.number]]
                by_model.setdefault(one.name, {}).setdefault(one.facts.settings.version, {})[one.number] = one
        for versions in by_model.values():
            for each in versions.values():
                yield from (each[number] for number in sorted(each))


def _shown(merged: _MergedLoading, most: int) -> Loading:
    best, ready = merged.best, len(merged.ready)
    if best.state is State.READY and 2 * ready < most:
        reason = f"ready in {ready} of {most} engines"
        return best._replace(number=merged.number, state=State.LOADING, reason=reason, takes_requests=False)
    return best._replace(number=merged.number, takes_requests=merged.takes_requests)


def _most_frequent(each: Iterable[Mapping[str, Mapping[str, Value]]]) -> dict[str, Mapping[str, Value]]:
    """Returns for each model the value that most engines have; of several such values, the first."""
    said: dict[str, list[Mapping[str, Value]]] = {}
    for of_engine in each:
        for name, one in of_engine.items():
            said.setdefault(name, []).append(one)
    return {name: max(of_model, key=of_model.count) for name, of_model in said.items()}


def _sizes(model: Model) -> set[tuple[int, ...]]:
    return {bucket[1:] for bucket in model.buckets}


async def _retire(part: RemotePart) -> None:
    """Tells the engine that this front needs the model no more, once its requests are answered."""
    await part.drained()
    part.release()
