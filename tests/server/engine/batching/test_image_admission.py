"""Bounds on a model's images and bytes in flight."""

from __future__ import annotations

import asyncio

import pytest
from tests.server.engine.batching.served_model import Make

from xlaserve.errors import InvalidArgument, QueueFull


async def test_too_many_images_are_refused_at_once(virtual_time: object, make: Make) -> None:
    model = make(max_images=10)
    first = model.ask(range(9))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_queue_images 10; 9 are in flight"):
        await model.answer([1, 2])
    await asyncio.gather(first, model.ask([1]))
    assert model.is_empty()


async def test_too_many_bytes_are_refused_at_once(virtual_time: object, make: Make) -> None:
    model = make(max_bytes=24)
    first = model.ask([1])
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_queue_bytes 24; 12 are in flight"):
        await model.answer([1, 2])
    await asyncio.gather(first, model.ask([1]))
    assert model.is_empty()


async def test_what_finds_no_room_is_told_when_there_should_be_some(virtual_time: object, make: Make) -> None:
    model = make(max_images=33, max_bytes=800)
    asks = [model.ask(range(8)) for _ in range(4)]
    await asyncio.sleep(0.5)
    # Of 32 images 8 run, 8 were gathered ahead and 16 wait: 11.5 s.
    for images, retry_s in ((2, 11.5 / 32), (17, 11.5 / 2)):
        with pytest.raises(QueueFull) as refused:
            model.batcher.admission.admit(images, 12)
        assert refused.value.retry_after_s == pytest.approx(retry_s, rel=0.05)
    with pytest.raises(QueueFull) as refused:
        model.batcher.admission.admit(1, 608)
    assert refused.value.retry_after_s == pytest.approx(11.5 / 2, rel=0.05)
    await asyncio.gather(*asks)


async def test_what_can_never_fit_is_an_invalid_argument(virtual_time: object, make: Make) -> None:
    model = make(max_images=10, max_bytes=60)
    with pytest.raises(InvalidArgument, match=r"images: expected at most 10 in a request \(max_queue_images\), got 11"):
        model.batcher.admission.admit(11, 12)
    expected = r"images: expected at most 60 bytes in a request \(max_queue_bytes\), got 61 bytes"
    with pytest.raises(InvalidArgument, match=expected):
        model.batcher.admission.admit(1, 61)
    assert model.is_empty()
    model.batcher.admission.admit(10, 60)
    model.batcher.admission.leave(10, 60)


async def test_images_that_run_count_until_their_request_has_left(virtual_time: object, make: Make) -> None:
    model = make(max_images=1)
    first = model.ask([1])
    await asyncio.sleep(0.5)
    assert model.batcher.waiting_images == 0
    with pytest.raises(QueueFull):
        await model.answer([2])
    await first
    await model.answer([2])
