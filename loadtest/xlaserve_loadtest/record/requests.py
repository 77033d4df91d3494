"""Requests of a run: how they end, and the table of their times."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class Status(IntEnum):
    """The outcome of a request: gRPC's statuses, and answers that are wrong although their status is OK."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16
    INVALID_REPLY = 100
    """Answered with OK, but the answer does not fit the request or the model's metadata."""
    DIFFERING_REPLY = 101
    """Answered as promised, but with other outputs than the same request got alone; known of a sample only."""


ANSWERED: Final = (Status.OK, Status.DIFFERING_REPLY)
"""Statuses of answers that are as promised, right or not."""


def in_words(status: str) -> str:
    """Returns the name of a status as reports show it."""
    return _WORDS.get(status, status)


_WORDS: Final = {Status.INVALID_REPLY.name: "invalid answer", Status.DIFFERING_REPLY.name: "differing answer"}


STAGES: Final = ("decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s")
"""Stages of a request inside the server whose seconds the server reports."""

NO_STAGES: Final = (math.nan,) * len(STAGES)
"""The stages of a request for which the server reported none."""

REQUEST: Final = np.dtype(
    [
        ("block", np.uint32),
        ("measured", np.bool_),
        ("scheduled_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("status", np.uint8),
        ("images", np.uint32),
        ("model", np.uint8),
        ("target", np.uint8),
        ("generator", np.uint8),
        *((stage, np.float32) for stage in STAGES),
    ]
)
"""The columns of a request. `scheduled_ns`, `start_ns` and `end_ns` are the times on one monotonic clock at which it
was due, was sent and was answered. `measured` says whether it was due inside the block's window. `model` is an index in
`Arm.served`, `target` in `Arm.targets`, and `generator` in `GeneratorUse.machines`. Stages that the server did not
report are NaN."""

MAX_MODELS: Final = int(np.iinfo(REQUEST["model"]).max) + 1
"""Largest number of models of an arm; also of its targets, and of the generators of a run."""

Rows = NDArray[np.void]
"""Requests: a one-dimensional array of dtype REQUEST."""


def measured(rows: Rows) -> Rows:
    """Returns the requests that were due inside the window."""
    window: Rows = rows[rows["measured"]]
    return window


def answered(rows: Rows) -> Rows:
    """Returns the measured requests that were answered correctly."""
    correct: Rows = rows[rows["measured"] & (rows["status"] == Status.OK)]
    return correct
