"""What every inference method does around the pipeline: finds the model, times the stages, counts the outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

import grpc

from xlaserve.errors import DeadlineExceeded, InvalidArgument, ModelNotFound, XlaserveError
from xlaserve.model.repository import Repository
from xlaserve.model.version import Served
from xlaserve.pipeline import Answer, Pipeline, Request
from xlaserve.rpc.status import status_of
from xlaserve.rpc.streams import Streams, shutting_down
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.model import Timings

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Inference:
    """Runs inference requests of any protocol.

    A protocol gives three functions: `parse` its message for the model that serves it, with the deadline and the time
    that it is, to a Request; `respond` to an Answer with its message; and `stamp` the timings onto that.
    """

    def __init__(self, repository: Repository, pipeline: Pipeline, metrics: Metrics) -> None:
        self._repository = repository
        self._pipeline = pipeline
        self._metrics = metrics
        self._is_draining = False
        self._refused = asyncio.Event()
        self.streams = Streams()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def under_way(self) -> int:
        """Requests that were accepted and not yet answered."""
        return self._under_way

    async def drain(self) -> None:
        """Refuses new requests and returns once the accepted ones are answered."""
        self._is_draining = True
        await self._idle.wait()

    async def quiet(self, quiet_s: float) -> None:
        """Returns once no request was refused for `quiet_s`."""
        with suppress(TimeoutError):
            while True:
                self._refused.clear()
                async with asyncio.timeout(quiet_s):
                    await self._refused.wait()

    def deadline(self, context: Context) -> float:
        """Returns the call's deadline in seconds of the pipeline's clock; infinity where it has none."""
        remaining_s = context.time_remaining()
        return float("inf") if remaining_s is None else self._pipeline.clock() + remaining_s

    async def run(
        self,
        method: str,
        message: RequestT,
        model: str,
        version: str,
        deadline: float,
        *,
        parse: Callable[[RequestT, Served, float, float], Request],
        respond: Callable[[RequestT, Answer], ResponseT],
        stamp: Callable[[ResponseT, Timings], None],
    ) -> ResponseT:
        """Returns the response. Raises what `parse`, the repository, the pipeline and `respond` raise."""
        if self._is_draining:
            self._refused.set()
            refusal = shutting_down()
            self._count_failure(method, model, refusal)
            raise refusal
        clock = self._pipeline.clock
        began = clock()
        served: Served | None = None
        request: Request | None = None
        self._under_way += 1
        self._idle.clear()
        try:
            served = self._repository.get(model, version)
            request = parse(message, served, deadline, began)
            answer = await self._pipeline.run(served, request)
            ran = clock()
            response = respond(message, answer)
            done = clock()
            timings = Timings(
                answer.decode_s,
                answer.queue_s,
                answer.gather_s,
                answer.execute_s,
                encode_s=answer.render_s + done - ran,
                total_s=done - began,
            )
            stamp(response, timings)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and clock() >= deadline:
                error = DeadlineExceeded()  # gRPC cancels the call at its deadline
            self._count_failure(method, model, error, served, request, seconds=clock() - began)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        served.telemetry.request_answered(method, answer.mode, answer.images, timings)
        if log.isEnabledFor(logging.DEBUG):
            self._log_access(method, answer, timings)
        return response

    def _count_failure(
        self,
        method: str,
        model: str,
        error: BaseException,
        served: Served | None = None,
        request: Request | None = None,
        *,
        seconds: float = 0.0,
    ) -> None:
        status = "CANCELLED" if isinstance(error, asyncio.CancelledError) else status_of(error)[0].name
        # What a client wrote becomes a label only where the repository or the model has the same.
        mode = ""
        if served is not None and request is not None:
            mode = request.mode or served.settings.effective_default_mode
            mode = mode if mode in served.settings.modes else ""
        try:
            known = served or self._repository.find(model)
        except ModelNotFound:
            self._metrics.refused.labels(method, status).inc()
            model = ""
        else:
            known.telemetry.request_failed(method, mode, status, seconds)
        log.debug(
            "%s model=%s %s %.2f ms",
            *(method, model, status, seconds * 1000),
            extra={"method": method, "model": model, "status": status, "total_s": seconds},
        )

    def _log_access(self, method: str, answer: Answer, timings: Timings) -> None:
        name = answer.served.settings.name
        log.debug(
            "%s model=%s mode=%s images=%d OK %.2f ms",
            *(method, name, answer.mode, answer.images, timings.total_s * 1000),
            extra={
                "method": method,
                "model": name,
                "mode": str(answer.mode),
                "images": answer.images,
                "status": "OK",
                "decode_s": timings.decode_s,
                "queue_s": timings.queue_s,
                "gather_s": timings.gather_s,
                "execute_s": timings.execute_s,
                "encode_s": timings.encode_s,
                "total_s": timings.total_s,
            },
        )


Method = Callable[[Any, RequestT, Context], Awaitable[ResponseT]]
Handler = Callable[[Any, RequestT | None, Context], Awaitable[ResponseT]]


def answers_errors(method: Method[RequestT, ResponseT]) -> Handler[RequestT, ResponseT]:
    """Makes a unary method answer whatever it raises with the status of `rpc.status`."""

    @wraps(method)
    async def answering(self: Any, request: RequestT | None, context: Context) -> ResponseT:
        try:
            if request is None:
                raise no_message()
            return await method(self, request, context)
        except Exception as error:
            del request  # what abort raises and this frame hold each other
            if _is_of_wire(error):
                raise asyncio.CancelledError from None
            try:
                await context.abort(*explain(error))
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None
            raise

    return answering


def _is_of_wire(error: Exception) -> bool:
    """Returns whether gRPC could not write: the client is gone, and nobody is left to be told."""
    if isinstance(error, ExceptionGroup):
        return all(map(_is_of_wire, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)


def no_message() -> InvalidArgument:
    """Returns the error for bytes that could not be parsed."""
    return InvalidArgument("message", "the protobuf message of this method, its text in UTF-8", "other bytes")


def explain(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Returns the status and the message for a client; what is not ours to explain goes to the log.

    Clears the traceback: its frames hold the request's images, some of them in cycles with the error, and a hundred
    refused requests must not keep theirs until the collector comes by.
    """
    if not isinstance(error, XlaserveError):
        log.error("unexpected error", exc_info=error)
    error.__traceback__ = None
    return status_of(error)
