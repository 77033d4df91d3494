"""What a trace tells of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from xlaserve.config import Bucket, Mode
from xlaserve.engine.trace_context import TraceContext

MAX_REQUESTS: Final = 128
"""Requests that a batch names: as many as OpenTelemetry links to a span by default."""


class TracedBatch(NamedTuple):
    """A batch with images of requests that are traced. Times are in seconds of the clock."""

    span: TraceContext
    """Its own, in a trace of its own: its requests may be of many."""
    requests: Sequence[TraceContext]
    """Their spans."""
    model: str
    mode: Mode
    bucket: Bucket
    images: int
    """Images in it, without its padding."""
    began: float
    """When it began to be gathered."""
    gathered: float
    started: float
    """When its lane was free."""
    ended: float
    error: str = ""
    """The name of the error that it raised; empty where it ran."""
