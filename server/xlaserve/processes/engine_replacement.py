"""ChangeQueue of what serves, made by another engine that takes this one's place: nothing of the old one stays."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

from xlaserve.config import ModelSettings
from xlaserve.config.versions import VersionSet, grouped
from xlaserve.errors import EngineLost, ModelFailed
from xlaserve.models.change_queue import ChangeQueue
from xlaserve.models.listing import Listing, Listings
from xlaserve.models.repository import NO_LABELS, Repository, check_labels, check_versions

log = logging.getLogger(__name__)

NOT_HERE: Final = "another process has taken the place of the one that ran the models"
LEFT: Final = "that is left to the process that has taken this one's place"


class Start(NamedTuple):
    """What an engine begins with in the place of another one; plain data, which can be pickled."""

    configured: Mapping[str, VersionSet]
    """The models as they were configured when they were last loaded."""
    listings: Listings
    required: frozenset[str] = frozenset()
    """Models without which it takes nobody's place."""
    changed_ns: int = 0
    """When the last change of all this was asked for, by the monotonic clock, which all processes of a machine share:
    of what several engines have, the latest is to last."""


class Outcome(NamedTuple):
    """What became of an engine that was to take this one's place."""

    reason: str = ""
    """Why it did not; empty where it did."""
    failed: Sequence[tuple[str, str, str]] = ()
    """The name, number and reason of each version that failed there."""


class Gate:
    """Lets changes that go on side by side through, or one alone. On the event loop."""

    def __init__(self) -> None:
        self._beside = 0
        self._alone = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Waits for one that is alone, or waits to be."""
        async with self._alone:
            self._beside += 1
        try:
            yield
        finally:
            self._beside -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Waits for all others."""
        async with self._alone:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._beside)
            yield


