"""The records on a link: a fixed part for each kind, and for some a tail of bounded length.

A front sends `Submit`, `Ask`, `Cancel`, `Left` and, where `Count` asks for it, `Counted`, and `Moved` after
`Succeeded`. For each job the engine sends `Settled`, which gives its memory back, or `Failed` and then, once nothing
uses the memory any more, `Released`; after a `Cancel` perhaps `Released` alone. `Published`, `LayoutOf`, `Outstanding`
and `Levels` tell a front what else it needs to know. What it asks is answered by `Told` or `Refused`. Numbers are in
the machine's own byte order.

Pickles travel from the engine to its fronts only: what a front sends can't harm the engine. What it asks is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

from xlaserve import errors
from xlaserve.config import Mode
from xlaserve.engine.trace_context import TraceContext
from xlaserve.errors import ExecutionFailed, InvalidArgument, OverloadError, XlaserveError

MODES: Final = tuple(Mode)
"""A mode travels as its place here."""
MAX_MESSAGE_LENGTH: Final = 2000
MAX_TAIL_BYTES: Final = 64 * 2**20
"""Of a tail from the engine: that of a snapshot has the labels of all models."""
MAX_ASK_BYTES: Final = 1024 * 1024
"""Of a tail from a front: a model's name, and perhaps labels of its versions."""
MAX_TALLY_BYTES: Final = 16 * 2**20
"""Of what a front has counted: some 2 KB for each version of a model that was used, and 7 KB for each shadow."""
_NO_TRACE: Final = bytes(16)
_NO_RETRY: Final = -1.0


class Garbled(Exception):
    """What came is no record, or one that can't be. The link ends."""


class Hello(NamedTuple):
    """The first bytes of a front, which come with the file of its arena."""

    magic: bytes
    arena_bytes: int
    max_jobs: int
    """Most jobs that it will have under way: the engine holds it to that."""


class Submit(NamedTuple):
    """Runs the pixels at the beginning of an extent; the rest of it is for the outputs."""

    job: int
    """Counts up."""
    offset: int
    size_bytes: int
    deadline: float
    """In seconds of CLOCK_MONOTONIC."""
    model: int
    images: int
    height: int
    width: int
    mode: int
    """Its place in `MODES`."""
    priority: int
    when_idle: bool
    """Whether it is run as `ModelEngine.run_when_idle` does."""
    is_sampled: bool
    trace_id: bytes
    """Of 16 bytes, all zero where it is not traced."""
    span_id: bytes


class Ask(NamedTuple):
    """Has the engine do something that is no job, such as to load a model. Jobs and questions share their numbers. The
    tail is JSON: the question, and its arguments by name."""

    number: int
    tail: bytes


class Cancel(NamedTuple):
    """Nobody waits for the job, or for the answer to the question, any more."""

    job: int


class Left(NamedTuple):
    """The front has no more use for a model that was published to it: it has no requests to it, and sends no job."""

    model: int


class Counted(NamedTuple):
    """What the front has counted, as `Count` asked it to tell. The tail is JSON."""

    number: int
    tail: bytes


class Settled(NamedTuple):
    """The outputs lie in the extent, and the engine is done with it. The tail, if any, is its pickled batches, where
    it is traced."""

    job: int
    layout: int
    queue_s: float
    gather_s: float
    execute_s: float
    tail: bytes = b""


class Failed(NamedTuple):
    """The tail is an error, as `packed` made it."""

    job: int
    tail: bytes


class Released(NamedTuple):
    """The engine is done with the job and its extent."""

    job: int


class Told(NamedTuple):
    """The tail is the answer to a question, in JSON."""

    number: int
    tail: bytes


class Refused(NamedTuple):
    """The tail is the error that a question ended with, as `packed` made it."""

    number: int
    tail: bytes


class LayoutOf(NamedTuple):
    """The tail is the pickled layout of outputs that `Settled` names by its number."""

    layout: int
    tail: bytes


class Published(NamedTuple):
    """The tail is a pickled snapshot."""

    epoch: int
    tail: bytes


class Outstanding(NamedTuple):
    """The seconds in which all that waits and runs of a model should be answered."""

    model: int
    seconds: float


class Succeeded(NamedTuple):
    """Another engine has taken this one's place: the front is to link to that, and then tell `Moved`."""


class Moved(NamedTuple):
    """The front has linked to the engine in this one's place, and brings nothing new."""


class Count(NamedTuple):
    """Has the front tell what it has counted. Numbers count up."""

    number: int


class Levels(NamedTuple):
    """What models have to do: the tail is, pickled, a mapping from ids of some to what their `live` returns, and what
    else is told of the engine now."""

    tail: bytes


Record = (
    Submit
    | Cancel
    | Ask
    | Left
    | Counted
    | Settled
    | Failed
    | Released
    | LayoutOf
    | Published
    | Outstanding
    | Told
    | Refused
    | Levels
    | Count
    | Succeeded
    | Moved
)

HELLO: Final = Struct("=8sQI")
MAGIC: Final = b"xlaserve"
_HEADER: Final = Struct("=B3xI")
"""The kind, and the bytes of the tail."""


