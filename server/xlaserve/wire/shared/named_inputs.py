"""The inputs of a request to a model of several inputs, or of one that holds no images, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import PixelRange
from xlaserve.engine.inputs import InputSpec
from xlaserve.errors import InvalidArgument
from xlaserve.images.image_input import ImageInput
from xlaserve.models.catalog import Model
from xlaserve.pipeline.request_inputs import Given, PendingTensor
from xlaserve.wire.shared.input_tensors import (
    FRACTIONS,
    MAX_SHOWN,
    TENSOR_DATATYPES,
    InputTensor,
    array_of,
    bounded,
    check_unknown,
    checked_shape,
    encoded_of,
    listed_numbers,
    pixels_of,
)


def names_of(model: Model, input_name: str = "") -> Sequence[str]:
    """Returns the names of a model's inputs for clients; `input_name` is that of an only one."""
    return [input_name] if input_name and len(model.names) == 1 else model.names


def flags_of(model: Model, input_name: str = "") -> Mapping[str, bool]:
    """Returns whether each of a model's inputs takes true and false, by the names for clients."""
    return {
        name: datatype_of(spec) == "BOOL" for name, spec in zip(names_of(model, input_name), model.inputs, strict=True)
    }


def datatype_of(spec: InputSpec) -> str:
    """Returns the protocol's datatype of an input that holds no images."""
    return TENSOR_DATATYPES[np.dtype(spec.dtype)]


def inputs_of(
    tensors: Iterable[InputTensor],
    model: Model,
    default_range: PixelRange = PixelRange.LEVELS,
    pixel_range: PixelRange | None = None,
    *,
    input_name: str = "",
    is_strict: bool = False,
) -> tuple[Given, ...]:
    """Returns what a request has for each input of a model, in its order; see `input_tensors.images_of`.

    Raises InvalidArgument where one is missing, unknown, or not as the model takes it.
    """
    names = names_of(model, input_name)
    listed = ", ".join(map(repr, names))
    found: dict[str, InputTensor] = {}
    for tensor in islice(tensors, len(names) + 1):
        if tensor.name not in names or tensor.name in found:
            raise InvalidArgument("inputs", f"{listed}, each once", repr(tensor.name[:64]))
        for key in bounded(tensor.parameters, f"inputs.{tensor.name}.parameters"):
            check_unknown(key, f"inputs.{tensor.name}", is_strict=is_strict)
        found[tensor.name] = tensor
    if missing := [name for name in names if name not in found]:
        raise InvalidArgument("inputs", listed, f"no {', '.join(map(repr, missing[:MAX_SHOWN]))}")
    if pixel_range is PixelRange.UNIT and not any(
        spec.is_image and found[name].datatype in FRACTIONS for name, spec in zip(names, model.inputs, strict=True)
    ):
        expected = f"{PixelRange.UNIT} with images of {' or '.join(FRACTIONS)} alone"
        raise InvalidArgument("parameters.pixel_range", expected, "none")
    images = (model.image, *model.others)
    given = tuple(
        _image_input(found[name], image, pixel_range or default_range, name)
        if spec.is_image and image is not None
        else _tensor_input(found[name], spec, name)
        for name, spec, image in zip(names, model.inputs, images, strict=True)
    )
    for name, one in zip(names, given, strict=True):
        if len(one) != len(given[0]):
            expected = f"{len(given[0])} in the first place, as {names[0]!r} has"
            raise InvalidArgument(f"{name}.shape", expected, list(found[name].shape[:16]))
    return given


def cast(numbers: NDArray[Any], dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Returns numbers in the type of an input. Raises InvalidArgument where it does not have them."""
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if numbers.dtype.kind not in "iub":
            raise InvalidArgument(field, f"whole numbers from {least} to {most}", "fractions")
        if numbers.size and (int(numbers.min()) < least or int(numbers.max()) > most):
            raise InvalidArgument(field, f"numbers from {least} to {most}", f"{numbers.min()} to {numbers.max()}")
    try:
        with np.errstate(over="raise"):
            return numbers.astype(dtype)
    except FloatingPointError:
        raise InvalidArgument(
            field, f"numbers within {dtype.name}", f"{numbers.min():g} to {numbers.max():g}"
        ) from None


def _image_input(tensor: InputTensor, image: ImageInput, pixel_range: PixelRange, name: str) -> Given:
    raw = tensor.raw()
    if tensor.datatype == "BYTES":
        return encoded_of(tensor, raw, name)
    return pixels_of(tensor, raw, image, pixel_range, name)


def _tensor_input(tensor: InputTensor, spec: InputSpec, name: str) -> Given:
    raw, dtype, datatype = tensor.raw(), np.dtype(spec.dtype), datatype_of(spec)
    if tensor.datatype != datatype and tensor.states_datatype:
        raise InvalidArgument(f"{name}.datatype", datatype, repr(tensor.datatype[:32]))
    expected = f"[{', '.join(map(str, ('n', *spec.shape)))}]"
    shape = checked_shape(tensor, name, expected, ranks=(1 + len(spec.shape),))
    if shape[1:] != spec.shape:
        raise InvalidArgument(f"{name}.shape", expected, list(shape))
    if raw is None:
        numbers = listed_numbers(tensor, shape, dtype)
        return numbers if isinstance(numbers, np.ndarray) else PendingTensor(numbers)
    if dtype == np.bool_:
        flags: NDArray[np.bool_] = array_of(tensor, raw, np.dtype(np.uint8), shape, name) != 0
        return flags
    return array_of(tensor, raw, dtype.newbyteorder("<"), shape, name)
