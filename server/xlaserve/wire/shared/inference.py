"""Requests of the Open Inference Protocol, and of TensorFlow Serving's Predict, checked and parsed from plain data.

A request is named input tensors, the outputs that it asks for, and parameters: pairs of a name and a value as JSON has
it, `bool`, `int`, `float` or `str`, None for none. Lists of parameters and of outputs are read only up to what is
refused, as clients may send thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from xlaserve.config import PixelRange
from xlaserve.engine.inputs import Images
from xlaserve.engine.request import DEFAULT_PRIORITY, WEIGHTS
from xlaserve.errors import InvalidArgument, UnsupportedFeature, shown
from xlaserve.models.task import Task, TensorSpec, classification_at
from xlaserve.pipeline.pipeline import Request
from xlaserve.pipeline.request_inputs import Given
from xlaserve.wire.shared import slips
from xlaserve.wire.shared.call import Call
from xlaserve.wire.shared.input_tensors import InputTensor, bounded, check_unknown, images_of
from xlaserve.wire.shared.named_inputs import inputs_of
from xlaserve.wire.shared.output_tensors import Listing, WantedOutput, rendering_of

CLASSIFICATION: Final = "classification"
EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"
"""Sent by Triton's clients. It means nothing here: each request gets exactly one response."""
SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")
NO_SEQUENCE: Final = (0, "", False)
"""Values of these parameters that ask for nothing."""
PARAMETERS: Final = "mode, pixel_range, timeout or priority"
NAMES: Final = frozenset({"mode", "pixel_range", "timeout", "priority"})
INT64_END: Final = 2**63


class Parameters(NamedTuple):
    """The options that a request's parameters set."""

    mode: str = ""
    timeout_s: float = math.inf
    """Seconds from when its call began, whose deadline may be earlier."""
    pixel_range: PixelRange | None = None
    unknown: str | None = None
    """Name of a parameter that is not ours; models with `strict_parameters` refuse it, others ignore it."""
    priority: int = DEFAULT_PRIORITY
    slip: str = ""
    """Warning of an unknown parameter with a name close to one of ours."""

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


class RequestedOutput(NamedTuple):
    """An output that a request names."""

    name: str
    parameters: Iterable[tuple[str, object]] = ()
    """Names and values of its parameters, except those that the wire itself acts on."""
    is_raw: bool = False


class InferRequest(NamedTuple):
    """A request to run a model, as any wire has it."""

    inputs: Iterable[InputTensor]
    outputs: Iterable[RequestedOutput] = ()
    """Empty, and then false, for all outputs of the model."""
    parameters: Parameters = Parameters()
    is_raw: bool = False
    """Whether outputs are wanted raw where the request names none."""
    id: str = ""
    """The client's name for it, which its answer has as well."""
    known_images: Images | None = None
    """Raw UINT8 pixels of a shape that `images_of` has checked in an earlier request; `inputs` are not read then."""


def parse(request: InferRequest, call: Call, listing: Listing) -> tuple[Request, Sequence[WantedOutput]]:
    """Returns the request for the pipeline, and the outputs to answer; `listing` writes those that are not raw.

    Raises InvalidArgument or UnsupportedFeature.
    """
    served, parameters = call.served, request.parameters
    task, settings = served.model.task, served.settings
    is_strict = settings.strict_parameters
    parameters.check_unknown(is_strict=is_strict)
    if request.outputs:
        wanted = check_outputs(request.outputs, task, settings.output_name, is_strict=is_strict)
    else:
        wanted = all_outputs(task, settings.output_name, is_raw=request.is_raw)
    others: tuple[Given, ...] = ()
    images: Given
    ranges = settings.pixel_range, parameters.pixel_range
    if request.known_images is not None:
        images = request.known_images
    elif served.model.is_of_one_image:
        images = images_of(
            request.inputs,
            *ranges,
            image=served.model.image,
            input_name=settings.input_name,
            is_strict=is_strict,
        )
    else:
        images, *rest = inputs_of(
            request.inputs, served.model, *ranges, input_name=settings.input_name, is_strict=is_strict
        )
        others = tuple(rest)
    until = min(call.deadline, call.began + parameters.timeout_s)
    rendering = rendering_of(wanted, served, images, listing)
    return Request(parameters.mode, images, until, rendering, parameters.priority, others=others), wanted


def outputs_of(task: Task, output_name: str = "") -> Sequence[TensorSpec]:
    """Returns the outputs by the names that clients see; `output_name` is that of an only one."""
    specs = task.outputs
    return [specs[0]._replace(name=output_name)] if output_name and len(specs) == 1 else specs


def all_outputs(task: Task, output_name: str = "", *, is_raw: bool = False) -> list[WantedOutput]:
    """Returns all outputs of the model, for a request that names none."""
    return [WantedOutput(place, spec, is_raw) for place, spec in enumerate(outputs_of(task, output_name))]


def check_outputs(
    requested: Iterable[RequestedOutput], task: Task, output_name: str = "", *, is_strict: bool = False
) -> list[WantedOutput]:
    """Returns the outputs that a request names, at least one, in the order of the model.

    Unknown parameters are refused where `is_strict`, else ignored. Raises InvalidArgument or UnsupportedFeature.
    """
    specs = outputs_of(task, output_name)
    names = [spec.name for spec in specs]
    named: dict[str, RequestedOutput] = {}
    for output in islice(requested, len(specs) + 1):
        if output.name not in names or output.name in named:
            raise InvalidArgument("outputs", f"{' or '.join(names)}, each at most once", repr(output.name[:64]))
        named[output.name] = output
    return [
        WantedOutput(place, spec, named[spec.name].is_raw, _classes(named[spec.name], task, place, is_strict=is_strict))
        for place, spec in enumerate(specs)
        if spec.name in named
    ]


def _classes(output: RequestedOutput, task: Task, place: int, *, is_strict: bool) -> int:
    """Returns how many classes are to stand in place of an output's scores; 0 for the scores."""
    classes = 0
    for key, value in bounded(output.parameters, f"outputs.{output.name}.parameters"):
        if key != CLASSIFICATION:
            check_unknown(key, f"outputs.{output.name}", is_strict=is_strict)
            continue
        field = f"outputs.{output.name}.{CLASSIFICATION}"
        if (classification := classification_at(task, place)) is None:
            raise UnsupportedFeature(f"{field}: the model's task is {task.name}")
        classes = min(_at_least_1(value, field), classification.classes)
    return classes
