"""Resolutions without configured buckets: served in graph mode at once, while their buckets compile beside the traffic.

No request waits for a trace or a compilation. The graph takes any size and was made at warm-up; what the first requests
of a resolution wait for is a run or two of it, on a lane like any batch, which show whether the network can take such
images and what they cost. Then the buckets compile on one thread for the whole server, which yields to everything else,
and are timed on lanes as if they were a model of their own. Once all buckets of a mode are there, requests go to them.

What clients can bring about is bounded: a model does this for a limited number of resolutions as long as it is
loaded, whether it works or not. None is given up for another, and no bucket has more pixels than the largest that was
configured.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.batching.unmatched import ServingPrograms, Unmatched, refusal
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.causes import cause
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, zeros
from xlaserve.engine.program import Executable, Warmed
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.compiler import fastest
from xlaserve.errors import ModelFailed, ShuttingDown

log = logging.getLogger(__name__)

GREY: Final = 127


@dataclass(eq=False, kw_only=True)
class Background:
    """Serves one model's resolutions without buckets. All methods run on the event loop.

    `any_size` is the program in graph mode, for images of any size that has the network's own `sides` where those are
    not None; `buckets` were compiled at warm-up, in `modes`; `beside` makes the model's programs.
    """

    settings: ModelSettings
    any_size: Executable
    sides: tuple[int | None, int | None]
    inputs: Inputs = RGB_IMAGE
    modes: Collection[Mode]
    buckets: Collection[Bucket]
    beside: BesideTraffic
    on_change: Callable[[], object] = lambda: None
    """Called when another resolution was opened, or runs in another mode."""

    def __post_init__(self) -> None:
        self._model = self.settings.name
        self._compiled_modes = [mode for mode in self.modes if mode is not Mode.GRAPH]
        self._batches = sorted({bucket.batch for bucket in self.buckets})
        self._opened: dict[Resolution, asyncio.Task[bool]] = {}
        self._compilations: set[asyncio.Task[None]] = set()
        self._unmatched = Unmatched(
            sides=self.sides,
            channels=self.inputs[0].shape[-1] or 0,
            max_pixels=max(map(math.prod, self.buckets)),
            max_opened=self.settings.max_background_resolutions,
            configured=frozenset((bucket.height, bucket.width) for bucket in self.buckets),
        )

    @property
    def unmatched(self) -> Unmatched:
        """The resolutions without buckets that the model takes."""
        return self._unmatched

    async def open(self, serving: ServingPrograms, size: Resolution, mode: Mode) -> Mode:
        """Adds programs for images of `size` to those that serve the model, and later its buckets.

        Returns the mode that images of `size` run in now, when they can be queued: `mode` once its buckets have
        compiled, else graph mode. Raises InvalidArgument where they are not taken, or the network can't run them."""
        self._unmatched.check(size)
        if size not in self._opened:
            self._opened[size] = asyncio.create_task(self._begin(serving, size), name=f"{self._model} at {size}")
            self._unmatched = replace(self._unmatched, opened=frozenset(self._opened))
        opened = self._opened[size]
        try:
            # A request that is cancelled must not take the trial with it, which others wait for.
            works = await asyncio.shield(opened)
        except asyncio.CancelledError:
            if opened.cancelled():
                raise ShuttingDown(f"model {self._model} was unloaded before this could run") from None
            raise
        if not works:
            raise refusal(size, "a size that the network can take")
        return mode if serving.largest(mode, *size) else Mode.GRAPH

    def stop_compiling(self) -> None:
        """Compiles nothing more; a compilation that runs can't be interrupted, and its result is dropped."""
        for task in self._compilations:
            task.cancel()

    async def close(self) -> None:
        """Ends all compilations and openings; called when no request is left."""
        self.stop_compiling()
        for task in self._opened.values():
            task.cancel()
        await asyncio.gather(*self._opened.values(), *self._compilations, return_exceptions=True)

    async def _begin(self, serving: ServingPrograms, size: Resolution) -> bool:
        """Makes the resolution ready in graph mode and has its buckets compiled; False where it can't be run."""
        try:
            bucket = Bucket(1, *size)
            rows = zeros(self.inputs, bucket)
            for image in (image for image, spec in zip(rows, self.inputs, strict=True) if spec.is_image):
                image[...] = GREY
            image_s = await self.beside.time(self.any_size, bucket, rows)
        except Exception as error:
            log.warning("model %s: images of %d x %d can't be run", self._model, *size, exc_info=error)
            self.on_change()
            return False
        most_pixels = self._unmatched.max_pixels
        buckets = [Bucket(batch, *size) for batch in self._batches if batch * math.prod(size) <= most_pixels]
        buckets = buckets or [Bucket(1, *size)]
        graph = {
            bucket: Warmed(self.any_size, Cost(image_s * bucket.batch, image_s * bucket.batch)) for bucket in buckets
        }
        serving.add({(Mode.GRAPH, bucket): warmed for bucket, warmed in graph.items()})
        self.on_change()
        if self._compiled_modes:
            compilation = asyncio.create_task(self._compile(serving, size, graph))
            self._compilations.add(compilation)
            compilation.add_done_callback(self._compilations.discard)
        return True

    async def _compile(self, serving: ServingPrograms, size: Resolution, graph: dict[Bucket, Warmed]) -> None:
        """Compiles and times the buckets, mode by mode, and switches to each mode once it is complete."""
        compiled = {(Mode.GRAPH, bucket): warmed for bucket, warmed in graph.items()}
        try:
            for mode in self._compiled_modes:
                programs: dict[tuple[Mode, Bucket], Warmed] = {}
                try:
                    for bucket in graph:
                        programs[mode, bucket] = await self.beside.make(mode, bucket)
                except Exception as error:
                    if self.settings.needs(mode):
                        raise
                    log.warning("model %s: auto does without %s at %d x %d: %s", self._model, mode, *size, cause(error))
                    continue
                serving.add(programs)
                self.on_change()
                compiled |= programs
        except ModelFailed as error:
            log.warning("model %s: %d x %d stays in graph mode: %s", self._model, *size, error)
            return
        except Exception:
            log.exception("model %s: %d x %d stays in graph mode, as it did not compile", self._model, *size)
            return
        finally:
            self.beside.forget(*size)
        if Mode.AUTO in self.settings.modes:
            serving.add({(Mode.AUTO, bucket): compiled[mode, bucket] for bucket, mode in fastest(compiled).items()})
            self.on_change()
        log.info("model %s: %d x %d switched from graph mode to its own buckets", self._model, *size)
