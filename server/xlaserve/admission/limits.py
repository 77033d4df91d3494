"""Counts what callers have asked for, at all fronts together, and refuses what their limits don't allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from xlaserve.admission.caller import Caller, Limit, is_among
from xlaserve.admission.shared_counts import Account, SharedCounts
from xlaserve.errors import DeadlineUnreachable, InvalidArgument, LimitExceeded, QueueFull

RATE: Final = "images_per_s"
UNDER_WAY: Final = "max_images"
TOLERANCE: Final = 1e-3
"""Of an image, by which floating-point numbers may be too small, after billions of images too."""


@dataclass(slots=True, eq=False)
class _Count:
    """The images that one caller has asked for under one limit."""

    limit: Limit
    account: Account
    level: float
    """Images that it may ask for now; below 0 after a request that was larger than the burst."""

    @classmethod
    def of(cls, account: Account, limit: Limit, now: float) -> _Count:
        """Returns the count with what the time since it changed allows, by the limit as it is now."""
        rate, level = limit.images_per_s, limit.burst
        if rate is not None and account.is_known:
            level = min(level, account.level + (now - account.at) * rate)
        return cls(limit, account, level)

    def wait_s(self, images: int) -> float:
        """Returns after how many seconds there will be room for `images`, 0 where there is now."""
        rate, missing = self.limit.images_per_s, min(images, self.limit.burst) - self.level
        return 0.0 if rate is None or missing < TOLERANCE else missing / rate


class Limiter:
    """Holds callers to their limits. Counts outlive what the limits say: a caller has its count after a reload.

    `clock` gives seconds of the monotonic clock, which fronts share. `on_refused` is called with each caller that is
    refused, and the field of the limit. Runs on the event loop.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_refused: Callable[[Caller, str], None] = lambda caller, field: None,
        usage: SharedCounts | None = None,
    ) -> None:
        self._clock = clock
        self._on_refused = on_refused
        self._usage = usage or SharedCounts()

    @contextmanager
    def hold(self, caller: Caller, model: str, images: int) -> Iterator[None]:
        """Counts `images` as under way, and against the rate unless no queue takes them in.

        Raises LimitExceeded, which counts nothing, and InvalidArgument for more images than are ever allowed.
        """
        counts, now = self._counts(caller, model)
        self._check(caller, counts, images)
        for count in counts:
            count.account.begin(images, count.level, now)
        try:
            yield
        except (QueueFull, DeadlineUnreachable):
            for count in counts:
                count.account.give_back(images)
            raise
        finally:
            for count in counts:
                count.account.end(images)

    def _counts(self, caller: Caller, model: str) -> tuple[list[_Count], float]:
        """Returns the counts of the limits that are for a model, as they are at the time that is returned too."""
        accounts = self._usage.listed if caller.is_listed else self._usage.others
        now = self._clock()
        counts: list[_Count] = []
        earlier: list[tuple[str, ...]] = []
        for limit in caller.limits:
            if is_among(model, limit.models):
                name = "\0".join((caller.identity, str(earlier.count(limit.models)), *limit.models))
                counts.append(_Count.of(accounts.look(name), limit, now))
                earlier.append(limit.models)
        return counts, now

    def _check(self, caller: Caller, counts: Sequence[_Count], images: int) -> None:
        for count in counts:
            most = count.limit.max_images
            if most is not None and images > most:
                raise InvalidArgument("images", f"at most {most} in a request ({UNDER_WAY} of this caller)", images)
        for count in counts:
            most, under_way = count.limit.max_images, count.account.under_way
            if most is not None and under_way + images > most:
                self._on_refused(caller, UNDER_WAY)
                raise LimitExceeded(
                    f"{images} more images exceed {UNDER_WAY} {most} of this caller; {under_way} are under way"
                )
        slowest = max(counts, key=lambda count: count.wait_s(images), default=None)
        if slowest is not None and (wait_s := slowest.wait_s(images)):
            self._on_refused(caller, RATE)
            rate = f"{RATE} {slowest.limit.images_per_s:g}"
            raise LimitExceeded(f"{images} more images exceed {rate} of this caller for {wait_s:.3g} s", wait_s)
