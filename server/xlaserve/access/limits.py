"""Counts what callers have asked for, and refuses what their limits don't allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

from xlaserve.access.caller import Caller, Limit, is_among
from xlaserve.errors import DeadlineUnreachable, InvalidArgument, LimitExceeded, QueueFull

MAX_REMEMBERED: Final = 16_384
"""Counts that are kept of callers whom the access file does not name, as there may be any number of them."""
FORGOTTEN_AT_ONCE: Final = 4
"""Counts that are looked at for each request, whether they are worth keeping."""
RATE: Final = "images_per_s"
UNDER_WAY: Final = "max_images"
TOLERANCE: Final = 1e-6
"""Of an image, by which floating-point numbers may be too small."""

_Counts = dict[tuple[str, tuple[str, ...]], "_Count"]
"""By the caller's name and the models of the limit. Those used last come last."""


@dataclass(slots=True, eq=False)
class _Count:
    """What one caller has asked for under one limit."""

    limit: Limit
    level: float
    """Images that it may ask for at `at`; below 0 after a request that was larger than the burst."""
    at: float
    under_way: int = 0

    def refill(self, limit: Limit, now: float) -> None:
        """Adds what the time since `at` allows, by the limit as it is now."""
        rate = limit.images_per_s
        self.level = limit.burst if rate is None else min(limit.burst, self.level + (now - self.at) * rate)
        self.limit, self.at = limit, now

    def wait_s(self, images: int) -> float:
        """Returns after how many seconds there will be room for `images`, 0 where there is now."""
        rate, missing = self.limit.images_per_s, min(images, self.limit.burst) - self.level
        return 0.0 if rate is None or missing < TOLERANCE else missing / rate

    def is_new(self, now: float) -> bool:
        """Whether it is as a new one would be."""
        self.refill(self.limit, now)
        return not self.under_way and self.level > self.limit.burst - TOLERANCE


class Limiter:
    """Holds callers to their limits. Counts outlive what the limits say: a caller has its count after a reload.

    `on_refused` is called with each caller that is refused, and the field of the limit. Runs on the event loop.
    """

    def __init__(
        self, clock: Callable[[], float], on_refused: Callable[[Caller, str], None] = lambda caller, field: None
    ) -> None:
        self._clock = clock
        self._on_refused = on_refused
        self._listed: _Counts = {}
        self._others: _Counts = {}
        """Of callers whom the access file does not name: however many come, the others' counts stay."""

    def __len__(self) -> int:
        return len(self._listed) + len(self._others)

    @contextmanager
    def hold(self, caller: Caller, model: str, images: int) -> Iterator[None]:
        """Counts `images` as under way, and against the rate unless no queue takes them in.

        Raises LimitExceeded, which counts nothing, and InvalidArgument for more images than are ever allowed.
        """
        kept = self._listed if caller.is_listed else self._others
        self._forget(kept)
        counts = [self._count(kept, caller, limit) for limit in caller.limits if is_among(model, limit.models)]
        self._check(caller, counts, images)
        for count in counts:
            count.level -= images
            count.under_way += images
        try:
            yield
        except (QueueFull, DeadlineUnreachable):
            for count in counts:
                count.level += images
            raise
        finally:
            for count in counts:
                count.under_way -= images

    def _check(self, caller: Caller, counts: Sequence[_Count], images: int) -> None:
        for count in counts:
            most = count.limit.max_images
            if most is not None and images > most:
                raise InvalidArgument("images", f"at most {most} in a request ({UNDER_WAY} of this caller)", images)
        for count in counts:
            most = count.limit.max_images
            if most is not None and count.under_way + images > most:
                self._on_refused(caller, UNDER_WAY)
                raise LimitExceeded(
                    f"{images} more images exceed {UNDER_WAY} {most} of this caller; {count.under_way} are under way"
                )
        slowest = max(counts, key=lambda count: count.wait_s(images), default=None)
        if slowest is not None and (wait_s := slowest.wait_s(images)):
            self._on_refused(caller, RATE)
            rate = f"{RATE} {slowest.limit.images_per_s:g}"
            raise LimitExceeded(f"{images} more images exceed {rate} of this caller for {wait_s:.3g} s", wait_s)

    def _count(self, kept: _Counts, caller: Caller, limit: Limit) -> _Count:
        now, key = self._clock(), (caller.name, limit.models)
        count = kept.pop(key, None)
        if count is None:
            count = _Count(limit, limit.burst, now)
        count.refill(limit, now)
        kept[key] = count
        return count

    def _forget(self, kept: _Counts) -> None:
        """Drops old counts that say nothing, and the oldest where there are too many."""
        now = self._clock()
        for key, count in [*islice(kept.items(), FORGOTTEN_AT_ONCE)]:
            if count.is_new(now):
                del kept[key]
        while len(kept) >= MAX_REMEMBERED:
            oldest = next(iter(kept))
            del kept[next((key for key, count in kept.items() if not count.under_way), oldest)]
