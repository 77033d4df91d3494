"""A version of a model, with its state and findings, and the parts of a ready version that requests use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, NamedTuple

from xlaserve.config import Bucket, Mode, ModelSettings, Precision
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.causes import cause
from xlaserve.engine.model_engine import ModelEngine
from xlaserve.engine.under_way import key_of
from xlaserve.engine.warmup.background import Background
from xlaserve.engine.warmup.difference import Difference
from xlaserve.engine.warmup.ledger import Entry, Ledger
from xlaserve.errors import InvalidArgument, ModelFailed
from xlaserve.images.frame import Frame, best_input
from xlaserve.models.catalog import Model
from xlaserve.programs.xla_refusal import explain
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.version_metrics import ModelTelemetry

log = logging.getLogger(__name__)

XLA_CAN_NOT: Final = "`modes: [graph]` or `[auto]` serve what XLA can't compile"


class State(StrEnum):
    """State of a version in its life cycle."""

    LOADING = "LOADING"
    COMPILING = "COMPILING"
    READY = "READY"
    DRAINING = "DRAINING"
    UNLOADED = "UNLOADED"
    FAILED = "FAILED"


@dataclass(eq=False)
class Version:
    """One loading of one model. `on_change` is called with it at every change of its state, or of the resolutions that
    it takes."""

    settings: ModelSettings
    telemetry: ModelTelemetry
    ledger: Ledger
    on_change: Callable[[Version], None]
    state: State = State.LOADING
    reason: str = ""
    """The reason for a failure; empty without one."""
    model: Model | None = None
    served: Served | None = None
    """The parts that requests use, once it is ready."""
    growth: asyncio.Task[None] | None = None
    """Makes the buckets that the model did not wait for."""
    auto: dict[Bucket, Mode] = field(default_factory=dict)
    """The mode that `auto` runs each bucket in."""
    differences: dict[Mode, Difference] = field(default_factory=dict)
    """The difference of each mode's answers from float32, of modes with a narrower precision."""
    decode_difference: Difference | None = None
    """The difference of answers to JPEGs that are decoded fast from the same decoded exactly; None without."""
    examples: dict[Mode, Difference] = field(default_factory=dict)
    """The difference of each mode's answers to the model's examples from the expected ones; empty without examples."""
    shadows: dict[Pair, Findings] = field(default_factory=dict)
    """Results of comparing its answers with those of other versions or modes."""
    left_out: set[Mode] = field(default_factory=set)
    """Modes that `auto` leaves out, as they can't run."""
    warnings: list[str] = field(default_factory=list)
    """Warnings to users about the answers and how they are served."""

    def enter(self, state: State, reason: str = "") -> None:
        """Changes the state to `state`, with the reason if given, logs it and calls `on_change`."""
        self.state = state
        self.reason = reason or self.reason
        reason = f": {self.reason}" if self.reason else ""
        log.log(
            logging.ERROR if state is State.FAILED else logging.INFO,
            "model %s: %s%s",
            self.title,
            state.lower(),
            reason,
        )
        self.on_change(self)

    def fail(self, error: Exception) -> None:
        """Drops the model, and enters FAILED with `error` as the reason, whose traceback is logged."""
        self.model = None
        is_explained = isinstance(error, ModelFailed)
        self.enter(State.FAILED, cause(error) if is_explained else f"{type(error).__name__}: {cause(error)}")
        level = logging.DEBUG if is_explained else logging.ERROR
        log.log(level, "model %s failed", self.title, exc_info=error)

    def warn(self, warning: str) -> None:
        """Gives a warning once, in the log and in the list of models. May be called from any thread."""
        if warning not in self.warnings:
            self.warnings.append(warning)
            log.warning("model %s: %s", self.title, warning)

    def leave_out(self, mode: Mode, error: Exception) -> None:
        """Removes a failed mode from those that `auto` chooses from. Raises `error` where the settings need the mode.

        An error of XLA's is raised as a ModelFailed that names the operation or line that XLA can't compile.
        """
        refusal = explain(error) if mode.traits.is_jit and not isinstance(error, ModelFailed) else None
        lacks_mode = isinstance(error, ModelFailed) and error.lacks_mode  # no fault of the model
        is_calibrated = mode is Mode.OPENVINO and self.settings.calibration is not None
        if self.settings.needs(mode) or (is_calibrated and not lacks_mode):
            if refusal is None or (refusal.operation is None and refusal.line is None):
                raise error
            raise ModelFailed(f"{refusal}; {XLA_CAN_NOT}") from error
        self.left_out.add(mode)
        if lacks_mode:
            log.info("model %s: auto does without %s: %s", self.title, mode, error)
        else:
            self.warn(f"auto does without {mode}: {refusal or cause(error)}")

    @property
    def batcher(self) -> Batcher | None:
        """The batcher that runs it, once it is ready; None where another process runs it."""
        return None if self.served is None or self.served.local is None else self.served.local.batcher

    @property
    def compiled_modes(self) -> list[Mode]:
        """The modes that are compiled for it."""
        return [mode for mode in self.settings.compiled_modes if mode not in self.left_out]

    def retired(self, mode: Mode, buckets: list[Bucket]) -> None:
        """Counts buckets that no longer serve for lack of memory, and warns of them. On the event loop."""
        self.telemetry.buckets_retired(mode, len(buckets))
        names = ", ".join(map(str, buckets))
        self.warn(f"mode {mode}: the device's memory did not hold a batch; smaller buckets serve in place of {names}")

    def forget_shadow(self, version: str) -> None:
        """Drops the results of comparisons with a version, whose loading has ended."""
        self.shadows = {pair: found for pair, found in self.shadows.items() if pair.shadow_version != version}

    @property
    def auto_text(self) -> str:
        """`auto` in words: `1x224x224 in graph, 8x224x224 in xla`."""
        return ", ".join(f"{bucket} in {mode}" for bucket, mode in sorted(self.auto.items()))

    @property
    def precision_text(self) -> str:
        """`bfloat16 (xla: largest difference 0.012, agreement 1.000 of 16 images)`."""
        settings = self.settings
        is_mixed = self.model is not None and self.model.is_narrow and settings.precision is Precision.FLOAT32
        others = {mode: settings.precision_in(mode) for mode in self.compiled_modes}
        own = (f"{other} in {mode}" for mode, other in others.items() if other is not settings.precision)
        text = ", ".join(["mixed, as the model was saved" if is_mixed else settings.precision, *own])
        found = [f"{mode}: {difference}" for mode, difference in self.differences.items()]
        if self.model is not None and self.model.calibrated and Mode.OPENVINO in others:
            found.append(f"calibrated: {self.model.calibrated}")
        measured = "; ".join(found)
        return f"{text} ({measured})" if measured else text

    @property
    def decode_text(self) -> str:
        """`fast (largest difference 0.012, agreement 1.000 of 8 images)`; empty while only loading tells."""
        decode = self.settings.decode if self.model is None else self.model.decode
        difference = self.decode_difference
        return str(decode or "") if difference is None else f"{decode} ({difference})"

    @property
    def examples_text(self) -> str:
        """`xla: largest difference 2e-07, agreement 1.000 of 20 images`; empty without examples."""
        return "; ".join(f"{mode}: {difference}" for mode, difference in self.examples.items())

    @cached_property
    def key(self) -> bytes:
        """A digest of its settings and its files, as they are at the first call."""
        return key_of(self.settings)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.settings.name

    @property
    def title(self) -> str:
        """The name of the version in messages."""
        return self.settings.title

    @property
    def programs_total(self) -> int:
        """Number of programs that warm-up compiles; while it measures candidates, the most that it may compile."""
        if self.model is None:
            return self.settings.most_programs
        # With `buckets: auto`, more were measured than are kept.
        return max(len(self.compiled_modes) * len(self.model.buckets), len(self.ledger))

    @property
    def progress(self) -> str:
        """The reason for its failure, or the progress of its warm-up."""
        if self.state is State.COMPILING:
            return f"{len(self.ledger)} of {self.programs_total} programs compiled"
        return self.reason


