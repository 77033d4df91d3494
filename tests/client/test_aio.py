from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.client.conftest import Puppet

from xlaserve_client import AsyncVisionClient, DeadlineExceeded, ModelNotFound, Overloaded, Unavailable


@pytest.fixture
async def client(puppet: Puppet) -> AsyncIterator[AsyncVisionClient]:
    async with AsyncVisionClient(puppet.target, deadline_s=5) as client:
        yield client


async def test_every_method_answers_as_the_synchronous_one(
    client: AsyncVisionClient, puppet: Puppet, tmp_path: Path
) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(b"\x01")
    assert (await client.classify(path, model="digits")).classifications[0].top.index == 1
    assert (await client.classify(np.zeros((4, 4, 3), np.uint8), model="digits")).classifications[0].top.index == 0
    assert (await client.detect(path, model="shapes", max_detections=3)).results[0].detections[0].index == 1
    assert puppet.seen[-1].max_detections == 3
    assert (await client.segment(path, model="shapes")).maps[0].classes.max() == 1
    assert (await client.embed(path, model="features")).vectors[0, -1] == 1
    assert (await client.transcribe(path, model="plates")).transcriptions[0].text == "class 1"
    assert (await client.locate(path, model="faces")).results[0].keypoints[0].index == 1
    assert (await client.infer(path, model="digits")).scores.argmax() == 1
    assert (await client.infer(b"\x02", model="digits", mode="graph")).mode == "graph"
    assert [model.name for model in await client.models()] == ["digits", "broken"]
    assert await client.ready()
    assert not await client.ready("other")
    await client.load("digits")
    await client.unload("digits")


async def test_requests_share_one_connection_at_the_same_time(client: AsyncVisionClient) -> None:
    results = await asyncio.gather(*(client.classify(bytes([n]), model="digits") for n in range(20)))
    assert [result.classifications[0].top.index for result in results] == list(range(20))


async def test_errors_carry_the_status(client: AsyncVisionClient, puppet: Puppet) -> None:
    puppet.failures = [(grpc.StatusCode.NOT_FOUND, "no model x")]
    with pytest.raises(ModelNotFound, match="no model x"):
        await client.classify(b"\x01", model="x")


async def test_inference_is_retried_and_loading_is_not(client: AsyncVisionClient, puppet: Puppet) -> None:
    puppet.failures = [(grpc.StatusCode.UNAVAILABLE, "draining")]
    await client.infer(b"\x01" * 1_000_000, model="digits")
    puppet.failures = [(grpc.StatusCode.UNAVAILABLE, "draining")]
    with pytest.raises(Unavailable):
        await client.load("digits")


async def test_a_server_that_says_when_to_come_again_is_obeyed(puppet: Puppet) -> None:
    puppet.failures = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", wait_s) for wait_s in (0.2, 0.1, 60.0)]
    async with AsyncVisionClient(puppet.target, retry_overload=True, deadline_s=30) as patient:
        with pytest.raises(Overloaded) as refused:
            await patient.classify(b"\x01", model="digits")
        assert refused.value.retry_after_s == 60.0
        assert (await patient.classify(b"\x01", model="digits")).classifications[0].top.index == 1
    first, second, third, _ = puppet.seen_at
    assert (second - first >= 0.2, third - second >= 0.1) == (True, True)


async def test_the_deadline_ends_a_call_that_is_never_answered(client: AsyncVisionClient, puppet: Puppet) -> None:
    puppet.hold = threading.Event()
    with pytest.raises(DeadlineExceeded):
        await client.infer(b"\x01", model="digits", deadline_s=0.1)


async def test_a_cancelled_call_is_cancelled_and_the_client_goes_on(client: AsyncVisionClient, puppet: Puppet) -> None:
    puppet.hold = threading.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.infer(b"\x01", model="digits"), timeout=0.1)
    puppet.hold.set()
    assert (await client.infer(b"\x01", model="digits")).scores.argmax() == 1


async def test_waiting_for_readiness(client: AsyncVisionClient, puppet: Puppet, closed_port: str) -> None:
    puppet.ready_after = 1
    await client.wait_until_ready(10)
    async with AsyncVisionClient(closed_port) as unreachable:
        assert not await unreachable.ready()
        with pytest.raises(DeadlineExceeded, match="not ready"):
            await unreachable.wait_until_ready(0.2)


def test_a_client_may_be_made_before_the_event_loop_runs(puppet: Puppet) -> None:
    client = AsyncVisionClient(puppet.target)

    async def use() -> int:
        async with client:
            return (await client.classify(b"\x03", model="digits")).classifications[0].top.index

    assert asyncio.run(use()) == 3
