"""The versions of models and their states: loading, compiling, ready, draining, unloaded, failed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from xlaserve.config import ModelSettings
from xlaserve.config.versions import VersionSet, grouped
from xlaserve.engine.under_way import key_of
from xlaserve.errors import LoadEnded, ModelFailed, ShuttingDown, XlaserveError
from xlaserve.models.change_checks import NO_LABELS, check_labels, check_versions
from xlaserve.models.change_plan import change_of, ends_any
from xlaserve.models.change_queue import UNLOADED, ChangeQueue
from xlaserve.models.configured_models import ConfiguredModels
from xlaserve.models.draining import drain
from xlaserve.models.listing import Ended, Listings, of_configured
from xlaserve.models.loader import Loader
from xlaserve.models.local_versions import LocalVersions
from xlaserve.models.version import Served, State, Version

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Repository(LocalVersions):
    """Loads, serves and unloads models. All methods run on the event loop.

    `read_models` reads the configured models again and may raise ConfigError.
    """

    loader: Loader
    read_models: Callable[[], Iterable[ModelSettings]]
    listings: Listings | None = None
    """The models that `load_all` loads; the configured ones by default."""
    required: Collection[str] = ()
    """Models that end `load_all` where one of them fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._configured = ConfiguredModels(self.read_models)
        self._changes = ChangeQueue()
        self._loading: dict[str, asyncio.Task[Served]] = {}
        """The load of each model that is under way."""
        self._announced: list[Version] | None = None
        """The versions that `load_all` still has to load; None until `announce`."""
        self._has_started = False

    @property
    def is_ready(self) -> bool:
        """Whether the server is ready; see `Directory.is_ready`."""
        return self._is_serving and not self.loader.stop.is_set()

    @property
    def _is_serving(self) -> bool:
        return self._has_started and any(self._served.values())

    def announce(self) -> None:
        """Lists the models that `load_all` will load, so that requests are told that they are loading."""
        listings = of_configured(grouped(self.settings.models)) if self.listings is None else self.listings
        self._announced = []
        for name, (model, ended) in listings.items():
            self._point(name, model)
            for number, settings in model.versions.items():
                version = self._begin(settings)
                crash = self._crash_of(settings)
                end = Ended(State.FAILED, crash) if crash else ended.get(number)
                if end is None:
                    self._announced.append(version)
                else:
                    version.enter(end.state, end.reason)

    async def load_all(self) -> None:
        """Loads the announced models, in their order.

        Raises ModelFailed at the first failure of a model that is required, or of any with `exit_on_model_failure`;
        where such a version is set aside, before any is loaded.
        """
        if self._announced is None:
            self.announce()
        for version in self.index():
            if self._is_needed(version) and (crash := self._crash_of(version.settings)):
                raise ModelFailed(f"model {version.title} failed: {crash}")
        versions, self._announced = self._announced or [], None
        by_name: dict[str, list[Version]] = {}
        for version in versions:
            by_name.setdefault(version.name, []).append(version)
        starts: dict[str, asyncio.Task[None]] = {}
        try:
            for name, versions in by_name.items():
                start = starts[name] = asyncio.create_task(self._start(name, versions))
                await self.loader.turns.until_done_or_given_up(start)
            # Where another engine serves until then, it is not to wait for models that did not serve there.
            await asyncio.gather(
                *(start for name, start in starts.items() if not self.required or name in self.required)
            )
        except ModelFailed:
            await self._changes.cancel()
            raise
        finally:
            for start in starts.values():
                start.cancel()
        self._has_started = True

    def ends_any(self, name: str, model: VersionSet | None, *, again: bool = False) -> bool:
        """Returns whether a version of a model that serves ends by a change to `model`; see `change_plan.ends_any`."""
        return ends_any(self._serving(name), model, again=again)

    async def load(self, name: str) -> None:
        """Loads, compiles and warms all configured versions of a model, each in the place of the one that serves.

        Versions that are no longer configured end once the others serve. Calls that come before a load has begun share
        it, and it goes on when they give up. Raises ModelNotFound, ShuttingDown, or ModelFailed with the reason; the
        versions that serve then go on.
        """
        if name not in self._versions:  # a made-up name must not leave an entry in the queue
            await self.configured_model(name)
        await self._changes.make(name, "load", partial(self._load, name, again=True))

    async def update(self, name: str, labels: Mapping[str, str] = NO_LABELS, versions: Collection[str] = ()) -> None:
        """Loads the versions whose settings have changed or that do not serve, as `load` does; moves `labels`, if any.

        Labels stay moved until the configuration is applied again. Raises what `load` raises, and InvalidArgument where
        the configuration has other versions than `versions`, if given, or a label names a version that is not ready;
        the labels are then unchanged.
        """
        before = self.labels(name)
        try:
            await self._changes.make(name, "update", partial(self._load, name, again=False))
            check_versions([one.settings.version for one in self.versions(name)], versions)
            check_labels(self._serving(name), labels)
        except XlaserveError:
            ready = self._serving(name)
            kept = {label: version for label, version in before.items() if version in ready}
            self._move_labels(name, {**self.labels(name), **kept})
            raise
        if labels:
            self._move_labels(name, labels)

    async def unload(self, name: str) -> None:
        """Refuses new requests for a model, finishes the accepted ones, and frees it. Raises ModelNotFound.

        Ends loads of the model that are under way, whose callers get LoadEnded: they may never end by themselves.
        """
        self.find(name)
        self.end_loads(name)
        await self._changes.make(name, "unload", partial(self._unload, name))

    def end_loads(self, name: str) -> None:
        """Ends the loads of a model that are under way or wait, as it is to be unloaded."""
        self._changes.drop_loads(name)
        if (loading := self._loading.get(name)) is not None:
            loading.cancel()
        for version in self._versions.get(name, ()):
            if version.state in (State.LOADING, State.COMPILING):  # at once: an engine that comes now is not to load it
                version.enter(State.UNLOADED)

    async def reconfigure(self, models: Iterable[ModelSettings], only: Collection[str] | None = None) -> list[str]:
        """Makes the server serve `models`, which are configured now; returns a sentence for each change.

        Loads versions that are new, have other settings, or do not serve, and unloads models that are no longer
        configured. Changes only the models named in `only`, where that is given. A version that fails is in the state
        FAILED, and the version that served goes on.
        """
        to_do, gone = self.to_do(configured := grouped(models), only)
        changed = [*to_do]
        names = {*configured, *self._versions} if only is None else {*only}
        for name in (names & self._versions.keys()) - {*changed}:
            self._forget_failed(name)
        results = await asyncio.gather(*map(self.update, changed), *map(self.unload, gone), return_exceptions=True)
        done = [*(to_do[name] for name in changed), *(f"{name} unloaded" for name in gone)]
        for number, result in enumerate(results):
            if isinstance(result, XlaserveError):
                done[number] = f"{[*changed, *gone][number]} as before: {result}"
            elif isinstance(result, BaseException):
                raise result
        return done

    def to_do(
        self, configured: Mapping[str, VersionSet], only: Collection[str] | None = None
    ) -> tuple[dict[str, str], list[str]]:
        """Returns the changes that make the server serve `configured`: a sentence for each model that is to be loaded
        or changed, and the names of models that are to be unloaded; of the models in `only`, where that is given."""
        names = {*configured, *self._versions} if only is None else {*only}
        to_do = {name: self._change_of(name, model) for name, model in configured.items() if name in names}
        gone = [name for name, served in self._served.items() if served and name in names and name not in configured]
        return {name: change for name, change in to_do.items() if change}, gone

    def _change_of(self, name: str, model: VersionSet) -> str:
        is_routed = (self._labels.get(name), self._shares.get(name)) == (model.labels, model.routing)
        return change_of(name, self._serving(name), model, self._is_set_aside, is_routed=is_routed)

    def _is_needed(self, version: Version) -> bool:
        """Returns whether a failure of the version ends the start of the server."""
        return self.settings.exit_on_model_failure or version.name in self.required

    def stop_loading(self) -> None:
        """Ends loads and warm-ups as soon as possible, and refuses further ones."""
        self.loader.stop.set()

    async def drain(self, timeout_s: float) -> None:
        """Ends loads and refuses requests; fails the accepted ones that do not finish within `timeout_s` seconds."""
        self.stop_loading()
        await self._changes.cancel()
        await asyncio.gather(*(drain(version, timeout_s) for version in self.index()))
        self._served.clear()
        self.loader.close()

    async def configured_model(self, name: str) -> VersionSet:
        """Reads how a model is configured now; raises what `ConfiguredModels.find` raises."""
        return await self._configured.find(name)

    async def _start(self, name: str, versions: Collection[Version]) -> None:
        """Loads announced versions of a model. Raises ModelFailed where one that is needed fails."""
        with suppress(LoadEnded):  # a client unloaded it meanwhile
            await self._changes.make(name, "start", partial(self._load_announced, versions))

    async def _load_announced(self, versions: Collection[Version]) -> None:
        for version in versions:
            if version.state is not State.LOADING or version not in self._versions[version.name]:
                continue  # a client loaded or unloaded it meanwhile
            try:
                await self._bring_up(version)
            except ModelFailed:
                if self._is_needed(version):
                    raise

    async def _load(self, name: str, *, again: bool) -> None:
        self.loader.stop.check()
        model = await self.configured_model(name)
        self.loader.stop.check()
        if not self._served.get(name):
            self._point(name, model)
        # Versions that are no longer configured stay only as long as they serve.
        versions = self._versions.get(name, ())
        self._versions[name] = [
            one for one in versions if one.state is State.READY or one.settings.version in model.versions
        ]
        unloads_first = self.settings.version_order == "unload_first"
        if unloads_first:
            await self._retire(name, self._left(name, model))
            self._point(name, model)  # requests for a label of an ended version wait for its new one
        serving = self._serving(name)
        failures = []
        for number, settings in model.versions.items():
            if again and self.set_aside:
                self.set_aside.pop(await asyncio.to_thread(key_of, settings), None)  # it reads the state of all files
            if again or (serving.get(number) != settings and not self._is_set_aside(settings)):
                newcomer = self._begin(settings)
                if unloads_first:
                    await self._retire(name, self._others(newcomer))
                try:
                    await self._bring_up(newcomer)
                except ModelFailed as error:
                    failures.append(error)
        self._point(name, model)
        if failures:
            raise failures[0]
        await self._retire(name, self._left(name, model))

    async def _unload(self, name: str) -> None:
        versions = self._versions.get(name, [])  # a configuration without the model may have come first
        await self._finish(versions)
        kept: dict[str, Version] = {}
        for version in versions:
            kept.setdefault(version.settings.version, version)
        if kept:
            self._versions[name] = [*kept.values()]

    async def _bring_up(self, newcomer: Version) -> None:
        """Makes `newcomer` serve, and ends the earlier loading of its version.

        Raises ModelFailed, ShuttingDown, and LoadEnded where `end_loads` has ended it.
        """
        loading = asyncio.create_task(self.loader.load(newcomer, others_serve=self._is_serving))
        self._loading[newcomer.name] = loading
        try:
            await loading
        except ShuttingDown:
            raise
        except asyncio.CancelledError:
            newcomer.model = None  # not to be dismantled: a thread may still be at it
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise LoadEnded(UNLOADED.format(newcomer.title)) from None
        except Exception as error:
            newcomer.fail(error)
            raise ModelFailed(f"model {newcomer.title} failed: {newcomer.reason}") from error
        finally:
            del self._loading[newcomer.name]
        if not self._is_serving:  # else the garbage of both is collected when the old one is freed
            await asyncio.to_thread(gc.collect)
        newcomer.enter(State.READY)
        await self._retire(newcomer.name, self._others(newcomer))
