"""A model that several engines run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from xlaserve.engine.batching.live import Live
from xlaserve.engine.batching.queue import Shape
from xlaserve.engine.buckets.demand import Demand
from xlaserve.engine.model_engine import Admitted, ModelEngine


class Part(ModelEngine, Protocol):
    """The model in one of the engines."""

    @property
    def images(self) -> int:
        """Those that it has of this front."""

    def leave(self) -> None:
        """Tells it, once, that nothing here has any use for it."""


class Spread:
    """A `ModelEngine` whose requests each go to one of its parts, of which there is at least one.

    That is the one with the fewest images of this front; of those the one that said it should be done first, and of
    those each in turn. It needs nothing that is old news, and spreads nothing too thin: where batches form because
    images wait, as many wait at each engine.
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

    def leave(self) -> None:
        """Tells all parts that nothing here has any use for them."""
        for part in self._parts:
            part.leave()

    def admit(self, images: int, size_bytes: int) -> Admitted:
        """Does as `ModelEngine.admit`."""
        return self._next().admit(images, size_bytes)

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

    def _next(self) -> Part:
        parts = self._parts
        if len(parts) == 1:
            return parts[0]
        self._turn = turn = (self._turn + 1) % len(parts)
        return min((*parts[turn:], *parts[:turn]), key=_load)


def _load(part: Part) -> tuple[int, float]:
    return part.images, part.outstanding_s()


def _outstanding_s(part: Part) -> float:
    return part.outstanding_s()
