"""The filters of `cv2.resize` for levels of 8 bits without OpenCV: the same operations in the same order.

`bilinear` and `lanczos4` compute in whole numbers, with weights in 2048ths; `area` and `bicubic` in float32. In
OpenCV's packages for x86-64, Intel's IPP computes `bicubic`: what it rounds otherwise is a level apart.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import ResizeFilter
from xlaserve.images.resizing.weighted import (
    Axis,
    Floats,
    Pixels,
    Taps,
    TapsOf,
    blocks,
    flat,
    kept_if_short,
    nearest,
    sum_columns_first,
    sum_rows_first,
)

Integers = NDArray[np.int32]

_ONE: Final = 2048
"""The weight of a pixel that counts alone."""
_BOTH_BITS: Final = 22
"""Bits of the product of a row's weight and a column's."""
_LEAST_PART: Final = 1e-3
"""The part of a pixel from which on it counts for `area`."""
_A: Final = -0.75
"""The constant of Keys's cubic."""


class _Places(NamedTuple):
    """Where new pixels lie between old ones along a side."""

    lower: NDArray[np.intp]
    """The old pixel before each; -1 and less before the first one."""
    share: Floats
    """How far the new one lies towards the next, 0 to 1."""


_Fixed = TapsOf[np.int32]
"""Taps with weights in 2048ths."""


def resize(pixels: Pixels, rows: Axis, columns: Axis, how: ResizeFilter, out: NDArray[np.uint8]) -> None:
    """Writes resized pixels into `out`."""
    factors = _whole_factor(rows), _whole_factor(columns)
    shrinks = rows.resized <= rows.length and columns.resized <= columns.length
    match how:
        case ResizeFilter.NEAREST:
            nearest(pixels, _nearest(rows), _nearest(columns), out)
        case ResizeFilter.BICUBIC:
            sum_rows_first(pixels, _cubic(rows), _cubic(columns), out)
        case ResizeFilter.LANCZOS4:
            _weigh(pixels, _lanczos(rows), _lanczos(columns), out)
        case ResizeFilter.BILINEAR if factors != (2, 2):
            _interpolate(pixels, _linear_rows(rows), _linear_columns(columns), out)
        case ResizeFilter.AREA if not shrinks:
            _interpolate(pixels, _linear_rows(rows, of_area=True), _linear_columns(columns, of_area=True), out)
        case _ if factors[0] and factors[1]:
            _average(pixels, rows, columns, factors, out)
        case _:
            sum_columns_first(pixels, _area(rows), _area(columns), np.float32(1), out)


def _scale(axis: Axis) -> float:
    """Returns the old pixels of each new one, as the inverse of the new ones of each old one."""
    return 1 / (axis.resized / axis.length)


def _whole_factor(axis: Axis) -> int:
    """Returns how many old pixels each new one is; 0 where that is no whole number."""
    factor, rest = divmod(axis.length, axis.resized)
    return 0 if rest or axis.length != axis.pixels else int(factor)


def _numbers(axis: Axis) -> NDArray[np.float64]:
    return np.arange(axis.start, axis.stop, dtype=np.float64)


@lru_cache(maxsize=256)
def _nearest(axis: Axis) -> NDArray[np.intp]:
    return np.minimum(np.floor(_numbers(axis) * _scale(axis)).astype(np.intp), axis.pixels - 1)


def _centres(axis: Axis) -> _Places:
    """Returns the places of the centres of new pixels between those of old ones."""
    places = ((_numbers(axis) + 0.5) * _scale(axis) - 0.5).astype(np.float32)
    lower = np.floor(places)
    return _Places(lower.astype(np.intp), places - lower)


def _borders(axis: Axis) -> _Places:
    """Returns the places of new pixels by the old ones' borders within them, which `area` has where it enlarges."""
    numbers = _numbers(axis)
    lower = np.floor(numbers * _scale(axis))
    share = np.maximum((numbers + 1) - (lower + 1) * (axis.resized / axis.length), 0).astype(np.float32)
    return _Places(lower.astype(np.intp), share - np.floor(share))


def _fixed(axis: Axis, indices: NDArray[np.intp], weights: Floats) -> _Fixed:
    whole = np.rint(weights * np.float32(_ONE)).astype(np.int32)
    return _Fixed(np.clip(indices, 0, axis.pixels - 1), whole)


def _pair(axis: Axis, lower: NDArray[np.intp], share: Floats) -> _Fixed:
    return _fixed(axis, np.stack([lower, lower + 1]), np.stack([np.float32(1) - share, share]))


@lru_cache(maxsize=256)
def _linear_rows(axis: Axis, *, of_area: bool = False) -> _Fixed:
    return _pair(axis, *(_borders(axis) if of_area else _centres(axis)))


@lru_cache(maxsize=256)
def _linear_columns(axis: Axis, *, of_area: bool = False) -> _Fixed:
    """Returns the taps of columns: at both ends the outermost one counts alone, while rows there keep both weights."""
    lower, share = _borders(axis) if of_area else _centres(axis)
    is_inside = (lower >= 0) & (lower < axis.pixels - 1)
    return _pair(axis, np.clip(lower, 0, axis.pixels - 1), np.where(is_inside, share, np.float32(0)))


