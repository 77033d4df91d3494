"""The filters of `tf.image.resize` without TensorFlow: the same float32 operations in the same order, on a CPU.

Where the kernels of TensorFlow 2.21 compute in float32 or in double is followed too; `tests` compare all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import ResizeFilter
from xlaserve.images.resizing.weighted import (
    Axis,
    Floats,
    Lerp,
    Pixels,
    Taps,
    interpolate,
    kept_if_short,
    nearest,
    sum_columns_first,
    sum_rows_first,
)

_CUBIC_STEPS: Final = 1024
"""Parts of a pixel for which `bicubic` has weights."""
_HALF: Final = np.float32(0.5)
_PI: Final = np.float32(math.pi)
_LEAST_SUM: Final = np.float32(1000) * np.finfo(np.float32).tiny


def resize(pixels: Pixels, rows: Axis, columns: Axis, how: ResizeFilter, *, antialias: bool, out: NDArray[Any]) -> None:
    """Writes resized pixels into `out`."""
    match how:
        case ResizeFilter.NEAREST:
            nearest(pixels, _nearest(rows), _nearest(columns), out)
        case ResizeFilter.BILINEAR if not antialias:
            interpolate(pixels, _lerp(rows), _lerp(columns), out)
        case ResizeFilter.BICUBIC if not antialias:
            sum_rows_first(pixels, _cubic(rows), _cubic(columns), out)
        case ResizeFilter.AREA:
            factor = np.float32(1 / float(rows.scale * columns.scale))
            sum_columns_first(pixels, _area(rows), _area(columns), factor, out)
        case _:
            sum_rows_first(pixels, _spans(rows, how, antialias), _spans(columns, how, antialias), out)


def _centres(axis: Axis) -> Floats:
    """Returns where the centre of each new pixel lies among the old ones, whose centres are at 0.5, 1.5 and so on."""
    return (axis.wanted + _HALF) * axis.scale


@lru_cache(maxsize=256)
def _nearest(axis: Axis) -> NDArray[np.intp]:
    return np.minimum(np.floor(_centres(axis)).astype(np.intp), axis.pixels - 1)


@lru_cache(maxsize=256)
def _lerp(axis: Axis) -> Lerp:
    places = _centres(axis) - _HALF
    lower = np.floor(places)
    upper = np.minimum(np.ceil(places).astype(np.intp), axis.pixels - 1)
    return Lerp(np.maximum(lower, 0).astype(np.intp), upper, places - lower)


@lru_cache(maxsize=1)
def _cubic_weights() -> tuple[Floats, Floats]:
    """Returns the weights of Keys's cubic (a = -0.5) at distances from 0 to 1 and from 1 to 2, in steps."""
    a = -0.5
    near = np.arange(_CUBIC_STEPS + 1) / _CUBIC_STEPS
    far = near + 1
    inner = ((a + 2) * near - (a + 3)) * near * near + 1
    outer = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    return inner.astype(np.float32), outer.astype(np.float32)


@lru_cache(maxsize=256)
def _cubic(axis: Axis) -> Taps:
    places = _centres(axis) - _HALF
    floor = np.floor(places)
    step = np.rint((places - floor) * np.float32(_CUBIC_STEPS)).astype(np.intp)
    inner, outer = _cubic_weights()
    indices = floor.astype(np.intp) + np.arange(-1, 3)[:, np.newaxis]
    weights = np.stack([outer[step], inner[step], inner[_CUBIC_STEPS - step], outer[_CUBIC_STEPS - step]])
    inside = np.clip(indices, 0, axis.pixels - 1)
    weights[inside != indices] = 0
    return Taps(inside, _normalized(weights))


@kept_if_short
def _area(axis: Axis) -> Taps:
    """Returns the parts of old pixels under each new one; the first and the last may be covered in part."""
    scale = axis.scale
    begins, ends = axis.wanted * scale, (axis.wanted + np.float32(1)) * scale
    first, last = np.floor(begins).astype(np.intp), np.ceil(ends).astype(np.intp) - 1
    indices = first + np.arange((last - first).max() + 1)[:, np.newaxis]
    left = indices.astype(np.float32)
    right = left + np.float32(1)
    weights = np.where(
        left < begins,
        np.where(right > ends, scale, right - begins),
        np.where(right > ends, ends - left, np.float32(1)),
    )
    weights[indices > last] = 0
    return Taps(np.clip(indices, 0, axis.pixels - 1), weights.astype(np.float32))


