"""The asyncio client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import Self, TypeVar

import grpc

from xlaserve_client import calls, vision_calls
from xlaserve_client.aio_connection import Connection, FleetConnection, ServerConnection, Tried
from xlaserve_client.call import Call
from xlaserve_client.connection import (
    DEFAULT_DEADLINE_S,
    DEFAULT_TARGET,
    LOAD_DEADLINE_S,
    READY_POLL_S,
    call_metadata,
    checked_deadline,
    checked_hedge,
    checked_priority,
)
from xlaserve_client.errors import DeadlineExceeded, ServerError, Unavailable
from xlaserve_client.images import Images, any_on_disk
from xlaserve_client.name_service import NameService, is_fleet
from xlaserve_client.results import ClassifyResult, DetectResult, EmbedResult, InferResult, Model, SegmentResult
from xlaserve_client.retries import Retries

Result = TypeVar("Result")


class AsyncVisionClient:
    """`VisionClient` for asyncio: the same arguments, results and errors. Belongs to one event loop.

    async with AsyncVisionClient("127.0.0.1:8001") as client:
        result = await client.classify("three.png", model="digits")
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        retry_overload: bool = False,
        hedge_after_s: float | None = None,
        priority: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._target = target
        self._deadline_s = checked_deadline(deadline_s)
        self._metadata = call_metadata(token, metadata)
        self._hedge_after_s = checked_hedge(hedge_after_s, is_fleet=is_fleet(target))
        self._retries = Retries(overload=retry_overload, unavailable=is_fleet(target))
        self._priority = checked_priority(priority)
        self._service = NameService.parse(target) if is_fleet(target) else None
        self._credentials = credentials

    async def classify(
        self, images: Images, *, model: str, top_k: int = 5, mode: str | None = None, deadline_s: float | None = None
    ) -> ClassifyResult:
        """As `VisionClient.classify`; files are read in a thread, in the other methods too."""
        build = partial(vision_calls.classify, images, model=model, top_k=top_k, mode=mode)
        return await self._ask(build, images, deadline_s)

    async def detect(
        self,
        images: Images,
        *,
        model: str,
        min_score: float = 0.0,
        max_detections: int | None = None,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> DetectResult:
        """As `VisionClient.detect`."""
        build = partial(
            vision_calls.detect, images, model=model, min_score=min_score, max_detections=max_detections, mode=mode
        )
        return await self._ask(build, images, deadline_s)

    async def segment(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> SegmentResult:
        """As `VisionClient.segment`."""
        return await self._ask(partial(vision_calls.segment, images, model=model, mode=mode), images, deadline_s)

    async def embed(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> EmbedResult:
        """As `VisionClient.embed`."""
        return await self._ask(partial(vision_calls.embed, images, model=model, mode=mode), images, deadline_s)

    async def infer(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> InferResult:
        """As `VisionClient.infer`."""
        return await self._ask(partial(calls.infer, images, model=model, mode=mode), images, deadline_s)

    async def models(self, *, deadline_s: float | None = None) -> tuple[Model, ...]:
        """As `VisionClient.models`."""
        return await self._answer(vision_calls.models(), deadline_s)

    async def ready(self, model: str | None = None, *, deadline_s: float | None = None) -> bool:
        """As `VisionClient.ready`."""
        try:
            return await self._answer(calls.ready(model), deadline_s)
        except Unavailable:
            return False

    async def wait_until_ready(self, timeout_s: float, *, model: str | None = None) -> None:
        """As `VisionClient.wait_until_ready`."""
        give_up_at = time.monotonic() + checked_deadline(timeout_s)
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                if await self._answer(calls.ready(model), left_s, wait_for_ready=True):
                    return
            except (Unavailable, DeadlineExceeded):
                pass  # Still starting.
            await asyncio.sleep(max(0.0, min(READY_POLL_S, give_up_at - time.monotonic())))
        raise DeadlineExceeded(self._target, grpc.StatusCode.DEADLINE_EXCEEDED, f"not ready after {timeout_s:g} s")

    async def load(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """As `VisionClient.load`."""
        await self._answer(calls.load(model), deadline_s)

    async def unload(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """As `VisionClient.unload`."""
        await self._answer(calls.unload(model), deadline_s)

    async def close(self) -> None:
        """Closes the connection; calls in progress are cancelled."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @cached_property
    def _connection(self) -> Connection:
        # Made at the first call, because gRPC binds a channel to the event loop that runs then.
        if self._service is None:
            return ServerConnection(self._target, self._credentials, self._metadata)
        return FleetConnection(self._service, self._credentials, self._metadata, self._hedge_after_s)

    async def _ask(self, build: Callable[[], Call[Result]], images: Images, deadline_s: float | None) -> Result:
        call = await asyncio.to_thread(build) if any_on_disk(images) else build()
        return await self._answer(call, deadline_s)

    async def _answer(self, call: Call[Result], deadline_s: float | None, *, wait_for_ready: bool = False) -> Result:
        left_s = self._deadline_s if deadline_s is None else checked_deadline(deadline_s)
        give_up_at = time.monotonic() + left_s
        if self._priority:
            calls.set_priority(call.request, self._priority)
        attempt, tried = 1, Tried()
        while True:
            try:
                return call.parse(await self._connection.invoke(call, left_s, tried, wait_for_ready=wait_for_ready))
            except ServerError as error:
                refusal = error.with_traceback(None)  # which would refer to this frame, and so to the request
            wait_s = self._retries.pause_s(call, refusal, attempt, give_up_at - time.monotonic())
            if wait_s is None:
                try:
                    raise refusal
                finally:
                    del refusal  # it has a traceback again
            await asyncio.sleep(wait_s)
            left_s, attempt = give_up_at - time.monotonic(), attempt + 1
