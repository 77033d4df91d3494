"""Figures of one arm under one load: rates, latencies, errors, and its server's work meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis import generator, stages
from xlaserve_loadtest.analysis.generator import GeneratorFigures
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.overload import Overload, overload
from xlaserve_loadtest.analysis.percentile_bounds import PercentileBounds
from xlaserve_loadtest.analysis.percentiles import PERCENTILES, Latencies, Percentile, nearest_rank
from xlaserve_loadtest.analysis.samples import Sample, label, latencies_ns, rate, typical_images_per_s
from xlaserve_loadtest.analysis.served import Goodput, goodput
from xlaserve_loadtest.analysis.settling import Unsettled, unsettled
from xlaserve_loadtest.analysis.stages import Stage
from xlaserve_loadtest.record.blocks import BlockLine, LoadLine, Role
from xlaserve_loadtest.record.requests import ANSWERED, Rows, Status, in_words
from xlaserve_loadtest.schedule.early_stopping import least_requests

_SLICES: Final = 240
"""Number of time slices for latency over time."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The server's use of the machine; None where it could not be seen."""

    cpu_s: float | None
    cpu_ms_per_image: float | None
    peak_rss_bytes: int | None
    gpu_utilisation: float | None
    """Mean share of the busiest GPU, from 0 to 1."""
    gpu_memory_bytes: int | None
    """The largest value seen."""
    energy_j_per_image: float | None
    """Energy of the machine's GPUs and processors, as far as they have meters, whatever else they did."""
    compilations: int | None
    """Programs of the model that the server compiled beside traffic during the blocks."""
    serving_compilations: int | None
    """Programs that XLA compiled during the blocks while requests waited for them: 0 in a healthy run."""


@dataclass(frozen=True, slots=True)
class Padding:
    """How much the batches were padded."""

    images: int
    padded_rows: int
    waste: float
    """Share of rows that were padding."""
    batches_by_bucket: Mapping[str, int]
    """Batches by batch size, height and width, smallest first: "8x224x224"."""


@dataclass(frozen=True, slots=True)
class CurveValue:
    """A point of the percentile curve."""

    percentile: float
    """From 0 to 100."""
    latency_ms: float


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """Answers to requests that were due in a short stretch of the run."""

    at_s: float
    """Middle of the stretch, from the start of the run's first block."""
    answers: int
    p50_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Point:
    """One arm under one load, all its blocks together."""

    arm: str
    role: Role
    load: LoadLine
    label: str
    """The load in words: "16 at a time", "50/s poisson", "offline"."""
    blocks: int
    measured_s: float
    requests: int
    """Answered requests."""
    images: int
    """Answered images."""
    images_per_s: Estimate | None
    """Over the whole time of all blocks."""
    requests_per_s: Estimate | None
    mean_ms: float | None
    """Mean over all requests that were due; a lower bound where some were not answered."""
    percentiles: tuple[Percentile, ...]
    max_ms: float | None
    """A lower bound where some were not answered."""
    errors: Mapping[str, int]
    """Failed requests by status, most frequent first, without answers that differ."""
    warmup_errors: Mapping[str, int]
    dropped: int
    """Requests that were due, but never sent."""
    compared: int
    """Answers under load that were compared with what the same request got alone, those of warm-up included."""
    comparable: int
    """Answers under load that could have been compared, right or not, those of warm-up included."""
    differing: int
    """Compared answers that differ beyond the tolerance."""
    differing_measured: int
    """The same without those of warm-up, which count as not answered."""
    steady: bool | None
    """Whether every block that was asked to became steady; None where none was asked."""
    generator: GeneratorFigures
    server: ServerFigures
    stages: tuple[Stage, ...]
    """Shares of the mean latency, in the order that a request passes them; empty where the server reports none."""
    padding: Padding | None
    curve: tuple[CurveValue, ...]
    over_time: tuple[TimeSlice, ...]
    block_images_per_s: tuple[float | None, ...]
    """Images/s of each block, in the order of the run; None where nothing was measured."""
    typical_images_per_s: Estimate | None = None
    """Images/s of a typical block or server process, however slow a few of them were."""
    overload: Overload | None = None
    """Of an open loop; None where the target kept up."""
    goodput: Goodput | None = None
    """None where the run has no limit of latency."""
    unsettled: Unsettled | None = None
    """How blocks are too short, where the target kept up; None where they are not."""

    @property
    def failed(self) -> int:
        """Requests that failed or were never sent."""
        return sum(self.errors.values()) + self.dropped

    @property
    def unanswered(self) -> int:
        """Requests that failed, were never sent, or whose answer is known to differ."""
        return self.failed + self.differing_measured

    @property
    def differing_text(self) -> str:
        """Answers that differ, in words: "12 of 480 compared (2.50%)"; the other answers are not known."""
        return f"{self.differing:,} of {self.compared:,} compared ({self.differing / self.compared:.2%})"

    @property
    def unanswered_text(self) -> str:
        """Requests without a right answer, in words: "12 INTERNAL, 3 dropped, at least 4 differing"."""
        if not self.differing_measured:
            return self.failed_text
        differing = f"{'at least ' * (self.compared < self.comparable)}{self.differing_measured:,} differing"
        return ", ".join(filter(None, (self.failed_text, differing)))

    @property
    def failed_text(self) -> str:
        """Requests that failed or were never sent, in words: "12 INTERNAL, 3 dropped"."""
        kinds = [f"{count:,} {in_words(status)}" for status, count in self.errors.items()]
        return ", ".join([*kinds, *([f"{self.dropped:,} dropped"] if self.dropped else [])])

    @property
    def due(self) -> int:
        """Requests that were due in the window."""
        return self.requests + self.unanswered

    def percentile(self, name: str) -> Percentile:
        """Returns the percentile called `name` ("p99")."""
        return next(percentile for percentile in self.percentiles if percentile.name == name)


