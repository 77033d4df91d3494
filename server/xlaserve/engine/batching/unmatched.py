"""Resolutions that have no buckets: which of them a model takes, and what makes it ready for one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from xlaserve.config import Mode
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """Which resolutions a model takes beside those that have buckets: plain data, which can be pickled."""

    sides: tuple[int | None, int | None]
    """The height and width that the network takes, None for any."""
    max_pixels: int
    """Of an image: as many as the largest bucket has."""
    max_opened: int
    configured: frozenset[Resolution]
    """Those that have buckets."""
    opened: frozenset[Resolution] = frozenset()
    """Those that have a place, of `max_opened`, whether the network can run them or not."""

    def check(self, resolution: Resolution, opening: Collection[Resolution] = ()) -> None:
        """Raises InvalidArgument where images of `resolution` are not taken; those that are `opening` have a place."""
        opened = self.opened.union(opening)
        if resolution in opened:
            return
        if any(side not in (None, got) for side, got in zip(self.sides, resolution, strict=True)):
            sides = ", ".join("any" if side is None else str(side) for side in self.sides)
            raise refusal(resolution, f"shape [n, {sides}, 3], as the network takes no other")
        if math.prod(resolution) > self.max_pixels:
            raise refusal(resolution, f"at most {self.max_pixels} pixels an image, as the largest bucket has")
        if len(opened) >= self.max_opened:
            known = " or ".join(f"[n, {height}, {width}, 3]" for height, width in sorted(self.configured | opened))
            raise refusal(resolution, f"shape {known}; no more are taken (max_background_resolutions)")


def refusal(resolution: Resolution, expected: str) -> InvalidArgument:
    """Returns the error for images of a resolution that is not taken."""
    return InvalidArgument("pixels", expected, f"{resolution[0]} x {resolution[1]}")


class Opener(Protocol):
    """Makes a model ready for resolutions that have no buckets."""

    @property
    def unmatched(self) -> Unmatched:
        """Which it takes."""

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Does as `Ticket.open`."""
