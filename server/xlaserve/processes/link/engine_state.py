"""What an engine tells its fronts of the models that it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from xlaserve.engine.batching.queue import Shape
from xlaserve.engine.batching.unmatched import Unmatched
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.processes.link.arena import ALIGNMENT, PAGE_BYTES, aligned

CHANNELS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """One loading of a model, as it is now: plain data, which can be pickled."""

    id: int
    """Names this loading among all that the engine ever has, from 0 to 2**32 - 1."""
    title: str
    """What messages call it."""
    is_open: bool
    """Whether it takes requests."""
    max_images: int
    """Bound of the images that it holds, of all fronts together; each front holds itself to it as well."""
    max_bytes: int
    output_bytes: Mapping[Resolution, tuple[int, ...]]
    """By the height and width of images that it takes: for each output, the bytes of one image's row."""
    largest: Mapping[Shape, int]
    """By mode, height and width of images that it takes: the most that run in one batch."""
    unmatched: Unmatched | None = None
    """Which other resolutions it may be made ready for; None for none."""

    def room_bytes(self, height: int, width: int, images: int) -> int:
        """Returns the bytes that the outputs of images of this size may take. Raises KeyError for an unknown size."""
        return sum(aligned(images * row_bytes) for row_bytes in self.output_bytes[height, width]) + ALIGNMENT

    @property
    def share_bytes(self) -> int:
        """The most that it may have of a front's arena.

        Half of it is what all the requests hold that it takes in at a time, with room for their outputs, in whole
        pages. So a request that is taken in finds memory. As much again is for what outlives its request: answers that
        are written, and batches that run although their clients have hung up.
        """
        rows = {size: sum(row_bytes) for size, row_bytes in self.output_bytes.items()}
        of_images = self.max_images * max(rows.values(), default=0)
        of_bytes = self.max_bytes * max((row / (CHANNELS * math.prod(size)) for size, row in rows.items()), default=0)
        rounding_bytes = PAGE_BYTES + (max(map(len, self.output_bytes.values()), default=0) + 2) * ALIGNMENT
        return 2 * (self.max_bytes + math.ceil(min(of_images, of_bytes)) + self.max_images * rounding_bytes)


class Snapshot(NamedTuple):
    """All models that take requests, as of the `epoch`-th change."""

    epoch: int
    models: tuple[ModelSnapshot, ...]
    details: object = None
    """What else is said of the server and all of its models: names, states, labels."""