@kept_if_short
def _spans(axis: Axis, how: ResizeFilter, antialias: bool) -> Taps:
    """Returns the weights of the filters that reach over many pixels."""
    kernel, radius = KERNELS[how]
    # The op is given new pixels over old ones, and inverts them again.
    scale = np.float32(1 / float(np.float32(axis.resized) / np.float32(axis.length)))
    widened = max(scale, np.float32(1)) if antialias else np.float32(1)
    reach = np.float32(radius) * widened
    centres = (axis.wanted + _HALF) * scale
    first, last = (
        np.clip(edge.astype(np.intp), 0, axis.pixels - 1)
        for edge in (np.ceil(centres - reach - _HALF), np.floor(centres + reach - _HALF))
    )
    indices = first + np.arange((last - first).max() + 1)[:, np.newaxis]
    distances = np.abs((indices.astype(np.float32) + _HALF - centres) * (np.float32(1) / widened))
    weights = kernel(distances)
    weights[indices > last] = 0
    return Taps(np.minimum(indices, axis.pixels - 1), _normalized(weights))


def _normalized(weights: Floats) -> Floats:
    """Returns weights `[taps, new pixels]` whose sum is 1, added in their order."""
    total = weights[0].copy()
    for tap in weights[1:]:
        total += tap
    is_sum = np.abs(total) >= _LEAST_SUM
    normalized: Floats = weights * np.where(is_sum, np.float32(1) / np.where(is_sum, total, 1), np.float32(0))
    return normalized


def _triangle(distance: Floats) -> Floats:
    weights: Floats = np.maximum(np.float32(1) - distance, np.float32(0))
    return weights


def _keys(distance: Floats) -> Floats:
    f = np.float32
    outer = ((f(-0.5) * distance + f(2.5)) * distance - f(4)) * distance + f(2)
    inner = ((f(1.5) * distance - f(2.5)) * distance) * distance + f(1)
    return _pieces(distance, inner, outer)


def _mitchell(distance: Floats) -> Floats:
    f = np.float32
    outer = ((f(-7 / 18) * distance + f(2)) * distance - f(10 / 3)) * distance + f(16 / 9)
    inner = ((f(7 / 6) * distance - f(2)) * distance) * distance + f(8 / 9)
    return _pieces(distance, inner, outer)


def _pieces(distance: Floats, inner: Floats, outer: Floats) -> Floats:
    weights: Floats = np.where(distance >= 2, np.float32(0), np.where(distance >= 1, outer, inner))
    return weights


def _gaussian(distance: Floats) -> Floats:
    inside = np.exp(-(distance * distance) / 0.5).astype(np.float32)  # twice the square of a deviation of a half
    return np.where(distance >= np.float32(1.5), np.float32(0), inside)


def _lanczos(radius: float) -> Callable[[Floats], Floats]:
    def kernel(distance: Floats) -> Floats:
        turn = np.maximum(distance, np.float32(1e-3)) * _PI
        lobes = np.float32(radius) * _sine(turn) * _sine(turn / np.float32(radius))
        inside = lobes / (_PI * _PI * np.maximum(distance, np.float32(1e-3)) * np.maximum(distance, np.float32(1e-3)))
        return np.where(distance > radius, np.float32(0), np.where(distance <= 1e-3, np.float32(1), inside))

    return kernel


def _sine(turn: Floats) -> Floats:
    return np.sin(turn.astype(np.float64)).astype(np.float32)


KERNELS: Final[dict[ResizeFilter, tuple[Callable[[Floats], Floats], float]]] = {
    ResizeFilter.BILINEAR: (_triangle, 1),
    ResizeFilter.BICUBIC: (_keys, 2),
    ResizeFilter.MITCHELLCUBIC: (_mitchell, 2),
    ResizeFilter.GAUSSIAN: (_gaussian, 1.5),
    ResizeFilter.LANCZOS3: (_lanczos(3), 3),
    ResizeFilter.LANCZOS5: (_lanczos(5), 5),
}
"""The weight of a pixel by its distance from the new one, in float32, and the distance from which on it is 0."""