def point(
    samples: Sequence[Sample],
    *,
    span_ns: tuple[int, int],
    percentiles: Sequence[float] = PERCENTILES,
) -> Point:
    """Sums up the blocks of one arm, role and load. `span_ns` is the run's, from its first block to its last."""
    blocks = [sample.block for sample in samples]
    first = blocks[0]
    # There may be millions of requests: no part of them is kept beside them.
    rows = samples[0].rows if len(samples) == 1 else np.concatenate([sample.rows for sample in samples])
    measured, is_right = rows["measured"], rows["status"] == Status.OK
    is_counted = measured & is_right
    latencies = Latencies(
        np.concatenate([sample.latencies_ns for sample in samples]),
        np.concatenate([sample.unanswered_ns for sample in samples]),
    )
    bounds = PercentileBounds([sample.successive_ns for sample in samples], [block.server for block in blocks])
    waits_ns = np.concatenate([sample.waits_ns for sample in samples])
    of_generator, too_much = generator.figures(samples), overload(samples)
    images_per_s = [sample.images_per_s for sample in samples]
    asked_steady = [block.steady for block in blocks if block.steady is not None]
    return Point(
        arm=first.arm,
        role=first.role,
        load=first.load,
        label=label(first.load),
        blocks=len(blocks),
        measured_s=sum(sample.seconds for sample in samples),
        requests=int(is_counted.sum()),
        images=int(rows["images"][is_counted].sum()),
        images_per_s=rate(samples, "images"),
        requests_per_s=rate(samples, "requests"),
        mean_ms=float(waits_ns.mean()) / 1e6 if waits_ns.size else None,
        percentiles=tuple(latencies.percentile(percentile, bounds.ranks(percentile)) for percentile in percentiles),
        max_ms=float(waits_ns.max()) / 1e6 if waits_ns.size else None,
        errors=_errors(rows["status"][measured]),
        warmup_errors=_errors(rows["status"][~measured]),
        dropped=sum(block.generator.dropped for block in blocks),
        compared=sum(block.generator.compared for block in blocks),
        comparable=int(np.isin(rows["status"], ANSWERED).sum()),
        differing=sum(block.generator.differing for block in blocks),
        differing_measured=int((rows["status"][measured] == Status.DIFFERING_REPLY).sum()),
        steady=all(asked_steady) if asked_steady else None,
        generator=of_generator,
        server=_server(blocks, int(rows["images"][is_right].sum())),
        stages=stages.split(rows[is_counted], of_generator.cpu_ms_per_request),
        padding=_padding(blocks),
        curve=_curve(latencies),
        over_time=_over_time(rows[is_right], span_ns),
        block_images_per_s=tuple(images_per_s),
        typical_images_per_s=typical_images_per_s(samples),
        overload=too_much,
        goodput=goodput(samples),
        unsettled=None if too_much else unsettled(samples),
    )


