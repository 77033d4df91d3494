"""Output tensors of the Open Inference Protocol, and of TensorFlow Serving's Predict, from a model's outputs.

Raw tensors are the same bytes on every wire. A wire adds how it lists values, and writes what stands around tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from itertools import chain
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs, Value
from xlaserve.models.task import DATATYPES, Classification, Datatype, Task, TensorSpec, classification_at
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Render
from xlaserve.pipeline.request_inputs import ARRAYS, Given
from xlaserve.wire.shared.input_tensors import raw_bytes
from xlaserve.wire.shared.parts import Part

MAX_COPIED_BYTES: Final = 64 * 1024
"""Outputs up to this size are copied before the response is put together: that costs less than a view."""
MAX_INLINE_US: Final = 1000.0
"""Responses that take up to this long to write are made on the event loop; others on threads."""
CATEGORY_US: Final = 2.0
SORT_US: Final = 0.02


class Listing(Protocol):
    """Writes values as a wire lists them in its messages."""

    def us_per_value(self, datatype: Datatype) -> float:
        """Returns how many microseconds a number takes; 0 where listing is no work."""

    def numbers(self, values: NDArray[Value]) -> list[Part]:
        """Returns the numbers of some of a tensor's rows, listed."""

    def elements(self, elements: Sequence[bytes]) -> list[Part]:
        """Returns some elements of a BYTES tensor, listed."""


class WantedOutput(NamedTuple):
    """An output that a request asks for."""

    place: int
    """The index among the task's outputs."""
    spec: TensorSpec
    """The output by the name that clients see."""
    is_raw: bool = False
    """Whether it is sent as bytes, not as a list of values."""
    classes: int = 0
    """The number of likeliest classes to answer in place of a classifier's scores; 0 for the scores."""

    def takes_time(self, listing: Listing) -> bool:
        """Whether it has to be written value by value."""
        return bool(self.classes) or (not self.is_raw and listing.us_per_value(self.spec.datatype) > 0)

    def cost_us(self, listing: Listing, pixels: int) -> float:
        """Returns how many microseconds it takes to write for an image of so many pixels, where it `takes_time`."""
        sides = self.spec.shape[1:]
        if self.classes:
            return category_us(self.classes, sides[0])
        values = math.prod(side for side in sides if side != -1) * (pixels if -1 in sides else 1)
        return listing.us_per_value(self.spec.datatype) * values

    def write(self, task: Task, outputs: Outputs, listing: Listing) -> list[Part]:
        """Returns its values in rows of a program's outputs, as they are sent."""
        if self.classes:
            classification = classification_at(task, self.place)
            assert classification is not None
            elements = [*chain.from_iterable(categories(classification, outputs, self.classes))]
            return [raw_bytes(elements)] if self.is_raw else listing.elements(elements)
        values = outputs[self.place]
        return [raw_part(values)] if self.is_raw else listing.numbers(values)


class RenderedOutputs(NamedTuple):
    """Writes an image's rows of some outputs."""

    outputs: Sequence[WantedOutput]
    listing: Listing

    def renderer(self, task: Task) -> Render:
        """Returns the function that writes a list of parts for each of the outputs."""
        return lambda outputs, frame: [one.write(task, outputs, self.listing) for one in self.outputs]


class OutputTensor(NamedTuple):
    """An output tensor of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Part]
    """The tensor's bytes, or its values as the wire's `Listing` writes them."""
    is_raw: bool


def rendering_of(
    wanted: Sequence[WantedOutput], served: Served, images: Given, listing: Listing
) -> RenderedOutputs | None:
    """Returns the rendering that writes each image's rows on a thread; None where the event loop can do it."""
    slow = [one for one in wanted if one.takes_time(listing)]
    if not slow:
        return None
    pixels = max(height * width for height, width in served.inputs)
    if isinstance(images, ARRAYS) and len(images.shape) == len("NHWC"):
        pixels = images.shape[1] * images.shape[2]
    cost_us = len(images) * sum(one.cost_us(listing, pixels) for one in slow)
    return RenderedOutputs(slow, listing) if cost_us > MAX_INLINE_US else None


def output_tensors(
    wanted: Sequence[WantedOutput], served: Served, answer: Answer, listing: Listing
) -> list[OutputTensor]:
    """Returns the wanted outputs of an answer, some rendered on threads before, the others written now."""
    task, outputs = served.model.task, answer.outputs
    rendered = zip(*answer.rendered, strict=True) if answer.rendered else None
    tensors = []
    for one in wanted:
        if rendered is not None and one.takes_time(listing):
            values = [*chain.from_iterable(next(rendered))]
        else:
            values = one.write(task, outputs, listing)
        if one.classes:
            datatype, shape = "BYTES", (answer.images, one.classes)
        else:
            output = outputs[one.place]
            datatype, shape = DATATYPES[output.dtype], output.shape
        tensors.append(OutputTensor(one.spec.name, datatype, shape, values, one.is_raw))
    return tensors


def raw_part(values: NDArray[Value]) -> Part:
    """Returns the bytes of an output: a view where it is large."""
    return values.tobytes() if values.nbytes <= MAX_COPIED_BYTES else np.ascontiguousarray(values).data.cast("B")


def category_us(k: int, classes: int) -> float:
    """Returns how many microseconds it takes to find and write the `k` likeliest of an image's classes."""
    return k * CATEGORY_US + classes * SORT_US


def fits_inline(images: Sized, k: int, classes: int) -> bool:
    """Whether the `k` likeliest of `classes` classes of each image are found and written on the event loop."""
    return len(images) * category_us(k, classes) <= MAX_INLINE_US


def categories(task: Classification, outputs: Outputs, k: int) -> list[list[bytes]]:
    """Returns for each image its `k` likeliest classes, as the `classification` extension writes them."""
    return [
        [f"{category.score:f}:{category.index}:{category.label}".encode() for category in row]
        for row in task.top(outputs, k)
    ]
