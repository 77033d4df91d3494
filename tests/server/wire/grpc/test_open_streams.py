from __future__ import annotations

import asyncio

import pytest

from xlaserve.errors import ShuttingDown
from xlaserve.wire.grpc.open_streams import OpenStreams


async def test_every_open_stream_ends_as_shutting_down() -> None:
    streams = OpenStreams()

    async def stream() -> None:
        async with streams.open():
            await asyncio.Event().wait()

    running = [asyncio.create_task(stream()) for _ in range(3)]
    await asyncio.sleep(0)
    await streams.end(timeout_s=20)
    for task in running:
        with pytest.raises(ShuttingDown):
            await task


async def test_a_stream_that_its_client_cancels_is_cancelled_and_forgotten() -> None:
    streams = OpenStreams()

    async def stream() -> None:
        async with streams.open():
            await asyncio.Event().wait()

    running = asyncio.create_task(stream())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await streams.end(timeout_s=20)


async def test_a_stream_that_does_not_end_is_not_waited_for() -> None:
    streams = OpenStreams()
    released = asyncio.Event()

    async def stubborn() -> None:
        async with streams.open():
            try:
                await asyncio.Event().wait()
            finally:
                await released.wait()

    running = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await streams.end(timeout_s=0.01)
    assert not running.done()
    released.set()
    with pytest.raises(ShuttingDown):
        await running