@lru_cache(maxsize=256)
def _cubic(axis: Axis) -> Taps:
    places = (_numbers(axis) + 0.5) * (axis.length / axis.resized) - 0.5
    lower = np.floor(places)
    near = places - lower
    far, other = near + 1, 1 - near
    first = ((_A * far - 5 * _A) * far + 8 * _A) * far - 4 * _A
    second = ((_A + 2) * near - (_A + 3)) * near * near + 1
    third = ((_A + 2) * other - (_A + 3)) * other * other + 1
    weights = np.stack([first, second, third, 1 - first - second - third]).astype(np.float32)
    indices = lower.astype(np.intp) + np.arange(-1, 3)[:, np.newaxis]
    return Taps(np.clip(indices, 0, axis.pixels - 1), weights)


@lru_cache(maxsize=256)
def _lanczos(axis: Axis) -> _Fixed:
    lower, share = _centres(axis)
    farthest = share + np.float32(3)
    turn = -farthest.astype(np.float64) * math.pi * 0.25
    sine, cosine = np.sin(turn), np.cos(turn)
    root = math.sqrt(0.5)
    # Sines of the same angle and a multiple of an eighth of a turn.
    of_sine = (1, -root, 0, root, -1, root, 0, -root)
    of_cosine = (0, -root, 1, -root, 0, root, -1, root)
    weights, total = [], np.zeros_like(share)
    for tap in range(8):
        distance = farthest - np.float32(tap)
        is_apart = np.abs(distance) >= np.float32(1e-6)
        angle = np.where(is_apart, -distance.astype(np.float64) * math.pi * 0.25, 1.0)
        weight = np.where(is_apart, (of_sine[tap] * sine + of_cosine[tap] * cosine) / (angle * angle), 1e30)
        weights.append(weight.astype(np.float32))
        total += weights[-1]
    normalized = np.stack(weights) * (np.float32(1) / total)
    return _fixed(axis, lower + np.arange(-3, 5)[:, np.newaxis], normalized)


@kept_if_short
def _area(axis: Axis) -> Taps:
    """Returns the parts of old pixels under each new one, as shares of it."""
    scale = _scale(axis)
    begins = _numbers(axis) * scale
    ends = begins + scale
    covered = np.minimum(scale, axis.length - begins)
    last = np.minimum(np.floor(ends), axis.pixels - 1)
    first = np.minimum(np.ceil(begins), last)
    indices = (first - 1) + np.arange((last - first).max() + 2)[:, np.newaxis]
    before = np.where(first - begins > _LEAST_PART, (first - begins) / covered, 0)
    after = np.where(ends - last > _LEAST_PART, np.minimum(np.minimum(ends - last, 1), covered) / covered, 0)
    weights = np.where(indices < last, 1 / covered, np.where(indices > last, 0, after))
    weights[0] = np.where(first > last, weights[0], before)
    return Taps(np.clip(indices.astype(np.intp), 0, axis.pixels - 1), weights.astype(np.float32))


def _across(values: NDArray[np.uint8], columns: _Fixed) -> Integers:
    """Returns weighted sums of the values of each row."""
    total: Integers | None = None
    for places, weights in zip(*columns, strict=True):
        term = values.take(places, axis=1).astype(np.int32)
        term *= weights
        total = term if total is None else np.add(total, term, out=total)
    assert total is not None
    return total


def _interpolate(pixels: Pixels, rows: _Fixed, columns: _Fixed, out: NDArray[np.uint8]) -> None:
    """Writes pixels between four each into `out`; each of the two rows is cut to 12 bits less before they are added."""
    values, across = flat(pixels), columns.of_values(pixels.shape[2])
    for start, stop in blocks(pixels, out):
        size = stop - start
        both = _across(values.take(rows.indices[:, start:stop].ravel(), axis=0), across)
        both >>= 4
        both *= rows.weights[:, start:stop].reshape(-1, 1)
        both >>= 16
        total = both[:size]
        total += both[size:]
        total += 2
        total >>= 2
        out[start:stop] = total.reshape(out[start:stop].shape)


def _weigh(pixels: Pixels, rows: _Fixed, columns: _Fixed, out: NDArray[np.uint8]) -> None:
    """Writes weighted sums of columns, then of rows, into `out`."""
    values, across = flat(pixels), columns.of_values(pixels.shape[2])
    for start, stop in blocks(pixels, out):
        total = np.full((stop - start, across.indices.shape[1]), 1 << (_BOTH_BITS - 1), np.int32)
        for places, weights in zip(*rows, strict=True):
            term = _across(values.take(places[start:stop], axis=0), across)
            term *= weights[start:stop, np.newaxis]
            total += term
        total >>= _BOTH_BITS
        np.clip(total, 0, 255, out=total)
        out[start:stop] = total.reshape(out[start:stop].shape)


def _average(pixels: Pixels, rows: Axis, columns: Axis, factors: tuple[int, int], out: NDArray[Any]) -> None:
    """Writes the means of squares of whole pixels into `out`: of 2x2 rounded half up, of others half to even."""
    (down, across), channels = factors, pixels.shape[2]
    inside = pixels[:, columns.start * across : columns.stop * across]
    share = np.float32(1) / np.float32(down * across)
    for start, stop in blocks(pixels, out):
        top = rows.start + start
        part = inside[top * down : (rows.start + stop) * down]
        of_rows = part.reshape(stop - start, down, -1).sum(axis=1, dtype=np.int32)
        total = of_rows.reshape(stop - start, -1, across, channels).sum(axis=2)
        out[start:stop] = (total + 2) >> 2 if factors == (2, 2) else np.rint(total.astype(np.float32) * share)