@dataclass(eq=False, kw_only=True)
class EngineReplacement:
    """Makes changes of the models in `repository`: in place where nothing ends that serves, else in another engine.

    `begin` starts that and returns once it has taken this one's place, or has failed to; `succeeded` then returns once
    no front brings anything new here. `check_room` raises ModelFailed where there is no room for two. Later changes are
    not made here: they raise EngineLost, and `pass_news` is called for a reconfiguration. With `always_in_place` no
    other engine is begun. `on_changed` is called after a change in place. On the event loop.
    """

    repository: Repository
    configured: dict[str, VersionSet]
    """As they were when they were last loaded."""
    begin: Callable[[Start], Awaitable[Outcome]]
    succeeded: Callable[[], Awaitable[None]]
    check_room: Callable[[], None] = lambda: None
    pass_news: Callable[[], object] = lambda: None
    always_in_place: bool = False
    changed_ns: int = 0
    """As `Start` has it."""
    on_changed: Callable[[], object] = lambda: None
    clock_ns: Callable[[], int] = time.monotonic_ns
    has_successor: bool = False
    _changes: ChangeQueue = field(default_factory=ChangeQueue)
    _gate: Gate = field(default_factory=Gate)
    _updating: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> Start:
        """Returns what another engine is to begin with to serve the same."""
        return Start(dict(self.configured), self.repository.listing(), changed_ns=self.changed_ns)

    async def load(self, name: str) -> None:
        """Does as `Repository.load`."""
        if name not in self.repository.serving():  # before anything is kept for a name that anybody may make up
            await self.repository.configured_model(name)
        in_place = partial(self.repository.load, name)
        await self._changes.make(name, "load", partial(self._load, name, in_place, again=True))

    async def update(self, name: str, labels: Mapping[str, str] = NO_LABELS, versions: Collection[str] = ()) -> None:
        """Does as `Repository.update`."""
        in_place = partial(self.repository.update, name, labels, versions)
        loading = asyncio.create_task(self._load(name, in_place, again=False, labels=labels, versions=versions))
        self._updating.add(loading)
        loading.add_done_callback(self._updating.discard)
        await asyncio.shield(loading)  # which goes on where this caller gives up: another engine may be starting

    async def unload(self, name: str) -> None:
        """Does as `Repository.unload`."""
        self.repository.find(name)
        await self._changes.make(name, "unload", partial(self._unload, name))

    async def reconfigure(self, models: Iterable[ModelSettings], only: Collection[str] | None = None) -> list[str]:
        """Does as `Repository.reconfigure`, but that nothing changes where a new engine can't serve all that it has
        to."""
        asked_ns = self.clock_ns()
        models = [*models]
        configured = grouped(models)
        async with self._gate.beside():
            if self.has_successor:
                return self._leave_news(only)
            to_do, gone = self.repository.to_do(configured, only)
            if not any(self._ends_any(name, configured.get(name)) for name in (*to_do, *gone)):
                self._note(configured, only)
                done = await self.repository.reconfigure(models, only)
                self._changed(asked_ns)
                return done
        async with self._gate.alone():
            if self.has_successor:
                return self._leave_news(only)
            to_do, gone = self.repository.to_do(configured, only)
            self._note(configured, only)
            try:
                targets = {name: configured[name] for name in to_do} | dict.fromkeys(gone)
                outcome = await self._succeed(targets, asked_ns)
            except ModelFailed as error:
                return [f"{name} as before: {error}" for name in (*to_do, *gone)]
            failed = {name: f"{name} failed: {reason}" for name, _, reason in outcome.failed}
            return [
                *(failed.get(name, change) for name, change in to_do.items()),
                *(f"{name} unloaded" for name in gone),
            ]

    async def cancel(self) -> None:
        """Ends changes that a model waits for; their callers get ShuttingDown, or are cancelled."""
        for loading in self._updating:
            loading.cancel()
        await self._changes.cancel()

    def _note(self, configured: Mapping[str, VersionSet], only: Collection[str] | None) -> None:
        for name in {*self.configured, *configured} if only is None else only:
            self.configured.pop(name, None)
            if name in configured:
                self.configured[name] = configured[name]

    def _leave_news(self, only: Collection[str] | None) -> list[str]:
        if only is None:  # folders of versions the other process follows by itself
            self.pass_news()
        return [LEFT]

    async def _load(
        self,
        name: str,
        in_place: Callable[[], Awaitable[None]],
        *,
        again: bool,
        labels: Mapping[str, str] = NO_LABELS,
        versions: Collection[str] = (),
    ) -> None:
        asked_ns = self.clock_ns()
        async with self._gate.beside():
            self._check()
            model = self.configured[name] = await self.repository.configured_model(name)
            if not self._ends_any(name, model, again=again):
                await in_place()
                self._changed(asked_ns)
                return
        async with self._gate.alone():
            self._check()
            model = self.configured[name] = await self.repository.configured_model(name)
            check_versions([*model.versions], versions)
            check_labels([*model.versions], labels)
            await self._succeed({name: replace(model, labels=labels) if labels else model}, asked_ns)

    async def _unload(self, name: str) -> None:
        asked_ns = self.clock_ns()
        async with self._gate.beside():
            self._check()
            if not self._ends_any(name, None):
                await self.repository.unload(name)
                self._changed(asked_ns)
                return
        async with self._gate.alone():
            self._check()
            await self._succeed({name: None}, asked_ns)

    def _ends_any(self, name: str, model: VersionSet | None, *, again: bool = False) -> bool:
        return not self.always_in_place and self.repository.ends_any(name, model, again=again)

    def _changed(self, asked_ns: int) -> None:
        self.changed_ns = max(self.changed_ns, asked_ns)
        self.on_changed()

    async def _succeed(self, targets: Mapping[str, VersionSet | None], asked_ns: int) -> Outcome:
        """Has another engine serve these models as they are here, None for not at all, and all others as they are now.

        Returns what failed there that was not required. Raises ModelFailed where it does not come to that: then nothing
        has changed.
        """
        self.check_room()
        start = self.start()
        listings = dict(start.listings)
        for name, model in targets.items():
            listings[name] = listings[name].unloaded() if model is None else Listing(model)
        required = {name for name, serves in self.repository.serving().items() if serves and targets.get(name, True)}
        changed_ns = max(self.changed_ns, asked_ns)
        start = start._replace(listings=listings, required=frozenset(required), changed_ns=changed_ns)
        outcome = await self.begin(start)
        if outcome.reason:
            for name, number, reason in outcome.failed:
                if (target := targets.get(name)) is not None and number in target.versions:
                    self.repository.show_failure(target.versions[number], reason)
            log.error("all is as before, another process could not take this one's place: %s", outcome.reason)
            raise ModelFailed(outcome.reason)
        self.has_successor = True
        await self.succeeded()
        return outcome

    def _check(self) -> None:
        if self.has_successor:
            raise EngineLost(NOT_HERE)
