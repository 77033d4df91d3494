"""A model that several engines run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from xlaserve.config import Mode
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.batching.queue import Result, Shape
from xlaserve.engine.buckets.demand import Demand, Resolution
from xlaserve.engine.model_engine import ModelEngine, Ticket
from xlaserve.engine.program import Images


class Part(ModelEngine, Protocol):
    """The model in one of the engines."""

    @property
    def images(self) -> int:
        """Those that it has of this front."""

    def has(self, resolution: Resolution) -> bool:
        """Returns whether it can run images of a resolution now."""

    def open_soon(self, resolution: Resolution) -> None:
        """Has it made ready for a resolution without buckets, if it takes it and was not asked before."""

    def release(self) -> None:
        """Tells it, once, that nothing here has any use for it."""


class Spread:
    """A `ModelEngine` whose requests each go to one of its parts, of which there is at least one.

    That is the one with the fewest images of this front; of those the one that said it should be done first, and of
    those each in turn. It needs nothing that is old news, and spreads nothing too thin: where batches form because
    images wait, as many wait at each engine.

    Those of a resolution without buckets go where that is open; the others are asked to open it too. Where it is open
    nowhere yet, the first part has the say, so that all open the same ones, of which each has a limited number.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts: Sequence[Part] = ()
        self._turn = 0
        self.use(parts)

    @property
    def parts(self) -> Sequence[Part]:
        """Those that requests go to."""
        return self._parts

    def use(self, parts: Iterable[Part]) -> None:
        """Brings new requests to these from now on."""
        self._parts = (*parts,)

    def release(self) -> None:
        """Tells all parts that nothing here has any use for them."""
        for part in self._parts:
            part.release()

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> Ticket:
        """Does as `ModelEngine.admit`."""
        parts = self._parts if unmatched is None else self._opened(unmatched)
        return self._next(parts).admit(images, size_bytes, unmatched)

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Returns the most images of this mode and resolution that run in one batch wherever some do."""
        found = (part.largest(mode, height, width) for part in self._parts)
        return min(filter(None, found), default=0)

    async def run_when_idle(self, pixels: Images, mode: Mode, deadline: float) -> Result:
        """Does as `ModelEngine.run_when_idle`. Of parts with as little to do it is the first, so that two batches that
        are to be compared run on the same device."""
        images, height, width, _ = pixels.shape
        parts = [part for part in self._parts if part.largest(mode, height, width) >= images]
        return await min(parts or self._parts, key=_load).run_when_idle(pixels, mode, deadline)

    def check_encoded(
        self, images: int, deadline: float, priority: int, *, shapes: Iterable[Shape], decode_s: float, decoding: int
    ) -> None:
        """Does as `ModelEngine.check_encoded`, of the part that should be done first."""
        soonest = min(self._parts, key=_outstanding_s)
        soonest.check_encoded(images, deadline, priority, shapes=shapes, decode_s=decode_s, decoding=decoding)

    def outstanding_s(self) -> float:
        """Returns the seconds in which one of them should have answered all that waits and runs there."""
        return min(map(_outstanding_s, self._parts))

    def live(self) -> Live:
        """Returns what all have to do together; what batches take is what they take the first."""
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
        """Returns where images of a resolution without buckets go, and has the others open it."""
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
