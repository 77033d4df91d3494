"""Spans of calls and batches, as plain data: sampling, attributes and stages.

The spans of a call are made once it has ended, from the timings that it measures in any case, so that tracing does no
work during the call. Attributes are named by OpenTelemetry's semantic conventions, others `xlaserve.*`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import getrandbits
from typing import Final, NamedTuple

from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch

MAX_BATCHES: Final = 16
"""Batches of one request that have spans; later ones have none."""
LEAST_WAIT_S: Final = 100e-6
"""Least wait for a lane, in seconds, that has a span."""
ERRORS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""gRPC's codes that are errors of a server, by the semantic conventions."""
CANCELLED: Final = "CANCELLED"

_RATIO_BITS: Final = 64

Attribute = str | int | float | bool


class Endpoint(NamedTuple):
    """A method of a protocol, as traces name it."""

    name: str
    attributes: Mapping[str, str]
    """By OpenTelemetry's semantic conventions."""
    is_http: bool = False
    headers: Iterable[tuple[str, str]] = ()
    """Headers of each answer, beside its ids; read for each answer."""


class SpanFailure(NamedTuple):
    """The error that a span records."""

    error: str
    """The name of the error."""
    status: str
    """The name of gRPC's code for it."""
    reason: str
    """The message for the client."""


class FinishedSpan(NamedTuple):
    """A span that can be sent. Times are in nanoseconds since the epoch."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    links: Sequence[TraceContext] = ()
    is_server: bool = False
    """Whether it is the span of a call, not of a stage or a batch."""
    failure: SpanFailure | None = None
    is_error: bool = False
    """Whether the server is at fault."""


class Answered(NamedTuple):
    """The times of an answered request, in seconds of the tracer's clock."""

    ended: float
    """The time at which its response message was made."""
    timings: Timings
    batches: Sequence[TracedBatch]


