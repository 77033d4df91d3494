"""Records as bytes: a header, a fixed part for each kind, and for some kinds a tail of bounded length.

Numbers are in the machine's own byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

from xlaserve import errors
from xlaserve.engine.inputs import Rows
from xlaserve.engine.request import EngineRequest
from xlaserve.engine.trace_context import TraceContext
from xlaserve.errors import ExecutionFailed, InvalidArgument, OverloadError, XlaserveError
from xlaserve.processes.link.link_records import (
    MODES,
    Answered,
    Ask,
    Cancel,
    Count,
    Counted,
    Failed,
    Garbled,
    Levels,
    Moved,
    OutputLayout,
    Outstanding,
    Published,
    Record,
    Refused,
    Released,
    ReleaseModel,
    Settled,
    Submit,
    Succeeded,
)

MAX_MESSAGE_LENGTH: Final = 2000
"""Characters of an error's message; the rest is cut off."""
MAX_TAIL_BYTES: Final = 64 * 2**20
"""Bound of a tail from the engine: the tail of a snapshot has the labels of all models."""
MAX_ASK_BYTES: Final = 1024 * 1024
"""Bound of a question's tail: a model's name, and perhaps labels of its versions."""
MAX_TALLY_BYTES: Final = 16 * 2**20
"""Bound of a front's counts: some 2 KB for each version of a model that was used, and 7 KB for each shadow."""
_NO_TRACE: Final = bytes(16)
_NOT_TRACED: Final = (False, _NO_TRACE, bytes(8))
_NO_RETRY: Final = -1.0

HELLO: Final = Struct("=8sQI")
MAGIC: Final = b"xlaserve"
_HEADER: Final = Struct("=B3xI")
"""The kind of the record, and the bytes of its tail."""
_RETRY: Final = Struct("=d")


class Hello(NamedTuple):
    """The greeting of a front: its first bytes, which come with the file of its arena."""

    magic: bytes
    arena_bytes: int
    max_jobs: int
    """The most jobs that the front will have under way. The engine ends a link with more."""


class _Form(NamedTuple):
    """The form of a kind of records."""

    kind: int
    make: Callable[..., Record]
    fixed: Struct
    max_tail_bytes: int
    """0 for records without a tail."""


def _form(kind: int, make: Callable[..., Record], fixed: str, *, max_tail_bytes: int = 0) -> _Form:
    return _Form(kind, make, Struct(f"={fixed}"), max_tail_bytes)


