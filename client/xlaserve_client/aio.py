"""The asyncio client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cached_property, partial
from types import TracebackType
from typing import Self, TypeVar

from xlaserve_client import calls, vision_calls
from xlaserve_client import inputs as named_inputs
from xlaserve_client.aio_connection import Connection, Tried, connect
from xlaserve_client.call import Call
from xlaserve_client.connection import LOAD_DEADLINE_S, READY_POLL_S, checked_deadline
from xlaserve_client.errors import DeadlineExceeded, ServerError, Unavailable
from xlaserve_client.images import Images, any_on_disk
from xlaserve_client.inputs import Inputs
from xlaserve_client.results import (
    ClassifyResult,
    DetectResult,
    EmbedResult,
    InferResult,
    LocateResult,
    Model,
    SegmentResult,
    TranscribeResult,
)
from xlaserve_client.settings import BaseClient

Result = TypeVar("Result")


class AsyncVisionClient(BaseClient):
    """`VisionClient` for asyncio: the same arguments, results and errors. Belongs to one event loop.

    async with AsyncVisionClient("127.0.0.1:8001") as client:
        result = await client.classify("three.png", model="digits")
    """

    async def classify(
        self, images: Images, *, model: str, top_k: int = 5, mode: str | None = None, deadline_s: float | None = None
    ) -> ClassifyResult:
        """Names what is in `images`; see `VisionClient.classify`. Files are read in a thread, as in the other
        methods."""
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
        """Finds the objects in `images`; see `VisionClient.detect`."""
        build = partial(
            vision_calls.detect, images, model=model, min_score=min_score, max_detections=max_detections, mode=mode
        )
        return await self._ask(build, images, deadline_s)

    async def segment(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> SegmentResult:
        """Names each pixel of `images`; see `VisionClient.segment`."""
        return await self._ask(partial(vision_calls.segment, images, model=model, mode=mode), images, deadline_s)

    async def embed(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> EmbedResult:
        """Makes a vector of each of `images`; see `VisionClient.embed`."""
        return await self._ask(partial(vision_calls.embed, images, model=model, mode=mode), images, deadline_s)

    async def transcribe(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> TranscribeResult:
        """Reads the sequence of classes in each of `images`; see `VisionClient.transcribe`."""
        return await self._ask(partial(vision_calls.transcribe, images, model=model, mode=mode), images, deadline_s)

    async def locate(
        self,
        images: Images,
        *,
        model: str,
        min_score: float = 0.0,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> LocateResult:
        """Finds the keypoints in `images`; see `VisionClient.locate`."""
        build = partial(vision_calls.locate, images, model=model, min_score=min_score, mode=mode)
        return await self._ask(build, images, deadline_s)

    async def infer(
        self,
        images: Images | None = None,
        *,
        model: str,
        inputs: Inputs | None = None,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> InferResult:
        """Runs `model` on `images` or `inputs` and returns its output tensors; see `VisionClient.infer`."""
        self._check_given(images, inputs)
        if images is not None:
            return await self._ask(partial(calls.infer, images, model=model, mode=mode), images, deadline_s)
        assert inputs is not None
        with self._using_inputs(model):
            if (declared := self._inputs.get(model)) is None:
                declared = self._inputs[model] = await self._answer(calls.inputs_of(model), deadline_s)
            build = partial(calls.infer_inputs, inputs, declared, model=model, mode=mode)
            call = await asyncio.to_thread(build) if named_inputs.any_on_disk(inputs) else build()
            return await self._answer(call, deadline_s)

    async def models(self, *, deadline_s: float | None = None) -> tuple[Model, ...]:
        """Returns every model with its state; see `VisionClient.models`."""
        return await self._answer(vision_calls.models(), deadline_s)

    async def ready(self, model: str | None = None, *, deadline_s: float | None = None) -> bool:
        """Returns whether the server or a model is ready; see `VisionClient.ready`."""
        try:
            return await self._answer(calls.ready(model), deadline_s)
        except Unavailable:
            return False

    async def wait_until_ready(self, timeout_s: float, *, model: str | None = None) -> None:
        """Waits until the server or a model is ready; see `VisionClient.wait_until_ready`."""
        give_up_at = time.monotonic() + checked_deadline(timeout_s)
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                if await self._answer(calls.ready(model), left_s, wait_for_ready=True):
                    return
            except (Unavailable, DeadlineExceeded):
                pass  # still starting
            await asyncio.sleep(max(0.0, min(READY_POLL_S, give_up_at - time.monotonic())))
        raise self._settings.not_ready(timeout_s)

    async def load(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Loads a configured model, or reloads it; see `VisionClient.load`."""
        await self._answer(calls.load(model), deadline_s)

    async def unload(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Lets a model finish the requests that it accepted, and frees it; see `VisionClient.unload`."""
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
        # Made at the first call, since gRPC binds a channel to the event loop that runs then.
        return connect(self._settings)

    async def _ask(self, build: Callable[[], Call[Result]], images: Images, deadline_s: float | None) -> Result:
        call = await asyncio.to_thread(build) if any_on_disk(images) else build()
        return await self._answer(call, deadline_s)

    async def _answer(self, call: Call[Result], deadline_s: float | None, *, wait_for_ready: bool = False) -> Result:
        attempts, tried = self._settings.attempts(call, deadline_s), Tried()
        while True:
            try:
                return call.parse(
                    await self._connection.invoke(call, attempts.left_s, tried, wait_for_ready=wait_for_ready)
                )
            except ServerError as error:
                refusal = error.with_traceback(None)  # which would refer to this frame, and so to the request
            pause_s = attempts.pause_s(refusal)
            if pause_s is None:
                try:
                    raise refusal
                finally:
                    del refusal  # it has a traceback again
            await asyncio.sleep(pause_s)
