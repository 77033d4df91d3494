"""Traces: a request's span, as W3C Trace Context writes it, and a batch as a span that its requests link to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import getrandbits
from typing import Final, NamedTuple

from xlaserve.config import Bucket, Mode

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
MAX_STATE_LENGTH: Final = 512
"""Characters of `tracestate` that are passed on; longer ones are dropped."""
SAMPLED: Final = 0x01

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE: Final = re.compile(rf"[ -~]{{1,{MAX_STATE_LENGTH}}}")


class TraceContext(NamedTuple):
    """One span of a trace: plain data, which can be pickled."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_sampled: bool
    """Whether who began the trace records it."""
    state: str = ""
    """The vendors' part, as it came in `tracestate`."""

    @property
    def traceparent(self) -> str:
        """The value of the `traceparent` header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


class TracedBatch(NamedTuple):
    """A batch with images of traced requests. Times are in seconds of the clock."""

    span: TraceContext
    """The batch's span, in a trace of its own, as its requests may be of many traces."""
    requests: Sequence[TraceContext]
    """The spans of its requests."""
    model: str
    mode: Mode
    bucket: Bucket
    images: int
    """Images in it, without its padding."""
    began: float
    """When gathering began."""
    gathered: float
    started: float
    """When its lane was free."""
    ended: float
    error: str = ""
    """The type of the error that it raised; empty where it ran."""


def new() -> TraceContext:
    """Returns the first span of a new trace, which is recorded."""
    return TraceContext(f"{getrandbits(128):032x}", f"{getrandbits(64):016x}", True)


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Returns the span that the headers name; None where `traceparent` is not valid.

    Of headers of later versions of the standard, the fields of version 00 are read.
    """
    match = _PARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate if _STATE.fullmatch(tracestate) else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED), state)