def _errors(statuses: NDArray[np.uint8]) -> dict[str, int]:
    counts = Counter(statuses[~np.isin(statuses, ANSWERED)].tolist())
    return {Status(status).name: count for status, count in counts.most_common()}


def _server(blocks: Sequence[BlockLine], images: int) -> ServerFigures:
    uses = [block.server_use for block in blocks]
    cpu = [use.cpu_s for use in uses if use.cpu_s is not None]
    gpu = [use.gpu_utilisation for use in uses if use.gpu_utilisation is not None]
    energy_j = [
        sum(joules for joules in (use.gpu_energy_j, use.cpu_energy_j) if joules is not None)
        for use in uses
        if use.gpu_energy_j is not None or use.cpu_energy_j is not None
    ]
    reported = [block.counters for block in blocks if block.counters]
    # CPU time and images must be of the same blocks.
    has_all = len(cpu) == len(blocks) and images > 0
    return ServerFigures(
        cpu_s=sum(cpu) if cpu else None,
        cpu_ms_per_image=sum(cpu) * 1000 / images if has_all else None,
        peak_rss_bytes=max((use.peak_rss_bytes for use in uses if use.peak_rss_bytes is not None), default=None),
        gpu_utilisation=sum(gpu) / len(gpu) if gpu else None,
        gpu_memory_bytes=max((use.gpu_memory_bytes for use in uses if use.gpu_memory_bytes is not None), default=None),
        energy_j_per_image=sum(energy_j) / images if energy_j and len(energy_j) == len(blocks) and images else None,
        compilations=_total(counters.compilations for counters in reported),
        serving_compilations=_total(counters.serving_compilations for counters in reported),
    )


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _padding(blocks: Sequence[BlockLine]) -> Padding | None:
    reported = [block.counters for block in blocks if block.counters]
    images = sum(counters.images or 0 for counters in reported)
    padded = sum(counters.padded_rows or 0 for counters in reported)
    if not images:
        return None
    batches: Counter[str] = Counter()
    for bucket, count in chain.from_iterable(counters.batches_by_bucket.items() for counters in reported):
        batches[bucket] += count
    ordered = {bucket: batches[bucket] for bucket in sorted(batches, key=bucket_order) if batches[bucket]}
    return Padding(images, padded, padded / (images + padded), ordered)


def bucket_order(bucket: str) -> tuple[tuple[int, ...], str]:
    """Returns the key by which buckets such as "8x224x224" are sorted, smallest first."""
    return tuple(int(part) for part in bucket.split("x") if part.isdecimal()), bucket


def _curve(latencies: Latencies) -> tuple[CurveValue, ...]:
    """Returns the curve with its tail stretched, up to the last percentile that answers support."""
    percentiles = [100 * (1 - 10 ** (-step / 10)) for step in range(1, 51)]
    supported = [
        percentile
        for percentile in percentiles
        if latencies.count >= least_requests(percentile)
        and nearest_rank(latencies.count, percentile) <= latencies.answered
    ]
    if not supported:
        return ()
    return tuple(CurveValue(percentile, latencies.value_ms(percentile)) for percentile in [0.0, *supported])


def _over_time(answered: Rows, span_ns: tuple[int, int]) -> tuple[TimeSlice, ...]:
    if not answered.size:
        return ()
    width_ns = max(math.ceil((span_ns[1] - span_ns[0]) / _SLICES), 1)
    places = (answered["scheduled_ns"] - span_ns[0]) // width_ns
    order = np.argsort(places, kind="stable")
    latencies = latencies_ns(answered)[order]
    occupied, starts = np.unique(places[order], return_index=True)
    return tuple(
        TimeSlice((place + 0.5) * width_ns / 1e9, values.size, float(np.median(values)) / 1e6, values.max() / 1e6)
        for place, values in zip(occupied.tolist(), np.split(latencies, starts[1:]), strict=True)
    )
