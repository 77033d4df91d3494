"""Parameters and outputs of an Open Inference Protocol request: checked, as plain data.

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
from xlaserve.engine.request import DEFAULT_PRIORITY, WEIGHTS
from xlaserve.errors import InvalidArgument, UnsupportedFeature, shown
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Classification, Task, TensorSpec
from xlaserve.models.version import Served
from xlaserve.pipeline import Pending
from xlaserve.wire.shared import slips
from xlaserve.wire.shared.input_tensors import bounded, check_unknown

CLASSIFICATION: Final = "classification"
EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"
"""Sent by Triton's clients. It means nothing here: each request gets exactly one response."""
SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")
NO_SEQUENCE: Final = (0, "", False)
"""Values of those that ask for nothing."""
PARAMETERS: Final = "mode, pixel_range, timeout or priority"
NAMES: Final = frozenset({"mode", "pixel_range", "timeout", "priority"})
INT64_END: Final = 2**63
MAX_INLINE_US: Final = 1000.0
"""Responses that take up to this long, by the times below, are made on the event loop; others on threads."""
CATEGORY_US: Final = 2.0
SORT_US: Final = 0.02


class Parameters(NamedTuple):
    """The options that a request's parameters set."""

    mode: str = ""
    timeout_s: float = math.inf
    """Seconds from when its call began, whose deadline may be earlier."""
    pixel_range: PixelRange | None = None
    unknown: str | None = None
    """Name of one that is not ours; models with `strict_parameters` refuse it, others ignore it."""
    priority: int = DEFAULT_PRIORITY
    slip: str = ""
    """Warning of an unknown one that is close to one of ours."""

    def check_unknown(self, *, is_strict: bool) -> None:
        """Raises InvalidArgument for an unknown parameter where those are refused; else the answer warns of a slip."""
        if is_strict and self.unknown is not None:
            raise InvalidArgument("parameters", PARAMETERS, repr(self.unknown[:64]))
        slips.warn(self.slip)


def check_parameters(parameters: Iterable[tuple[str, object]]) -> Parameters:
    """Returns what a request's parameters ask for. Raises InvalidArgument or UnsupportedFeature."""
    mode, timeout_s, pixel_range, unknown, priority, slip = Parameters()
    for key, value in bounded(parameters, "parameters"):
        if key == "mode":
            if not isinstance(value, str):
                raise InvalidArgument("parameters.mode", "a string", shown(value))
            mode = value
        elif key == "pixel_range":
            pixel_range = _pixel_range(value)
        elif key == "timeout":
            timeout_s = _at_least_1(value, "parameters.timeout", ", in microseconds") / 1e6
        elif key == "priority":
            priority = check_priority(value, "parameters.priority")
        elif key in SEQUENCE:
            if value not in NO_SEQUENCE:
                raise UnsupportedFeature(f"parameters.{key}: sequences are not supported, no model keeps state")
        elif key == EMPTY_FINAL_RESPONSE:
            if type(value) is not bool:
                raise InvalidArgument(f"parameters.{key}", "a boolean", shown(value))
        else:
            unknown = key
            slip = slip or slips.slip_in([key], NAMES)
    return Parameters(mode, timeout_s, pixel_range, unknown, priority, slip)


def check_priority(value: object, field: str) -> int:
    """Returns the priority that a request asks for as Triton has it: 0 for the default. Raises InvalidArgument."""
    if type(value) is not int or value not in (0, *WEIGHTS):
        raise InvalidArgument(field, f"1 (the highest) to {max(WEIGHTS)}, or 0 for {DEFAULT_PRIORITY}", shown(value))
    return value or DEFAULT_PRIORITY


def _pixel_range(value: object) -> PixelRange:
    if value not in [*PixelRange]:
        raise InvalidArgument("parameters.pixel_range", f"a string, {' or '.join(PixelRange)}", shown(value))
    return PixelRange(str(value))


def _at_least_1(value: object, field: str, unit: str = "") -> int:
    if type(value) is not int or not 1 <= value < INT64_END:
        raise InvalidArgument(field, f"an int64 of at least 1{unit}", shown(value))
    return value


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


def outputs_of(task: Task, output_name: str = "") -> Sequence[TensorSpec]:
    """Returns the outputs by the names that clients see; `output_name` is that of an only one."""
    specs = task.outputs
    return [specs[0]._replace(name=output_name)] if output_name and len(specs) == 1 else specs


def all_outputs(task: Task, output_name: str = "") -> Wanted:
    """Returns what a request asks for that names no outputs."""
    return Wanted([*enumerate(outputs_of(task, output_name))])


def check_outputs(
    requested: Iterable[tuple[str, Iterable[tuple[str, object]]]],
    task: Task,
    output_name: str = "",
    *,
    is_strict: bool = False,
) -> Wanted:
    """Returns what a request asks for that names these outputs, with their parameters; all where it names none.

    Unknown parameters are refused where `is_strict`, else ignored. Raises InvalidArgument or UnsupportedFeature.
    """
    specs = outputs_of(task, output_name)
    named = [*islice(requested, len(specs) + 1)]
    if not named:
        return all_outputs(task, output_name)
    names = [spec.name for spec in specs]
    wanted = [name for name, _ in named]
    for name in wanted:
        if name not in names or wanted.count(name) > 1:
            raise InvalidArgument("outputs", f"{' or '.join(names)}, each at most once", repr(name[:64]))
    classes = 0
    for name, parameters in named:
        for key, value in bounded(parameters, f"outputs.{name}.parameters"):
            if key != CLASSIFICATION:
                check_unknown(key, f"outputs.{name}", is_strict=is_strict)
                continue
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
