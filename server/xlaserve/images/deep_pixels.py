"""Pixels of more than 8 bits: the numbers of a request as a model of such depth takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import InvalidArgument
from xlaserve.images.image_input import PixelType


def check(array: NDArray[Any], dtype: PixelType) -> NDArray[Any]:
    """Returns numbers, at least one, in `dtype`: those that have it as they are, others copied.

    For uint16 they are rounded. Raises InvalidArgument for those beyond its range, and for NaN and infinity.
    """
    if dtype == "uint16":
        return _as_uint16(array)
    with np.errstate(over="ignore"):
        values = array.astype(np.float32, copy=False)
    for extreme in (values.min(), values.max()):  # either is NaN where any value is
        if not np.isfinite(extreme):
            raise InvalidArgument("pixels", "finite numbers within the range of float32", extreme)
    return values


def from_floats(values: NDArray[Any], dtype: PixelType) -> NDArray[Any]:
    """Returns decoded pixels in `dtype`, those of 16 bits rounded, half to even, and clipped."""
    if dtype == "uint16" and values.dtype.kind == "f":
        values = np.clip(np.rint(values), 0, np.iinfo(np.uint16).max)
    typed: NDArray[Any] = values.astype(dtype, copy=False)
    return typed


def _as_uint16(array: NDArray[Any]) -> NDArray[np.uint16]:
    if array.dtype == np.float16:  # which can't be compared with 65535
        array = array.astype(np.float32)
    if array.dtype not in (np.uint8, np.uint16):
        for extreme in (array.min(), array.max()):
            if not 0 <= extreme <= np.iinfo(np.uint16).max:
                raise InvalidArgument("pixels", f"values from 0 to {np.iinfo(np.uint16).max}", extreme)
    if array.dtype.kind == "f":
        array = np.rint(array)
    values: NDArray[np.uint16] = array.astype(np.uint16, copy=False)
    return values
