"""Inference calls of every protocol: the model is found, stages are timed, the outcome is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from xlaserve.admission.caller import CURRENT
from xlaserve.admission.calls import CallAdmission, current_call
from xlaserve.admission.limits import Limiter
from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.engine.timings import Timings
from xlaserve.errors import (
    DeadlineExceeded,
    ModelNotFound,
    OverloadError,
    PermissionDenied,
    ShuttingDown,
    XlaserveError,
    status_of,
)
from xlaserve.models.version import Served, Version
from xlaserve.models.version_lookup import Directory
from xlaserve.pipeline.pipeline import Answer, Pipeline, Request
from xlaserve.telemetry import request_context
from xlaserve.telemetry.access_log import AccessLog
from xlaserve.telemetry.failures import Failures
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.tracing import CANCELLED, Answered, Span, SpanFailure
from xlaserve.wire.shared.loop_time import LoopTime
from xlaserve.wire.shared.shadow import Shadows


def shutting_down() -> ShuttingDown:
    """Returns the error for what comes to a server that stops."""
    return ShuttingDown("the server is shutting down; try another one")


@dataclass(eq=False)
class Calls:
    """The inference requests in flight, of all protocols."""

    directory: Directory
    metrics: Metrics
    pipeline: Pipeline
    shadows: Shadows | None = None
    access_log: AccessLog = field(default_factory=AccessLog)
    failures: Failures = field(default_factory=Failures)
    is_tracing: bool = False
    """Whether calls may have spans."""
    usage: SharedCounts = field(default_factory=SharedCounts)
    """Of callers, at all fronts."""
    admission: CallAdmission | None = None
    """Knows which calls began before the drain."""
    in_flight: int = 0
    """Requests that were accepted and not yet answered."""

    def __post_init__(self) -> None:
        self._is_draining = False
        self.loop_time = LoopTime()
        self._refused = asyncio.Event()
        self.clock = self.pipeline.clock
        self._idle = asyncio.Event()
        """Set when the last request is answered while draining."""
        self.limiter = Limiter(self.clock, self.metrics.count_limited, self.usage)

    def enter(self, method: str, model: str, version: str, deadline: float, request_id: str = "") -> Call:
        """Accepts a request, to be answered in a `with` of what this returns.

        `version` is a number, a label, or empty: then versions may share such requests, by the message's own
        `request_id` or else by the id that the client gave the call. `deadline` is in seconds of the clock. Raises
        ShuttingDown, ModelNotFound, ModelNotReady or ModelFailed.
        """
        began = self.clock()
        if self._is_draining and not self._has_begun:
            self._refused.set()
            refusal = shutting_down()
            self.count_failure(method, model, refusal, named=version)
            raise refusal
        try:
            CURRENT.get().check_model(model)
            if version:
                served = self.directory.get(model, version)
            else:
                served = self.directory.routed(model, request_id or request_context.given_id())
        except XlaserveError as error:
            self.count_failure(method, model, error, named=version, seconds=self.clock() - began)
            raise
        return Call(self, method, served, deadline, began)

    def leave(self) -> None:
        """Counts a request as no longer in flight."""
        self.in_flight -= 1
        self.loop_time.count()
        if self._is_draining and not self.in_flight:
            self._idle.set()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Counts a request that is no inference as in flight, so that a drain waits for it."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.leave()

    async def drain(self) -> None:
        """Refuses requests of calls that begin from now on; returns once all that are in flight are answered."""
        self._is_draining = True
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    @property
    def _has_begun(self) -> bool:
        """Whether the current call began before the drain. Messages of a stream are no calls."""
        return self.admission is not None and self.admission.has_begun(current_call())

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
        named: str = "",
        mode: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Counts a request that failed after `seconds`, of `version` or of the one that it `named`.

        `mode` is empty where it failed before its mode was known.
        """
        status, _ = outcome(error)
        failed = ""
        try:
            CURRENT.get().check_model(model)
            known = version or self.directory.find(model, named)
        except (ModelNotFound, PermissionDenied):  # strangers don't change what is counted of a model
            self.metrics.count_refused(method, status)
        else:
            failed = known.settings.version
            known.telemetry.request_failed(method, mode, status, seconds)
            if isinstance(error, OverloadError):
                known.telemetry.request_refused(error.reason, seconds)
        self.note_failure(method, error, model=model, version=failed, seconds=seconds)

    def note_failure(
        self,
        method: str,
        error: BaseException,
        *,
        model: str = "",
        version: str = "",
        seconds: float | None = None,
    ) -> None:
        """Leaves a line of a failure in the log and keeps it: one, though several parts of its call may see it."""
        request = request_context.current()
        status, reason = outcome(error)
        if request is not None and not request.fail(SpanFailure(type(error).__name__, status, reason)):
            return
        caller = CURRENT.get().name
        self.access_log.failed(method, status, reason, caller=caller, model=model, version=version, seconds=seconds)
        self.failures.note(method, status, reason, caller=caller, model=model, seconds=seconds)


