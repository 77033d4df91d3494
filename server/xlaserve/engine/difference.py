"""How far a model's answers in another precision are from those in float32, measured at warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.engine.compiler import Warmed
from xlaserve.engine.program import Images, Outputs

LEAST_IMAGES: Final = 16
MOST_RELATIVE: Final = 0.1
LEAST_AGREEMENT: Final = 0.95
_GRAINS: Final = (2, 4, 8, 16, 32)
"""How many patches the sides of the images are cut into; besides noise."""


class Comparing(Protocol):
    """What a task knows of its outputs."""

    def comparable(self, outputs: Outputs) -> Outputs:
        """Returns those that can be compared number by number."""

    def agreement(self, wanted: Outputs, got: Outputs) -> float | None:
        """Returns the share of answers that are the same, where the task has such."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far outputs are from the reference's."""

    largest: float
    """Of all numbers of an output that is of floats, as a share of the reference's largest number; of all outputs."""
    agreement: float | None
    """The share of answers that are the same: a classifier's top class, a segmenter's pixels."""
    images: int

    @property
    def is_large(self) -> bool:
        """Whether it deserves a warning."""
        agrees = self.agreement is None or self.agreement >= LEAST_AGREEMENT
        return not agrees or not self.largest <= MOST_RELATIVE

    def __str__(self) -> str:
        agreement = "" if self.agreement is None else f", agreement {self.agreement:.3f}"
        return f"largest difference {self.largest:.2g}{agreement} of {self.images} images"


def measure(
    programs: Mapping[tuple[Mode, Bucket], Warmed],
    reference: Callable[[Images], Outputs],
    task: Comparing,
) -> dict[Mode, Difference]:
    """Runs a bucket of each mode and the reference on the same images, and compares their outputs."""
    buckets = sorted({bucket for _, bucket in programs})
    bucket = max((bucket for bucket in buckets if bucket.batch <= LEAST_IMAGES), default=buckets[0])
    batches = make_images(bucket)
    wanted = [reference(batch) for batch in batches]
    return {
        mode: compare(wanted, [warmed.executable(batch) for batch in batches], task)
        for (mode, own), warmed in programs.items()
        if own == bucket
    }


def compare(wanted: list[Outputs], got: list[Outputs], task: Comparing) -> Difference:
    """Compares the outputs of several batches."""
    expected = tuple(np.concatenate(outputs) for outputs in zip(*wanted, strict=True))
    found = tuple(np.concatenate(outputs) for outputs in zip(*got, strict=True))
    largest = 0.0
    for ours, theirs in zip(task.comparable(found), task.comparable(expected), strict=True):
        if np.issubdtype(theirs.dtype, np.floating):
            largest = max(largest, relative(theirs, ours))
    return Difference(largest, task.agreement(expected, found), len(expected[0]))


def relative(wanted: NDArray[Any], got: NDArray[Any]) -> float:
    """Returns the largest difference of `got` from `wanted`, or from its one row, over the largest number of `wanted`.

    Not a number anywhere is as wrong as can be, unless both say so.
    """
    largest = float(np.max(np.nan_to_num(np.abs(wanted)), initial=0.0)) or 1.0
    same = np.broadcast_to(wanted, got.shape)
    apart = np.where(np.isnan(same) & np.isnan(got), 0.0, np.abs(got - same))
    difference = float(np.max(apart, initial=0.0)) / largest
    return difference if np.isfinite(difference) else float("inf")


def make_images(bucket: Bucket) -> list[Images]:
    """Returns batches of noise and of coloured patches, coarse and fine; the same ones every time."""
    random = np.random.default_rng(seed=0)
    count = -(-LEAST_IMAGES // bucket.batch) * bucket.batch
    images = random.integers(0, 256, (count, bucket.height, bucket.width, 3), dtype=np.uint8)
    for index, image in enumerate(images):
        grain = _GRAINS[index % len(_GRAINS)]
        patches = random.integers(0, 256, (grain, grain, 3), dtype=np.uint8)
        if index % 4:  # every fourth stays noise
            rows, columns = np.arange(bucket.height) * grain, np.arange(bucket.width) * grain
            image[:] = patches[rows // bucket.height][:, columns // bucket.width]
    return list(images.reshape(-1, *bucket, 3))
