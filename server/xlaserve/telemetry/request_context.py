"""What names a call in logs and answers: its request id and its trace, from its client's headers or made here."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from random import getrandbits
from typing import Any, Final, NamedTuple

from xlaserve.trace_context import TRACEPARENT, TRACESTATE, TraceContext, parse

REQUEST_ID: Final = "x-request-id"
MAX_LENGTH: Final = 128
"""Characters of a client's id; longer ones are dropped."""

_HEADERS: Final = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})
# No space, quote or bracket: an id can't look like another part of a log line.
_ID: Final = re.compile(rf"[\w.:;/+=,@~-]{{1,{MAX_LENGTH}}}", re.ASCII)


Headers = tuple[tuple[str, str], ...]


class Endpoint(NamedTuple):
    """A method of a protocol, as traces name it."""

    name: str
    attributes: Mapping[str, str]
    """By OpenTelemetry's semantic conventions."""
    is_http: bool = False


class RequestContext:
    """What names one call, or one message of a stream."""

    __slots__ = ("_id", "_task", "endpoint", "given_id", "message_id", "own", "parent")

    def __init__(
        self, endpoint: Endpoint, headers: Iterable[tuple[str, Any]] = (), *, stream: RequestContext | None = None
    ) -> None:
        self.endpoint = endpoint
        self.message_id = ""
        """The `id` of a stream's message: any text of its client."""
        self.parent: TraceContext | None = None if stream is None else stream.parent
        """The client's span."""
        self.own: TraceContext | None = None
        """The server's span, where it records one."""
        self.given_id: str = "" if stream is None else stream.given_id
        """The client's id, empty where it gave none."""
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
        return self.own or self.parent

    @property
    def headers(self) -> Headers:
        """What the answer carries."""
        trace = self.trace
        return ((REQUEST_ID, self.id),) if trace is None else ((REQUEST_ID, self.id), (TRACEPARENT, trace.traceparent))

    @property
    def has_ended(self) -> bool:
        """Whether the call was answered. Tasks that it began and that outlive it, a loaded model's, still see it."""
        if self._task is None:
            return False
        task = self._task()
        return task is None or task.done()


_CURRENT: Final[ContextVar[RequestContext | None]] = ContextVar("request", default=None)


def begin(endpoint: Endpoint, headers: Iterable[tuple[str, Any]]) -> RequestContext:
    """Returns what names the call of the current task from now on. A protocol calls this before anything else."""
    request = RequestContext(endpoint, headers)
    _CURRENT.set(request)
    return request


def begin_message(message_id: str) -> None:
    """Notes that the current task answers one message of the stream that began it."""
    stream = _CURRENT.get()
    if stream is None:
        return
    message = RequestContext(stream.endpoint, stream=stream)
    message.message_id = message_id
    _CURRENT.set(message)


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
