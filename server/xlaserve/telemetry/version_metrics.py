"""Counts of one version of a model: its Prometheus series, and the statistics of the Open Inference Protocol."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.worker import Run
from xlaserve.engine.timings import Timings
from xlaserve.telemetry.metrics import BACKGROUND, WARM_UP, Metrics
from xlaserve.telemetry.request_context import sampled_trace_id


@dataclass(slots=True)
class Duration:
    """Number of events and their total time in seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts an event that took `seconds`."""
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class Statistics:
    """Counts since the version was loaded."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    input: Duration = field(default_factory=Duration)
    """Decoding and gathering."""
    infer: Duration = field(default_factory=Duration)
    output: Duration = field(default_factory=Duration)
    images: int = 0
    batches: int = 0
    last_at_ms: int = 0
    """Time of the last answer, in milliseconds since the epoch; 0 where there was none."""
    gather_by_size: defaultdict[int, Duration] = field(default_factory=lambda: defaultdict(Duration))
    """Gathering, by the number of real images in the batch."""
    infer_by_size: defaultdict[int, Duration] = field(default_factory=lambda: defaultdict(Duration))
    """Execution, by the number of real images in the batch."""


class ModelTelemetry:
    """Observes one version of a model. Each series is looked up once, since a look-up costs more than counting."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self.statistics = Statistics()
        self._metrics = metrics
        self._labels = labels = (model, version)
        self._decode_s = metrics.decode_s.labels(*labels)
        self._queue_s = metrics.queue_s.labels(*labels)
        self._gather_s = metrics.gather_s.labels(*labels)
        self._encode_s = metrics.encode_s.labels(*labels)
        self._failed_batches = metrics.failed_batches.labels(*labels)
        self._of_batches = lru_cache(None)(
            lambda mode, bucket: (
                metrics.execute_s.labels(*labels, mode),
                metrics.batch_size.labels(*labels, mode),
                metrics.bucket_batches.labels(*labels, mode, str(bucket)),
                metrics.padded_rows.labels(*labels, mode),
            )
        )
        self._of_requests = lru_cache(None)(
            lambda method, mode, status: (
                metrics.requests.labels(*labels, method, mode, status),
                metrics.request_s.labels(*labels, method, status),
            )
        )
        self._refusal_s = lru_cache(None)(lambda reason: metrics.refusal_s.labels(*labels, reason))
        self._images = lru_cache(None)(lambda mode: metrics.images.labels(*labels, mode))

    def compiled(self, mode: Mode, seconds: float, *, in_background: bool) -> None:
        """Counts a program that was traced and compiled in `seconds`."""
        phase = BACKGROUND if in_background else WARM_UP
        self._metrics.compilations.labels(*self._labels, mode, phase).inc()
        self._metrics.compile_s.labels(*self._labels, mode).observe(seconds)

    def loaded(self, mode: Mode) -> None:
        """Counts a program that was read from the compile cache."""
        self._metrics.cache_loads.labels(*self._labels, mode).inc()

    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: Run) -> None:
        """Counts a batch of `images` real images that ran in `bucket`."""
        execute_s, batch_size, batches, padded_rows = self._of_batches(mode, bucket)
        self._gather_s.observe(run.gather_s)
        execute_s.observe(run.execute_s)
        batch_size.observe(images)
        batches.inc()
        padded_rows.inc(bucket.batch - images)
        if not run.is_finite:
            self._metrics.not_finite_batches.labels(*self._labels, mode).inc()
        self.statistics.batches += 1
        self.statistics.gather_by_size[images].add(run.gather_s)
        self.statistics.infer_by_size[images].add(run.execute_s)

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        """Counts a batch that raised."""
        self._failed_batches.inc()

    def buckets_retired(self, mode: Mode, buckets: int) -> None:
        """Counts buckets that no longer serve, for lack of memory."""
        self._metrics.retired_buckets.labels(*self._labels, mode).inc(buckets)

    def request_answered(self, method: str, mode: Mode, images: int, timings: Timings) -> None:
        """Counts a request that succeeded."""
        requests, request_s = self._of_requests(method, mode, "OK")
        requests.inc()
        request_s.observe(timings.total_s, sampled_trace_id())
        self._images(mode).inc(images)
        self._queue_s.observe(timings.queue_s)
        self._encode_s.observe(timings.encode_s)
        if timings.decode_s:
            self._decode_s.observe(timings.decode_s)
        statistics = self.statistics
        statistics.success.add(timings.total_s)
        statistics.queue.add(timings.queue_s)
        statistics.input.add(timings.decode_s + timings.gather_s)
        statistics.infer.add(timings.execute_s)
        statistics.output.add(timings.encode_s)
        statistics.images += images
        statistics.last_at_ms = int(time.time() * 1000)

    def request_failed(self, method: str, mode: str, status: str, seconds: float) -> None:
        """Counts a request that got another status than OK. `mode` is one of the model's modes, or empty."""
        requests, request_s = self._of_requests(method, mode, status)
        requests.inc()
        request_s.observe(seconds, sampled_trace_id())
        self.statistics.fail.add(seconds)

    def request_refused(self, reason: str, seconds: float) -> None:
        """Counts a failed request as refused for overload, for `reason`, after `seconds`."""
        self._refusal_s(reason).observe(seconds)
