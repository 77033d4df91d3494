"""What is kept of a run: a row for each request and an entry for each block. The report needs nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class Status(IntEnum):
    """How a request ended: gRPC's statuses, and what gRPC doesn't see."""

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
    """Answered with OK, but not with what the model's metadata promises."""


STAGES: Final = ("decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s")
"""Where a request's time went inside the server, in its own words."""

NO_STAGES: Final = (math.nan,) * len(STAGES)

REQUEST: Final = np.dtype(
    [
        ("block", np.uint32),
        ("measured", np.bool_),
        ("scheduled_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("status", np.uint8),
        ("images", np.uint32),
        *((stage, np.float32) for stage in STAGES),
    ]
)
"""A request. Times are of one monotonic clock: when it was due, when it was sent, when its answer was there."""

Requests = NDArray[np.void]
"""Rows of `REQUEST`."""

_CHUNK_ROWS: Final = 8192


@dataclass
class BlockRecord:
    """One block as it was run; grows while it runs."""

    index: int
    arm: str
    slots: int
    start_ns: int
    window_ns: tuple[int, int] | None = None
    """Requests that became due in this half-open interval are the measured ones; None while warming up."""
    slot_ns: int = 0
    """Time that the measured requests took up of their slots, from one due time to the next."""
    end_ns: int | None = None
    """None when the run was interrupted in it."""
    cpu_s: float = 0.0
    """CPU seconds of the load generator."""


@dataclass
class Record:
    """A run as it grows."""

    blocks: list[BlockRecord] = field(default_factory=list)
    failures: dict[tuple[str, Status], str] = field(default_factory=dict)
    """The first message of each status of each arm."""
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _chunks: list[Requests] = field(default_factory=list)

    def add(
        self,
        block: BlockRecord,
        *,
        measured: bool,
        scheduled_ns: int,
        start_ns: int,
        end_ns: int,
        status: Status,
        images: int,
        stages: tuple[float, ...] = NO_STAGES,
        detail: str = "",
    ) -> None:
        """Adds one ended request; `stages` in the order of `STAGES`, NaN for what the server did not say."""
        self._rows.append((block.index, measured, scheduled_ns, start_ns, end_ns, status, images, *stages))
        if status != Status.OK:
            self.failures.setdefault((block.arm, status), detail)
        if len(self._rows) >= _CHUNK_ROWS:
            self._pack()

    def requests(self) -> Requests:
        """Returns all requests so far, in the order in which they ended."""
        self._pack()
        return np.concatenate(self._chunks) if self._chunks else np.empty(0, REQUEST)

    def _pack(self) -> None:
        if self._rows:
            self._chunks.append(np.array(self._rows, REQUEST))
            self._rows.clear()
