"""W3C Trace Context: which trace a request is part of, as `traceparent` and `tracestate` say it."""

from __future__ import annotations

import re
from random import getrandbits
from typing import Final, NamedTuple

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
    """What vendors added, as it came in `tracestate`."""

    @property
    def traceparent(self) -> str:
        """The header that says this."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def new() -> TraceContext:
    """Returns the first span of a new trace, which is recorded."""
    return TraceContext(f"{getrandbits(128):032x}", f"{getrandbits(64):016x}", True)


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Returns what the headers say; None where `traceparent` is not as the standard has it.

    Of a later version of the standard, what version 00 has is read.
    """
    match = _PARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate if _STATE.fullmatch(tracestate) else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED), state)
