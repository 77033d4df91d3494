from __future__ import annotations

import asyncio

import grpc
import pytest

from xlaserve.admission.message_memory import MEMORY_CHECK_S, MessageMemory
from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.errors import QueueFull


class Client:
    """Sends a message when the test says so."""

    def __init__(self) -> None:
        self.sent: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        return await self.sent


class Host:
    """An message_memory that is sure of four messages, in a process that takes `resident_bytes` of 1,000."""

    def __init__(self) -> None:
        self.resident_bytes = 0
        self.looks = 0
        self.message_memory = MessageMemory(400, 100, 1000, self._resident)

    def _resident(self) -> int:
        self.looks += 1
        return self.resident_bytes

    def receive(self) -> tuple[Client, asyncio.Task[object]]:
        client = Client()
        return client, asyncio.create_task(self.message_memory.receive(client.read))


@pytest.fixture
def host() -> Host:
    return Host()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_message_is_given_as_it_arrived(host: Host) -> None:
    client, task = host.receive()
    await settle()
    client.sent.set_result(b"data")
    assert await task == b"data"
    client, task = host.receive()
    client.sent.set_result(grpc.aio.EOF)
    assert await task is grpc.aio.EOF


async def test_what_is_held_is_bounded(host: Host) -> None:
    host.message_memory.take(300)
    with pytest.raises(QueueFull, match="101 more bytes exceed max_inflight_bytes 400; 300 are held"):
        host.message_memory.take(101)
    host.message_memory.take(100)
    host.message_memory.release(300)
    host.message_memory.hold(1000)  # an answer
    assert host.message_memory.held_bytes == 1100
    with pytest.raises(QueueFull):
        host.message_memory.take(1)


async def test_any_number_arrive_while_there_is_memory(host: Host) -> None:
    host.resident_bytes = 599
    calls = [host.receive() for _ in range(100)]
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert host.looks >= 2
    for client, _ in calls:
        client.sent.set_result(b"data")
    assert await asyncio.gather(*(task for _, task in calls)) == [b"data"] * 100


async def test_memory_is_not_looked_at_while_few_arrive(host: Host) -> None:
    for _ in range(10):
        calls = [host.receive() for _ in range(4)]
        await settle()
        for client, _ in calls:
            client.sent.set_result(b"data")
        await settle()
    assert host.looks == 0


async def test_when_memory_is_short_the_slowest_are_refused_and_new_ones_let_in(host: Host) -> None:
    calls = [host.receive() for _ in range(10)]
    await settle()
    host.resident_bytes = 600
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    for _, task in calls[:6]:
        with pytest.raises(QueueFull, match="short of memory"):
            await task
    assert not any(task.done() for _, task in calls[6:])
    client, task = host.receive()
    await settle()
    assert calls[6][1].done()
    client.sent.set_result(b"quick")
    assert await task == b"quick"
    with pytest.raises(QueueFull):
        await calls[6][1]
    for client, _ in calls[7:]:
        client.sent.set_result(b"data")
    assert [await task for _, task in calls[7:]] == [b"data"] * 3


async def test_each_front_has_its_share_of_the_memory_of_as_many_as_there_are(host: Host) -> None:
    """With 40 possible, one alone would else be short of memory at a fortieth of it."""
    usage = SharedCounts(fronts=40)
    usage.serving = 1
    host.message_memory = MessageMemory(400, 100, 1000, host._resident, usage)
    host.resident_bytes = 599
    calls = [host.receive() for _ in range(10)]
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert not any(task.done() for _, task in calls)
    usage.serving = 2
    host.resident_bytes = 299
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert not any(task.done() for _, task in calls)
    host.resident_bytes = 300
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert [task.done() for _, task in calls] == [True] * 6 + [False] * 4
    for _, task in calls[:6]:
        with pytest.raises(QueueFull, match="short of memory"):
            await task
    for client, _ in calls[6:]:
        client.sent.set_result(b"data")
    assert [await task for _, task in calls[6:]] == [b"data"] * 4


async def test_what_is_held_leaves_less_room_for_what_arrives_but_always_for_one(host: Host) -> None:
    host.resident_bytes = 600
    host.message_memory.hold(10_000)
    calls = [host.receive() for _ in range(5)]
    await settle()
    assert [task.done() for _, task in calls] == [True] * 4 + [False]
    calls[4][0].sent.set_result(b"data")
    assert await calls[4][1] == b"data"
    for _, task in calls[:4]:
        with pytest.raises(QueueFull):
            await task


async def test_a_caller_that_is_cancelled_is_cancelled_and_not_refused(host: Host) -> None:
    _, task = host.receive()
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_process_is_looked_at_no_more_once_the_crowd_has_gone(host: Host) -> None:
    calls = [host.receive() for _ in range(10)]
    await settle()
    for client, _ in calls:
        client.sent.set_result(b"data")
    await asyncio.sleep(2 * MEMORY_CHECK_S)
    looks = host.looks
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert host.looks == looks


async def test_memory_is_short_as_well_when_all_processes_have_little_left(host: Host) -> None:
    left_bytes = 401.0
    host.message_memory = MessageMemory(400, 100, 1000, host._resident, left=lambda: left_bytes)
    calls = [host.receive() for _ in range(10)]
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert not any(task.done() for _, task in calls)
    left_bytes = 400.0
    await asyncio.sleep(3 * MEMORY_CHECK_S)
    assert [task.done() for _, task in calls] == [True] * 6 + [False] * 4
    for client, _ in calls[6:]:
        client.sent.set_result(b"data")
    for _, task in calls[:6]:
        with pytest.raises(QueueFull, match="short of memory"):
            await task
    assert [await task for _, task in calls[6:]] == [b"data"] * 4


async def test_a_lowered_bound_holds_at_once_for_what_is_already_held(host: Host) -> None:
    host.message_memory.take(300)
    host.message_memory.max_bytes = 200
    with pytest.raises(QueueFull, match="1 more bytes exceed what the server's memory has room for, 200; 300 are held"):
        host.message_memory.take(1)
    host.message_memory.release(200)
    host.message_memory.take(100)
    host.message_memory.max_bytes = 400
    host.message_memory.take(200)
    assert host.message_memory.held_bytes == 400
