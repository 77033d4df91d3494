"""The load of a version: built, compiled, verified, and given a queue. `repository` then makes it ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, ParamSpec, TypeVar

from xlaserve.config import Bucket, Decoding, Mode, ModelSettings, Settings
from xlaserve.engine import gil
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.buckets import demand
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.causes import failing_on_exit
from xlaserve.engine.inputs import zeros
from xlaserve.engine.niceness import yield_to_traffic
from xlaserve.engine.program import AnySize, Executable, IsLowered
from xlaserve.engine.trace_context import TracedBatch
from xlaserve.engine.under_way import LoadRecord, UnderWay
from xlaserve.engine.warmup.auto_buckets import Programs, warm_up_auto
from xlaserve.engine.warmup.background import Background
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.compiler import Timer, compile_threads, fastest, measure, noise, warm_up
from xlaserve.engine.warmup.kept_costs import corrected
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import ShuttingDown
from xlaserve.images.decoder import ImageLimits
from xlaserve.models import examples, fast_decoding, pixel_doubts, scores, verification
from xlaserve.models.advice import slower
from xlaserve.models.catalog import Model
from xlaserve.models.change_queue import NO_MORE_LOADS, Stop
from xlaserve.models.growth import grow, sealed
from xlaserve.models.load_turns import LoadTurns
from xlaserve.models.preparer import Preparer
from xlaserve.models.version import Local, Served, State, Version
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.tf.device import usable_cores

P = ParamSpec("P")
R = TypeVar("R")

MAX_LOADS: Final = 32
"""Most loads with a thread at the same time: the one that has the turn, and others that have given it up."""

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Loader:
    """Loads and warms versions of models. All methods run on the event loop; loading and compiling on a thread.

    `load_model` builds a model from its settings, or from the compile cache that `preparer` has filled, and blocks. All
    work that may compile runs in an `expecting()`. `on_crash` is called where a model's batch loop dies.
    """

    settings: Settings
    load_model: Callable[[ModelSettings, CompileCache | None], Model]
    lanes: Lanes
    worker: Worker
    expecting: Callable[[], AbstractContextManager[object]] = nullcontext
    on_crash: Callable[[], None] = lambda: None
    on_traced: Callable[[TracedBatch], None] | None = None
    """Called with each batch that holds traced requests."""
    under_way: UnderWay = field(default_factory=UnderWay)
    """Records the steps of loads and runs, for the parent to find after a crash."""
    preparer: Preparer | None = None
    stop: Stop = field(default_factory=Stop)
    """Set to end loads and warm-ups as soon as possible; `preparer` has the same."""
    turns: LoadTurns = field(default_factory=LoadTurns)
    """One load at a time: XLA's own work is parallel, and models become ready one after the other instead of all at the
    end."""
    background_turns: LoadTurns = field(default_factory=LoadTurns)
    """Turns of programs that are made beside the traffic."""
    has_tf32: bool = False
    on_cpu: bool = True

    def __post_init__(self) -> None:
        self._compiling = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="compile")
        self._compiling_in_background = ThreadPoolExecutor(MAX_LOADS, "background", initializer=yield_to_traffic)

    def close(self) -> None:
        """Cancels the work that still waits for a thread."""
        if self.preparer is not None:
            self.preparer.close()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._compiling_in_background.shutdown(wait=False, cancel_futures=True)

    async def load(self, version: Version, *, others_serve: bool) -> Served:
        """Returns the parts of a new version that requests use, once it is compiled and warmed.

        Where `others_serve`, another process compiles, and programs are timed in their turn, so that the traffic is not
        held up. If it is cancelled, its thread goes on to the end of the step. Raises ShuttingDown, ModelFailed, and
        any error of loading and compiling.
        """
        stop = Stop(self.stop)
        preparing: AbstractAsyncContextManager[CompileCache | None] = nullcontext()
        if self.preparer is not None and others_serve:
            preparing = self.preparer.prepare(version.settings)
        try:
            async with preparing as prepared, self.turns.turn(version.title) as turn:
                await asyncio.to_thread(lambda: version.key)  # it reads the state of all of the model's files
                with self.under_way.loading(version.key, version.title) as turn.progress:
                    return await self._load(version, turn.progress, prepared, stop, others_serve=others_serve)
        finally:
            stop.set()

    async def _load(
        self, version: Version, load: LoadRecord, prepared: CompileCache | None, stop: Stop, *, others_serve: bool
    ) -> Served:
        settings = version.settings
        began = time.perf_counter()
        build = partial(self.load_model, settings, prepared)
        model = version.model = await self._compile(load.at("building the model"), build)
        version.enter(State.COMPILING)
        verifier = verification.verifier(model, has_tf32=self.has_tf32, warn=version.warn)
        # A prepared cache has all programs, and only until the model is loaded.
        buckets = self._first_buckets(model) if prepared is None else model.buckets
        timer: Timer = partial(measure, lanes=self.lanes.count, inputs=model.inputs)
        if others_serve:
            timer = self._timer_beside(version, model)
        warm_up = partial(self._warm_up, version, load, model, buckets, timer=timer, verifier=verifier, stop=stop)
        programs = await self._compile(nullcontext(), warm_up)
        if isinstance(model.program, IsLowered):  # without those that have failed
            model = version.model = replace(model, lowerings=model.program.lowerings(model.buckets[0]))
        warmed = {bucket for _, bucket in programs}
        if settings.has_auto_buckets or verifier.is_dependent:
            model = version.model = replace(model, buckets=tuple(sorted(warmed)))
        self._report(version, model, programs)
        if Mode.AUTO in settings.modes:
            version.auto = fastest(programs)
            programs |= {(Mode.AUTO, bucket): programs[mode, bucket] for bucket, mode in version.auto.items()}
            log.info("model %s: auto runs %s", settings.title, version.auto_text)
        for doubts in (scores.measure, pixel_doubts.measure):
            for doubt in await self._compile(load.at("running a few images"), doubts, model, programs):
                version.warn(doubt)
        if model.decode is Decoding.FAST:
            await self._measure_decoding(version, load, model, programs)
        if settings.examples is not None:
            await self._check_examples(version, load, model, programs)
        any_size = None
        if settings.unmatched == "background":
            any_size = await self._compile(load.at(f"compiling mode {Mode.GRAPH}, any size"), _any_size, model)
        background = None if any_size is None else self._make_background(version, model, any_size)
        batcher = self._make_batcher(version, model, programs, background)
        log.info(
            "model %s: %d programs ready in %.1f s", settings.title, len(version.ledger), time.perf_counter() - began
        )
        served = version.served = Served(version, model, batcher, Local(batcher, background))
        if left := [bucket for bucket in model.buckets if bucket not in warmed]:
            beside = self._beside(version, model, verifier)
            version.growth = asyncio.create_task(grow(served, batcher, left, programs, beside))
        elif background is None:
            version.model = served.model = await asyncio.to_thread(sealed, model)
        return served

    def _report(self, version: Version, model: Model, programs: Programs) -> None:
        """Logs the model's precision and advice on its speed, as warm-up has measured them."""
        settings = version.settings
        if narrow := verification.narrow(model, has_tf32=self.has_tf32):
            version.differences = verification.furthest(version.ledger, narrow)
            is_large = any(found.is_large(narrow[mode]) for mode, found in version.differences.items())
            level = logging.WARNING if is_large else logging.INFO
            log.log(level, "model %s: precision %s", settings.title, version.precision_text)
        for advice in slower(settings, programs, on_cpu=self.on_cpu):
            version.warn(advice)

    async def _measure_decoding(self, version: Version, load: LoadRecord, model: Model, programs: Programs) -> None:
        """Logs how far answers are from those to images that are decoded exactly."""
        mode, limits = version.settings.effective_default_mode, ImageLimits.of(self.settings)
        at_it = load.at(f"running mode {mode}")
        found = await self._compile(at_it, fast_decoding.measure, model, programs, mode, limits)
        version.decode_difference = found
        level = logging.WARNING if found is not None and found.is_large() else logging.INFO
        log.log(level, "model %s: decode %s", version.title, version.decode_text)

    async def _check_examples(self, version: Version, load: LoadRecord, model: Model, programs: Programs) -> None:
        """Compares answers to the model's examples with the expected ones. Raises ModelFailed where they differ."""
        limits, narrow = ImageLimits.of(self.settings), verification.narrow(model, has_tf32=self.has_tf32)
        at_it = load.at("running the examples")
        version.examples = await self._compile(at_it, examples.check, model, programs, limits, narrow)
        log.info("model %s: examples %s", version.title, version.examples_text)

    def _make_batcher(
        self, version: Version, model: Model, programs: Programs, background: Background | None
    ) -> Batcher:
        settings = version.settings
        return Batcher(
            name=settings.title,
            programs=programs,
            lanes=self.lanes,
            worker=self.worker,
            observer=version.telemetry,
            max_images=settings.max_queue_images or self.settings.max_queue_images,
            max_bytes=self.settings.max_queue_bytes,
            max_queue_delay_s=settings.max_queue_delay_ms / 1000,
            inputs=model.inputs,
            noted=partial(self.under_way.noted, version.key, version.title),
            on_crash=self.on_crash,
            on_retired=version.retired,
            on_traced=self.on_traced,
            opener=background,
        )

    def _make_background(self, version: Version, model: Model, any_size: Executable) -> Background:
        # Graph mode is as independent of XLA as the model's own reference, which nobody may call while it serves.
        verifier = verification.verifier(model, has_tf32=self.has_tf32, warn=version.warn, reference=any_size)
        return Background(
            settings=version.settings,
            any_size=any_size,
            sides=model.size,
            inputs=model.inputs,
            modes=version.compiled_modes,
            buckets=model.buckets,
            beside=self._beside(version, model, verifier),
            on_change=partial(version.on_change, version),
        )

    @contextmanager
    def _making(self, version: Version, step: str) -> Iterator[None]:
        """Held while a program is made beside the traffic."""
        with self.expecting(), self.under_way.loading(version.key, version.title) as load, load.at(step):
            yield

    async def _compile(
        self, at_it: AbstractContextManager[object], work: Callable[P, R], *arguments: P.args, **named: P.kwargs
    ) -> R:
        """Runs work that may compile on the compiling thread, with `at_it` entered there.

        Raises ShuttingDown, before it or after it.
        """

        def expected() -> R:
            with at_it, self.expecting(), gil.shared(), failing_on_exit():
                return work(*arguments, **named)

        self.stop.check()
        made = await asyncio.get_running_loop().run_in_executor(self._compiling, expected)
        self.stop.check()
        return made

    def _first_buckets(self, model: Model) -> tuple[Bucket, ...]:
        """Returns the buckets without which the model is not ready."""
        if self.settings.ready_when == "all" or model.settings.has_auto_buckets:
            return model.buckets
        smallest = {(bucket.height, bucket.width): bucket for bucket in sorted(model.buckets, reverse=True)}
        return tuple(sorted(smallest.values()))

    def _beside(self, version: Version, model: Model, verifier: Verifier | None = None) -> BesideTraffic:
        return BesideTraffic(
            program=model.program,
            lanes=self.lanes,
            worker=self.worker,
            ledger=version.ledger,
            compiling=self._compiling_in_background,
            turn=partial(self.background_turns.turn, version.title),
            expecting=partial(self._making, version),
            noted=partial(self.under_way.noted, version.key, version.title),
            verifier=verifier,
            inputs=model.inputs,
        )

    def _timer_beside(self, version: Version, model: Model) -> Timer:
        """Returns a timer that runs programs in their turn on one lane."""
        loop = asyncio.get_running_loop()
        beside = self._beside(version, model)

        def time_beside(executable: Executable, bucket: Bucket) -> Cost:
            timed = beside.time(executable, bucket, noise(bucket, model.inputs))
            try:
                turns = asyncio.run_coroutine_threadsafe(timed, loop)
            except RuntimeError:  # the loop has ended meanwhile
                timed.close()
                raise ShuttingDown(NO_MORE_LOADS) from None
            seconds = turns.result()
            return Cost(seconds, seconds)  # measured beside traffic, so idle and loaded cost are not told apart

        return time_beside

    def _warm_up(
        self,
        version: Version,
        load: LoadRecord,
        model: Model,
        buckets: Iterable[Bucket],
        *,
        timer: Timer,
        verifier: Verifier,
        stop: Stop,
    ) -> Programs:
        settings = version.settings

        def warm(modes: Iterable[Mode], buckets: Iterable[Bucket]) -> Programs:
            return warm_up(
                program=model.program,
                modes=[mode for mode in modes if mode not in version.left_out],
                buckets=buckets,
                timer=timer,
                ledger=version.ledger,
                stop=stop,
                threads=self.settings.compile_threads or compile_threads(usable_cores()),
                verifier=verifier,
                leave_out=version.leave_out,
                at=load.at,
            )

        def correct(programs: Programs) -> Programs:
            return corrected(programs, timer, version.ledger, self.lanes.count, stop)

        if not settings.has_auto_buckets:
            programs = warm(settings.compiled_modes, buckets)
        else:
            demand_file = settings.auto_buckets.demand
            demands = demand.read(demand_file) if demand_file else {}
            programs = warm_up_auto(warm, settings, buckets, demands, corrected=correct)
            # A mode that a later candidate has failed in may have run an earlier one.
            programs = {key: one for key, one in programs.items() if key[0] not in version.left_out}
        if verifier.is_dependent:
            programs = verification.in_batches_of_one(programs, warm)
        return correct(programs)


def _any_size(model: Model) -> Executable:
    """Returns the model in graph mode for any size. It has run once, as every program has before it serves."""
    assert isinstance(model.program, AnySize)
    any_size = model.program.any_size()
    any_size(*zeros(model.inputs, model.buckets[-1]))
    return any_size
