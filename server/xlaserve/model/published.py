"""What fronts are told of a version of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from xlaserve.config import Fit, ModelSettings
from xlaserve.link.snapshot import ModelSnapshot
from xlaserve.model.task import Datatype, Task, TensorSpec
from xlaserve.model.version import Served, State

ITEM_BYTES: Final[dict[Datatype, int]] = {"FP32": 4, "INT32": 4, "UINT8": 1}


class Published(NamedTuple):
    """The details of a model's snapshot: what a front needs to parse requests and to make answers."""

    settings: ModelSettings
    state: State
    task: Task
    """With its outputs and labels."""
    fit: Fit


def snapshot(served: Served, number: int) -> ModelSnapshot:
    """Returns what fronts are told of a version that serves; `number` names this loading of it."""
    admission, model = served.batcher.admission, served.model
    return ModelSnapshot(
        id=number,
        title=served.settings.title,
        is_open=not admission.is_closed,
        max_images=admission.max_images,
        max_bytes=admission.max_bytes,
        output_bytes={size: tuple(row_bytes(output, *size) for output in model.task.outputs) for size in served.inputs},
        details=Published(served.settings, served.version.state, model.task, model.fit),
    )


def row_bytes(output: TensorSpec, height: int, width: int) -> int:
    """Returns the bytes of an output for one image of this size."""
    sides: Iterator[int] = iter((height, width))
    return ITEM_BYTES[output.datatype] * math.prod(next(sides) if side == -1 else side for side in output.shape[1:])
