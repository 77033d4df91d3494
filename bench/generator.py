"""A load generator that costs next to nothing: one serialised request, sent again and again, its answer not parsed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import accumulate, count, cycle, takewhile
from typing import NamedTuple

import grpc
import numpy as np
import uvloop

from xlaserve_proto import open_inference_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
DEADLINE_S = 120.0
RAMP = 0.3
"""A timed load runs for this share of its time before it counts, so that all lanes are as busy as they stay."""


class Load(NamedTuple):
    """What was answered."""

    requests: int
    """All that were answered; fewer are `counted`."""
    counted: int
    seconds: float
    """Time in which the counted ones were answered."""

    @property
    def per_s(self) -> float:
        """Requests answered in a second."""
        return self.counted / self.seconds


class Answered(NamedTuple):
    """One request of an open loop."""

    due_s: float
    """When it was to be sent, in seconds from the beginning."""
    seconds: float
    """From then until it was answered."""
    status: grpc.StatusCode
    payload: int
    """Which of the payloads it was."""


def pixels_request(model: str, side: int, mode: str = "", images: int = 1) -> bytes:
    """Returns a request with images of noise, `side` pixels wide and high."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="pixels", datatype="UINT8", shape=(images, side, side, 3))
    noise = np.random.default_rng(seed=0).integers(0, 256, (images, side, side, 3), dtype=np.uint8)
    request.raw_input_contents.append(noise.tobytes())
    if mode:
        request.parameters["mode"].string_param = mode
    return request.SerializeToString()


def image_request(model: str, encoded: bytes) -> bytes:
    """Returns a request with one encoded image."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="image", datatype="BYTES", shape=(1,)).contents.bytes_contents.append(encoded)
    return request.SerializeToString()


def answer(address: str, payload: bytes) -> bytes:
    """Sends one request and returns what was computed for it, as it is on the wire."""
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., bytes] = channel.unary_unary(METHOD)
        response = pb.ModelInferResponse.FromString(call(payload, timeout=DEADLINE_S))
    return b"".join(response.raw_output_contents)


def closed_loop(
    address: str, payload: bytes, concurrency: int, *, seconds: float = 0, requests: int = 0, connections: int = 1
) -> Load:
    """Keeps `concurrency` requests in flight, and counts for `seconds`, or until `requests` are answered.

    Requests take turns on `connections`. What is answered before and after those seconds is not
    counted: lanes are idle there, for as long as a batch of a slow model takes. Any error raises.
    """
    load: Load = uvloop.run(
        _closed_loop(address, payload, concurrency, seconds=seconds, requests=requests, connections=connections)
    )
    return load


async def _closed_loop(
    address: str, payload: bytes, concurrency: int, *, seconds: float, requests: int, connections: int
) -> Load:
    # Channels of one address share a connection without it.
    options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with AsyncExitStack() as stack:
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
        calls: list[Callable[..., Awaitable[bytes]]] = []
        for channel in channels:
            await stack.enter_async_context(channel)
            calls.append(channel.unary_unary(METHOD))
            await calls[-1](payload, timeout=DEADLINE_S, wait_for_ready=True)
        turns = cycle(calls)
        answered = counted = 0
        began = time.perf_counter()
        since = began + RAMP * seconds
        until = since + seconds

        async def client() -> None:
            nonlocal answered, counted
            while time.perf_counter() < until if seconds else answered < requests:
                await next(turns)(payload, timeout=DEADLINE_S)
                answered += 1
                counted += since <= time.perf_counter() < until

        await asyncio.gather(*(client() for _ in range(concurrency)))
        if seconds:
            return Load(answered, counted, seconds)
        return Load(answered, answered, time.perf_counter() - began)


def open_loop(
    address: str, payloads: Sequence[bytes], rate: float, seconds: float, deadline_s: float
) -> list[Answered]:
    """Sends `rate` requests/s at random times for `seconds`, `payloads` in turn, whatever is answered."""
    return replay(address, payloads, at_random(rate, seconds), deadline_s)


def at_random(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Returns the seconds at which `rate` requests/s come, independently of each other."""
    chance = random.Random(seed)
    due = accumulate(chance.expovariate(rate) for _ in count())
    return list(takewhile(lambda at: at <= seconds, due))


def replay(address: str, payloads: Sequence[bytes], due_s: Sequence[float], deadline_s: float) -> list[Answered]:
    """Sends `payloads` in turn at `due_s`, whatever is answered."""
    found: list[Answered] = uvloop.run(_replay(address, payloads, due_s, deadline_s))
    return found


async def _replay(address: str, payloads: Sequence[bytes], due_s: Sequence[float], deadline_s: float) -> list[Answered]:
    answered: list[Answered] = []
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        call: Callable[..., Awaitable[bytes]] = channel.unary_unary(METHOD)
        await call(payloads[0], timeout=DEADLINE_S, wait_for_ready=True)

        async def send(due: float, payload: int) -> None:
            status = grpc.StatusCode.OK
            try:
                await call(payloads[payload], timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                status = error.code()
            answered.append(Answered(due - began, time.perf_counter() - due, status, payload))

        began = time.perf_counter()
        for due, payload in zip(due_s, cycle(range(len(payloads)))):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            group.create_task(send(began + due, payload))
    return answered