class Tracer:
    """Begins spans of calls, and exports them and those of batches once they have ended.

    A call that is part of its client's trace is recorded if the client records that trace; of all other calls, the
    share `sample_ratio` is recorded. `export` is called on the event loop, and has to return at once.
    """

    def __init__(
        self,
        sample_ratio: float,
        export: Callable[[FinishedSpan], None],
        clock: Callable[[], float] = time.perf_counter,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._bound = round(sample_ratio * 2**_RATIO_BITS)
        self.export = export
        self.clock = clock
        self._wall_ns = wall_ns

    def begin(self, endpoint: Endpoint, parent: TraceContext | None) -> Span | None:
        """Returns the span of a call, or of a message of a stream; None where it is not recorded."""
        if parent is None:
            number = getrandbits(128)
            # The rule of OpenTelemetry's TraceIdRatioBased, so that all services with the same ratio sample the same
            # traces.
            if number % 2**_RATIO_BITS >= self._bound:
                return None
            own = TraceContext(f"{number:032x}", _span_id(), True)
        elif parent.is_sampled:
            own = parent._replace(span_id=_span_id())
        else:
            return None
        return Span(self, endpoint, own, parent)

    def batch_ran(self, batch: TracedBatch) -> None:
        """Exports the span of a batch, which begins a trace of its own."""
        to_ns = self.to_ns()
        attributes: dict[str, Attribute] = {
            "xlaserve.model.name": batch.model,
            "xlaserve.mode": str(batch.mode),
            "xlaserve.bucket": str(batch.bucket),
            "xlaserve.images": batch.images,
        }
        failure = SpanFailure(batch.error, "INTERNAL", "the batch failed") if batch.error else None
        if failure is not None:
            attributes["error.type"] = failure.error
        self.export(
            FinishedSpan(
                f"batch {batch.model}",
                batch.span,
                None,
                to_ns(batch.began),
                to_ns(batch.ended),
                attributes,
                batch.requests,
                failure=failure,
                is_error=failure is not None,
            )
        )

    def to_ns(self) -> Callable[[float], int]:
        """Returns a function from seconds of the clock to nanoseconds since the epoch, by the current offset between
        both."""
        offset_ns = self._wall_ns() - round(self.clock() * 1e9)
        return lambda at: offset_ns + round(at * 1e9)


class Span:
    """One call, or one message of a stream, that is recorded."""

    __slots__ = (
        "_answered",
        "_began",
        "_failure",
        "_has_succeeded",
        "_parent",
        "_tracer",
        "attributes",
        "context",
        "http_status",
        "is_http",
        "links",
        "name",
    )

    def __init__(self, tracer: Tracer, endpoint: Endpoint, context: TraceContext, parent: TraceContext | None) -> None:
        self._tracer = tracer
        self._parent = parent
        self._began = tracer.clock()
        self._answered: Answered | None = None
        self._failure: SpanFailure | None = None
        self._has_succeeded = False
        self.is_http = endpoint.is_http
        self.name = endpoint.name
        self.context = context
        self.attributes: dict[str, Attribute] = {**endpoint.attributes}
        self.links: Sequence[TraceContext] = ()
        self.http_status: int | None = None
        """The status of the HTTP response; None for gRPC, and where there was no response."""

    def fail(self, failure: SpanFailure) -> None:
        """Records why the call failed; later failures are ignored."""
        self._failure = self._failure or failure

    def succeed(self) -> None:
        """Records that the call succeeded."""
        self._has_succeeded = True

    def answer(self, answered: Answered) -> None:
        """Records the times of the request, from which the spans of its stages are made."""
        self._answered = answered

    def end(self, _: asyncio.Task[object] | None = None) -> None:
        """Exports the span and those of its stages; called once the call's task is done."""
        ended, to_ns, export = self._tracer.clock(), self._tracer.to_ns(), self._tracer.export
        is_error = self._note_status()
        export(
            FinishedSpan(
                self.name,
                self.context,
                self._parent,
                to_ns(self._began),
                to_ns(ended),
                self.attributes,
                self.links,
                is_server=True,
                failure=self._failure,
                is_error=is_error,
            )
        )
        if self._answered is None:
            return
        for name, start, stop, batch in stages(self._answered):
            context = self.context._replace(span_id=_span_id())
            start_ns = to_ns(max(start, self._began))
            links = () if batch is None else (batch.span,)
            export(FinishedSpan(name, context, self.context, start_ns, max(start_ns, to_ns(stop)), _of(batch), links))

    def _note_status(self) -> bool:
        """Adds the outcome to the attributes, and returns whether it is an error of the server."""
        if self.http_status is not None:
            self.attributes["http.response.status_code"] = self.http_status
            is_error, kind = self.http_status >= 500, str(self.http_status)
        elif self.is_http:  # the client has gone
            is_error, kind = False, CANCELLED
        else:
            kind = "OK" if self._has_succeeded else CANCELLED
            if self._failure is not None:
                kind = self._failure.status
            self.attributes["rpc.response.status_code"] = kind
            is_error = kind in ERRORS
        if is_error:
            self.attributes["error.type"] = kind
        return is_error


def stages(answered: Answered) -> Iterator[tuple[str, float, float, TracedBatch | None]]:
    """Yields the name, the start, the end and the batch of each stage that took time; the batch is None outside of
    batches."""
    ended, timings, batches = answered
    if batches:
        in_order = sorted(batches, key=lambda batch: batch.began)[:MAX_BATCHES]
        first = in_order[0]
        # The queue's seconds are two waits: for the batch to be formed, and for a lane once it was gathered.
        formed = first.began - max(0.0, timings.queue_s - (first.started - first.gathered))
        if timings.decode_s:
            yield "decode", formed - timings.decode_s, formed, None
        if timings.queue_s:
            yield "queue", formed, first.began, None
        for batch in in_order:
            if batch.gathered > batch.began:
                yield "gather", batch.began, batch.gathered, batch
            if batch.started - batch.gathered > LEAST_WAIT_S:
                yield "queue", batch.gathered, batch.started, batch
            yield "execute", batch.started, batch.ended, batch
    yield "encode", ended - timings.encode_s, ended, None


def _of(batch: TracedBatch | None) -> Mapping[str, Attribute]:
    return {} if batch is None else {"xlaserve.bucket": str(batch.bucket), "xlaserve.images": batch.images}


def _span_id() -> str:
    return f"{getrandbits(64):016x}"
