"""A front's directory of the models that engines in other processes publish."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Final, Protocol

from xlaserve.engine.model_engine import ModelEngine
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.models.version import Served, State, Version
from xlaserve.models.version_lookup import Directory
from xlaserve.processes.published import Catalogue, Facts, Loading
from xlaserve.telemetry.metrics import Metrics, SeriesRetention
from xlaserve.telemetry.version_metrics import ModelTelemetry

LOST: Final = "the process that ran it has ended; another one is starting"


class RemoteModelEngine(ModelEngine, Protocol):
    """A model's engine in another process."""

    def release(self) -> None:
        """Tells the other process that this one needs the model no more."""


class Mirror(Directory):
    """Shows the last catalogue of an engine, and after the engine's end that its models are lost. On the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._on_change: list[Callable[[], object]] = []
        self._metrics = metrics
        self._loadings: dict[int, tuple[bytes, Version]] = {}
        """By the number of a loading, its pickled facts and the version made of them."""
        self._is_ready = False
        self._has_become_ready = asyncio.Event()
        self._is_stopping = False
        self._lost: set[str] = set()
        """Names of the models whose engine has ended, until the next engine has loaded them or failed to."""
        self._retiring: dict[int, asyncio.Task[None]] = {}
        self._series_retention = SeriesRetention(metrics.forget)

    @property
    def is_ready(self) -> bool:
        """Whether models serve and this process does not end."""
        return self._is_ready and not self._is_stopping

    def stop(self) -> None:
        """Notes that this process is to end: from now on, nothing is ready, whatever the engine publishes."""
        self._is_stopping = True

    def follow(self, on_change: Callable[[], object]) -> None:
        """Calls `on_change` whenever the directory has changed, from now on."""
        self._on_change.append(on_change)

    async def ready(self) -> None:
        """Returns once an engine has been ready."""
        await self._has_become_ready.wait()

    def serving(self) -> dict[str, bool]:
        """Returns for each model whether it serves, in some version."""
        return {name: any(one.state is State.READY for one in versions) for name, versions in self._versions.items()}

    def take(self, catalogue: Catalogue, engines: Mapping[int, RemoteModelEngine]) -> None:
        """Shows `catalogue` from now on; `engines` run its loadings, by their numbers."""
        before = self._loadings
        self._loadings = {one.number: self._taken(one, engines.get(one.number)) for one in catalogue.loadings}
        versions = [version for _, version in self._loadings.values()]
        self._versions = {name: [*each] for name, each in groupby(versions, key=lambda version: version.name)}
        self._labels = dict(catalogue.labels)
        for number in before.keys() - self._loadings.keys():
            _, ended = before[number]
            for version in self._versions.get(ended.name, ()):
                version.forget_shadow(ended.settings.version)
        for name in [name for name in self._served if name not in self._versions]:
            self._forget(name)
        for name, of_model in self._versions.items():
            if self.shares(name) != (shares := catalogue.shares.get(name, {})):
                self._share(name, shares)
            if name in self._lost and not any(map(_is_loaded_or_failed, of_model)):
                continue  # requests still find the lost model, which tells clients when to try again
            self._lost.discard(name)
            self._publish(name)
        self._is_ready = catalogue.is_ready
        if self._is_ready:
            self._has_become_ready.set()
        for number, (_, version) in self._loadings.items():
            if version.served is not None and version.state is not State.READY and number not in self._retiring:
                self._retiring[number] = asyncio.create_task(_retire(version.served, engines[number]))
        for number in [*self._retiring]:
            if number not in self._loadings or self._loadings[number][1].state is State.READY:
                self._retiring.pop(number).cancel()
        self.see_versions()
        self._changed()

    def in_use(self) -> list[Served]:
        """Returns all versions that requests may use, or still use."""
        return [version.served for version in self.index() if version.served is not None]

    def number(self, version: Version) -> int | None:
        """Returns the number of this loading of a version at the engine; None once the loading has ended."""
        return next((number for number, (_, one) in self._loadings.items() if one is version), None)

    def numbered(self) -> dict[int, Version]:
        """Returns all loadings by their numbers."""
        return {number: version for number, (_, version) in self._loadings.items()}

    def see_versions(self) -> None:
        """Forgets metrics of versions that have been gone for a while; see `SeriesRetention`."""
        self._series_retention.update((version.name, version.settings.version) for version in self.index())

    def lose(self) -> None:
        """Shows that the engine has ended. Requests still find its models, and get EngineLost from them.

        Does nothing if that is shown already.
        """
        if not self._loadings:
            return
        self._is_ready = False
        self._lost = {name for name, served in self._served.items() if served}
        self._loadings.clear()
        while self._retiring:
            self._retiring.popitem()[1].cancel()
        for version in self.index():
            if version.state is not State.FAILED:
                version.state, version.reason = State.LOADING, LOST
        self._changed()

    def _changed(self) -> None:
        for on_change in self._on_change:
            on_change()

    def _taken(self, loading: Loading, engine: RemoteModelEngine | None) -> tuple[bytes, Version]:
        facts, version = self._loadings.get(loading.number, (b"", None))
        if version is None:
            read: Facts = pickle.loads(loading.facts)
            name, number = read.settings.name, read.settings.version
            telemetry = ModelTelemetry(self._metrics, name, number)
            version = Version(read.settings, telemetry, Ledger(name, number), lambda version: None)
        if facts != loading.facts:
            _describe(version, pickle.loads(loading.facts))
        version.state, version.reason = loading.state, loading.reason
        if engine is None or version.model is None or not loading.takes_requests:
            version.served = None
        elif version.served is None:
            version.served = Served(version, version.model, engine)
        else:
            version.served.model = version.model
        return loading.facts, version


def _is_loaded_or_failed(version: Version) -> bool:
    return version.state not in (State.LOADING, State.COMPILING)


async def _retire(served: Served, engine: RemoteModelEngine) -> None:
    """Lets the engine end a loading that takes no new requests, once no request here uses it."""
    await served.left()
    engine.release()


def _describe(version: Version, facts: Facts) -> None:
    version.model = facts.model
    version.auto, version.differences = dict(facts.auto), dict(facts.differences)
    version.decode_difference, version.examples = facts.decode_difference, dict(facts.examples)
    version.warnings = [*facts.warnings]
    version.ledger.show(facts.entries)
