"""Calls that wait for their clients."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from unittest.mock import Mock

import pytest

from xlaserve.admission.authenticator import OPEN
from xlaserve.admission.calls import STALL_CHECK_S, CallAdmission, CallTask, current_call
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import QueueFull
from xlaserve.planning.virtual_time import VirtualTimeLoop
from xlaserve.wire.grpc.method_guard import MethodGuard
from xlaserve.wire.grpc.reader import MessageReader


class House:
    """An admission of `places`, with calls that last until the test or the admission ends them."""

    def __init__(
        self,
        places: int,
        max_transfer_s: float = 100.0,
        crowded_transfer_s: float = 10.0,
        max_per_address: int | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.ended: list[CallTask] = []
        self.ends_at_once = True
        self.admission = CallAdmission(
            places, max_transfer_s, crowded_transfer_s, clock, max_per_address=max_per_address
        )

    async def enter(self, *addresses: str) -> CallTask:
        """Returns a call that was admitted. Raises QueueFull."""
        admitted: asyncio.Future[CallTask] = asyncio.get_running_loop().create_future()

        async def call() -> None:
            try:
                self.admission.enter(self._end)
                for address in addresses:
                    self.admission.locate(address)
            except QueueFull as error:
                admitted.set_exception(error)
                return
            admitted.set_result(current_call())
            await asyncio.Event().wait()

        self._last = asyncio.create_task(call())
        return await admitted

    def _end(self, calls: Collection[CallTask], reason: str) -> None:
        self.ended += calls
        for call in calls if self.ends_at_once else ():
            call.cancel()


async def leave(*calls: CallTask) -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await asyncio.sleep(0)


async def test_places_are_bounded_and_free_again_when_calls_end(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=2)
    first, second = await house.enter(), await house.enter()
    with pytest.raises(QueueFull, match="max_concurrent_calls: expected at most 2 calls at a time"):
        await house.enter()
    await leave(first)
    await house.enter()
    with pytest.raises(QueueFull):
        await house.enter()
    assert not house.ended
    assert not second.done()


async def test_an_address_has_so_many_places_until_its_calls_end(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=10, max_per_address=2)
    assert house.admission.bounds_addresses
    first = await house.enter("one", "one")  # a call is counted once
    second = await house.enter("one")
    for _ in range(3):
        with pytest.raises(QueueFull, match=r"^max_calls_per_address: expected at most 2 calls at a time"):
            await house.enter("one")
    others = [await house.enter("two"), await house.enter(), await house.enter()]
    await leave(first)
    first = await house.enter("one")
    await asyncio.sleep(101)  # it ends them all
    assert set(house.ended) == {first, second, *others}
    await leave(await house.enter("one"), await house.enter("one"))


async def test_a_transfer_is_ended_after_its_time_and_work_and_idleness_are_not(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=100)
    arriving, working, idle, answered = [await house.enter() for _ in range(4)]
    house.admission.work(working)
    house.admission.idle(idle)
    house.admission.work(answered)
    await asyncio.sleep(60)
    house.admission.transfer(answered)
    await asyncio.sleep(39.5)
    assert not house.ended
    await asyncio.sleep(STALL_CHECK_S)
    assert house.ended == [arriving]
    await asyncio.sleep(60)
    assert house.ended == [arriving, answered]
    await asyncio.sleep(1000)
    assert house.ended == [arriving, answered]
    assert not working.done()
    assert not idle.done()


async def test_a_call_whose_client_reads_is_no_longer_idle(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=2)
    reading, idle = [await house.enter() for _ in range(2)]
    for call in (reading, idle):
        house.admission.idle(call)
    await asyncio.sleep(9)
    house.admission.transfer(reading)
    await asyncio.sleep(1)
    await house.enter()
    assert house.ended == [idle]


async def test_each_answer_of_a_stream_has_all_its_time(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=2)
    streaming, stalled = [await house.enter() for _ in range(2)]
    await asyncio.sleep(9)
    house.admission.transfer(streaming)
    await asyncio.sleep(1)
    await house.enter()
    assert house.ended == [stalled]


async def test_a_call_that_was_ended_is_not_ended_again_while_it_leaves(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=1)
    house.ends_at_once = False
    first = await house.enter()
    await asyncio.sleep(10)
    second = await house.enter()
    house.admission.idle(first)
    house.admission.transfer(first)
    await asyncio.sleep(10)
    await house.enter()
    assert house.ended == [first, second]


async def test_calls_of_each_protocol_are_ended_in_its_way(virtual_time: VirtualTimeLoop) -> None:
    house, other = House(places=32), House(places=1)
    other.admission = house.admission
    ours, theirs = [await house.enter() for _ in range(16)], [await other.enter() for _ in range(16)]
    house.admission.work(ours[1])
    await asyncio.sleep(100 + STALL_CHECK_S)
    assert house.ended == [ours[0], *ours[2:]]
    assert other.ended == theirs


async def test_a_new_call_takes_the_place_of_the_one_that_transfers_longest(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=3)
    idle, first, second = [await house.enter() for _ in range(3)]
    house.admission.idle(idle)
    await asyncio.sleep(9.5)
    with pytest.raises(QueueFull):
        await house.enter()
    await asyncio.sleep(0.5)
    await house.enter()
    assert house.ended == [first]
    await house.enter()
    assert house.ended == [first, second]
    await house.enter()
    assert house.ended == [first, second, idle]
    with pytest.raises(QueueFull):
        await house.enter()


async def test_a_call_that_the_server_works_on_never_loses_its_place(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=3)
    for _ in range(3):
        house.admission.work(await house.enter())
    await asyncio.sleep(10_000)
    with pytest.raises(QueueFull):
        await house.enter()
    assert not house.ended


async def test_several_transfers_are_ended_together(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=64)
    calls = [await house.enter() for _ in range(64)]
    await asyncio.sleep(10)
    await house.enter()
    assert house.ended == calls[:4]


async def test_of_idle_calls_one_is_ended_for_a_new_one(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=64)
    calls = [await house.enter() for _ in range(64)]
    for call in calls:
        house.admission.idle(call)
    await asyncio.sleep(10)
    await house.enter()
    assert house.ended == calls[:1]


async def test_nothing_is_checked_while_there_are_no_calls(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=3)
    await leave(await house.enter(), await house.enter())
    moments: list[float] = []
    virtual_time.when_quiet.append(lambda: moments.append(virtual_time.time()))
    await asyncio.sleep(100 * STALL_CHECK_S)
    assert len(moments) == 2
    late = await house.enter()
    await asyncio.sleep(100 + STALL_CHECK_S)
    assert house.ended == [late]


async def test_a_message_that_finds_no_memory_ends_no_call(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=8)
    idle, arriving = await house.enter(), await house.enter()
    house.admission.idle(idle)
    await asyncio.sleep(20)
    reader = MessageReader(
        MessageMemory(10, 10, 10**12, lambda: 0),
        house.admission,
        MethodGuard(OPEN, ()),
        lambda data: data,
        Mock(),
        Mock(),
    )
    with pytest.raises(QueueFull):
        reader.admit(bytes(11))
    assert not house.ended
    assert not idle.done()
    assert not arriving.done()


async def test_a_drain_waits_for_messages_that_arrived_in_part(virtual_time: VirtualTimeLoop) -> None:
    house = House(places=8)
    uploading, idle, working = [await house.enter() for _ in range(3)]
    house.admission.idle(idle)
    house.admission.work(working)
    house.admission.drain()
    late = await house.enter()
    assert [house.admission.has_begun(call) for call in (uploading, idle, working, late)] == [True, True, True, False]
    assert house.admission.has_transfers
    house.admission.work(uploading)
    assert not house.admission.has_transfers
    house.admission.transfer(working)
    assert house.admission.has_transfers
    await leave(working)
    assert not house.admission.has_transfers
    await leave(uploading, idle, late)
