"""Requests taken in, and answers sent: an ASGI application around each method.

Calls are bounded as gRPC's are, by the same `Admissions` and `MessageMemory`. A call whose client has gone is
cancelled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from xlaserve.admission.authenticator import OPEN, Authenticator
from xlaserve.admission.caller import ADMIN, Role
from xlaserve.admission.calls import Admissions, CallAdmission, CallTask, current_call
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.admission.method_access import MethodAccess
from xlaserve.errors import (
    RETRY_AFTER,
    InvalidArgument,
    QueueFull,
    ShuttingDown,
    Unauthenticated,
    explain,
    retry_after_s,
    status_of,
)
from xlaserve.telemetry import request_context
from xlaserve.telemetry.request_context import RequestContext
from xlaserve.telemetry.tracing import Endpoint, Span, Tracer
from xlaserve.wire.http.body import ENCODINGS, decompress, read_body
from xlaserve.wire.http.connection import CONNECTION, Connection
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, json_answer, too_large
from xlaserve.wire.http.operation import Method
from xlaserve.wire.shared.parts import Part

PIECE_BYTES: Final = 256 * 1024
"""Bytes of an answer that are handed to the connection at a time."""
LARGE_BYTES: Final = 64 * 1024
"""Answers from here on are counted for as long as the client reads them."""
ASK: Final = ("www-authenticate", "Bearer")
IDENTITY: Final = "identity"
MAX_QUERY_FIELDS: Final = 64
MAX_PATH_LENGTH: Final = 256
"""Characters of a path that traces show."""
VERBS: Final = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
CLOSE: Final = ("connection", "close")


class Ending:
    """Ends calls: clients that were sent nothing yet are told why, to others the connection is closed."""

    def __init__(self) -> None:
        self._reasons: dict[CallTask, str] = {}

    def __call__(self, calls: Collection[CallTask], reason: str) -> None:
        """Ends `calls` soon."""
        for call in calls:
            self._reasons[call] = reason
            call.add_done_callback(self.reason)
            call.cancel()

    def reason(self, call: CallTask) -> str | None:
        """Returns why a call was ended, once; None where its client has gone."""
        return self._reasons.pop(call, None)


@dataclass(eq=False)
class CallsIn:
    """Takes in the calls of all methods."""

    admissions: Admissions
    message_memory: MessageMemory
    max_body_bytes: int
    on_refused: Callable[[str, str], None] = lambda method, status: None
    """Called with the method and the status of each message that is refused before its method is called."""
    authenticator: Authenticator = OPEN
    end: Ending = field(default_factory=Ending)
    on_failed: Callable[[str, Exception], None] = lambda method, error: None
    """Called with the method and the error of every call that is answered with one."""
    tracer: Tracer | None = None
    """Records the calls of all methods but probes."""

    def application(
        self, name: str, method: Method, roles: Sequence[Role], *, route: str = "", is_probe: bool = False
    ) -> HttpCalls:
        """Returns the ASGI application that answers with `method` callers with one of `roles`, where there are any.

        `route` is the verb and the path that it answers, with parameters in braces; empty for any.
        """
        admission = self.admissions.probes if is_probe else self.admissions.calls
        tracer = None if is_probe else self.tracer
        access = MethodAccess(self.authenticator, roles, name)
        is_awaited = roles is not ADMIN  # a load ends with the models
        return HttpCalls(self, name, _endpoint(name, route), method, access, admission, tracer, is_awaited=is_awaited)


@dataclass(eq=False)
class HttpCalls:
    """Answers the requests of one method."""

    all: CallsIn
    name: str
    endpoint: Endpoint
    method: Method
    access: MethodAccess
    admission: CallAdmission
    tracer: Tracer | None
    is_awaited: bool = True
    """Whether a server that ends lets its requests be answered before."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        connection: Connection = scope["extensions"][CONNECTION]
        task = connection.call = current_call()
        connection.is_awaited = self.is_awaited
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = request_context.begin(self.endpoint, headers.items(), self.tracer)
        if request.span is not None:
            _describe(request.span, scope)
        try:
            answer = await self._answer(task, scope, headers, receive)
            if connection.awaits_leave:
                answer = replace(answer, headers=[*answer.headers, CLOSE])
            self.admission.transfer(task)
            await self._send(answer, request, send)
        except asyncio.CancelledError:
            reason = self.all.end.reason(task)
            if reason is None or not connection.can_answer:
                connection.abort()
            else:
                task.uncancel()
                await _send(self._refuse(QueueFull(reason), CLOSE), request, send)
        finally:
            connection.call = None

    async def _answer(self, task: CallTask, scope: Scope, headers: Mapping[str, str], receive: Receive) -> HttpAnswer:
        held = _Held(self.all.message_memory)
        try:
            try:
                self._recognise(headers, scope["extensions"][CONNECTION])
                self.admission.enter(self.all.end, has_begun=scope["extensions"][CONNECTION].has_begun)
                if self.admission.bounds_addresses:
                    self.admission.locate(scope["extensions"][CONNECTION].address)
                request = await self._receive(task, scope, headers, receive, held)
            except Exception as error:
                self.all.on_refused(self.name, status_of(error)[0].grpc)
                return self._refuse(error)
            try:
                return await self.method(request)
            except Exception as error:
                return self._refuse(error)
        finally:
            held.release()

    def _refuse(self, error: Exception, *headers: tuple[str, str]) -> HttpAnswer:
        self.all.on_failed(self.name, error)
        return _refusal(error, *headers)

    def _recognise(self, headers: Mapping[str, str], connection: Connection) -> None:
        """Notes who calls. Raises Unauthenticated or PermissionDenied."""
        access = self.access
        if access.is_open:
            return
        access.check_headers(headers)
        if access.asks_connection:
            access.check_connection(connection.certificate_names(), connection.address)

    async def _receive(
        self, task: CallTask, scope: Scope, headers: Mapping[str, str], receive: Receive, held: _Held
    ) -> HttpRequest:
        """Returns a request whose body has arrived. Raises InvalidArgument, MessageTooLarge or QueueFull."""
        query = read_query(scope["query_string"])
        encoding = headers.get("content-encoding", IDENTITY).lower()
        if encoding != IDENTITY and encoding not in ENCODINGS:
            raise InvalidArgument("content-encoding", " or ".join(ENCODINGS), repr(encoding[:32]))
        max_bytes, length = self.all.max_body_bytes, int(headers.get("content-length", 0))
        if length > max_bytes:
            raise too_large(max_bytes, length)
        body: bytes | memoryview = b""
        if length or "transfer-encoding" in headers:
            body = await self.all.message_memory.receive(partial(read_body, receive, max_bytes, length))
        self.admission.work(task)
        held.take(len(body))
        if encoding != IDENTITY and body:
            body = await decompress(memoryview(body), max_bytes, held.take)
        return HttpRequest(scope.get("path_params", {}), query, headers, memoryview(body), held.take)

    async def _send(self, answer: HttpAnswer, request: RequestContext, send: Send) -> None:
        size_bytes = answer.size_bytes
        if size_bytes < LARGE_BYTES:
            await _send(answer, request, send)
            return
        self.all.message_memory.hold(size_bytes)
        try:
            await _send(answer, request, send)
        finally:
            self.all.message_memory.release(size_bytes)