class _Form(NamedTuple):
    kind: int
    make: Callable[..., Record]
    fixed: Struct
    max_tail_bytes: int
    """0 where there is no tail."""


def _form(kind: int, make: Callable[..., Record], fixed: str, *, max_tail_bytes: int = 0) -> _Form:
    return _Form(kind, make, Struct(f"={fixed}"), max_tail_bytes)


_OF_FRONTS: Final = (
    _form(1, Submit, "QQQdIIIIBB??16s8s"),
    _form(2, Cancel, "Q"),
    _form(9, Ask, "Q", max_tail_bytes=MAX_ASK_BYTES),
    _form(13, Left, "I"),
    _form(14, Counted, "Q", max_tail_bytes=MAX_TALLY_BYTES),
    _form(17, Moved, ""),
)
_OF_ENGINES: Final = (
    _form(3, Settled, "QIddd", max_tail_bytes=MAX_TAIL_BYTES),
    _form(4, Failed, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(5, Released, "Q"),
    _form(6, LayoutOf, "I", max_tail_bytes=MAX_TAIL_BYTES),
    _form(7, Published, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(8, Outstanding, "Id"),
    _form(10, Told, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(11, Refused, "Q", max_tail_bytes=MAX_TAIL_BYTES),
    _form(15, Count, "Q"),
    _form(16, Succeeded, ""),
    _form(12, Levels, "", max_tail_bytes=MAX_TAIL_BYTES),
)
_FORMS: Final[dict[object, _Form]] = {form.make: form for form in (*_OF_FRONTS, *_OF_ENGINES)}


def pack(record: Record) -> bytes:
    """Returns a record as bytes."""
    kind, _, fixed, max_tail_bytes = _FORMS[type(record)]
    if not max_tail_bytes:
        return _HEADER.pack(kind, 0) + fixed.pack(*record)
    fields: tuple[object, ...] = record
    tail = fields[-1]
    assert isinstance(tail, bytes)
    return _HEADER.pack(kind, len(tail)) + fixed.pack(*record[:-1]) + tail


class Reader:
    """Finds records in a stream of bytes."""

    def __init__(self, forms: Iterable[_Form]) -> None:
        self._forms = {form.kind: form for form in forms}
        self._parts: list[bytes] = []
        """Of a record that is not complete."""
        self._missing_bytes = 0
        """What that still lacks, as far as is known."""

    @classmethod
    def from_front(cls) -> Reader:
        """Reads what fronts send."""
        return cls(_OF_FRONTS)

    @classmethod
    def from_engine(cls) -> Reader:
        """Reads what engines send."""
        return cls(_OF_ENGINES)

    def feed(self, data: bytes) -> Iterator[Record]:
        """Yields the records that are complete with `data`. Raises Garbled."""
        if self._parts:
            self._parts.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:  # put together once, however many pieces a large tail comes in
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
    """Returns the first bytes of a front."""
    return HELLO.pack(MAGIC, arena_bytes, max_jobs)


def unpack_hello(data: bytes) -> Hello:
    """Returns what a front says first. Raises Garbled."""
    if len(data) != HELLO.size:
        raise Garbled(f"a greeting of {len(data)} bytes")
    hello = Hello(*HELLO.unpack(data))
    if hello.magic != MAGIC or not hello.arena_bytes or not hello.max_jobs:
        raise Garbled("a greeting that is none of a front")
    return hello


def pack_trace(trace: TraceContext | None) -> tuple[bool, bytes, bytes]:
    """Returns the last values of `Submit`. What vendors added to the trace does not travel."""
    if trace is None:
        return False, _NO_TRACE, bytes(8)
    return trace.is_sampled, bytes.fromhex(trace.trace_id), bytes.fromhex(trace.span_id)


def unpack_trace(submit: Submit) -> TraceContext | None:
    """Returns the span of a job, where it is traced."""
    if submit.trace_id == _NO_TRACE:
        return None
    return TraceContext(submit.trace_id.hex(), submit.span_id.hex(), submit.is_sampled)


_RETRY: Final = Struct("=d")


def pack_error(error: XlaserveError) -> bytes:
    """Returns an error's type, message, field, and when to come again."""
    retry_after_s = error.retry_after_s if isinstance(error, OverloadError) else None
    field = error.field if isinstance(error, InvalidArgument) else ""
    words = "\0".join((type(error).__name__, field, str(error)[:MAX_MESSAGE_LENGTH]))
    return _RETRY.pack(_NO_RETRY if retry_after_s is None else retry_after_s) + words.encode(errors="replace")


def unpack_error(tail: bytes) -> XlaserveError:
    """Returns the error that `pack_error` was given."""
    (retry_after_s,) = _RETRY.unpack_from(tail)
    name, field, message = tail[_RETRY.size :].decode(errors="replace").split("\0", 2)
    kind = getattr(errors, name, ExecutionFailed)
    error: XlaserveError = kind.__new__(kind, message)
    if isinstance(error, InvalidArgument):
        error.field = field
    elif isinstance(error, OverloadError):
        error.retry_after_s = None if retry_after_s == _NO_RETRY else retry_after_s
    return error
