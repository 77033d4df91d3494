"""The records on a link between a front and an engine.

A front sends `Submit`, `Ask`, `Cancel`, `ReleaseModel` and, in answer to `Count`, `Counted`, and `Moved` after
`Succeeded`. For each job the engine sends `Settled`, which gives the job's memory back, or `Failed` and then, once
nothing uses the memory any more, `Released`; after a `Cancel` perhaps `Released` alone. `Published`, `OutputLayout`,
`Outstanding` and `Levels` carry the state of the engine. `Answered` or `Refused` ends a question.

Pickles travel from the engine to its fronts only: nothing that a front sends can harm the engine. Questions, answers
and counts are JSON.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from xlaserve.config import Mode

MODES: Final = tuple(Mode)
"""All modes: a record names one by its index here."""


class Garbled(Exception):
    """Bytes that are no record, or a record that makes no sense. The link ends."""


class Submit(NamedTuple):
    """A job: an `EngineRequest` to a model, with its rows at the beginning of an extent, whose rest is for the outputs.

    See `record_codec.pack_request`.
    """

    job: int
    """The number of the job. Numbers of jobs and questions count up together."""
    model: int
    offset: int
    size_bytes: int
    when_idle: bool
    """Whether `ModelEngine.run_when_idle` runs the job."""
    images: int
    height: int
    width: int
    mode: int
    """An index of `MODES`."""
    deadline: float
    """The time by which it has to be answered, in seconds of CLOCK_MONOTONIC."""
    priority: int
    is_sampled: bool
    trace_id: bytes
    """16 bytes, all zero for a job that is not traced."""
    span_id: bytes
    """8 bytes."""


class Ask(NamedTuple):
    """A question: an order to the engine that is no job, such as to load a model."""

    number: int
    tail: bytes
    """JSON: the question, and its arguments by name."""


class Cancel(NamedTuple):
    """The end of the wait for a job, or for the answer to a question."""

    job: int


class ReleaseModel(NamedTuple):
    """The end of the front's use of a published model: no request of it is left, and no job will follow."""

    model: int


class Counted(NamedTuple):
    """The counts of a front, in answer to `Count`."""

    number: int
    tail: bytes
    """JSON."""


class Settled(NamedTuple):
    """The end of a job whose outputs lie in its extent, with which the engine is done."""

    job: int
    layout: int
    """The number of an `OutputLayout`."""
    queue_s: float
    gather_s: float
    execute_s: float
    tail: bytes = b""
    """The pickled batches of a job that is traced, else nothing."""


class Failed(NamedTuple):
    """The failure of a job, whose extent the engine may still use."""

    job: int
    tail: bytes
    """The error, as `pack_error` makes it."""


class Released(NamedTuple):
    """The end of the engine's use of a job's extent."""

    job: int


class Answered(NamedTuple):
    """The answer to a question."""

    number: int
    tail: bytes
    """JSON."""


class Refused(NamedTuple):
    """The failure of a question."""

    number: int
    tail: bytes
    """The error, as `pack_error` makes it."""


class OutputLayout(NamedTuple):
    """The layout of outputs, which `Settled` names by its number."""

    layout: int
    tail: bytes
    """The pickled `arena.Layout`."""


class Published(NamedTuple):
    """The models of the engine."""

    epoch: int
    tail: bytes
    """The pickled `engine_state.Snapshot`."""


class Outstanding(NamedTuple):
    """The seconds in which all that waits and runs of a model should be answered."""

    model: int
    seconds: float


class Succeeded(NamedTuple):
    """Notice that another engine has taken this one's place. The front is to link to that, and then to send `Moved`."""


class Moved(NamedTuple):
    """Notice that the front has linked to the engine in this one's place, and sends no new requests here."""


class Count(NamedTuple):
    """A request for the counts of a front."""

    number: int
    """Counts up."""


class Levels(NamedTuple):
    """The load of models that have run something, and the engine's data about itself."""

    tail: bytes
    """A pickled pair: the value of `ModelEngine.live` by model, and plain data."""


Record = (
    Submit
    | Cancel
    | Ask
    | ReleaseModel
    | Counted
    | Settled
    | Failed
    | Released
    | OutputLayout
    | Published
    | Outstanding
    | Answered
    | Refused
    | Levels
    | Count
    | Succeeded
    | Moved
)
