"""The inputs of a request: what clients may send for each input of a model, and the checks against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import NO_RESOLUTION, Images
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded, check_pixels
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.catalog import Model
from xlaserve.models.version import Served


class Readable(Protocol):
    """An array, or what `numpy.asarray` makes one of. Plain data, which can be pickled."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""

    def __array__(self) -> NDArray[Any]:
        """Returns the array. May raise InvalidArgument."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Pixels that are read and checked on a thread, as that takes too long for the event loop."""

    pixels: Readable
    """The array, in a shape that `image` takes."""
    pixel_range: PixelRange
    image: ImageInput = RGB

    @property
    def shape(self) -> tuple[int, ...]:
        """`[n, height, width, channels]`. Raises InvalidArgument for another shape."""
        return self.image.arranged_shape(self.pixels.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.pixels.nbytes

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def check(self) -> Images:
        """Reads the pixels and checks them as `decoder.check_pixels` does. Raises InvalidArgument."""
        return check_pixels(np.asarray(self.pixels), self.pixel_range, self.image)


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """An input that holds no images, which is read on a thread, as that takes too long for the event loop."""

    values: Readable
    """The array, in the type and the shape that the model takes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, whose first dimension is the batch."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.values.nbytes

    def __len__(self) -> int:
        return self.values.shape[0]

    def check(self) -> NDArray[Any]:
        """Reads the values. Raises InvalidArgument."""
        return np.asarray(self.values)


Array = NDArray[Any] | Pending | PendingTensor
"""Rows of an input, to be run as they are."""
Given = Array | Sequence[Encoded]
"""An input of a request: pixels `[n, height, width, channels]` that passed `decoder.check_pixels`, encoded
images, or a tensor in the type and the shape that the model takes; at least one row."""


ARRAYS: Final = (np.ndarray, Pending, PendingTensor)
"""Classes of `Array`."""


def size_of(model: Model, first: Array) -> Resolution:
    """Returns the size of the buckets in which a request runs, by the array of its first input. Raises InvalidArgument
    where that has other channels than the model."""
    if not model.inputs[0].is_image:
        _check_shape(model, 0, first, NO_RESOLUTION)
        return NO_RESOLUTION
    _, height, width, channels = first.shape
    if channels != model.image.channels:
        raise InvalidArgument(model.names[0], f"shape {model.image.text()}", list(first.shape))
    return height, width


def check_size(served: Served, first: Array, size: Resolution) -> None:
    """Raises InvalidArgument for images of a size that has no buckets."""
    if size not in served.sizes:
        sizes = " or ".join(served.model.image.text(*size) for size in sorted(served.sizes))
        raise InvalidArgument(served.model.names[0], f"shape {sizes}", list(first.shape))


def check_others(model: Model, given: Sequence[Given], size: Resolution) -> None:
    """Raises InvalidArgument where an array of the other inputs has another shape than in buckets of this size."""
    for place, one in enumerate(given[1:], start=1):
        if isinstance(one, ARRAYS):
            _check_shape(model, place, one, size)


def sizes_of(served: Served, given: Sequence[Given]) -> list[Resolution]:
    """Returns the sizes of the buckets in which a request with encoded images may run: where it has pixels of images of
    any size as well, theirs alone. Raises InvalidArgument where an array has another shape than in these."""
    first, model = given[0], served.model
    if isinstance(first, ARRAYS):
        size = size_of(model, first)
        check_size(served, first, size)
        sizes = [size]
    else:
        sizes = [size for size in served.inputs if _fit(model, given, size)] or list(served.inputs[:1])
    check_others(model, given, sizes[0])
    return sizes


def _fit(model: Model, given: Sequence[Given], size: Resolution) -> bool:
    """Returns whether all arrays of the inputs behind the first have the shapes of buckets of this size."""
    arrays = ((spec, one) for spec, one in zip(model.inputs[1:], given[1:], strict=True) if isinstance(one, ARRAYS))
    return all(tuple(one.shape[1:]) == spec.row_shape(*size) for spec, one in arrays)


def _check_shape(model: Model, place: int, given: Array, size: Resolution) -> None:
    shape = model.inputs[place].row_shape(*size)
    if tuple(given.shape[1:]) != shape:
        raise InvalidArgument(model.names[place], f"shape [n, {', '.join(map(str, shape))}]", list(given.shape))


def check_colors(model: Model, given: Sequence[Given]) -> None:
    """Raises InvalidArgument for encoded images of an input that takes none."""
    for place, (one, image) in enumerate(zip(given, (model.image, *model.others), strict=True)):
        if not isinstance(one, ARRAYS) and (image is None or image.color is None):
            raise model.no_pictures(place)
