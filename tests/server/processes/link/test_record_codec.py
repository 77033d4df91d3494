from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from xlaserve import errors
from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest
from xlaserve.engine.trace_context import TraceContext
from xlaserve.errors import ExecutionFailed, InvalidArgument, OverloadError, QueueFull, XlaserveError
from xlaserve.processes.link.link_records import (
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
from xlaserve.processes.link.record_codec import (
    MAX_ASK_BYTES,
    MAX_MESSAGE_LENGTH,
    RecordReader,
    pack,
    pack_error,
    pack_hello,
    pack_request,
    unpack_error,
    unpack_hello,
    unpack_request,
)

ROWS = np.zeros((1, 224, 224, 3), np.uint8)
REQUEST = EngineRequest((ROWS,), Mode.XLA, 12.5, 1)
SUBMIT = pack_request(REQUEST, 1, 3, 4096, 150_528)
FROM_FRONTS: list[Record] = [
    SUBMIT,
    Cancel(2**64 - 1),
    SUBMIT._replace(deadline=math.inf),
    Ask(5, b"[]"),
    ReleaseModel(3),
    Counted(5, b"{}"),
    Moved(),
]
FROM_ENGINES: list[Record] = [
    Settled(1, 2, 0.5, 0.25, 1e-6),
    Settled(1, 2, 0.5, 0.25, 1e-6, b"traced"),
    Failed(7, b"error"),
    Released(7),
    OutputLayout(1, bytes(100)),
    Published(9, bytes(100_000)),
    Outstanding(3, 0.125),
    Answered(5, b"{}"),
    Refused(5, b"error"),
    Levels(b"levels"),
    Count(5),
    Succeeded(),
]


@pytest.mark.parametrize(
    ("reader", "records"), [(RecordReader.from_front, FROM_FRONTS), (RecordReader.from_engine, FROM_ENGINES)]
)
def test_records_come_as_they_were_sent_however_the_stream_is_cut(
    reader: Callable[[], RecordReader], records: list[Record]
) -> None:
    draw = random.Random(1)
    data = b"".join(map(pack, records * 5))
    for longest in (1, 7, 100, len(data)):
        reading = reader()
        read: list[Record] = []
        at = 0
        while at < len(data):
            stop = at + draw.randint(1, longest)
            read += reading.feed(data[at:stop])
            at = stop
        assert read == records * 5


def test_a_large_tail_is_put_together_once_in_however_many_pieces_it_comes() -> None:
    record = Published(1, random.Random(1).randbytes(16 * 2**20))
    data, reading = pack(record), RecordReader.from_engine()
    began = time.process_time()
    read = [one for at in range(0, len(data), 4096) for one in reading.feed(data[at : at + 4096])]
    assert time.process_time() - began < 0.5, "copied with every piece, it takes seconds"
    assert read == [record]


def test_an_end_reads_only_what_the_other_may_send() -> None:
    for record in FROM_ENGINES:
        with pytest.raises(Garbled, match="no record is of kind"):
            list(RecordReader.from_front().feed(pack(record)))
    for record in FROM_FRONTS:
        with pytest.raises(Garbled, match="no record is of kind"):
            list(RecordReader.from_engine().feed(pack(record)))


def test_a_front_cannot_have_the_engine_wait_for_a_tail() -> None:
    data = bytearray(pack(Cancel(1)))
    data[4] = 1
    with pytest.raises(Garbled, match="of kind 2 with a tail of 1 bytes"):
        list(RecordReader.from_front().feed(bytes(data)))


def test_a_front_cannot_ask_more_than_the_engine_would_hold() -> None:
    data = pack(Ask(1, bytes(MAX_ASK_BYTES + 1)))
    with pytest.raises(Garbled, match=f"of kind 9 with a tail of {MAX_ASK_BYTES + 1} bytes"):
        list(RecordReader.from_front().feed(data))


def test_any_bytes_are_records_or_garbled() -> None:
    draw = random.Random(2)
    for _ in range(2000):
        data = bytearray(draw.randbytes(draw.randrange(400)))
        if data:
            data[0] = draw.choice((1, 2, 9, 13, 14, data[0]))
            data[4:8] = bytes(4) if draw.random() < 0.5 else data[4:8]
        try:
            for record in RecordReader.from_front().feed(bytes(data)):
                assert isinstance(record, (Submit, Cancel, Ask, ReleaseModel, Counted))
        except Garbled:
            pass


def test_a_greeting_is_one_of_a_front() -> None:
    assert unpack_hello(pack_hello(4096, 10))[1:] == (4096, 10)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n  ", pack_hello(0, 10), pack_hello(10, 0), bytes(20)):
        with pytest.raises(Garbled, match="a greeting"):
            unpack_hello(data)


@pytest.mark.parametrize(
    "kind", [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, XlaserveError)]
)
def test_errors_keep_their_type_their_message_and_when_to_come_again(kind: type[XlaserveError]) -> None:
    if kind is InvalidArgument:
        error: XlaserveError = InvalidArgument("pixels", "a\0 null", 3)
    else:
        error = kind("too much: \0 ü")
    came = unpack_error(pack_error(error))
    assert type(came) is kind
    assert str(came) == str(error)
    assert vars(came) == vars(error)
    if isinstance(error, OverloadError):
        error.retry_after_s = 1.5
        came = unpack_error(pack_error(error))
        assert isinstance(came, OverloadError)
        assert came.retry_after_s == 1.5


def test_a_long_message_is_cut_and_an_unknown_error_is_one_of_the_model() -> None:
    assert len(str(unpack_error(pack_error(QueueFull("ü" * 100_000))))) == MAX_MESSAGE_LENGTH

    class Newer(XlaserveError):
        pass

    assert type(unpack_error(pack_error(Newer("x")))) is ExecutionFailed


@pytest.mark.parametrize("trace", [None, TraceContext("12" * 16, "ab" * 8, True, "vendor=1")])
def test_a_request_travels_as_it_is_but_for_the_vendors_part_of_its_trace(trace: TraceContext | None) -> None:
    request = REQUEST._replace(trace=trace)
    (submit,) = RecordReader.from_front().feed(pack(pack_request(request, 1, 3, 4096, 150_528)))
    assert isinstance(submit, Submit)
    assert (submit.images, submit.height, submit.width) == (1, 224, 224)
    (rows,), *others = unpack_request(submit, (ROWS,))
    assert rows is ROWS
    assert others == [Mode.XLA, 12.5, 1, trace and trace._replace(state=""), (224, 224)]
