"""The inputs of a model by their names: what callers pass for them, checked against the model's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xlaserve_client import images, tensors
from xlaserve_client.images import Encoded

Inputs = Mapping[str, Encoded | Sequence[Encoded] | ArrayLike]
"""The values of each input, by its name: encoded images for inputs that hold images, arrays of the model's own shapes
and types for these and all others. Integers and floating point of other sizes are converted. An array without the
first dimension is one row."""

ANY: Final = -1
"""A side of any length in metadata."""
_PIXELS: Final = "UINT8"
_PIXEL_RANKS: Final = (3, 4)
"""Numbers of dimensions of inputs of UINT8 that may hold images, the batch among them."""
_ENCODED: Final = (str, PathLike, bytes, bytearray, memoryview)


class Declared(NamedTuple):
    """An input as the metadata of a model declare it."""

    datatype: str
    """The protocol's name of the type; BYTES for encoded images."""
    shape: tuple[int, ...]
    """The shape with the batch; ANY where a side has any length."""


class ModelInputs(NamedTuple):
    """The inputs of a model."""

    declared: Mapping[str, Declared]
    """All inputs, each of which a request must have."""
    names: tuple[str, ...]
    """Names that a request may use: those of `declared`, and other names of the only one, such as `image` for encoded
    images of a model of `pixels`."""


class InputTensor(NamedTuple):
    """An input of a request, as it is sent."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes
    """Contents in the form of `raw_input_contents`."""


def any_on_disk(inputs: Inputs) -> bool:
    """Returns whether `load` will read files."""
    return any(_is_encoded(value) and images.any_on_disk(value) for value in inputs.values())


def load(inputs: Inputs, model: ModelInputs) -> list[InputTensor]:
    """Returns the inputs of a request in the order of `inputs`.

    Raises ValueError for missing, unknown and empty inputs, other shapes, numbers beyond the type's range and
    different numbers of rows; TypeError for arrays of another type; OSError for a file that can't be read.
    """
    if len(inputs) != len(model.declared) or not set(inputs) <= set(model.names):
        expected = ", ".join(model.declared)
        raise ValueError(f"inputs: expected {expected}, got {', '.join(map(repr, inputs)) or 'none'}")
    loaded = [_load(name, value, model.declared.get(name)) for name, value in inputs.items()]
    first, *others = loaded
    for one in (first, *others):
        if not one.shape or one.shape[0] != first.shape[0] or not one.shape[0]:
            rows = f"{first.shape[0]} rows, as {first.name} has" if one is not first else "at least one row"
            raise ValueError(f"{one.name}: expected {rows}, got shape {list(one.shape)}")
    return loaded


def _load(name: str, value: Any, declared: Declared | None) -> InputTensor:
    if _is_encoded(value):
        files = images.load(value)
        assert isinstance(files, list)
        return InputTensor(name, tensors.BYTES, (len(files),), tensors.bytes_to_raw(files))
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected encoded images or an array: {error}") from None
    if declared is not None and declared.datatype != tensors.BYTES:
        array = _shaped(name, _cast(name, array, declared), declared.shape)
    return InputTensor(name, tensors.datatype(array), array.shape, tensors.to_raw(array))


def _is_encoded(value: object) -> TypeGuard[images.Images]:
    return isinstance(value, _ENCODED) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, _ENCODED) for one in value)
    )


def _cast(name: str, array: NDArray[Any], declared: Declared) -> NDArray[Any]:
    dtype = tensors.dtype(declared.datatype)
    # Pixels may be sent in floating point too, which the server checks by the model's own range.
    if declared.datatype == _PIXELS and len(declared.shape) in _PIXEL_RANKS and array.dtype in (np.float16, np.float32):
        return array
    kinds = {"b": "b", "f": "fiu"}.get(dtype.kind, "iu")
    if array.dtype.kind not in kinds:
        raise TypeError(f"{name}: expected {dtype.name}, got {array.dtype}")
    if dtype.kind in "iu" and array.size:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if int(array.min()) < least or int(array.max()) > most:
            raise ValueError(f"{name}: expected numbers from {least} to {most}, got {array.min()} to {array.max()}")
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def _shaped(name: str, array: NDArray[Any], declared: tuple[int, ...]) -> NDArray[Any]:
    """Returns an array in the declared shape: as it is, as one row, or with its numbers as rows of one number."""
    for shaped in _with_sides(array):
        if shaped.ndim == len(declared) and all(
            own in (side, ANY) for side, own in zip(shaped.shape[1:], declared[1:], strict=True)
        ):
            return shaped
    expected = ", ".join(
        "n" if not place else "any" if side == ANY else str(side) for place, side in enumerate(declared)
    )
    raise ValueError(f"{name}: expected shape [{expected}], got {list(array.shape)}")


def _with_sides(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    yield array
    yield array[np.newaxis]
    yield array[..., np.newaxis]
    yield array[np.newaxis, ..., np.newaxis]
