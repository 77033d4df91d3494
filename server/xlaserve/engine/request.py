"""A request as an engine runs it, the same value from the pipeline to the lane, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from xlaserve.config import Mode
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import Rows
from xlaserve.engine.program import Outputs
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch
from xlaserve.errors import ExecutionFailed

WEIGHTS: Final = {1: 4, 2: 2, 3: 1}
"""Shares of a queue's images by priority, 1 the highest, while all of them wait."""
DEFAULT_PRIORITY: Final = 2

Shape = tuple[Mode, int, int]
"""Mode, height and width: images share a batch only where all three agree."""


class EngineRequest(NamedTuple):
    """Rows that a model is to run, and how. They wait, run, or fail together."""

    rows: Rows
    mode: Mode
    deadline: float
    """The time by which it has to be answered, in seconds of the clock."""
    priority: int = DEFAULT_PRIORITY
    """A key of `WEIGHTS`."""
    trace: TraceContext | None = None
    """The client's request, where it is recorded."""
    resolution: Resolution | None = None
    """Height and width of its buckets; None where they are those of the first input, which holds images."""

    @property
    def images(self) -> int:
        """Number of rows."""
        return len(self.rows[0])

    @property
    def shape(self) -> Shape:
        """Mode, height and width."""
        if self.resolution is not None:
            return self.mode, *self.resolution
        shape = self.rows[0].shape
        return self.mode, shape[1], shape[2]


class EncodedRequest(NamedTuple):
    """A request whose images are not decoded yet, so that its deadline is all that can be checked."""

    images: int
    deadline: float
    """The time by which it has to be answered, in seconds of the clock."""
    priority: int
    shapes: Sequence[Shape]
    """The shapes that its images may run in."""
    decode_s: float
    """Seconds in which its images are expected to be decoded."""
    decoding: int
    """Images of the model that are decoded before its own."""


class BatchRows(NamedTuple):
    """The outputs of one batch for a job, or for a request of several jobs."""

    rows: Sequence[int]
    """Places of the images in the job or request."""
    outputs: Outputs
    """Outputs with a row for each of these images."""


def check_row_shapes(batches: Sequence[BatchRows]) -> None:
    """Raises ExecutionFailed where the rows of an output differ in shape between batches.

    They can't be one array, and NumPy would repeat a row of one number to fill a longer one.
    """
    first, *others = ([output.shape[1:] for output in batch.outputs] for batch in batches)
    for other in others:
        if other != first:
            raise ExecutionFailed(f"the model gave rows of several shapes for one request: {first} and {other}")


class Result(NamedTuple):
    """The result of an engine's request, and the seconds of its stages."""

    batches: list[BatchRows]
    """One batch where the request was not split; several are in any order, as joining them may take long."""
    timings: Timings
    traced: list[TracedBatch]
    """The batches, where the request is traced."""
