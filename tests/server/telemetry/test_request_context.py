from __future__ import annotations

import asyncio
import gc
import re
import weakref

import pytest

from xlaserve.telemetry import request_context
from xlaserve.telemetry.request_context import MAX_LENGTH, RequestContext
from xlaserve.telemetry.tracing import Endpoint

ENDPOINT = Endpoint("service/Method", {})
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("id_", ["a", "x" * MAX_LENGTH, "Root=1-67891233-abc;Self=1", "c0ffee-4.b_c:d/e+f,g@h~i"])
async def test_a_clients_id_is_kept(id_: str) -> None:
    request = RequestContext(ENDPOINT, [("user-agent", "x"), ("x-request-id", id_)])
    assert request.id == request.given_id == id_
    assert request.headers == (("x-request-id", id_),)


@pytest.mark.parametrize(
    "id_", ["", "x" * (MAX_LENGTH + 1), "a b", "a\nb", "a] [request b", 'a"b', "é", "a\x1b[2J", "٣", b"abc"]
)
async def test_an_id_that_could_be_taken_for_something_else_is_replaced(id_: str) -> None:
    request = RequestContext(ENDPOINT, [("x-request-id", id_)])
    assert re.fullmatch("[0-9a-f]{32}", request.id)
    assert not request.given_id, "one that is made means nothing to the client"


async def test_an_id_is_made_where_there_is_none_and_stays_the_same() -> None:
    first, second = RequestContext(ENDPOINT), RequestContext(ENDPOINT)
    assert first.id == first.id
    assert first.id != second.id


async def test_the_answer_says_which_trace_it_is_part_of() -> None:
    request = RequestContext(ENDPOINT, [("traceparent", PARENT), ("x-request-id", "7")])
    assert request.headers == (("x-request-id", "7"), ("traceparent", PARENT))


async def test_a_call_is_seen_by_its_tasks_and_by_no_other() -> None:
    seen = []

    async def call(id_: str) -> None:
        request_context.begin(ENDPOINT, [("x-request-id", id_)])
        await asyncio.sleep(0)
        await asyncio.create_task(part())

    async def part() -> None:
        seen.append(request_context.log_fields())

    await asyncio.gather(call("1"), call("2"))
    assert seen == [{"request_id": "1"}, {"request_id": "2"}]
    assert request_context.current() is None


async def test_what_outlives_a_call_is_no_part_of_it() -> None:
    answered = asyncio.Event()
    kept: list[asyncio.Task[object]] = []

    async def outlive() -> object:
        assert request_context.log_fields() == {"request_id": "1"}
        await answered.wait()
        return request_context.log_fields()

    async def call() -> None:
        request_context.begin(ENDPOINT, [("x-request-id", "1")])
        kept.append(asyncio.create_task(outlive()))
        await asyncio.sleep(0)

    await asyncio.create_task(call())
    answered.set()
    assert await kept[0] == {}


async def test_a_streams_message_has_the_id_of_the_call_and_its_own() -> None:
    async def message(name: str) -> tuple[str, str, str]:
        request_context.begin_message(name)
        request = request_context.current()
        assert request is not None
        assert request.parent is not None
        return request.id, request.message_id, request.parent.traceparent

    request_context.begin(ENDPOINT, [("traceparent", PARENT)])
    stream = request_context.current()
    assert stream is not None
    found = await asyncio.gather(*map(asyncio.create_task, [message("a"), message("b")]))
    assert found == [(stream.id, "a", PARENT), (stream.id, "b", PARENT)]
    assert stream.message_id == ""


@pytest.mark.parametrize("given", ["", "7"])
async def test_a_streams_messages_share_the_id_that_its_client_gave(given: str) -> None:
    async def message() -> str:
        request_context.begin_message("own")
        return request_context.given_id()

    request_context.begin(ENDPOINT, [("x-request-id", given)])
    assert [await asyncio.create_task(message()) for _ in range(2)] == [given] * 2


async def test_a_call_that_has_ended_is_freed_before_the_collector_comes() -> None:
    class Held:
        pass

    async def call() -> weakref.ref[Held]:
        request_context.begin(ENDPOINT, ())
        held = Held()
        return weakref.ref(held)

    gc.disable()
    try:
        task = asyncio.create_task(call())
        freed, is_over = await task, weakref.ref(task)
        del task
        await asyncio.sleep(0)
        assert freed() is None
        assert is_over() is None
    finally:
        gc.enable()
