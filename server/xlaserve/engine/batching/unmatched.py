"""Resolutions without buckets: which of them a model takes, and the interface that makes it ready for one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.program import Warmed
from xlaserve.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """The resolutions without buckets that a model takes: plain data, which can be pickled."""

    sides: tuple[int | None, int | None]
    """The height and width that the network takes, None for any."""
    channels: int = 3
    max_pixels: int
    """Most pixels of an image: as many as the largest bucket has."""
    max_opened: int
    configured: frozenset[Resolution]
    """Resolutions that have buckets."""
    opened: frozenset[Resolution] = frozenset()
    """Resolutions that count towards `max_opened`, whether the network can run them or not."""

    def check(self, resolution: Resolution, opening: Collection[Resolution] = ()) -> None:
        """Raises InvalidArgument where images of `resolution` are not taken; resolutions in `opening` count as
        opened."""
        opened = self.opened.union(opening)
        if resolution in opened:
            return
        if any(side not in (None, got) for side, got in zip(self.sides, resolution, strict=True)):
            sides = ", ".join("any" if side is None else str(side) for side in self.sides)
            raise refusal(resolution, f"shape [n, {sides}, {self.channels}], as the network takes no other")
        if math.prod(resolution) > self.max_pixels:
            raise refusal(resolution, f"at most {self.max_pixels} pixels an image, as the largest bucket has")
        if len(opened) >= self.max_opened:
            known = " or ".join(
                f"[n, {height}, {width}, {self.channels}]" for height, width in sorted(self.configured | opened)
            )
            raise refusal(resolution, f"shape {known}; no more are taken (max_background_resolutions)")


def refusal(resolution: Resolution, expected: str) -> InvalidArgument:
    """Returns the error for images of a resolution that is not taken."""
    return InvalidArgument("pixels", expected, f"{resolution[0]} x {resolution[1]}")


class ServingPrograms(Protocol):
    """The programs that serve a model, to which others can be added."""

    def add(self, programs: Mapping[tuple[Mode, Bucket], Warmed]) -> None:
        """Serves `programs` as well."""

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Returns the largest bucket for images of this mode and resolution; 0 where there is none."""


class Opener(Protocol):
    """Makes a model ready for resolutions that have no buckets."""

    @property
    def unmatched(self) -> Unmatched:
        """The resolutions that the model takes."""

    async def open(self, serving: ServingPrograms, resolution: Resolution, mode: Mode) -> Mode:
        """Adds programs for a resolution to those that serve the model; see `Ticket.open`."""
