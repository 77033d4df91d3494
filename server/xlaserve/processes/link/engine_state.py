"""The state of an engine's models, which it publishes to its fronts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xlaserve.engine.batching.unmatched import Unmatched
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, row_bytes
from xlaserve.engine.request import Shape
from xlaserve.processes.link.arena import ALIGNMENT, PAGE_BYTES, aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """The state of one loading of a model: plain data, which can be pickled."""

    id: int
    """The number of this loading among all that the engine ever has, from 0 to 2**32 - 1."""
    title: str
    """The model's name in messages."""
    is_open: bool
    """Whether the model takes requests."""
    max_images: int
    """Bound of the images that the model holds, of all fronts together; each front applies it to its own as well."""
    max_bytes: int
    inputs: Inputs = RGB_IMAGE
    """The inputs of its programs."""
    output_bytes: Mapping[Resolution, tuple[int, ...]]
    """For each output, the bytes of one image's row, by the height and width of images that the model takes."""
    largest: Mapping[Shape, int]
    """The most images that run in one batch, by the mode, height and width that the model takes."""
    unmatched: Unmatched | None = None
    """The other resolutions that the model may be made ready for; None for none."""

    def room_bytes(self, height: int, width: int, images: int) -> int:
        """Returns the bytes that the outputs of images of this size may take. Raises KeyError for an unknown size."""
        return sum(aligned(images * output_bytes) for output_bytes in self.output_bytes[height, width]) + ALIGNMENT

    @property
    def share_bytes(self) -> int:
        """The bytes of a front's arena that the model may have.

        Half of them are for all requests that the model admits at a time, with room for their outputs, in whole pages.
        So a request that is admitted finds memory. As many again are for memory that outlives its request: answers that
        are written, and batches that run although their clients have hung up.
        """
        rows = {size: sum(row_bytes) for size, row_bytes in self.output_bytes.items()}
        of_images = self.max_images * max(rows.values(), default=0)
        of_bytes = self.max_bytes * max((row / row_bytes(self.inputs, *size) for size, row in rows.items()), default=0)
        arrays = len(self.inputs) + max(map(len, self.output_bytes.values()), default=0)
        rounding_bytes = PAGE_BYTES + (arrays + 1) * ALIGNMENT
        return 2 * (self.max_bytes + math.ceil(min(of_images, of_bytes)) + self.max_images * rounding_bytes)


class Snapshot(NamedTuple):
    """All models that take requests, as of the `epoch`-th change."""

    epoch: int
    models: tuple[ModelSnapshot, ...]
    details: object = None
    """Further data on the server and all of its models: names, states, labels."""
