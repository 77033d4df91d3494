from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from xlaserve_loadtest.record.requests import REQUEST, STAGES, Status
from xlaserve_loadtest.run.sender import Sender, Task
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array, Reply

InVirtualTime = Callable[[Callable[[], Any]], Any]

INTERVAL_NS = 1_000_000
REQUESTS = 20_000


class Answering:
    """A connection that answers at once with `reply`."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    async def send(self, request: Request) -> Reply:
        return self.reply

    async def outputs(self, request: Request) -> list[Array]:
        raise NotImplementedError


def sender_of(count: int, reply: Reply, request: Request) -> Sender:
    loop = asyncio.get_running_loop()
    schedule_ns = np.arange(count, dtype=np.int64) * INTERVAL_NS
    task = Task("xla", ("fake",), schedule_ns=schedule_ns, max_in_flight=count)
    return Sender(task, Answering(reply), repeat(request, count), lambda: round(loop.time() * 1e9), spin_s=0)


def test_a_request_is_recorded_as_it_was(in_virtual_time: InVirtualTime) -> None:
    stages = tuple(0.5 + index for index in range(len(STAGES)))

    async def main() -> tuple[Sender, int]:
        request = Request(b"", images=300, mode="xla", model=4)
        sender = sender_of(3, Reply(Status.INVALID_REPLY, stages, "wrong", target=7), request)
        start_ns = round(asyncio.get_running_loop().time() * 1e9) + INTERVAL_NS
        sender.window = (start_ns + INTERVAL_NS, start_ns + 2 * INTERVAL_NS)
        sender.begin(start_ns)
        await sender.is_settled.wait()
        await sender.finish(at_once=False)
        return sender, start_ns

    sender, start_ns = in_virtual_time(main)
    rows = sender.rows()
    assert rows["scheduled_ns"].tolist() == [start_ns + number * INTERVAL_NS for number in range(3)]
    assert rows["measured"].tolist() == [False, True, False]
    for column, value in (("status", Status.INVALID_REPLY), ("images", 300), ("model", 4), ("target", 7)):
        assert rows[column].tolist() == [value] * 3
    assert [tuple(row) for row in rows[list(STAGES)].tolist()] == [stages] * 3


def test_requests_of_a_long_block_take_little_memory(in_virtual_time: InVirtualTime) -> None:
    async def main() -> float:
        sender = sender_of(REQUESTS, Reply(Status.OK), Request(b"", 1, "xla"))
        sender.window = (0, 1)
        tracemalloc.start()
        try:
            sender.begin(0)
            while sender.answered < REQUESTS:
                await asyncio.sleep(1)
                sender.live()
            return tracemalloc.get_traced_memory()[0] / REQUESTS
        finally:
            tracemalloc.stop()
            await sender.finish(at_once=True)

    assert in_virtual_time(main) < 2 * REQUEST.itemsize


@pytest.mark.parametrize("status", [Status.OK, Status.DIFFERING_REPLY, Status.UNAVAILABLE])
def test_a_look_counts_what_ended_since_the_last_one(in_virtual_time: InVirtualTime, status: Status) -> None:
    async def main() -> list[tuple[int, int, int, int]]:
        sender = sender_of(10, Reply(status), Request(b"", 2, "xla"))
        start_ns = round(asyncio.get_running_loop().time() * 1e9)
        sender.window = (start_ns + 2 * INTERVAL_NS, start_ns + 6 * INTERVAL_NS)
        assert sender.live().latencies_ms.size == 0
        sender.begin(start_ns)
        await asyncio.sleep(4.5 * INTERVAL_NS / 1e9)
        looks = [sender.live()]
        await sender.is_settled.wait()
        await sender.finish(at_once=False)
        looks.append(sender.live())
        return [(look.images, look.measured_images, look.errors, look.measured_errors) for look in looks]

    looks = in_virtual_time(main)
    assert looks == (
        [(10, 6, 0, 0), (4, 2, 0, 0)] if status is not Status.UNAVAILABLE else [(0, 0, 5, 3), (0, 0, 2, 1)]
    )
