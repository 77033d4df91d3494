"""The synchronous client."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TypeVar

from xlaserve_client import calls, vision_calls
from xlaserve_client.call import Call
from xlaserve_client.connection import LOAD_DEADLINE_S, READY_POLL_S, checked_deadline
from xlaserve_client.errors import DeadlineExceeded, ServerError, Unavailable
from xlaserve_client.images import Images
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
from xlaserve_client.sync_connection import Tried, connect

Result = TypeVar("Result")


class VisionClient(BaseClient):
    """A client of a server or a fleet. Safe to use from several threads; close it, or use it as a context manager.

    `target` is HOST:PORT, or fleet://HOST:PORT for the servers that the name service there lists: each call is sent to
    the server with the fewest outstanding calls of this client, and retried on another one. `deadline_s` is the time
    for a call in seconds, retries included; each call may set its own. Inference and listing are retried a few times
    where the server can't be reached or is draining, and with `retry_overload` where it refuses them for overload,
    after the time that it asks for; loading and unloading are never retried. Inference of a fleet that is not answered
    after `hedge_after_s` seconds is sent to a second server as well, in the long run at most one call in 20, and the
    first answer is returned. `credentials` enables TLS. `token` is an API key or a JSON Web Token; `metadata` is sent
    with every call. `priority` of inference is 1 (the highest) to 3; 0 leaves it to the server.

        with VisionClient("127.0.0.1:8001") as client:
            print(client.classify("three.png", model="digits").classifications[0].top.label)
    """

    def _begin(self) -> None:
        self._connection = connect(self._settings)

    def classify(
        self, images: Images, *, model: str, top_k: int = 5, mode: str | None = None, deadline_s: float | None = None
    ) -> ClassifyResult:
        """Names what is in `images`: the `top_k` likeliest classes of each, run in `mode` or the model's default.

        Encoded images are of any size, pixels of the model's own. Raises ServerError, InvalidReply; OSError for a file
        that can't be read; TypeError or ValueError for arguments that are not images.
        """
        return self._answer(vision_calls.classify(images, model=model, top_k=top_k, mode=mode), deadline_s)

    def detect(
        self,
        images: Images,
        *,
        model: str,
        min_score: float = 0.0,
        max_detections: int | None = None,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> DetectResult:
        """Finds the objects in `images`, at most `max_detections` in each and none below `min_score`.

        Takes and raises the same as `classify`.
        """
        call = vision_calls.detect(images, model=model, min_score=min_score, max_detections=max_detections, mode=mode)
        return self._answer(call, deadline_s)

    def segment(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> SegmentResult:
        """Names each pixel of `images`. Takes and raises the same as `classify`."""
        return self._answer(vision_calls.segment(images, model=model, mode=mode), deadline_s)

    def embed(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> EmbedResult:
        """Makes a vector of each of `images`. Takes and raises the same as `classify`."""
        return self._answer(vision_calls.embed(images, model=model, mode=mode), deadline_s)

    def transcribe(
        self, images: Images, *, model: str, mode: str | None = None, deadline_s: float | None = None
    ) -> TranscribeResult:
        """Reads the text, or another sequence of classes, in each of `images`. Takes and raises the same as
        `classify`."""
        return self._answer(vision_calls.transcribe(images, model=model, mode=mode), deadline_s)

    def locate(
        self,
        images: Images,
        *,
        model: str,
        min_score: float = 0.0,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> LocateResult:
        """Finds the keypoints in `images`, none below `min_score` where the model gives scores. Takes and raises the
        same as `classify`."""
        return self._answer(vision_calls.locate(images, model=model, min_score=min_score, mode=mode), deadline_s)

    def infer(
        self,
        images: Images | None = None,
        *,
        model: str,
        inputs: Inputs | None = None,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> InferResult:
        """Runs `model` on `images`, or on its `inputs` by their names, and returns its output tensors.

        `inputs` are for models of several inputs and of inputs that hold no images: each is sent encoded images or an
        array, all with the same number of rows. They are checked against the model's metadata, which the first request
        asks for. Takes and raises the same as `classify`; TypeError also for arrays of another type, ValueError for
        missing or unknown inputs and other shapes.

            client.infer(inputs={"photo": "cat.jpg", "age": 3.5}, model="pets").outputs
        """
        self._check_given(images, inputs)
        if images is not None:
            return self._answer(calls.infer(images, model=model, mode=mode), deadline_s)
        assert inputs is not None
        with self._using_inputs(model):
            declared = self._inputs.get(model) or self._answer(calls.inputs_of(model), deadline_s)
            self._inputs[model] = declared
            call = calls.infer_inputs(inputs, declared, model=model, mode=mode)
            return self._answer(call, deadline_s)

    def models(self, *, deadline_s: float | None = None) -> tuple[Model, ...]:
        """Returns every model with its state, those that were unloaded included. Raises ServerError."""
        return self._answer(vision_calls.models(), deadline_s)

    def ready(self, model: str | None = None, *, deadline_s: float | None = None) -> bool:
        """Returns whether the server with at least one model, or the model `model`, is ready; False also for an
        unreachable server.

        Raises ServerError for any other failure, such as an unknown model.
        """
        try:
            return self._answer(calls.ready(model), deadline_s)
        except Unavailable:
            return False

    def wait_until_ready(self, timeout_s: float, *, model: str | None = None) -> None:
        """Blocks until `ready`. Raises DeadlineExceeded after `timeout_s`, ServerError for any other failure."""
        give_up_at = time.monotonic() + checked_deadline(timeout_s)
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                if self._answer(calls.ready(model), left_s, wait_for_ready=True):
                    return
            except (Unavailable, DeadlineExceeded):
                pass  # still starting
            time.sleep(max(0.0, min(READY_POLL_S, give_up_at - time.monotonic())))
        raise self._settings.not_ready(timeout_s)

    def load(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Loads a configured model, or reloads it; returns when it is ready. Raises ServerError; ValueError for a
        fleet."""
        self._answer(calls.load(model), deadline_s)

    def unload(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> None:
        """Lets a model finish the requests that it accepted, and frees it. Raises ServerError; ValueError for a
        fleet."""
        self._answer(calls.unload(model), deadline_s)

    def close(self) -> None:
        """Closes the connection; calls in progress are cancelled."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, call: Call[Result], deadline_s: float | None, *, wait_for_ready: bool = False) -> Result:
        attempts, tried = self._settings.attempts(call, deadline_s), Tried()
        while True:
            try:
                return call.parse(self._connection.invoke(call, attempts.left_s, tried, wait_for_ready=wait_for_ready))
            except ServerError as error:
                refusal = error.with_traceback(None)  # which would refer to this frame, and so to the request
            pause_s = attempts.pause_s(refusal)
            if pause_s is None:
                try:
                    raise refusal
                finally:
                    del refusal  # it has a traceback again
            time.sleep(pause_s)
