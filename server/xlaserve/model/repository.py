"""The models of the server and their life: loading, compiling, ready, draining, unloaded, failed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from xlaserve.config import ModelSettings, Settings
from xlaserve.engine.program import Dismantled
from xlaserve.engine.warmup.ledger import Entry, Ledger
from xlaserve.errors import ConfigError, ModelFailed, ModelNotFound, ModelNotReady, ShuttingDown, XlaserveError, cause
from xlaserve.model.catalog import Model
from xlaserve.model.changes import Changes, Shared
from xlaserve.model.loader import Loader
from xlaserve.model.version import Served, State, Version, superseded
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.model import ModelTelemetry

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Repository:
    """Loads, serves and unloads models. All methods run on the event loop.

    `read_models` reads the configured models again and may raise ConfigError. `on_change` is called at every change of
    state, `on_record` with every program that was compiled (on the compiling thread).
    """

    settings: Settings
    loader: Loader
    read_models: Callable[[], Iterable[ModelSettings]]
    metrics: Metrics
    on_change: Callable[[Version], None] = lambda version: None
    on_record: Callable[[Entry], None] = lambda entry: None

    def __post_init__(self) -> None:
        self._configured = Shared(lambda: {model.name: model for model in self.read_models()})
        self._versions: dict[str, list[Version]] = {}
        self._served: dict[str, Served] = {}
        self._changes = Changes()
        self._has_started = False

    def get(self, name: str, version: str = "") -> Served:
        """Returns the ready version. Raises ModelNotFound, ModelNotReady or ModelFailed."""
        served = self._served.get(name)
        if served is not None and version in ("", served.settings.version):
            return served
        found = self.find(name, version)
        if found.state is State.FAILED:
            raise ModelFailed(f"model {name} failed: {found.reason}")
        raise ModelNotReady(f"model {name} is {found.state.lower()}")

    def find(self, name: str, version: str = "") -> Version:
        """Returns a version in any state, preferably the one that serves. Raises ModelNotFound."""
        versions = self._versions.get(name, [])
        for candidate in sorted(versions, key=lambda candidate: candidate.state is not State.READY):
            if version in ("", candidate.settings.version):
                return candidate
        known = ", ".join(sorted(self._versions)) or "none"
        if versions:
            raise ModelNotFound(f"model {name} has no version {version[:32]!r}; it has {versions[0].settings.version}")
        raise ModelNotFound(f"no model {name[:128]!r}; there are: {known}")

    def index(self) -> list[Version]:
        """Returns every version, in the order of the configuration; a newcomer after the one that serves."""
        return [version for versions in list(self._versions.values()) for version in versions]

    def serving(self) -> dict[str, bool]:
        """Returns for each model whether it serves."""
        return {name: name in self._served for name in list(self._versions)}

    @property
    def is_ready(self) -> bool:
        """Whether start-up has warmed every model that did not fail, one serves, and the server does not stop.

        What is loaded later is ready or not for itself: it takes nothing from those that serve.
        """
        return self._is_serving and not self.loader.stop.is_set()

    @property
    def _is_serving(self) -> bool:
        return self._has_started and bool(self._served)

    async def load_all(self) -> None:
        """Loads the configured models in their order. Raises ModelFailed at the first that fails, if so configured."""
        for version in [self._begin(model) for model in self.settings.models]:
            try:
                await self._changes.make(version.name, "start", partial(self._start, version))
            except ModelFailed:
                if self.settings.exit_on_model_failure:
                    raise
        self._has_started = True

    async def load(self, name: str) -> None:
        """Loads, compiles and warms a configured model, puts it in the place of the one that serves, and drains that.

        Calls that come before a load has begun share it, and it goes on when they give up. Raises ModelNotFound,
        ShuttingDown, or ModelFailed with the reason; the one that serves then goes on.
        """
        if name not in self._versions:  # before anything is kept for a name that anybody may make up
            await self._configured_model(name)
        await self._changes.make(name, "load", partial(self._load, name))

    async def unload(self, name: str) -> None:
        """Takes no new requests for a model, finishes the accepted ones, and frees it. Raises ModelNotFound."""
        self.find(name)
        await self._changes.make(name, "unload", partial(self._unload, name))

    async def reconfigure(self, models: Iterable[ModelSettings]) -> list[str]:
        """Makes the server serve `models`, which are configured now; returns a sentence for each change.

        Loads what is new, has other settings, or does not serve, and unloads what is gone. A model that fails shows
        that in its state, and the version that served goes on.
        """
        configured = {model.name: model for model in models}
        serving = {name: served.settings for name, served in self._served.items()}
        changed = [name for name, settings in configured.items() if serving.get(name) != settings]
        gone = [name for name in serving if name not in configured]
        for name in self._versions.keys() - set(changed):
            self._forget_failed(name)
        results = await asyncio.gather(*map(self.load, changed), *map(self.unload, gone), return_exceptions=True)
        done = [f"{name} loaded" for name in changed] + [f"{name} unloaded" for name in gone]
        for number, result in enumerate(results):
            if isinstance(result, XlaserveError):
                done[number] = f"{[*changed, *gone][number]} as before: {result}"
            elif isinstance(result, BaseException):
                raise result
        return done

    def _forget_failed(self, name: str) -> None:
        """Drops a version that failed and that nothing asks for any more."""
        self._versions[name] = [version for version in self._versions[name] if version.state is not State.FAILED]
        if not self._versions[name]:
            del self._versions[name]

    def stop_loading(self) -> None:
        """Ends loads and warm-ups as soon as they can be, and takes no more."""
        self.loader.stop.set()

    async def drain(self, timeout_s: float) -> None:
        """Ends loads and takes nothing new; fails what was accepted and does not finish in `timeout_s`."""
        self.stop_loading()
        await self._changes.cancel()
        await asyncio.gather(*(self._end(version, timeout_s) for version in self.index()))
        self._served.clear()
        self.loader.close()

    async def _configured_model(self, name: str) -> ModelSettings:
        try:
            models = await self._configured()
        except ConfigError as error:
            log.error("model %s: %s", name[:128], error)
            raise ModelFailed("the configuration is no longer valid; the server's log says why") from error
        if name not in models:
            raise ModelNotFound(f"no model {name[:128]!r} is configured; there are: {', '.join(models)}")
        return models[name]

    async def _start(self, version: Version) -> None:
        if version.state is State.LOADING and version in self._versions[version.name]:
            await self._bring_up(version)  # else a client loaded or unloaded it meanwhile

    async def _load(self, name: str) -> None:
        self.loader.stop.check()
        settings = await self._configured_model(name)
        self.loader.stop.check()
        await self._bring_up(self._begin(settings))

    async def _unload(self, name: str) -> None:
        self._served.pop(name, None)
        ended = [_to_dismantle(version) for version in self._versions[name]]
        for version in self._versions[name]:
            await self._end(version, self.settings.drain_timeout_s)
        self._versions[name] = self._versions[name][:1]
        await asyncio.to_thread(_free, ended)

    def _begin(self, settings: ModelSettings) -> Version:
        """Returns a new version, announced as loading."""
        versions = self._versions.setdefault(settings.name, [])
        # What serves stays until the newcomer is ready; anything else is replaced.
        versions[:] = [version for version in versions if version.state is State.READY]
        telemetry = ModelTelemetry(self.metrics, settings.name)

        def record(entry: Entry) -> None:
            if entry.from_cache:
                telemetry.loaded(entry.mode)
            elif seconds := entry.trace_s + entry.compile_s:
                telemetry.compiled(entry.mode, seconds, in_background=entry.in_background)
            self.on_record(entry)

        ledger = Ledger(settings.name, settings.version, record)
        version = Version(settings, telemetry, ledger, self.on_change)
        versions.append(version)
        version.enter(State.LOADING)
        return version

    async def _bring_up(self, newcomer: Version) -> None:
        """Makes `newcomer` serve in place of the version that serves now; `load` says how."""
        name = newcomer.name
        try:
            served = await self.loader.load(newcomer, others_serve=self._is_serving)
        except ShuttingDown:
            raise
        except Exception as error:
            newcomer.model = None
            is_explained = isinstance(error, ModelFailed)
            newcomer.reason = cause(error) if is_explained else f"{type(error).__name__}: {cause(error)}"
            newcomer.enter(State.FAILED)
            log.log(logging.DEBUG if is_explained else logging.ERROR, "model %s failed", name, exc_info=error)
            raise ModelFailed(f"model {name} failed: {newcomer.reason}") from error
        if not self._is_serving:  # else the garbage of both is collected when the old one is freed
            await asyncio.to_thread(gc.collect)
        self._served[name] = served
        newcomer.enter(State.READY)
        for old in superseded(self._versions[name], newcomer):
            ended = [_to_dismantle(old)]
            await self._end(old, self.settings.drain_timeout_s)
            self._versions[name].remove(old)
            await asyncio.to_thread(_free, ended)

    async def _end(self, version: Version, timeout_s: float) -> None:
        if (served := version.served) is not None:
            version.enter(State.DRAINING)
            if served.background is not None:
                served.background.stop_compiling()
            if version.growth is not None:
                version.growth.cancel()
                await asyncio.wait([version.growth])
            await served.batcher.drain(timeout_s)
            if served.background is not None:
                await served.background.close()
        if version.state is not State.FAILED:
            version.enter(State.UNLOADED)
        version.model = version.served = version.growth = None


def _to_dismantle(version: Version) -> Model | None:
    """Returns the version's model, None while it may still compile something in the background."""
    return None if version.growth or (version.served and version.served.background) else version.model


def _free(ended: list[Model | None]) -> None:
    """Frees models that nobody uses any more; blocks."""
    while ended:
        model = ended.pop()
        if model is not None and isinstance(model.program, Dismantled):
            model.program.dismantle()
        del model
    gc.collect()  # what is left of a model refers to itself