_FROM_FRONTS: Final = (
    _form(1, Submit, "QIQQ?IIIBdB?16s8s"),
    _form(2, Cancel, "Q"),
    _form(9, Ask, "Q", max_tail_bytes=MAX_ASK_BYTES),
    _form(13, ReleaseModel, "I"),
    _form(14, Counted, "Q", max_tail_bytes=MAX_TALLY_BYTES),
    _form(17, Moved, ""),
)
_FROM_ENGINES: Final = (
    _form(3, Settled, "QIddd", max_tail_bytes=MAX_TAIL_BYTES),
    _form(4, Failed, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(5, Released, "Q"),
    _form(6, OutputLayout, "I", max_tail_bytes=MAX_TAIL_BYTES),
    _form(7, Published, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(8, Outstanding, "Id"),
    _form(10, Answered, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(11, Refused, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(15, Count, "Q"),
    _form(16, Succeeded, ""),
    _form(12, Levels, "", max_tail_bytes=MAX_TAIL_BYTES),
)
_FORMS: Final[dict[object, _Form]] = {form.make: form for form in (*_FROM_FRONTS, *_FROM_ENGINES)}


def pack(record: Record) -> bytes:
    """Returns a record as bytes."""
    kind, _, fixed, max_tail_bytes = _FORMS[type(record)]
    if not max_tail_bytes:
        return _HEADER.pack(kind, 0) + fixed.pack(*record)
    fields: tuple[object, ...] = record
    tail = fields[-1]
    assert isinstance(tail, bytes)
    return _HEADER.pack(kind, len(tail)) + fixed.pack(*record[:-1]) + tail


class RecordReader:
    """Finds records in a stream of bytes."""

    def __init__(self, forms: Iterable[_Form]) -> None:
        self._forms = {form.kind: form for form in forms}
        self._parts: list[bytes] = []
        """The bytes so far of a record that is not complete."""
        self._missing_bytes = 0
        """The bytes that this record still lacks; of its header, until that is complete."""

    @classmethod
    def from_front(cls) -> RecordReader:
        """Returns a reader of the records that fronts send."""
        return cls(_FROM_FRONTS)

    @classmethod
    def from_engine(cls) -> RecordReader:
        """Returns a reader of the records that engines send."""
        return cls(_FROM_ENGINES)

    def feed(self, data: bytes) -> Iterator[Record]:
        """Yields the records that are complete with `data`. Raises Garbled."""
        if self._parts:
            self._parts.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:  # a large tail is joined once, in however many pieces it comes
                return
            data = b"".join(self._parts)
            self._parts.clear()
        start, end, wanted = 0, len(data), _HEADER.size
        while end - start >= wanted:
            kind, tail_bytes = _HEADER.unpack_from(data, start)
            form = self._forms.get(kind)
            if form is None or tail_bytes > form.max_tail_bytes:
                raise Garbled(f"no record is of kind {kind} with a tail of {tail_bytes} bytes")
            tail_at = start + _HEADER.size + form.fixed.size
            if tail_at + tail_bytes > end:
                wanted = tail_at + tail_bytes - start
                break
            values = form.fixed.unpack_from(data, start + _HEADER.size)
            start = tail_at + tail_bytes
            yield form.make(*values, data[tail_at:start]) if form.max_tail_bytes else form.make(*values)
        if start < end:
            self._parts.append(data[start:])
            self._missing_bytes = wanted - (end - start)


def pack_hello(arena_bytes: int, max_jobs: int) -> bytes:
    """Returns the greeting of a front."""
    return HELLO.pack(MAGIC, arena_bytes, max_jobs)


def unpack_hello(data: bytes) -> Hello:
    """Returns the greeting of a front. Raises Garbled."""
    if len(data) != HELLO.size:
        raise Garbled(f"a greeting of {len(data)} bytes")
    hello = Hello(*HELLO.unpack(data))
    if hello.magic != MAGIC or not hello.arena_bytes or not hello.max_jobs:
        raise Garbled("a greeting that is none of a front")
    return hello


def pack_request(
    request: EngineRequest, job: int, model: int, offset: int, size_bytes: int, *, when_idle: bool = False
) -> Submit:
    """Returns the record of a job: a request to a model, whose rows lie in an extent at `offset`.

    The state that vendors add to a trace is left out.
    """
    _, mode, deadline, priority, trace, _ = request
    _, height, width = request.shape
    is_sampled, trace_id, span_id = _NOT_TRACED
    if trace is not None:
        is_sampled, trace_id, span_id = trace.is_sampled, bytes.fromhex(trace.trace_id), bytes.fromhex(trace.span_id)
    return Submit(
        job,
        model,
        offset,
        size_bytes,
        when_idle,
        request.images,
        height,
        width,
        MODES.index(mode),
        deadline,
        priority,
        is_sampled,
        trace_id,
        span_id,
    )


def unpack_request(submit: Submit, rows: Rows) -> EngineRequest:
    """Returns the request of a job whose rows are these."""
    trace = None
    if submit.trace_id != _NO_TRACE:
        trace = TraceContext(submit.trace_id.hex(), submit.span_id.hex(), submit.is_sampled)
    resolution = submit.height, submit.width
    return EngineRequest(rows, MODES[submit.mode], submit.deadline, submit.priority, trace, resolution)


def pack_error(error: XlaserveError) -> bytes:
    """Returns an error as bytes: its class, its message, its field, and after how many seconds to try again."""
    retry_after_s = error.retry_after_s if isinstance(error, OverloadError) else None
    field = error.field if isinstance(error, InvalidArgument) else ""
    words = "\0".join((type(error).__name__, field, str(error)[:MAX_MESSAGE_LENGTH]))
    return _RETRY.pack(_NO_RETRY if retry_after_s is None else retry_after_s) + words.encode(errors="replace")


def unpack_error(tail: bytes) -> XlaserveError:
    """Returns the error that `pack_error` was given; ExecutionFailed for a class that is unknown here."""
    (retry_after_s,) = _RETRY.unpack_from(tail)
    name, field, message = tail[_RETRY.size :].decode(errors="replace").split("\0", 2)
    kind: type[XlaserveError] = getattr(errors, name, ExecutionFailed)
    if issubclass(kind, InvalidArgument):
        return kind.with_message(field, message)
    if issubclass(kind, OverloadError):
        return kind(message, None if retry_after_s == _NO_RETRY else retry_after_s)
    return kind(message)
