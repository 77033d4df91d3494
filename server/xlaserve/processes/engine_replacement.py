"""Replacement of an engine by another one that serves changed models: no memory and no program of the old one stays."""

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
from xlaserve.engine.memory import available_memory_bytes, own_bytes
from xlaserve.errors import EngineLost, ModelFailed
from xlaserve.models.change_checks import NO_LABELS, check_labels, check_versions
from xlaserve.models.change_queue import ChangeQueue
from xlaserve.models.listing import Listing, Listings
from xlaserve.models.repository import Repository
from xlaserve.programs.tf.device import Device
from xlaserve.telemetry.gpus import Gpus

log = logging.getLogger(__name__)

NOT_HERE: Final = "another process has taken the place of the one that ran the models"
LEFT: Final = "that is left to the process that has taken this one's place"


class InitialModels(NamedTuple):
    """The models that an engine begins with in the place of another one; plain data, which can be pickled."""

    configured: Mapping[str, VersionSet]
    """The models as they were configured when they were last loaded, by name."""
    listings: Listings
    required: frozenset[str] = frozenset()
    """Models that must serve before the engine takes the place of another one."""
    changed_ns: int = 0
    """Time at which the last change of these models was asked for, in nanoseconds of the monotonic clock, which all
    processes of a machine share. Among several engines, the models with the latest change are kept."""


class Outcome(NamedTuple):
    """The outcome of starting an engine that was to take this one's place."""

    reason: str = ""
    """Why it did not take the place; empty if it did."""
    failed: Sequence[tuple[str, str, str]] = ()
    """The model's name, the version's number and the reason for each version that failed there."""


class SharedLock:
    """A lock that many holders share, or one has alone. On the event loop."""

    def __init__(self) -> None:
        self._shared = 0
        self._alone = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Holds the lock together with others, after those that hold it alone or already wait for that."""
        async with self._alone:
            self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Holds the lock alone, after all others."""
        async with self._alone:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._shared)
            yield


