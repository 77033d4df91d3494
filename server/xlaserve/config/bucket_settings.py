"""Buckets, as they are compiled and as they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from xlaserve.config.base import Frozen


class Bucket(NamedTuple):
    """A padded input shape that is compiled ahead of traffic."""

    batch: int
    height: int
    width: int
    """Height and width of the images; 0 where the model takes no images."""

    def __str__(self) -> str:
        return f"{self.batch}x{self.height}x{self.width}" if self.height else str(self.batch)


class BucketSettings(NamedTuple):
    """A bucket as it is configured: without height and width it takes the model's own."""

    batch: int
    height: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        return shown(self)


class AutoBuckets(Frozen):
    """How `buckets: auto` chooses."""

    max_batch: int = Field(16, ge=1, le=256)
    """The largest candidate. Candidates are the powers of two and the numbers half-way between them: 1, 2, 3, 4, 6, 8,
    12, 16."""
    max_buckets: int = Field(6, ge=1, le=16)
    """Most buckets that are kept, for each resolution. Fewer are where more would gain less than 1 %."""
    max_compile_s: float = Field(300.0, gt=0)
    """Once measuring candidates has taken this long, no more are begun: the best of those measured are kept. The most
    useful come first."""
    max_memory_mib: int | None = Field(None, ge=1)
    """Most of the host's memory that the programs kept for one resolution may take, the largest of them running on
    every lane. No limit by default."""
    demand: Path | None = None
    """The demand to choose for: a file that `xlaserve buckets MODEL --save FILE` wrote from a server's traffic. By
    default as many images are expected to meet each demand from 1 to twice `max_batch`."""

    @property
    def candidates(self) -> tuple[int, ...]:
        """The batch sizes to measure, in ascending order."""
        powers = [2**exponent for exponent in range(self.max_batch.bit_length())]
        between = [3 * power // 2 for power in powers[1:]]
        return tuple(sorted({size for size in (*powers, *between, self.max_batch) if size <= self.max_batch}))


def shown(item: object) -> str:
    """Returns a mode as it is, and a bucket or a resolution by its numbers."""
    return "x".join(str(side) for side in item if side is not None) if isinstance(item, tuple) else str(item)