class _Held:
    """Bytes of one request that its server holds."""

    def __init__(self, message_memory: MessageMemory) -> None:
        self._message_memory = message_memory
        self._size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Counts them. Raises QueueFull."""
        self._message_memory.take(size_bytes)
        self._size_bytes += size_bytes

    def release(self) -> None:
        """Counts them no more."""
        self._message_memory.release(self._size_bytes)


def read_query(query: bytes) -> dict[str, str]:
    """Returns the fields of a query. Raises InvalidArgument."""
    if not query:
        return {}
    try:
        return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise InvalidArgument("query", f"at most {MAX_QUERY_FIELDS} fields", "more") from None


async def _send(answer: HttpAnswer, request: RequestContext, send: Send) -> None:
    """Sends an answer; returns once at most some 64 KiB of it still wait for the client."""
    if request.span is not None:
        request.span.http_status = answer.status
    headers = [
        ("content-type", answer.media_type),
        ("content-length", str(answer.size_bytes)),
        *answer.headers,
        *request.headers,
    ]
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    for piece in _pieces(answer.parts):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        if len(piece) > LARGE_BYTES:
            await asyncio.sleep(0)  # a client that reads as fast as this is no reason to keep others waiting
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(parts: Sequence[Part]) -> Iterator[Part]:
    """Yields parts with short ones joined and long ones cut: TLS encrypts what it is given before it returns."""
    short: list[Part] = []
    size_bytes = 0
    for part in parts:
        if size_bytes + len(part) <= PIECE_BYTES:
            short.append(part)
            size_bytes += len(part)
            continue
        if short:
            yield b"".join(short)
        whole = memoryview(part)
        places = range(0, len(whole), PIECE_BYTES)
        yield from (whole[start : start + PIECE_BYTES] for start in places[:-1])
        short = [whole[places[-1] :]]
        size_bytes = len(short[0])
    yield b"".join(short)


def _endpoint(name: str, route: str) -> Endpoint:
    if not route:
        return Endpoint("", {}, is_http=True)  # named by its verb
    verb, path = route.split(" ")
    return Endpoint(route, {"http.request.method": verb, "http.route": path}, is_http=True)


def _describe(span: Span, scope: Scope) -> None:
    """Notes what a request asks for, by OpenTelemetry's semantic conventions."""
    verb = scope["method"] if scope["method"] in VERBS else "_OTHER"
    path, scheme = scope["path"][:MAX_PATH_LENGTH], scope["scheme"]
    span.attributes |= {"http.request.method": verb, "url.path": path, "url.scheme": scheme}
    span.name = span.name or verb


def _refusal(error: Exception, *headers: tuple[str, str]) -> HttpAnswer:
    status, message = explain(error)
    if (wait_s := retry_after_s(error)) is not None:
        headers = ((RETRY_AFTER, str(math.ceil(wait_s))), *headers)
    if isinstance(error, Unauthenticated):
        headers = (ASK, *headers)
    if isinstance(error, ShuttingDown):
        headers = (CLOSE, *headers)
    return json_answer({"error": message}, status.http, headers)
