"""A model that several engines run, with its requests spread over them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from xlaserve.config import Mode
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.buckets.demand import Demand, Resolution
from xlaserve.engine.model_engine import ModelEngine, Ticket
from xlaserve.engine.request import EncodedRequest, EngineRequest, Result


class Part(ModelEngine, Protocol):
    """The model in one of the engines."""

    @property
    def images(self) -> int:
        """Images of this front in that engine: of requests that are admitted and not answered."""

    def has(self, resolution: Resolution) -> bool:
        """Returns whether the engine can run images of a resolution now."""

    def open_soon(self, resolution: Resolution) -> None:
        """Has the engine make the model ready for a resolution without buckets, if it can and was not asked before."""

    def release(self) -> None:
        """Tells the engine, once, that this front does not use the model any more."""


class Spread:
    """A `ModelEngine` whose requests each go to one of its parts, of which there is at least one.

    A request goes to the part with the fewest images of this front; of several such, to the one that should be done
    first; of several such, to each in turn. The choice depends on no count that may be outdated, and keeps batches
    full: where batches form because images wait, as many wait at each engine.

    Images of a resolution without buckets go to parts that are ready for it; the others are asked to become ready too.
    Where none is ready yet, the first part decides, so that all parts open the same resolutions, of which each has a
    limited number.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts: Sequence[Part] = ()
        self._turn = 0
        self.use(parts)

    @property
    def parts(self) -> Sequence[Part]:
        """The parts that requests go to."""
        return self._parts

    def use(self, parts: Iterable[Part]) -> None:
        """Sends new requests to these parts from now on."""
        self._parts = (*parts,)

    def release(self) -> None:
        """Releases all parts; see `Part.release`."""
        for part in self._parts:
            part.release()

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> Ticket:
        """Admits a request at one of the parts; see `ModelEngine.admit`."""
        parts = self._parts if unmatched is None else self._opened(unmatched)
        return self._next(parts).admit(images, size_bytes, unmatched)

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Returns the most images of this mode and resolution that run in one batch at each part that runs them."""
        found = (part.largest(mode, height, width) for part in self._parts)
        return min(filter(None, found), default=0)

    async def run_when_idle(self, request: EngineRequest) -> Result:
        """Runs a batch that no request waits for at the part with the least load; see `ModelEngine.run_when_idle`.

        Of several such parts it is the first, so that two batches that are to be compared run on the same device.
        """
        parts = [part for part in self._parts if part.largest(*request.shape) >= request.images]
        return await min(parts or self._parts, key=_load).run_when_idle(request)

    def check_encoded(self, request: EncodedRequest) -> None:
        """Checks the deadline of encoded images by the part that should be done first; see
        `ModelEngine.check_encoded`."""
        min(self._parts, key=_outstanding_s).check_encoded(request)

    def outstanding_s(self) -> float:
        """Returns the seconds in which the first of the parts should have answered all that waits and runs there."""
        return min(map(_outstanding_s, self._parts))

    def live(self) -> Live:
        """Returns the load of all parts together, with the turns of the first; see `ModelEngine.live`."""
        lives = [part.live() for part in self._parts]
        if len(lives) == 1:
            return lives[0]
        demand: defaultdict[tuple[int, int], Demand] = defaultdict(Counter)
        for live in lives:
            for size, of_part in live.demand.items():
                demand[size].update(of_part)
        return Live(
            waiting_images=sum(live.waiting_images for live in lives),
            outstanding_s=max(live.outstanding_s for live in lives),
            queued_work_s=sum(live.queued_work_s for live in lives),
            in_flight_images=sum(live.in_flight_images for live in lives),
            in_flight_images_limit=sum(live.in_flight_images_limit for live in lives),
            turns=lives[0].turns,
            demand=demand,
        )

    def _opened(self, resolution: Resolution) -> Sequence[Part]:
        """Returns the parts for images of a resolution without buckets, and has the other parts open it."""
        opened = [part for part in self._parts if part.has(resolution)]
        if not opened:
            return self._parts[:1]
        for part in self._parts:
            if part not in opened:
                part.open_soon(resolution)
        return opened

    def _next(self, parts: Sequence[Part]) -> Part:
        if len(parts) == 1:
            return parts[0]
        self._turn = turn = (self._turn + 1) % len(parts)
        return min((*parts[turn:], *parts[:turn]), key=_load)


def _load(part: Part) -> tuple[int, float]:
    return part.images, part.outstanding_s()


def _outstanding_s(part: Part) -> float:
    return part.outstanding_s()
