"""Outputs as a wire with lists of its own would write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.fakes import served_with

from xlaserve.config import Mode
from xlaserve.engine.timings import Timings
from xlaserve.images.frame import whole
from xlaserve.models.task import Classification, Detection, Segmentation, Task
from xlaserve.pipeline.pipeline import Answer
from xlaserve.wire.shared.output_tensors import (
    MAX_COPIED_BYTES,
    OutputTensor,
    RenderedOutputs,
    WantedOutput,
    output_tensors,
    rendering_of,
)

SIDE = 8
COUNT = 3
RANDOM = np.random.default_rng(0)
BOXES = Detection(9, max_detections=5)
OUTPUTS = (
    RANDOM.random((COUNT, 5, 4), np.float32),
    RANDOM.random((COUNT, 5), np.float32),
    RANDOM.integers(-1, 9, (COUNT, 5), np.int32),
    RANDOM.integers(0, 5, COUNT).astype(np.int32),
)


@dataclass(frozen=True)
class Listing:
    """Lists integers at a cost, and floats at none."""

    integer_us: float = 1.0

    def us_per_value(self, datatype: str) -> float:
        return 0.0 if datatype == "FP32" else self.integer_us

    def numbers(self, values: np.ndarray[Any, Any]) -> list[bytes | memoryview]:
        return [f"{value};".encode() for value in values.reshape(-1).tolist()]

    def elements(self, elements: Sequence[bytes]) -> list[bytes | memoryview]:
        return [element + b";" for element in elements]


def images(count: int = COUNT) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((count, SIDE, SIDE, 3), np.uint8)


def tensors(
    wanted: Sequence[WantedOutput],
    task: Task,
    outputs: tuple[Any, ...],
    rendering: RenderedOutputs | None = None,
    listing: Listing = Listing(),
) -> list[OutputTensor]:
    frames, rendered = [whole(SIDE, SIDE)] * COUNT, []
    if rendering is not None:
        render = rendering.renderer(task)
        rendered = [render(tuple(one[row : row + 1] for one in outputs), frames[row]) for row in range(COUNT)]
    answer = Answer(Mode.GRAPH, COUNT, outputs, frames, rendered, Timings(), 0.0)
    return output_tensors(wanted, served_with(task, SIDE), answer, listing)


def joined(found: Sequence[OutputTensor]) -> list[tuple[Any, ...]]:
    return [(*tensor[:3], b"".join(tensor.values), tensor.is_raw) for tensor in found]


def test_slow_outputs_alone_are_rendered_and_say_the_same() -> None:
    boxes, scores, classes, count = BOXES.outputs
    wanted = [
        WantedOutput(0, boxes),
        WantedOutput(1, scores, is_raw=True),
        WantedOutput(2, classes),
        WantedOutput(3, count, is_raw=True),
    ]
    slow = Listing(integer_us=100.0)
    rendering = rendering_of(wanted, served_with(BOXES, SIDE), images(), slow)
    assert rendering == RenderedOutputs([wanted[2]], slow)
    rendered, inline = (tensors(wanted, BOXES, OUTPUTS, one, slow) for one in (rendering, None))
    assert joined(rendered) == joined(inline)
    assert [tensor.name for tensor in inline] == [spec.name for spec in BOXES.outputs]
    assert [tensor.datatype for tensor in inline] == ["FP32", "FP32", "INT32", "INT32"]
    assert [tensor.shape for tensor in inline] == [values.shape for values in OUTPUTS]
    assert joined(inline)[1][3] == OUTPUTS[1].tobytes()


@pytest.mark.parametrize(("integer_us", "is_inline"), [(66.0, True), (67.0, False)])
def test_what_takes_up_to_a_millisecond_is_written_on_the_event_loop(integer_us: float, is_inline: bool) -> None:
    wanted = [WantedOutput(2, BOXES.outputs[2])]  # 15 integers
    rendering = rendering_of(wanted, served_with(BOXES, SIDE), images(), Listing(integer_us))
    assert (rendering is None) == is_inline


def test_an_output_of_the_images_size_costs_as_many_values_as_pixels() -> None:
    task = Segmentation(3)
    wanted, served = [WantedOutput(0, task.outputs[0])], served_with(task, SIDE)
    limit = 1000.0 / (COUNT * SIDE * SIDE)
    for listing, is_inline in ((Listing(limit * 0.99), True), (Listing(limit * 1.01), False)):
        for given in (images(), [b"image"] * COUNT):
            assert (rendering_of(wanted, served, given, listing) is None) == is_inline


@pytest.mark.parametrize("is_raw", [True, False])
def test_classes_stand_in_place_of_scores_however_they_are_written(is_raw: bool) -> None:
    task = Classification(3, ("a", "b", "c"))
    scores = np.array([[0.1, 0.5, 0.4], [0.7, 0.2, 0.1], [0.0, 0.1, 0.9]], np.float32)
    wanted = [WantedOutput(0, task.outputs[0], is_raw, classes=2)]
    expected = [b"0.500000:1:b", b"0.400000:2:c", b"0.700000:0:a", b"0.200000:1:b", b"0.900000:2:c", b"0.100000:1:b"]
    sent = b"".join(len(one).to_bytes(4, "little") + one for one in expected) if is_raw else b";".join(expected) + b";"
    for rendering in (None, RenderedOutputs(wanted, Listing())):
        found = joined(tensors(wanted, task, (scores,), rendering))
        assert found == [("scores", "BYTES", (3, 2), sent, is_raw)]


def test_large_raw_outputs_are_viewed_and_small_ones_copied() -> None:
    task = Classification(3)
    for rows, is_viewed in ((COUNT, False), (MAX_COPIED_BYTES, True)):
        scores = np.zeros((rows, 3), np.float32)
        (tensor,) = tensors([WantedOutput(0, task.outputs[0], is_raw=True)], task, (scores,))
        assert isinstance(tensor.values[0], memoryview) == is_viewed
        assert b"".join(tensor.values) == scores.tobytes()
