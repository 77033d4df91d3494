"""What an inference request of the Open Inference Protocol asks for, in addition to its images: checked, as plain data.

Parameters are pairs of a name and a value as JSON has it: `bool`, `int`, `float` or `str`, None for none. Lists of them
and of outputs are read only up to what is refused, as clients may send thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from xlaserve.config import PixelRange
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.image import Encoded
from xlaserve.model.task import Classification, Task, TensorSpec
from xlaserve.model.version import Served
from xlaserve.pipeline import Pending
from xlaserve.protocol.tensors import unknown_parameter

CLASSIFICATION: Final = "classification"
PARAMETERS: Final = "mode, pixel_range, timeout or priority"
INT64_END: Final = 2**63
MAX_INLINE_US: Final = 1000.0
"""Responses that take up to this long, by the times below, are made on the event loop; others on threads."""
CATEGORY_US: Final = 2.0
SORT_US: Final = 0.02


class Parameters(NamedTuple):
    """What a request's parameters ask for."""

    mode: str = ""
    timeout_s: float = math.inf
    """Seconds from when its call began, whose deadline may be earlier."""
    pixel_range: PixelRange | None = None


def check_parameters(parameters: Iterable[tuple[str, object]]) -> Parameters:
    """Returns what a request's parameters ask for. Raises InvalidArgument or UnsupportedFeature."""
    mode, timeout_s, pixel_range = Parameters()
    for key, value in parameters:
        if key == "mode":
            if not isinstance(value, str):
                raise InvalidArgument("parameters.mode", "a string", _text(value))
            mode = value
        elif key == "pixel_range":
            pixel_range = _pixel_range(value)
        elif key == "timeout":
            timeout_s = _at_least_1(value, "parameters.timeout", ", in microseconds") / 1e6
        elif key == "priority":
            if type(value) is not int or value:
                raise UnsupportedFeature("parameters.priority: only 0 is supported, all requests are alike")
        elif key.startswith("sequence_"):
            raise UnsupportedFeature(f"parameters.{key[:64]}: sequences are not supported, no model keeps state")
        elif key.startswith("triton_"):
            raise UnsupportedFeature(f"parameters.{key[:64]}: not supported; expected {PARAMETERS}")
        else:
            raise InvalidArgument("parameters", PARAMETERS, repr(key[:64]))
    return Parameters(mode, timeout_s, pixel_range)


def _pixel_range(value: object) -> PixelRange:
    try:
        return PixelRange(str(value))
    except ValueError:
        expected = f"a string, {' or '.join(PixelRange)}"
        raise InvalidArgument("parameters.pixel_range", expected, _text(value)) from None


def _at_least_1(value: object, field: str, unit: str = "") -> int:
    if type(value) is not int or not 1 <= value < INT64_END:
        raise InvalidArgument(field, f"an int64 of at least 1{unit}", _text(value))
    return value


def _text(value: object) -> str:
    return "nothing" if value is None else repr(value)[:64]


class Wanted(NamedTuple):
    """The outputs that a request asks for."""

    outputs: Sequence[tuple[int, TensorSpec]]
    """Each with its index among the task's."""
    classes: int = 0
    """How many of the likeliest classes are to stand in place of a classifier's scores; 0 for the scores."""

    def count_values(self, served: Served, images: Images | Pending | Sequence[Encoded]) -> int:
        """Returns how many values the outputs have for these images at most."""
        pixels = max(height * width for height, width in served.inputs)
        if isinstance(images, (np.ndarray, Pending)):
            pixels = images.shape[1] * images.shape[2]
        sizes = (pixels if -1 in spec.shape[1:] else math.prod(spec.shape[1:]) for _, spec in self.outputs)
        return len(images) * sum(sizes)


def all_outputs(task: Task) -> Wanted:
    """Returns what a request asks for that names no outputs."""
    return Wanted([*enumerate(task.outputs)])


def check_outputs(requested: Iterable[tuple[str, Iterable[tuple[str, object]]]], task: Task) -> Wanted:
    """Returns what a request asks for that names these outputs, with their parameters; all where it names none.

    Raises InvalidArgument or UnsupportedFeature.
    """
    specs = task.outputs
    named = [*islice(requested, len(specs) + 1)]
    if not named:
        return all_outputs(task)
    names = [spec.name for spec in specs]
    wanted = [name for name, _ in named]
    for name in wanted:
        if name not in names or wanted.count(name) > 1:
            raise InvalidArgument("outputs", f"each of {', '.join(names)} once at most", repr(name[:64]))
    classes = 0
    for name, parameters in named:
        for key, value in parameters:
            if key != CLASSIFICATION:
                raise unknown_parameter(key, f"outputs.{name}")
            field = f"outputs.{name}.{CLASSIFICATION}"
            if not isinstance(task, Classification):
                raise UnsupportedFeature(f"{field}: the model's task is {task.name}")
            classes = min(_at_least_1(value, field), task.classes)
    return Wanted([one for one in enumerate(specs) if one[1].name in wanted], classes)


def fits_inline(images: Sized, k: int, classes: int) -> bool:
    """Whether the `k` likeliest of `classes` classes of each image are found and written on the event loop."""
    return len(images) * (k * CATEGORY_US + classes * SORT_US) <= MAX_INLINE_US


def categories(task: Classification, outputs: Outputs, k: int) -> list[list[bytes]]:
    """Returns for each image its `k` likeliest classes, as the `classification` extension writes them."""
    return [
        [f"{category.score:f}:{category.index}:{category.label}".encode() for category in row]
        for row in task.top(outputs, k)
    ]
