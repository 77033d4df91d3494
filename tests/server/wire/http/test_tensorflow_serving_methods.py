from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from xlaserve.config import Mode
from xlaserve.engine.timings import Timings
from xlaserve.images.frame import whole
from xlaserve.models.task import Classification, Detection, Segmentation, Task
from xlaserve.pipeline.pipeline import Answer
from xlaserve.wire.http import tensorflow_serving_methods as serving
from xlaserve.wire.shared.inference import all_outputs
from xlaserve.wire.shared.output_tensors import RenderedOutputs
from xlaserve.wire.shared.tensorflow_serving_models import LikeliestClasses

RANDOM = np.random.default_rng(0)
TASKS: dict[str, tuple[Task, tuple[Any, ...]]] = {
    "scores": (Classification(4), (RANDOM.random((3, 4), np.float32),)),
    "maps": (Segmentation(3), (RANDOM.integers(0, 3, (3, 5, 6), np.uint8),)),
    "boxes": (
        Detection(9, max_detections=7),
        (
            RANDOM.random((3, 7, 4), np.float32),
            RANDOM.random((3, 7), np.float32),
            RANDOM.integers(-1, 9, (3, 7), np.int32),
            RANDOM.integers(0, 7, 3).astype(np.int32),
        ),
    ),
}


def answered(task: Task, outputs: tuple[Any, ...], *, is_rows: bool) -> Any:
    answer = Answer(Mode.GRAPH, 3, outputs, [whole(5, 6)] * 3, (), Timings(), 0.0)
    wanted = all_outputs(task)
    render = RenderedOutputs(wanted, serving.LISTING).renderer(task)
    rows = [render(one, answer.frames[0]) for one in serving._rows(answer)]
    return json.loads(b"".join(serving._respond(rows, wanted, is_rows=is_rows)))


@pytest.mark.parametrize("name", TASKS)
def test_rows_and_columns_hold_the_outputs(name: str) -> None:
    task, outputs = TASKS[name]
    rows = answered(task, outputs, is_rows=True)["predictions"]
    columns = answered(task, outputs, is_rows=False)["outputs"]
    if len(outputs) == 1:
        np.testing.assert_array_equal(np.array(rows, outputs[0].dtype), outputs[0])
        np.testing.assert_array_equal(np.array(columns, outputs[0].dtype), outputs[0])
        return
    assert set(columns) == {spec.name for spec in task.outputs}
    for spec, values in zip(task.outputs, outputs, strict=True):
        np.testing.assert_array_equal(np.array([row[spec.name] for row in rows], values.dtype), values)
        np.testing.assert_array_equal(np.array(columns[spec.name], values.dtype), values)


def test_what_is_no_number_is_null() -> None:
    scores = np.array([[1, np.nan, np.inf, -np.inf]] * 3, np.float32)
    assert answered(Classification(4), (scores,), is_rows=True)["predictions"][0] == [1.0, None, None, None]
    render = LikeliestClasses(serving._labels).renderer(Classification(4))
    assert json.loads(render((scores[:1],), whole(5, 6)))[0] == ["2", None]
