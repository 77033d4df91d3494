from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.fakes import Clock

from xlaserve.config import Bucket, Mode
from xlaserve.engine.timings import Timings
from xlaserve.engine.trace_context import TraceContext, TracedBatch, new
from xlaserve.telemetry import request_context
from xlaserve.telemetry.tracing import MAX_BATCHES, Answered, Endpoint, FinishedSpan, SpanFailure, Tracer

GRPC = Endpoint("service/Method", {"rpc.system.name": "grpc"})
HTTP = Endpoint("GET /", {}, is_http=True)
PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "shop=7")
EPOCH_NS = 1_700_000_000_000_000_000


class World:
    """A tracer on a clock of the test, and what it has handed over."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.clock = Clock(100.0)
        self.spans: list[FinishedSpan] = []
        self.tracer = Tracer(ratio, self.spans.append, self.clock, lambda: EPOCH_NS + round(self.clock.now * 1e9))

    def times(self) -> Iterator[tuple[str, float, float]]:
        for span in self.spans:
            yield span.name, (span.start_ns - EPOCH_NS) / 1e9, (span.end_ns - EPOCH_NS) / 1e9


def batch(began: float, gathered: float, started: float, ended: float) -> TracedBatch:
    return TracedBatch(new(), [], "noop", Mode.XLA, Bucket(4, 8, 8), 3, began, gathered, started, ended)


def test_a_call_of_a_trace_is_recorded_if_its_client_records_it() -> None:
    for ratio in (0.0, 1.0):
        world = World(ratio)
        assert world.tracer.begin(GRPC, PARENT._replace(is_sampled=False)) is None
        span = world.tracer.begin(GRPC, PARENT)
        assert span is not None
        assert span.context == PARENT._replace(span_id=span.context.span_id)
        assert span.context.span_id != PARENT.span_id


def test_of_other_calls_a_share_is_recorded() -> None:
    def recorded(ratio: float) -> int:
        tracer = World(ratio).tracer
        return sum(tracer.begin(GRPC, None) is not None for _ in range(2000))

    assert recorded(0.0) == 0
    assert recorded(1.0) == 2000
    assert 300 < recorded(0.25) < 700  # nine standard deviations


def test_stages_follow_each_other_as_they_were_measured() -> None:
    world = World()
    span = world.tracer.begin(GRPC, None)
    assert span is not None
    timings = Timings(decode_s=1.0, queue_s=2.5, gather_s=0.5, execute_s=4.0, encode_s=0.25, total_s=10.0)
    span.answer(Answered(109.0, timings, [batch(103.5, 104.0, 104.5, 108.5)]))
    span.succeed()
    world.clock.now = 110.0
    span.end()
    assert [*world.times()] == [
        ("service/Method", 100.0, 110.0),
        ("decode", 100.5, 101.5),
        ("queue", 101.5, 103.5),
        ("gather", 103.5, 104.0),
        ("queue", 104.0, 104.5),
        ("execute", 104.5, 108.5),
        ("encode", 108.75, 109.0),
    ]
    root, *children = world.spans
    assert {child.parent for child in children} == {root.context}
    assert len({child.context.span_id for child in world.spans}) == len(world.spans)
    assert {child.context.trace_id for child in children} == {root.context.trace_id}
    assert root.attributes == {"rpc.system.name": "grpc", "rpc.response.status_code": "OK"}
    assert root.is_server
    assert root.parent is None


def test_a_stage_never_begins_before_its_call() -> None:
    world = World()
    span = world.tracer.begin(GRPC, None)
    assert span is not None
    span.answer(Answered(101.0, Timings(decode_s=5.0, queue_s=9.0), [batch(100.25, 100.25, 100.25, 100.5)]))
    span.end()
    assert all(100.0 <= start <= end for _, start, end in world.times())


def test_a_request_of_many_batches_has_a_bounded_number_of_spans() -> None:
    world = World()
    span = world.tracer.begin(GRPC, None)
    assert span is not None
    batches = [batch(100.0 + n, 100.0 + n, 100.0 + n, 101.0 + n) for n in range(1000)]
    span.answer(Answered(2000.0, Timings(), batches))
    span.end()
    links = [link for span in world.spans if span.name == "execute" for link in span.links]
    assert links == [one.span for one in batches[:MAX_BATCHES]]


@pytest.mark.parametrize(
    ("status", "is_error"), [("NOT_FOUND", False), ("RESOURCE_EXHAUSTED", False), ("INTERNAL", True)]
)
def test_a_failure_is_an_error_where_the_server_is_at_fault(status: str, is_error: bool) -> None:
    world = World()
    span = world.tracer.begin(GRPC, None)
    assert span is not None
    failure = SpanFailure("SomeError", status, "because")
    span.fail(failure)
    span.fail(SpanFailure("Later", "UNKNOWN", "of that"))
    span.end()
    (finished,) = world.spans
    assert (finished.failure, finished.is_error) == (failure, is_error)
    assert finished.attributes["rpc.response.status_code"] == status
    assert finished.attributes.get("error.type") == (status if is_error else None)


@pytest.mark.parametrize(("status", "is_error"), [(200, False), (404, False), (503, True)])
def test_http_has_its_own_status(status: int, is_error: bool) -> None:
    world = World()
    span = world.tracer.begin(HTTP, None)
    assert span is not None
    span.http_status = status
    span.end()
    (finished,) = world.spans
    assert finished.is_error == is_error
    assert finished.attributes["http.response.status_code"] == status
    assert finished.attributes.get("error.type") == (str(status) if is_error else None)


async def test_a_call_whose_client_has_gone_is_cancelled() -> None:
    world = World()

    async def call() -> None:
        request_context.begin(GRPC, (), world.tracer)
        await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert not world.spans
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [span.attributes["rpc.response.status_code"] for span in world.spans] == ["CANCELLED"]


async def test_messages_of_a_stream_are_recorded_one_by_one() -> None:
    world = World()

    async def message(name: str) -> None:
        request = request_context.begin_message(name)
        assert request is not None
        request.succeed()

    async def stream() -> None:
        request_context.begin(GRPC, (("x-request-id", "mine"),), world.tracer)
        await asyncio.gather(*(asyncio.create_task(message(name)) for name in "ab"))

    await asyncio.create_task(stream())
    await asyncio.sleep(0)
    *messages, whole = world.spans
    assert whole.name == "service/Method"
    for finished, name in zip(messages, "ab", strict=True):
        assert finished.name == "service/Method message"
        assert finished.links == (whole.context,)
        assert finished.attributes["xlaserve.message_id"] == name
        assert finished.attributes["xlaserve.request_id"] == "mine"
    assert len({span.context.trace_id for span in world.spans}) == 3  # no trace grows with its stream


def test_a_batch_begins_a_trace_and_names_its_requests() -> None:
    world = World()
    ran = batch(100.0, 101.0, 102.0, 103.0)._replace(requests=[PARENT])
    world.tracer.batch_ran(ran)
    world.tracer.batch_ran(ran._replace(error="MemoryError"))
    good, bad = world.spans
    assert (good.context, good.parent, good.links) == (ran.span, None, [PARENT])
    assert next(world.times()) == ("batch noop", 100.0, 103.0)
    assert good.attributes == {
        "xlaserve.model.name": "noop",
        "xlaserve.mode": "xla",
        "xlaserve.bucket": "4x8x8",
        "xlaserve.images": 3,
    }
    assert not good.is_error
    assert bad.is_error
    assert bad.attributes["error.type"] == "MemoryError"
