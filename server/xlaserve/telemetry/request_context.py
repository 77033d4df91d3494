"""The context of a request: its id and trace, from the client's headers or made here, which logs and answers carry."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from random import getrandbits
from typing import Any, Final

from xlaserve.engine.trace_context import TRACEPARENT, TRACESTATE, TraceContext, parse
from xlaserve.telemetry.tracing import Endpoint, Span, SpanFailure, Tracer

REQUEST_ID: Final = "x-request-id"
WARNING: Final = "xlaserve-warning"
"""The header with a warning about an answer that succeeded."""
MAX_LENGTH: Final = 128
"""Characters of a client's request id; a longer id is ignored."""

_HEADERS: Final = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})
# No space, quote or bracket: an id can't look like another part of a log line.
_ID: Final = re.compile(rf"[\w.:;/+=,@~-]{{1,{MAX_LENGTH}}}", re.ASCII)

Headers = tuple[tuple[str, str], ...]


class RequestContext:
    """Id, trace and warning of one call, or of one message of a stream. `stream` is the context of the stream's
    call."""

    __slots__ = (
        "_has_failed",
        "_id",
        "_task",
        "endpoint",
        "given_id",
        "message_id",
        "parent",
        "span",
        "tracer",
        "warning",
    )

    def __init__(
        self, endpoint: Endpoint, headers: Iterable[tuple[str, Any]] = (), *, stream: RequestContext | None = None
    ) -> None:
        self.endpoint = endpoint
        self.message_id = ""
        """The `id` of a stream's message: any text of its client; empty for a call."""
        self.parent: TraceContext | None = None if stream is None else stream.parent
        """The client's span; None where its headers name none."""
        self.span: Span | None = None
        """The server's span; None where none is recorded."""
        self.tracer: Tracer | None = None if stream is None else stream.tracer
        """Records spans; None where tracing is off, or not wanted for this call."""
        self.given_id: str = "" if stream is None else stream.given_id
        """The request id that the client sent; empty where it sent none."""
        self.warning = ""
        """The warning in the answer, in ASCII and on one line; empty where there is none."""
        self._has_failed = False
        self._id = "" if stream is None else stream.id
        task = asyncio.current_task()
        self._task = None if task is None else weakref.ref(task)  # a strong one would be a cycle
        found = {key: value for key, value in headers if key in _HEADERS and isinstance(value, str)}
        if found:
            self._read(found)

    def _read(self, headers: Mapping[str, str]) -> None:
        if _ID.fullmatch(headers.get(REQUEST_ID, "")):
            self._id = self.given_id = headers[REQUEST_ID]
        self.parent = parse(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))

    @property
    def id(self) -> str:
        """The client's request id, or one that is made when it is first read."""
        if not self._id:
            self._id = f"{getrandbits(128):032x}"
        return self._id

    @property
    def trace(self) -> TraceContext | None:
        """The span that logs and answers name: the server's, or else the client's."""
        return self.parent if self.span is None else self.span.context

    @property
    def headers(self) -> Headers:
        """Headers of the answer: request id, the endpoint's own, the warning and the trace."""
        trace, headers = self.trace, ((REQUEST_ID, self.id), *self.endpoint.headers)
        if self.warning:
            headers = (*headers, (WARNING, self.warning))
        return headers if trace is None else (*headers, (TRACEPARENT, trace.traceparent))

    def warn(self, warning: str) -> None:
        """Adds a warning to the answer, in ASCII and on one line."""
        self.warning = f"{self.warning}; {warning}" if self.warning else warning

    def fail(self, failure: SpanFailure) -> bool:
        """Notes that it failed, in the span too where one is recorded. Returns False where that was noted before."""
        if self._has_failed:
            return False
        self._has_failed = True
        if self.span is not None:
            self.span.fail(failure)
        return True

    def succeed(self) -> None:
        """Marks the span as succeeded, where one is recorded."""
        if self.span is not None:
            self.span.succeed()

    @property
    def has_ended(self) -> bool:
        """Whether the call was answered. Tasks that it started and that outlive it, such as a model's, still have this
        context."""
        if self._task is None:
            return False
        task = self._task()
        return task is None or task.done()


_CURRENT: Final[ContextVar[RequestContext | None]] = ContextVar("request", default=None)


def begin(endpoint: Endpoint, headers: Iterable[tuple[str, Any]], tracer: Tracer | None = None) -> RequestContext:
    """Makes the context of the call that the current task answers. A protocol calls this before anything else.

    With a `tracer`, the call's span lasts until the task ends.
    """
    request = RequestContext(endpoint, headers)
    if tracer is not None:
        request.tracer = tracer
        _record(request, tracer)
    _CURRENT.set(request)
    return request


def begin_message(message_id: str) -> RequestContext | None:
    """Makes the context of the stream's message that the current task answers; None outside of a call.

    A message is recorded as a trace of its own, linked to the stream: one trace of all messages of a long stream would
    be larger than viewers can show.
    """
    stream = _CURRENT.get()
    if stream is None:
        return None
    message = RequestContext(stream.endpoint, stream=stream)
    message.message_id = message_id
    if message.tracer is not None:
        _record(message, message.tracer)
        if message.span is not None:
            message.span.name += " message"
            message.span.attributes["xlaserve.message_id"] = message_id[:MAX_LENGTH]
            message.span.links = () if stream.span is None else (stream.span.context,)
    _CURRENT.set(message)
    return message


def _record(request: RequestContext, tracer: Tracer) -> None:
    """Begins a span that lasts until the current task ends, if `tracer` samples it."""
    request.span = span = tracer.begin(request.endpoint, request.parent)
    if span is not None:
        span.attributes["xlaserve.request_id"] = request.id
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(span.end)


def current() -> RequestContext | None:
    """Returns the context of the call that the current task answers; None where there is none."""
    request = _CURRENT.get()
    return None if request is None or request.has_ended else request


def given_id() -> str:
    """Returns the request id that the client of the current call sent; empty where it sent none."""
    request = current()
    return "" if request is None else request.given_id


def sampled_trace_id() -> str | None:
    """Returns the id of the current call's trace if it is sampled, else None."""
    request = _CURRENT.get()
    trace = None if request is None else request.trace
    return trace.trace_id if trace is not None and trace.is_sampled else None


def log_fields() -> dict[str, str]:
    """Returns the request id, and the trace id where there is one, of the current call; empty outside of a call."""
    request = current()
    if request is None:
        return {}
    trace = request.trace
    return {"request_id": request.id} if trace is None else {"request_id": request.id, "trace_id": trace.trace_id}
