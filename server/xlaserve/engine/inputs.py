"""The inputs of a model: named arrays whose first dimension is the batch, and their shapes in each bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket

Images = NDArray[Any]
"""Pixels, `[n, height, width, channels]`, in the type of the model's image input: uint8, uint16 or float32."""

Rows = tuple[NDArray[Any], ...]
"""Rows of a model: an array for each of its inputs, in their order, all with the same first dimension, n >= 1."""

Layout = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
"""The dtype of each of several arrays, and the shape of one row."""

NO_RESOLUTION: Final = (0, 0)
"""Height and width in the buckets of a model that takes no images."""


class InputSpec(NamedTuple):
    """An input of a model, as its programs take it."""

    name: str
    dtype: str
    """NumPy's name of the type."""
    shape: tuple[int | None, ...]
    """The shape of one row. Sides that are None are the bucket's: its height, then its width."""
    is_image: bool = False
    """Whether it holds images, `[height, width, channels]`."""

    def row_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Returns the shape of one row in buckets of this height and width."""
        sides = iter((height, width))
        return tuple(next(sides) if side is None else side for side in self.shape)


Inputs = tuple[InputSpec, ...]


def pixels(channels: int = 3, name: str = "pixels", dtype: str = "uint8") -> Inputs:
    """Returns the inputs of a model of one image, whose pixels are of `dtype`."""
    return (InputSpec(name, dtype, (None, None, channels), is_image=True),)


RGB_IMAGE: Final = pixels()
"""The inputs of most models."""


@lru_cache(maxsize=1024)
def layout(inputs: Inputs, height: int, width: int) -> Layout:
    """Returns the layout of rows in buckets of this height and width."""
    return tuple((np.dtype(each.dtype), each.row_shape(height, width)) for each in inputs)


def row_bytes(inputs: Inputs, height: int, width: int) -> int:
    """Returns the bytes of one row of all inputs, in buckets of this height and width."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout(inputs, height, width))


def empty(inputs: Inputs, bucket: Bucket) -> Rows:
    """Returns arrays of a bucket's shapes, with any content."""
    return empty_rows(layout(inputs, bucket.height, bucket.width), bucket.batch)


def empty_rows(of: Layout, count: int) -> Rows:
    """Returns arrays of `count` rows of a layout, with any content."""
    return tuple(np.empty((count, *shape), dtype) for dtype, shape in of)


def zeros(inputs: Inputs, bucket: Bucket) -> Rows:
    """Returns arrays of a bucket's shapes that hold nothing but zeros."""
    of = layout(inputs, bucket.height, bucket.width)
    return tuple(np.zeros((bucket.batch, *shape), dtype) for dtype, shape in of)


def size_bytes(rows: Iterable[NDArray[Any]]) -> int:
    """Returns the bytes of several arrays."""
    return sum([each.nbytes for each in rows])


def selected(rows: Rows, index: Any) -> Rows:
    """Returns some of the rows: those of a slice as views, those of an array of numbers as copies."""
    return tuple([each[index] for each in rows])


def shapes(inputs: Inputs, bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """Returns the whole shape of each input in a bucket."""
    return tuple((bucket.batch, *each.row_shape(bucket.height, bucket.width)) for each in inputs)