@dataclass(eq=False, kw_only=True)
class EngineReplacement:
    """Changes the models in `repository`: in place if no version that serves ends by that, else in another engine.

    `begin` starts the other engine and returns once it has taken this one's place, or has failed to; `succeeded` then
    returns once no front sends new requests here. `check_room` raises ModelFailed if there is no memory for two
    engines. Later changes are not made here: they raise EngineLost, and `pass_news` is called for a reconfiguration.
    With `always_in_place` no other engine is started. `on_changed` is called after a change in place. On the event
    loop.
    """

    repository: Repository
    configured: dict[str, VersionSet]
    """The models as they were configured when they were last loaded, by name."""
    begin: Callable[[InitialModels], Awaitable[Outcome]]
    succeeded: Callable[[], Awaitable[None]]
    check_room: Callable[[], None] = lambda: None
    pass_news: Callable[[], object] = lambda: None
    always_in_place: bool = False
    changed_ns: int = 0
    """See `InitialModels.changed_ns`."""
    on_changed: Callable[[], object] = lambda: None
    clock_ns: Callable[[], int] = time.monotonic_ns
    has_successor: bool = False
    _changes: ChangeQueue = field(default_factory=ChangeQueue)
    _replacing: SharedLock = field(default_factory=SharedLock)
    """Held alone by a change that another engine makes, shared by those in place."""
    _updating: set[asyncio.Task[None]] = field(default_factory=set)

    def initial_models(self) -> InitialModels:
        """Returns the models that another engine has to begin with to serve the same ones as this."""
        return InitialModels(dict(self.configured), self.repository.listing(), changed_ns=self.changed_ns)

    async def load(self, name: str) -> None:
        """Loads all configured versions of a model; see `Repository.load`."""
        if name not in self.repository.serving():  # before anything is kept for a name that anybody may make up
            await self.repository.configured_model(name)
        in_place = partial(self.repository.load, name)
        await self._changes.make(name, "load", partial(self._load, name, in_place, again=True))

    async def update(self, name: str, labels: Mapping[str, str] = NO_LABELS, versions: Collection[str] = ()) -> None:
        """Loads the versions of a model that changed, and moves labels; see `Repository.update`."""
        in_place = partial(self.repository.update, name, labels, versions)
        loading = asyncio.create_task(self._load(name, in_place, again=False, labels=labels, versions=versions))
        self._updating.add(loading)
        loading.add_done_callback(self._updating.discard)
        await asyncio.shield(loading)  # goes on if this caller gives up: another engine may be starting

    async def unload(self, name: str) -> None:
        """Unloads a model; see `Repository.unload`."""
        self.repository.find(name)
        self._changes.drop_loads(name)
        self.repository.end_loads(name)  # now: a change that waits for them may hold up this one
        await self._changes.make(name, "unload", partial(self._unload, name))

    async def reconfigure(self, models: Iterable[ModelSettings], only: Collection[str] | None = None) -> list[str]:
        """Serves the configured models; see `Repository.reconfigure`.

        If that takes another engine, and it can't serve the models that serve here, then nothing changes.
        """
        asked_ns = self.clock_ns()
        models = [*models]
        configured = grouped(models)
        async with self._replacing.shared():
            if self.has_successor:
                return self._pass_on(only)
            to_do, gone = self.repository.to_do(configured, only)
            if not any(self._ends_any(name, configured.get(name)) for name in (*to_do, *gone)):
                self._note_configured(configured, only)
                done = await self.repository.reconfigure(models, only)
                self._changed(asked_ns)
                return done
        async with self._replacing.alone():
            if self.has_successor:
                return self._pass_on(only)
            to_do, gone = self.repository.to_do(configured, only)
            self._note_configured(configured, only)
            try:
                targets = {name: configured[name] for name in to_do} | dict.fromkeys(gone)
                outcome = await self._replace(targets, asked_ns)
            except ModelFailed as error:
                return [f"{name} as before: {error}" for name in (*to_do, *gone)]
            failed = {name: f"{name} failed: {reason}" for name, _, reason in outcome.failed}
            return [
                *(failed.get(name, change) for name, change in to_do.items()),
                *(f"{name} unloaded" for name in gone),
            ]

    async def cancel(self) -> None:
        """Ends changes that are under way; their callers get ShuttingDown, or are cancelled."""
        for loading in self._updating:
            loading.cancel()
        await self._changes.cancel()

    def _note_configured(self, configured: Mapping[str, VersionSet], only: Collection[str] | None) -> None:
        for name in {*self.configured, *configured} if only is None else only:
            self.configured.pop(name, None)
            if name in configured:
                self.configured[name] = configured[name]

    def _pass_on(self, only: Collection[str] | None) -> list[str]:
        if only is None:  # the other process looks for new versions by itself
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
        async with self._replacing.shared():
            self._check_in_charge()
            model = self.configured[name] = await self.repository.configured_model(name)
            if not self._ends_any(name, model, again=again):
                await in_place()
                self._changed(asked_ns)
                return
        async with self._replacing.alone():
            self._check_in_charge()
            model = self.configured[name] = await self.repository.configured_model(name)
            check_versions([*model.versions], versions)
            check_labels([*model.versions], labels)
            await self._replace({name: replace(model, labels=labels) if labels else model}, asked_ns)

    async def _unload(self, name: str) -> None:
        asked_ns = self.clock_ns()
        async with self._replacing.shared():
            self._check_in_charge()
            if not self._ends_any(name, None):
                await self.repository.unload(name)
                self._changed(asked_ns)
                return
        async with self._replacing.alone():
            self._check_in_charge()
            await self._replace({name: None}, asked_ns)

    def _ends_any(self, name: str, model: VersionSet | None, *, again: bool = False) -> bool:
        return not self.always_in_place and self.repository.ends_any(name, model, again=again)

    def _changed(self, asked_ns: int) -> None:
        self.changed_ns = max(self.changed_ns, asked_ns)
        self.on_changed()

    async def _replace(self, targets: Mapping[str, VersionSet | None], asked_ns: int) -> Outcome:
        """Has another engine serve `targets`, by model, None for an unloaded one, and all other models as they are now.

        Returns the outcome, with the versions that failed and were not required. Raises ModelFailed if the other engine
        does not take this one's place; then nothing has changed.
        """
        self.check_room()
        initial = self.initial_models()
        listings = dict(initial.listings)
        for name, model in targets.items():
            listings[name] = listings[name].unloaded() if model is None else Listing(model)
        required = {name for name, serves in self.repository.serving().items() if serves and targets.get(name, True)}
        changed_ns = max(self.changed_ns, asked_ns)
        initial = initial._replace(listings=listings, required=frozenset(required), changed_ns=changed_ns)
        outcome = await self.begin(initial)
        if outcome.reason:
            for name, number, reason in outcome.failed:
                if (target := targets.get(name)) is not None and number in target.versions:
                    self.repository.show_failure(target.versions[number], reason)
            log.error("all is as before, another process could not take this one's place: %s", outcome.reason)
            raise ModelFailed(outcome.reason)
        self.has_successor = True
        await self.succeeded()
        return outcome

    def _check_in_charge(self) -> None:
        """Raises EngineLost once another engine has taken this one's place."""
        if self.has_successor:
            raise EngineLost(NOT_HERE)


def check_room(max_resident_bytes: int | None, device: Device, gpus: Gpus) -> None:
    """Raises ModelFailed unless the machine, and each GPU of `device`, has memory for another process like this one."""
    taken, free, what = own_bytes(), available_memory_bytes(), "memory"  # without that of fronts, which engines share
    if max_resident_bytes is not None:
        free = min(free, max_resident_bytes - taken)
    if device.kind == "gpu":
        levels = [gpus.levels()[index] for index in device.gpus]
        used = [int(level["memory_used_bytes"]) for level in levels]
        left = [int(level["memory_size_bytes"]) - int(level["memory_used_bytes"]) for level in levels]
        if used and min(left) < max(used):
            taken, free, what = max(used), min(left), "memory of the GPU"
    if taken > free:
        raise ModelFailed(
            f"another process beside the one that serves needs some {taken >> 20} MiB of {what}, and"
            f" {max(0, free) >> 20} MiB are free: set swap: in_place, to change models in the process that serves"
        )
