"""The request id and the trace of a call, which name it in logs and answers, from its client's headers or made here;
and the other headers of its answer."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from random import getrandbits
from typing import Any, Final

from xlaserve.engine.trace_context import TRACEPARENT, TRACESTATE, TraceContext, parse
from xlaserve.telemetry.tracing import Endpoint, Span, Tracer

REQUEST_ID: Final = "x-request-id"
WARNING: Final = "xlaserve-warning"
"""The header of an answer that a client should know something about."""
MAX_LENGTH: Final = 128
"""Characters of a client's id; longer ones are dropped."""

_HEADERS: Final = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})
# No space, quote or bracket: an id can't look like another part of a log line.
_ID: Final = re.compile(rf"[\w.:;/+=,@~-]{{1,{MAX_LENGTH}}}", re.ASCII)


Headers = tuple[tuple[str, str], ...]


class RequestContext:
    """What names one call, or one message of a stream."""

    __slots__ = ("_id", "_task", "endpoint", "given_id", "message_id", "parent", "span", "tracer", "warning")

    def __init__(
        self, endpoint: Endpoint, headers: Iterable[tuple[str, Any]] = (), *, stream: RequestContext | None = None
    ) -> None:
        self.endpoint = endpoint
        self.message_id = ""
        """The `id` of a stream's message: any text of its client."""
        self.parent: TraceContext | None = None if stream is None else stream.parent
        """The client's span."""
        self.span: Span | None = None
        """The server's span, where it records one."""
        self.tracer: Tracer | None = None if stream is None else stream.tracer
        """Records spans; None where that is off, or not wanted for this call."""
        self.given_id: str = "" if stream is None else stream.given_id
        """The client's id, empty where it gave none."""
        self.warning = ""
        """The warning in its answer, in ASCII and on one line."""
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
        """The client's id, or one that is made when it is first asked for."""
        if not self._id:
            self._id = f"{getrandbits(128):032x}"
        return self._id

    @property
    def trace(self) -> TraceContext | None:
        """The span that logs and answers name."""
        return self.parent if self.span is None else self.span.context

    @property
    def headers(self) -> Headers:
        """What the answer carries."""
        trace, headers = self.trace, ((REQUEST_ID, self.id), *self.endpoint.headers)
        if self.warning:
            headers = (*headers, (WARNING, self.warning))
        return headers if trace is None else (*headers, (TRACEPARENT, trace.traceparent))

    def succeed(self) -> None:
        """Notes that the call was answered, where it is traced."""
        if self.span is not None:
            self.span.succeed()

    @property
    def has_ended(self) -> bool:
        """Whether the call was answered. Tasks that it began and that outlive it, a loaded model's, still see it."""
        if self._task is None:
            return False
        task = self._task()
        return task is None or task.done()


_CURRENT: Final[ContextVar[RequestContext | None]] = ContextVar("request", default=None)


def begin(endpoint: Endpoint, headers: Iterable[tuple[str, Any]], tracer: Tracer | None = None) -> RequestContext:
    """Returns what names the call of the current task from now on. A protocol calls this before anything else.

    With a `tracer`, its span lasts until the task ends.
    """
    request = RequestContext(endpoint, headers)
    if tracer is not None:
        request.tracer = tracer
        _record(request, tracer)
    _CURRENT.set(request)
    return request


def begin_message(message_id: str) -> RequestContext | None:
    """Returns what names the message that the current task answers, of the stream that began it.

    It is recorded as a call of its own, linked to the stream: one trace of all that a long stream carries would be
    more than others can show.
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
    """Begins the span of the current task's call, if it is recorded."""
    request.span = span = tracer.begin(request.endpoint, request.parent)
    if span is not None:
        span.attributes["xlaserve.request_id"] = request.id
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(span.end)


def current() -> RequestContext | None:
    """Returns what names the call that is answered here; None where there is none."""
    request = _CURRENT.get()
    return None if request is None or request.has_ended else request


def given_id() -> str:
    """Returns the id that the client gave the call that is answered here, empty where it gave none."""
    request = current()
    return "" if request is None else request.given_id


def sampled_trace_id() -> str | None:
    """Returns the trace that the call which is answered here is part of, where somebody records it."""
    request = _CURRENT.get()
    trace = None if request is None else request.trace
    return trace.trace_id if trace is not None and trace.is_sampled else None


def log_fields() -> dict[str, str]:
    """Returns what every line in the log has that is written while a call is answered; nothing where there is none."""
    request = current()
    if request is None:
        return {}
    trace = request.trace
    return {"request_id": request.id} if trace is None else {"request_id": request.id, "trace_id": trace.trace_id}