def new_version(
    settings: ModelSettings,
    metrics: Metrics,
    on_change: Callable[[Version], None],
    on_record: Callable[[Entry], None],
) -> Version:
    """Returns a version in the state LOADING, whose compilations are counted and passed to `on_record`."""
    telemetry = ModelTelemetry(metrics, settings.name, settings.version)

    def record(entry: Entry) -> None:
        if entry.from_cache:
            telemetry.loaded(entry.mode)
        elif seconds := entry.trace_s + entry.compile_s:
            telemetry.compiled(entry.mode, seconds, in_background=entry.in_background)
        on_record(entry)

    return Version(settings, telemetry, Ledger(settings.name, settings.version, record), on_change)


class Local(NamedTuple):
    """The parts of a ready version that run it, in the process that does."""

    batcher: Batcher
    background: Background | None
    """Takes pixels of other sizes as well, where that is configured."""


@dataclass(eq=False)
class Served:
    """The parts of a ready version that requests use."""

    version: Version
    model: Model
    engine: ModelEngine
    """Queues and runs its requests."""
    local: Local | None = None
    """None where another process runs it."""
    calls: int = 0
    """Requests that found it and are not yet answered; some are still parsed."""
    _left: asyncio.Event | None = None
    """Set once the last of these requests is answered; None while `left` is not awaited."""

    def __post_init__(self) -> None:
        self.sizes = frozenset((bucket.height, bucket.width) for bucket in self.model.buckets)
        """The resolutions that have buckets."""
        self.inputs = sorted(self.sizes)
        """Heights and widths that encoded images may be fitted to."""

    def leave(self) -> None:
        """Counts a request as answered."""
        self.calls -= 1
        if self._left is not None and not self.calls:
            self._left.set()

    async def left(self) -> None:
        """Returns once all requests that found it are answered; no other may find it from now on."""
        if self.calls:
            self._left = asyncio.Event()
            await self._left.wait()

    @property
    def settings(self) -> ModelSettings:
        """The version's settings."""
        return self.version.settings

    def place(self, height: int, width: int) -> Frame:
        """Returns where an encoded image goes: into the input that suits it best. Raises what `frame.place` raises."""
        return self.place_into(best_input(height, width, self.inputs), height, width)

    def place_into(self, size: tuple[int, int], height: int, width: int) -> Frame:
        """Returns where an encoded image goes in an input of `size`."""
        return self.model.place(size, height, width)

    @property
    def takes_unmatched(self) -> bool:
        """Whether it may take pixels of resolutions without buckets."""
        return self.settings.unmatched == "background"

    @property
    def has_sized_outputs(self) -> bool:
        """Whether the outputs' shape depends on the input's, so that images of several sizes can't be answered in one
        array."""
        return any(-1 in output.shape[1:] for output in self.model.task.outputs)

    def mode(self, name: str) -> Mode:
        """Returns the mode that a request asks for, the default for an empty name. Raises InvalidArgument."""
        if not name:
            return self.settings.effective_default_mode
        for mode in self.settings.modes:
            if mode == name:
                return mode
        raise InvalidArgument("mode", f"one of {', '.join(self.settings.modes)}", repr(name))
