"""Sums of weighted pixels along the rows and columns of an image, in float32 and in the order of other libraries.

Rows are made in blocks: temporary memory stays small, in the processor's cache, whatever the size of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Pixels = NDArray[Any]
"""`[height, width, channels]`."""

Weight = TypeVar("Weight", np.float32, np.int32)
Args = ParamSpec("Args")
Made = TypeVar("Made")

LONGEST_KEPT: Final = 4096
"""Pixels along a side up to which a weight for each of them is kept."""
_BLOCK_VALUES: Final = 1 << 15
"""Values of a block of rows, of the image or of the result, whichever has the longer ones."""


class Axis(NamedTuple):
    """One side of an image that is resized."""

    pixels: int
    """Old pixels in memory."""
    length: float
    """Old pixels that are the image: fewer, by less than one, where a JPEG was reduced in decoding."""
    resized: int
    """New pixels."""
    start: int
    """The first of the new pixels that are wanted."""
    stop: int
    """The end of these."""

    @property
    def wanted(self) -> Floats:
        """The numbers of the new pixels that are wanted."""
        return np.arange(self.start, self.stop, dtype=np.float32)

    @property
    def scale(self) -> np.float32:
        """Old pixels of each new one."""
        return np.float32(self.length) / np.float32(self.resized)


class TapsOf(NamedTuple, Generic[Weight]):
    """The pixels along one side that make each of the new pixels there."""

    indices: NDArray[np.intp]
    """`[taps, new pixels]`: places of the old pixels, in the order in which they are added."""
    weights: NDArray[Weight]
    """`[taps, new pixels]`."""

    def of_values(self, channels: int) -> TapsOf[Weight]:
        """Returns the taps of the values of a row, of those of its pixels."""
        return TapsOf(spread(self.indices, channels), self.weights.repeat(channels, axis=1))


Taps = TapsOf[np.float32]


class Lerp(NamedTuple):
    """The two pixels along one side between which each of the new pixels lies."""

    lower: NDArray[np.intp]
    upper: NDArray[np.intp]
    share: Floats
    """How far it lies from the lower to the upper one, 0 to 1."""


def kept_if_short(make: Callable[Concatenate[Axis, Args], Made]) -> Callable[Concatenate[Axis, Args], Made]:
    """Returns `make`, whose results have a weight for each old pixel, with a cache for axes where they are not
    megabytes."""
    kept: Callable[..., Made] = lru_cache(maxsize=64)(make)

    @wraps(make)
    def of_axis(axis: Axis, /, *args: Args.args, **kwargs: Args.kwargs) -> Made:
        return kept(axis, *args, **kwargs) if axis.pixels <= LONGEST_KEPT else make(axis, *args, **kwargs)

    return of_axis


def nearest(pixels: Pixels, rows: NDArray[np.intp], columns: NDArray[np.intp], out: NDArray[Any]) -> None:
    """Writes the pixels at `rows` and `columns` into `out`."""
    values = flat(pixels)
    places = spread(columns, pixels.shape[2])
    for start, stop in blocks(pixels, out):
        block = values.take(rows[start:stop], axis=0).take(places, axis=1)
        out[start:stop] = block.reshape(out[start:stop].shape)


def interpolate(pixels: Pixels, rows: Lerp, columns: Lerp, out: NDArray[Any]) -> None:
    """Writes pixels between four each into `out`: first along each row, then between two rows.

    Each step is `a + (b - a) * share`, rounded to float32.
    """
    channels = pixels.shape[2]
    values = flat(pixels)
    lower, upper = (spread(places, channels) for places in (columns.lower, columns.upper))
    across = columns.share.repeat(channels)
    for start, stop in blocks(pixels, out):
        size = stop - start
        both = values.take(np.concatenate([rows.lower[start:stop], rows.upper[start:stop]]), axis=0)
        left = both.take(lower, axis=1).astype(np.float32)
        right = both.take(upper, axis=1).astype(np.float32)
        right -= left
        right *= across
        right += left
        top, bottom = right[:size], right[size:]
        bottom -= top
        bottom *= rows.share[start:stop, np.newaxis]
        bottom += top
        _store(bottom, out[start:stop])


def sum_rows_first(pixels: Pixels, rows: Taps, columns: Taps, out: NDArray[Any]) -> None:
    """Writes weighted sums of rows, then of their columns, into `out`."""
    values, across = flat(pixels), columns.of_values(pixels.shape[2])
    for start, stop in blocks(pixels, out):
        total = _sum(values.take(part.places, axis=0) * part.weights for part in _taps(rows, start, stop))
        _store(_columns(total, across), out[start:stop])


def sum_columns_first(pixels: Pixels, rows: Taps, columns: Taps, factor: np.float32, out: NDArray[Any]) -> None:
    """Writes weighted sums of columns, then of rows, times `factor`, into `out`."""
    values, across = flat(pixels), columns.of_values(pixels.shape[2])
    for start, stop in blocks(pixels, out):
        taps = _taps(rows, start, stop)
        total = _sum(_columns(values.take(part.places, axis=0), across) * part.weights for part in taps)
        total *= factor
        _store(total, out[start:stop])


class _Tap(NamedTuple):
    """One of the pixels that make each of the new ones, along the rows."""

    places: NDArray[np.intp]
    weights: Floats
    """`[rows, 1]`."""


def _taps(rows: Taps, start: int, stop: int) -> Iterator[_Tap]:
    for places, weights in zip(rows.indices, rows.weights, strict=True):
        yield _Tap(places[start:stop], weights[start:stop, np.newaxis])


def _columns(values: NDArray[Any], across: Taps) -> Floats:
    taps = zip(across.indices, across.weights, strict=True)
    return _sum(values.take(places, axis=1) * weights for places, weights in taps)


def _sum(terms: Iterator[Floats]) -> Floats:
    """Returns the sum of at least one term, each rounded to float32, the first one first."""
    total = next(terms)
    for term in terms:
        total += term
    return total


def _store(values: Floats, out: NDArray[Any]) -> None:
    """Writes `[rows, values]` into `[rows, width, channels]`: as they are, or as whole numbers, rounded and clipped."""
    if out.dtype.kind == "u":
        np.rint(values, out=values)
        np.clip(values, 0, np.iinfo(out.dtype).max, out=values)
    out[...] = values.reshape(out.shape)


def flat(pixels: Pixels) -> NDArray[Any]:
    """Returns the rows of an image, in one piece: `take` would copy a part of a larger one as a whole each time."""
    return np.ascontiguousarray(pixels.reshape(len(pixels), -1))


def spread(places: NDArray[np.intp], channels: int) -> NDArray[np.intp]:
    """Returns the places of values of those of pixels, along the last axis."""
    values = places[..., np.newaxis] * channels + np.arange(channels)
    return values.reshape(*places.shape[:-1], -1)


def blocks(pixels: Pixels, out: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yields the first and the end of the rows of `out` that are made together."""
    longest = max(pixels.shape[1], out.shape[1]) * out.shape[2]
    step = max(1, _BLOCK_VALUES // longest)
    for start in range(0, len(out), step):
        yield start, min(start + step, len(out))
