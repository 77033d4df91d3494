"""Class maps encoded as runs or as PNG. Blocking functions without state, made for a thread pool."""

from __future__ import annotations

import io
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ClassMap = NDArray[np.uint8] | NDArray[np.int32]
"""`[height, width]`: each pixel's class, by its index."""

_BYTE: Final = 256
_FAST: Final = 1
"""zlib's level: a map of runs shrinks nearly as far as with the best, in a fraction of the time."""


class Runs(NamedTuple):
    """A map row by row as runs of pixels of one class, none of them longer than its row."""

    classes: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def to_bytes(self) -> bytes:
        """Returns class and length of each run, little-endian, 4 bytes each."""
        return np.column_stack(self).astype("<u4").tobytes()

    def counts(self) -> dict[int, int]:
        """Returns the number of pixels of each class that is there, by its index."""
        indices, places = np.unique(self.classes, return_inverse=True)
        pixels = np.bincount(places, weights=self.lengths).astype(np.int64)
        return dict(zip(indices.tolist(), pixels.tolist(), strict=True))


def runs(classes: ClassMap) -> Runs:
    """Returns the runs of a map of at least one pixel."""
    width = classes.shape[1]
    begins = np.empty(classes.shape, bool)
    begins[:, 0] = True
    np.not_equal(classes[:, 1:], classes[:, :-1], out=begins[:, 1:])
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=classes.shape[0] * width)
    return Runs(classes.reshape(-1)[starts].astype(np.int32), lengths.astype(np.int32))


def to_png(classes: ClassMap, number_of_classes: int) -> bytes:
    """Returns a greyscale PNG file whose levels are the classes: of 8 bits, or of 16 for more than 256 classes."""
    levels: NDArray[Any] = classes.astype(np.uint8 if number_of_classes <= _BYTE else np.uint16, copy=False)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "PNG", compress_level=_FAST)
    return file.getvalue()
