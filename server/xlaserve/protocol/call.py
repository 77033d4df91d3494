"""What inference requests of every protocol share: the model is found, stages are timed, the outcome is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Self

from xlaserve.errors import DeadlineExceeded, ModelNotFound, ShuttingDown, XlaserveError
from xlaserve.model.repository import Repository
from xlaserve.model.version import Served, Version
from xlaserve.pipeline import Answer, Request
from xlaserve.status import status_of
from xlaserve.telemetry.metrics import Metrics
from xlaserve.timings import Timings

log = logging.getLogger(__name__)

CANCELLED: Final = "CANCELLED"


def shutting_down() -> ShuttingDown:
    """Returns the error for what comes to a server that stops."""
    return ShuttingDown("the server is shutting down; try another one")


@dataclass(eq=False)
class Calls:
    """The inference requests in flight, of all protocols. `clock` is the pipeline's."""

    repository: Repository
    metrics: Metrics
    clock: Callable[[], float]
    in_flight: int = 0
    """Requests that were accepted and not yet answered."""

    def __post_init__(self) -> None:
        self._is_draining = False
        self._refused = asyncio.Event()
        self._idle = asyncio.Event()
        """Set once, when the last request is answered while draining."""

    def enter(self, method: str, model: str, version: str, deadline: float) -> Call:
        """Accepts a request, to be answered in a `with` of what this returns.

        `deadline` is in seconds of the clock. Raises ShuttingDown, ModelNotFound, ModelNotReady or ModelFailed.
        """
        began = self.clock()
        if self._is_draining:
            self._refused.set()
            refusal = shutting_down()
            self.count_failure(method, model, refusal)
            raise refusal
        try:
            served = self.repository.get(model, version)
        except XlaserveError as error:
            self.count_failure(method, model, error, seconds=self.clock() - began)
            raise
        return Call(self, method, served, deadline, began)

    def leave(self) -> None:
        """Counts a request as no longer in flight."""
        self.in_flight -= 1
        if self._is_draining and not self.in_flight:
            self._idle.set()

    async def drain(self) -> None:
        """Refuses new requests and returns once the accepted ones are answered."""
        self._is_draining = True
        if self.in_flight:
            await self._idle.wait()

    async def quiet(self, quiet_s: float) -> None:
        """Returns once no request was refused for `quiet_s`."""
        with suppress(TimeoutError):
            while True:
                self._refused.clear()
                async with asyncio.timeout(quiet_s):
                    await self._refused.wait()

    def count_failure(
        self,
        method: str,
        model: str,
        error: BaseException,
        *,
        version: Version | None = None,
        mode: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Counts a request that failed after `seconds`. `mode` is empty where it failed before its mode was known."""
        status = CANCELLED if isinstance(error, asyncio.CancelledError) else status_of(error)[0].grpc
        try:
            known = version or self.repository.find(model)
        except ModelNotFound:
            self.metrics.refused.labels(method, status).inc()
            model = ""
        else:
            known.telemetry.request_failed(method, mode, status, seconds)
        log.debug(
            "%s model=%s %s %.2f ms",
            method,
            model,
            status,
            seconds * 1000,
            extra={"method": method, "model": model, "status": status, "total_s": seconds},
        )


class Call:
    """One request in flight. An error that leaves its `with` block is counted as its failure."""

    __slots__ = ("_answer", "_calls", "_method", "began", "deadline", "request", "served")

    def __init__(self, calls: Calls, method: str, served: Served, deadline: float, began: float) -> None:
        self._calls = calls
        self._method = method
        self.served = served
        self.deadline = deadline
        self.began = began
        """When it began, in seconds of the clock, as `deadline` is."""
        self.request: Request | None = None
        """The request, once it is parsed."""
        self._answer: Answer | None = None

    def __enter__(self) -> Self:
        self._calls.in_flight += 1
        return self

    def end(self, answer: Answer) -> Timings:
        """Takes `answer` for the outcome of the call, and returns its timings, which are complete now."""
        timings = answer.timings
        now = self._calls.clock()
        timings.encode_s += now - answer.at
        timings.total_s = now - self.began
        self._answer = answer
        return timings

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._calls.leave()
        if error is not None:
            self._count_failure(error)
        elif answer := self._answer:
            self.served.version.telemetry.request_answered(self._method, answer.mode, answer.images, answer.timings)
            if log.isEnabledFor(logging.DEBUG):
                self._log_access(answer)

    def _count_failure(self, error: BaseException) -> None:
        now = self._calls.clock()
        if isinstance(error, asyncio.CancelledError) and now >= self.deadline:
            error = DeadlineExceeded()  # gRPC cancels the call at its deadline
        settings = self.served.settings
        # What a client wrote becomes a label only where the model has the same.
        mode = "" if self.request is None else self.request.mode or settings.effective_default_mode
        self._calls.count_failure(
            self._method,
            settings.name,
            error,
            version=self.served.version,
            mode=mode if mode in settings.modes else "",
            seconds=now - self.began,
        )

    def _log_access(self, answer: Answer) -> None:
        name, timings = self.served.settings.name, answer.timings
        log.debug(
            "%s model=%s mode=%s images=%d OK %.2f ms",
            self._method,
            name,
            answer.mode,
            answer.images,
            timings.total_s * 1000,
            extra={
                "method": self._method,
                "model": name,
                "mode": str(answer.mode),
                "images": answer.images,
                "status": "OK",
                **asdict(timings),
            },
        )