def outcome(error: BaseException) -> tuple[str, str]:
    """Returns the status that an error is counted as, and what its client is told."""
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED, "the client has gone"
    status, reason = status_of(error)
    return status.grpc, reason


class Call:
    """One request in flight. An error that leaves its `with` block is counted as its failure."""

    __slots__ = ("_answer", "_calls", "_method", "_span", "began", "deadline", "request", "served")

    def __init__(self, calls: Calls, method: str, served: Served, deadline: float, began: float) -> None:
        self._calls = calls
        self._method = method
        self.served = served
        self.deadline = deadline
        self.began = began
        """When it began, in seconds of the clock, as `deadline` is."""
        self.request: Request | None = None
        """The parsed request; None until then."""
        self._answer: Answer | None = None
        self._span = _current_span() if calls.is_tracing else None

    def __enter__(self) -> Self:
        self._calls.in_flight += 1
        self.served.calls += 1
        return self

    def route(self, request_id: str) -> None:
        """Lets versions share the request, which names none, by an id that was found in its body."""
        served = self._calls.directory.routed(self.served.settings.name, request_id)
        served.calls += 1
        self.served.leave()
        self.served = served

    async def run(self, request: Request) -> Answer:
        """Returns what the model answers. Raises what `Pipeline.run` and `Limiter.hold` raise."""
        caller = CURRENT.get()
        if request.priority < caller.priority:
            request = request._replace(priority=caller.priority)
        if self._span is not None:
            request = request._replace(trace=self._span.context)
        self.request = request
        if caller.limits:
            with self._calls.limiter.hold(caller, self.served.settings.name, len(request.images)):
                answer = await self._calls.pipeline.run(self.served, request)
        else:
            answer = await self._calls.pipeline.run(self.served, request)
        if answer.warning and (current := request_context.current()) is not None:
            current.warn(answer.warning)
        if (shadows := self._calls.shadows) is not None and self.served.settings.shadow is not None:
            shadows.offer(self.served, request.images, answer.mode)
        return answer

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
        self.served.leave()
        if self._span is not None:
            self._describe(self._span)
        if error is not None:
            self._count_failure(error)
        elif answer := self._answer:
            self.served.version.telemetry.request_answered(self._method, answer.mode, answer.images, answer.timings)
            if (log := self._calls.access_log).has_answers:
                name, version = self.served.settings.name, self.served.settings.version
                caller, images, timings = CURRENT.get().name, answer.images, answer.timings
                log.answered(self._method, name, version, answer.mode, images=images, timings=timings, caller=caller)

    def _describe(self, span: Span) -> None:
        settings, answer = self.served.settings, self._answer
        span.attributes |= {"xlaserve.model.name": settings.name, "xlaserve.model.version": settings.version}
        if answer is not None:
            span.attributes |= {"xlaserve.mode": str(answer.mode), "xlaserve.images": answer.images}
            span.answer(Answered(self.began + answer.timings.total_s, answer.timings, answer.traced))

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


def _current_span() -> Span | None:
    request = request_context.current()
    return None if request is None else request.span
