"""Reports of batches: to the metrics, the log and the traces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.queue import TakenBatch
from xlaserve.engine.batching.worker import Run
from xlaserve.engine.program import WrongRowsError
from xlaserve.engine.trace_context import TraceContext, TracedBatch, new

log = logging.getLogger(__name__)

MAX_TRACED_REQUESTS: Final = 128
"""Requests that the span of a batch links to: as many as OpenTelemetry links to a span by default."""


class Observer(Protocol):
    """Called after every batch."""

    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: Run) -> None:
        """A batch of `images` real images ran in `bucket`."""

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        """A batch raised."""


@dataclass(eq=False)
class BatchReports:
    """Reports the batches of `model` to its observer, to the log and, where requests are traced, to `on_traced`."""

    model: str
    observer: Observer
    on_traced: Callable[[TracedBatch], None] | None
    clock: Callable[[], float]

    def trace(self, taken: TakenBatch, run: Run | BaseException) -> TracedBatch | None:
        """Returns the span of a batch, and adds it to its traced jobs; None where none of them is traced."""
        if self.on_traced is None:
            return None
        jobs = [piece.job for piece in taken.pieces if piece.job.request.trace is not None]
        if not jobs:
            return None
        if isinstance(run, Run):
            started = run.ended - run.execute_s
            gathered = started - run.wait_s
            times = (gathered - run.gather_s, gathered, started, run.ended)
        else:
            times = (taken.at, taken.at, taken.at, self.clock())
        requests = [job.request.trace for job in jobs[:MAX_TRACED_REQUESTS] if job.request.trace is not None]
        traced = TracedBatch(new(), requests, self.model, taken.mode, taken.bucket, taken.images, *times)
        for job in jobs:
            job.result.traced.append(traced)
        return traced

    def trace_alone(
        self, request: TraceContext, mode: Mode, bucket: Bucket, images: int, *, began: float, ended: float
    ) -> TracedBatch:
        """Returns the span of a batch of one request, which was neither gathered nor waited for a lane."""
        return TracedBatch(new(), [request], self.model, mode, bucket, images, began, began, began, ended)

    def report(
        self, mode: Mode, bucket: Bucket, images: int, run: Run | BaseException, traced: TracedBatch | None
    ) -> None:
        """Reports the outcome of a batch, once its jobs are settled. Raises nothing."""
        try:
            if isinstance(run, Run):
                self.observer.batch_ran(mode, bucket, images, run)
            else:
                is_explained = isinstance(run, WrongRowsError)
                reason, trace = (f": {run}", None) if is_explained else ("", run)
                log.error("model %s: a batch in %s %s raised%s", self.model, mode, bucket, reason, exc_info=trace)
                self.observer.batch_failed(mode, bucket, images)
        except Exception:
            log.exception("model %s: a batch in %s %s could not be observed", self.model, mode, bucket)
        try:
            if traced is not None and self.on_traced is not None:
                error = "" if isinstance(run, Run) else type(run).__name__
                self.on_traced(traced._replace(error=error))
        except Exception:
            log.exception("model %s: a batch could not be traced", self.model)
