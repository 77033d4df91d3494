"""The models of the server and their life: loading, compiling, ready, draining, unloaded, failed."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np

from xlaserve import interpreter
from xlaserve.cache.cache import CompileCache
from xlaserve.config import Bucket, Mode, ModelSettings, Settings
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.buckets import demand
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import AnySize, Dismantled, Executable, Sealed
from xlaserve.engine.warmup.auto_buckets import Programs, warm_up_auto
from xlaserve.engine.warmup.background import Background
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.compiler import Timer, compile_threads, fastest, measure, noise, warm_up
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import ConfigError, ModelFailed, ModelNotFound, ModelNotReady, ShuttingDown, XlaserveError, cause
from xlaserve.model import verification
from xlaserve.model.advice import slower
from xlaserve.model.catalog import Model
from xlaserve.model.changes import Changes
from xlaserve.model.preparer import Preparer
from xlaserve.model.version import Served, State, Version
from xlaserve.priority import yield_to_traffic
from xlaserve.runtimes.tf.device import usable_cores
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.model import ModelTelemetry

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


class Repository:
    """Loads, serves and unloads models. All methods run on the event loop; loading and compiling on a thread.

    `load_model` builds a model from its settings, or takes it from where `preparer` has it, and blocks. `read_models`
    reads the configured models again and may raise ConfigError. All that may compile something is done in an
    `expecting()`. `on_change` is called at every change of state, `on_record` with every program that was compiled (on
    the compiling thread).
    """

    def __init__(
        self,
        *,
        settings: Settings,
        load_model: Callable[[ModelSettings, CompileCache | None], Model],
        read_models: Callable[[], Iterable[ModelSettings]],
        lanes: Lanes,
        worker: Worker,
        metrics: Metrics,
        expecting: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_change: Callable[[Version], None] = lambda version: None,
        on_record: Callable[[Entry], None] = lambda entry: None,
        on_crash: Callable[[], None] = lambda: None,
        preparer: Preparer | None = None,
        has_tf32: bool = False,
        on_cpu: bool = True,
    ) -> None:
        self._settings = settings
        self._load_model = load_model
        self._lanes = lanes
        self._worker = worker
        self._metrics = metrics
        self._expecting = expecting
        self._on_change = on_change
        self._on_record = on_record
        self._on_crash = on_crash
        self._preparer = preparer
        self._has_tf32 = has_tf32
        self._on_cpu = on_cpu
        self._read_models = read_models
        self._versions: dict[str, list[Version]] = {}
        self._served: dict[str, Served] = {}
        self._changes = Changes()
        self._stop = threading.Event()
        self._has_started = False
        # One thread: XLA's own work is parallel, and models become ready one after the other instead of all at the end.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiling_in_background = ThreadPoolExecutor(1, "background", initializer=yield_to_traffic)

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
        return self._has_started and bool(self._served) and not self._stop.is_set()

    async def load_all(self) -> None:
        """Loads the configured models in their order. Raises ModelFailed at the first that fails, if so configured."""
        for version in [self._begin(model) for model in self._settings.models]:
            try:
                await self._changes.make(version.name, "start", partial(self._start, version))
            except ModelFailed:
                if self._settings.exit_on_model_failure:
                    raise
        self._has_started = True

    async def load(self, name: str) -> None:
        """Loads, compiles and warms a configured model, puts it in the place of the one that serves, and drains that.

        Calls that come before a load has begun share it, and it goes on when they give up. Raises ModelNotFound,
        ShuttingDown, or ModelFailed with the reason; the one that serves then goes on.
        """
        await self._changes.make(name, "load", partial(self._load, name))

    async def unload(self, name: str) -> None:
        """Takes no new requests for a model, finishes the accepted ones, and frees it. Raises ModelNotFound."""
        self.find(name)
        await self._changes.make(name, "unload", partial(self._unload, name))

    async def reconfigure(self, models: Iterable[ModelSettings]) -> list[str]:
        """Makes the server serve `models`, which are what is configured now, and returns what that took, in words.

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
        self._stop.set()
        if self._preparer is not None:
            self._preparer.stop()

    async def drain(self, timeout_s: float) -> None:
        """Ends loads and takes nothing new; fails what was accepted and does not finish in `timeout_s`."""
        self.stop_loading()
        await self._changes.cancel()
        await asyncio.gather(*(self._end(version, timeout_s) for version in self.index()))
        self._served.clear()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._compiling_in_background.shutdown(wait=False, cancel_futures=True)

    def _configured_model(self, name: str) -> ModelSettings:
        try:
            models = {model.name: model for model in self._read_models()}
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
        self._check_stop()
        settings = await asyncio.to_thread(self._configured_model, name)
        self._check_stop()
        await self._bring_up(self._begin(settings))

    async def _unload(self, name: str) -> None:
        self._served.pop(name, None)
        ended = [_to_dismantle(version) for version in self._versions[name]]
        for version in self._versions[name]:
            await self._end(version, self._settings.drain_timeout_s)
        self._versions[name] = self._versions[name][:1]
        await asyncio.to_thread(_free, ended)

    def _begin(self, settings: ModelSettings) -> Version:
        """Returns a new version, announced as loading."""
        versions = self._versions.setdefault(settings.name, [])
        # What serves stays until the newcomer is ready; anything else is replaced.
        versions[:] = [version for version in versions if version.state is State.READY]
        telemetry = ModelTelemetry(self._metrics, settings.name)

        def record(entry: Entry) -> None:
            if entry.from_cache:
                telemetry.loaded(entry.mode)
            elif seconds := entry.trace_s + entry.compile_s:
                telemetry.compiled(entry.mode, seconds, in_background=entry.in_background)
            self._on_record(entry)

        version = Version(settings, telemetry, record)
        versions.append(version)
        self._change(version, State.LOADING)
        return version

    async def _bring_up(self, newcomer: Version) -> None:
        """Makes `newcomer` serve in place of the version that serves now; `load` says how."""
        name = newcomer.name
        try:
            served = await self._prepare(newcomer)
        except ShuttingDown:
            raise
        except Exception as error:
            newcomer.model = None
            newcomer.reason = _reason(error)
            self._change(newcomer, State.FAILED)
            is_explained = isinstance(error, ModelFailed)
            log.log(logging.DEBUG if is_explained else logging.ERROR, "model %s failed", name, exc_info=error)
            raise ModelFailed(f"model {name} failed: {newcomer.reason}") from error
        if not self._is_serving:  # else the garbage of both is collected when the old one is freed
            await asyncio.to_thread(gc.collect)
        self._served[name] = served
        self._change(newcomer, State.READY)
        for old in [version for version in self._versions[name] if version is not newcomer]:
            ended = [_to_dismantle(old)]
            await self._end(old, self._settings.drain_timeout_s)
            self._versions[name].remove(old)
            await asyncio.to_thread(_free, ended)

    async def _prepare(self, version: Version) -> Served:
        settings = version.settings
        began = time.perf_counter()
        async with self._prepared(settings) as prepared:
            self._check_stop()
            model = version.model = await self._compile(self._load_model, settings, prepared)
            self._check_stop()
            self._change(version, State.COMPILING)
            verifier = verification.verifier(model, has_tf32=self._has_tf32, warn=version.warn)
            # A prepared cache has all programs, and only until this block ends.
            buckets = self._first_buckets(model) if prepared is None else model.buckets
            timer = self._timer(version, model)
            programs = await self._compile(self._warm_up, version, model, buckets, timer, verifier)
            self._check_stop()
        if verification.is_narrow(model, has_tf32=self._has_tf32):
            version.differences = verification.furthest(version.ledger)
            is_large = any(found.is_large for found in version.differences.values())
            log.log(
                logging.WARNING if is_large else logging.INFO,
                *("model %s: precision %s", settings.name, version.precision_text),
            )
        for advice in slower(settings, programs, on_cpu=self._on_cpu):
            version.warn(advice)
        warmed = {bucket for _, bucket in programs}
        if settings.has_auto_buckets or verifier.is_dependent:
            model = version.model = replace(model, buckets=tuple(sorted(warmed)))
        if Mode.AUTO in settings.modes:
            version.auto = fastest(programs)
            programs |= {(Mode.AUTO, bucket): programs[mode, bucket] for bucket, mode in version.auto.items()}
            log.info("model %s: auto runs %s", settings.name, version.auto_text)
        any_size = None
        if settings.unmatched == "background":
            any_size = await self._compile(self._make_any_size, model)
            self._check_stop()
        batcher = Batcher(
            name=settings.name,
            programs=programs,
            lanes=self._lanes,
            worker=self._worker,
            observer=version.telemetry,
            max_images=settings.max_queue_images or self._settings.max_queue_images,
            max_bytes=self._settings.max_queue_bytes,
            max_queue_delay_s=settings.max_queue_delay_ms / 1000,
            on_crash=self._on_crash,
            on_retired=version.retired,
        )
        background = None
        if any_size is not None:
            # Graph mode is as independent of XLA as the model's own reference, which nobody may call while it serves.
            resolutions = verification.verifier(model, has_tf32=self._has_tf32, warn=version.warn, reference=any_size)
            background = Background(
                settings=settings,
                any_size=any_size,
                sides=model.size,
                buckets=model.buckets,
                batcher=batcher,
                beside=self._beside(version, model, resolutions),
            )
        log.info(
            "model %s: %d programs ready in %.1f s", settings.name, len(version.ledger), time.perf_counter() - began
        )
        served = version.served = Served(version, model, batcher, background)
        if left := [bucket for bucket in model.buckets if bucket not in warmed]:
            beside = self._beside(version, model, verifier)
            version.growth = asyncio.create_task(self._grow(served, left, programs, beside))
        elif background is None:
            version.model = served.model = await asyncio.to_thread(_sealed, model)
        return served

    def _prepared(self, settings: ModelSettings) -> AbstractAsyncContextManager[CompileCache | None]:
        """Gives the compile cache that another process has put the model into, where there is traffic to hold up."""
        return self._preparer.prepare(settings) if self._preparer and self._is_serving else nullcontext()

    @property
    def _is_serving(self) -> bool:
        return self._has_started and bool(self._served)

    def _timer(self, version: Version, model: Model) -> Timer:
        """Returns what times programs: on all lanes at once, or, where others serve, in their turn on one."""
        if not self._is_serving:
            return partial(measure, lanes=self._lanes.count)
        loop = asyncio.get_running_loop()
        beside = self._beside(version, model)

        def time_beside(executable: Executable, bucket: Bucket) -> Cost:
            turns = asyncio.run_coroutine_threadsafe(beside.time(executable, bucket, noise(bucket)), loop)
            seconds = turns.result()
            return Cost(seconds, seconds)  # of lanes that are as busy as they are

        return time_beside

    async def _compile(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Does what may compile something on the compiling thread."""

        def expected() -> R:
            with self._expecting(), interpreter.shared():
                return work(*arguments, **named)

        return await asyncio.get_running_loop().run_in_executor(self._compiling, expected)

    def _make_any_size(self, model: Model) -> Executable:
        """Returns the model in graph mode for any size; as all that serves, it has run."""
        assert isinstance(model.program, AnySize)
        any_size = model.program.any_size()
        any_size(np.zeros((*model.buckets[-1], 3), np.uint8))
        return any_size

    def _first_buckets(self, model: Model) -> tuple[Bucket, ...]:
        """Returns the buckets without which the model is not ready."""
        if self._settings.ready_when == "all" or model.settings.has_auto_buckets:
            return model.buckets
        smallest = {(bucket.height, bucket.width): bucket for bucket in sorted(model.buckets, reverse=True)}
        return tuple(sorted(smallest.values()))

    def _beside(self, version: Version, model: Model, verifier: Verifier | None = None) -> BesideTraffic:
        return BesideTraffic(
            program=model.program,
            lanes=self._lanes,
            worker=self._worker,
            ledger=version.ledger,
            compiling=self._compiling_in_background,
            expecting=self._expecting,
            verifier=verifier,
        )

    async def _grow(self, served: Served, buckets: Iterable[Bucket], programs: Programs, beside: BesideTraffic) -> None:
        """Makes what is left of `buckets` beside the traffic, the smallest first, and has each serve once it is there.

        `programs` are those that serve, each resolution's smallest bucket among them.
        """
        version, settings = served.version, served.settings
        known = {(mode, bucket[1:]): (bucket, warmed) for (mode, bucket), warmed in programs.items()}
        for bucket in sorted(buckets, key=math.prod):
            try:
                made = {
                    (mode, bucket): await beside.make(mode, bucket, known[mode, bucket[1:]])
                    for mode in settings.compiled_modes
                }
            except Exception:
                log.exception(
                    "model %s: %s did not compile; the other buckets serve in its place", version.name, bucket
                )
                continue
            if Mode.AUTO in settings.modes:
                ((_, mode),) = chosen = tuple(fastest(made).items())
                version.auto |= dict(chosen)
                made[Mode.AUTO, bucket] = made[mode, bucket]
            served.batcher.add(made)
        if served.background is None:
            version.model = served.model = await asyncio.to_thread(_sealed, served.model)
        log.info("model %s: all %d programs are there", version.name, len(version.ledger))

    def _warm_up(
        self, version: Version, model: Model, buckets: Iterable[Bucket], timer: Timer, verifier: Verifier
    ) -> Programs:
        settings = version.settings

        def warm(modes: Iterable[Mode], buckets: Iterable[Bucket]) -> Programs:
            return warm_up(
                program=model.program,
                modes=modes,
                buckets=buckets,
                timer=timer,
                ledger=version.ledger,
                stop=self._stop,
                threads=self._settings.compile_threads or compile_threads(usable_cores()),
                verifier=verifier,
            )

        if not settings.has_auto_buckets:
            programs = warm(settings.compiled_modes, buckets)
        else:
            demand_file = settings.auto_buckets.demand
            programs = warm_up_auto(warm, settings, buckets, demand.read(demand_file) if demand_file else {})
        return verification.in_batches_of_one(programs, warm) if verifier.is_dependent else programs

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise ShuttingDown("the server is shutting down; no model is loaded any more")

    async def _end(self, version: Version, timeout_s: float) -> None:
        if (served := version.served) is not None:
            self._change(version, State.DRAINING)
            if served.background is not None:
                served.background.stop_compiling()
            if version.growth is not None:
                version.growth.cancel()
                await asyncio.wait([version.growth])
            await served.batcher.drain(timeout_s)
            if served.background is not None:
                await served.background.close()
        if version.state is not State.FAILED:
            self._change(version, State.UNLOADED)
        version.model = version.served = version.growth = None

    def _change(self, version: Version, state: State) -> None:
        version.state = state
        log.log(
            logging.ERROR if state is State.FAILED else logging.INFO,
            "model %s: %s%s",
            version.name,
            state.lower(),
            f": {version.reason}" if version.reason else "",
        )
        self._on_change(version)


def _sealed(model: Model) -> Model:
    """Returns a model of which nothing more is compiled, without what only that needs."""
    if isinstance(model.program, Sealed):
        model.program.seal()
    return replace(model, reference=None)


def _to_dismantle(version: Version) -> Model | None:
    """Returns the model, but for one that may still compile something in the background."""
    return None if version.growth or (version.served and version.served.background) else version.model


def _free(ended: list[Model | None]) -> None:
    """Frees models that nobody uses any more; blocks."""
    while ended:
        model = ended.pop()
        if model is not None and isinstance(model.program, Dismantled):
            model.program.dismantle()
        del model
    gc.collect()  # what is left of a model refers to itself


def _reason(error: Exception) -> str:
    """Returns why a model failed in one line that a client may read."""
    return cause(error) if isinstance(error, ModelFailed) else f"{type(error).__name__}: {cause(error)}"
