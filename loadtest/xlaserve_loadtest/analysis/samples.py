"""The measured part of a run, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis.intervals import Estimate, Work, estimate, rate_over_time
from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.record import requests as record
from xlaserve_loadtest.record.blocks import BlockLine, LoadLine
from xlaserve_loadtest.record.lines import Header, Run
from xlaserve_loadtest.record.requests import MAX_MODELS, Rows, Status
from xlaserve_loadtest.schedule.conditions import ConditionError, parse

_MIN_LEFT_SHARE: Final = 0.03
"""Share of the requests due that must be left over where they were too much."""
_NOISE: Final = 3.0
"""Standard deviations of the number of arrivals that must be left over: by chance a queue grows, too."""

Amount = Literal["images", "requests", "in time"]
"""Units that a rate counts: answered images, answered requests, or requests that were answered within the limit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One block and its requests."""

    block: BlockLine
    rows: Rows
    """All requests of the block, those of warm-up included."""
    deadline_s: float | None = None
    """Deadline of a request; None where the record has none."""
    limit_ns: float = math.inf
    """Latency that the run was to keep to; infinite without such a limit."""
    generators: tuple[str, ...] = ()
    """Names of the run's generators on other machines, by their index in the column `generator`."""
    max_in_flight: int | None = None
    """Requests that an open loop may have under way; None in older files."""
    is_overloaded: bool = False
    """Whether the blocks of its arm and load were too much for their target (`is_too_much`)."""
    late_ns: int = 0
    """Time by which the window of a closed loop opened later than is usual for its arm and load, since warm-up waited
    for a server that stood still."""

    @property
    def answered(self) -> Rows:
        """Measured requests that were answered as they should be."""
        return record.answered(self.rows)

    @property
    def latencies_ns(self) -> Nanoseconds:
        """Time from due to answered, for each of `answered`."""
        return latencies_ns(self.answered)

    @property
    def due(self) -> int:
        """Requests that were due in the window, sent or not."""
        return int(record.measured(self.rows).size) + self.block.generator.dropped

    @property
    def in_time(self) -> int:
        """Requests that were answered within the limit."""
        return int((self.latencies_ns < self.limit_ns).sum())

    @property
    def unanswered_ns(self) -> Nanoseconds:
        """Time that each measured request that failed or was never sent would have waited at least.

        That is its deadline, or the time until it failed where that was longer. Where the record has no deadline, it is
        that of the slowest answer, too.
        """
        measured = record.measured(self.rows)
        failed_ns = latencies_ns(measured[measured["status"] != Status.OK])
        least_ns = self.latencies_ns.max(initial=0) if self.deadline_s is None else round(self.deadline_s * 1e9)
        waits_ns = np.concatenate([failed_ns, np.zeros(self.block.generator.dropped, np.int64)])
        unanswered: Nanoseconds = np.maximum(waits_ns, least_ns)
        return unanswered

    @property
    def waits_ns(self) -> Nanoseconds:
        """Time from due to answered of all requests that were due: `latencies_ns` and then `unanswered_ns`."""
        return np.concatenate([self.latencies_ns, self.unanswered_ns])

    @property
    def successive_ns(self) -> Nanoseconds:
        """The same in the order in which requests were due, all that were not answered as slow as the slowest of all.

        Those that were never sent come last: when they were due is not known.
        """
        slowest_ns = self.waits_ns.max(initial=0)
        measured = record.measured(self.rows)
        waits_ns = np.where(measured["status"] == Status.OK, latencies_ns(measured), slowest_ns)
        successive_ns = waits_ns[np.argsort(measured["scheduled_ns"], kind="stable")]
        return np.concatenate([successive_ns, np.full(self.block.generator.dropped, slowest_ns, np.int64)])

    def of_model(self, index: int) -> Sample:
        """Returns the requests for one model of the arm; rates mean nothing there."""
        generator = self.block.generator
        dropped = dict(enumerate(generator.dropped_by_model or (generator.dropped,))).get(index, 0)
        block = replace(self.block, generator=replace(generator, dropped=dropped, dropped_by_model=()))
        return replace(self, block=block, rows=self.rows[self.rows["model"] == index])

    def of_part(self, column: str, index: int) -> Sample:
        """Returns the requests to one target, or from one generator; what was dropped belongs to none."""
        block = replace(self.block, generator=replace(self.block.generator, dropped=0, dropped_by_model=()))
        return replace(self, block=block, rows=self.rows[self.rows[column] == index])

    @property
    def seconds(self) -> float:
        """Length of the measured window."""
        window = self.block.window_ns
        return (window[1] - window[0]) / 1e9 if window else 0.0

    @property
    def has_answers(self) -> bool:
        """Whether anything was answered, be it by a request that was due before the window."""
        return self.work("images")[0] > 0

    @property
    def requests_per_s(self) -> float | None:
        """Answers each second; None where nothing was answered."""
        return self._rate("requests")

    @property
    def images_per_s(self) -> float | None:
        """Images answered each second; None where nothing was answered."""
        return self._rate("images")

    @property
    def left_over(self) -> int:
        """Requests due in the window for which the target had no answer while it lasted, without what was dropped.

        The window begins and ends later by the shortest latency: that long any request is under way.
        """
        measured = record.measured(self.rows)
        refused = int((measured["status"] == Status.RESOURCE_EXHAUSTED).sum())
        return int(measured.size) - int(self._ended_inside.sum()) + refused

    @property
    def _ended_inside(self) -> NDArray[np.bool_]:
        first_ns, last_ns = self.block.window_ns or (0, 0)
        latencies = self.latencies_ns
        shortest_ns = latencies.min() if latencies.size and self.block.load.type == "open" else 0
        ended_ns = self.rows["end_ns"] - shortest_ns
        inside: NDArray[np.bool_] = (ended_ns >= first_ns) & (ended_ns < last_ns)
        return inside

    def _rate(self, amount: Amount) -> float | None:
        count, seconds = self._in_window(amount)
        return count / seconds if count and seconds else None

    def work(self, amount: Amount) -> tuple[float, float]:
        """Returns an amount and the seconds that it took, of a stretch of time that no answer has moved.

        In a closed loop that is as long as the window, and begins when it should have opened: it would hardly hold a
        pause of the server if it waited for its end. A request counts by the part of its time that lies in it.
        """
        measured, load, window_ns = record.measured(self.rows), self.block.load, self.block.window_ns
        if load.type == "open" or not load.concurrency or window_ns is None or self.answered.size < measured.size:
            return self._in_window(amount)
        rows = self.rows[self.rows["status"] == Status.OK]
        first_ns, last_ns = (at_ns - self.late_ns for at_ns in window_ns)
        inside_ns = np.minimum(rows["end_ns"], last_ns) - np.maximum(rows["scheduled_ns"], first_ns)
        rows, inside_ns = rows[inside_ns > 0], inside_ns[inside_ns > 0]
        counts = rows["images"] if amount == "images" else np.ones(rows.size)
        if amount == "in time":
            counts = latencies_ns(rows) < self.limit_ns
        return float((counts * inside_ns / latencies_ns(rows)).sum()), float(inside_ns.sum()) / 1e9 / load.concurrency

    def _count(self, rows: Rows, amount: Amount) -> float:
        if amount == "in time":
            rows = rows[latencies_ns(rows) < self.limit_ns]
        return float(rows["images"].sum() if amount == "images" else rows.size)

    def _in_window(self, amount: Amount) -> tuple[float, float]:
        """Returns an amount and the seconds that it took, over whole requests where that is possible.

        A closed loop's rate, offline too, is the answers of its slots for each second of their time: counting answers
        in a window of fixed length would be off by up to a batch, and timing a set of requests to its end by the time
        in which the last slots run empty. An open loop's is what was due in the window and answered, over its length.
        Where that was too much for the target, and where failures made slots rest, it is the number answered inside
        the window, no matter when they were due.
        """
        measured, answered = record.measured(self.rows), self.answered
        load = self.block.load
        if self.block.window_ns is None:
            return 0.0, 0.0
        if load.type != "open" and load.concurrency and answered.size and answered.size == measured.size:
            slot_s = float(latencies_ns(measured).sum()) / 1e9
            return self._count(answered, amount), slot_s / load.concurrency
        if answered.size and (load.type != "open" or self.is_overloaded):
            answered = self.rows[self._ended_inside & (self.rows["status"] == Status.OK)]
        return self._count(answered, amount), self.seconds


def is_too_much(samples: Sequence[Sample], *, dropped: bool = True) -> bool:
    """Whether the blocks of one open loop were too much for their target: more was due than it answered.

    What was left over is the growth of the number of requests under way from the start of each window to its end, what
    was refused with RESOURCE_EXHAUSTED, and what was `dropped` where that counts.
    """
    windows = [sample for sample in samples if sample.block.load.type == "open" and sample.seconds]
    due = sum(sample.due for sample in windows)
    left_over = sum(sample.left_over + dropped * sample.block.generator.dropped for sample in windows)
    return left_over > max(_MIN_LEFT_SHARE * due, _NOISE * math.sqrt(due))


def work_of(units: Sequence[Sequence[Sample]], amount: Amount) -> Work:
    """Returns an amount and its time for each unit of blocks."""
    done = [[sum(each) for each in zip(*(sample.work(amount) for sample in unit), strict=True)] for unit in units]
    amounts, seconds = np.array(done, np.float64).reshape(-1, 2).T
    return Work(amounts, seconds)


def by_process(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Groups blocks by the server process that they ran on, since they share what differs between processes."""
    groups: dict[int | None, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.block.server, []).append(sample)
    return list(groups.values())


def rate(samples: Sequence[Sample], amount: Amount) -> Estimate | None:
    """Returns a rate over the whole time of all blocks, with its interval over server processes where the arm had
    several; None where nothing was answered."""
    work = _work(samples, amount)
    return rate_over_time(work) if work.seconds.sum() and any(sample.answered.size for sample in samples) else None


def typical_images_per_s(samples: Sequence[Sample]) -> Estimate | None:
    """Returns the images/s of a typical block or, where the arm had several, of a typical server process."""
    work = _work(samples, "images")
    has_any = work.amounts > 0
    return estimate(work.amounts[has_any] / work.seconds[has_any]) if has_any.any() else None


def _work(samples: Sequence[Sample], amount: Amount) -> Work:
    units = by_process(samples)
    return work_of(units if len(units) > 1 else [[sample] for sample in samples], amount)


def collect(run: Run) -> list[Sample]:
    """Returns the blocks of a run with their requests, in the order of the run."""
    order = np.argsort(run.requests["block"], kind="stable")
    rows = run.requests[order]
    blocks = sorted(run.blocks, key=lambda block: block.index)
    edges = np.searchsorted(rows["block"], [(block.index, block.index + 1) for block in blocks]).reshape(-1, 2)
    found = run.header.configuration.get("deadline_s")
    deadline_s = float(found) if isinstance(found, int | float) else None
    found = run.header.configuration.get("most_in_flight")
    max_in_flight = found if isinstance(found, int) else None
    limit_ns = _limit_ns(run.header)
    generators = tuple(dict.fromkeys(machine.generator for block in blocks for machine in block.generator.machines))
    for block, (first, last) in zip(blocks, edges, strict=True):
        own = rows[first:last]
        own["generator"] = _places(block, generators)[own["generator"]]
        if block.window_ns is None and not (own["status"] == Status.OK).any():
            # It had no window as nothing was answered: these failures must not pass for those of a warm-up.
            own["measured"] = True
    samples = [
        Sample(block, rows[first:last], deadline_s, limit_ns, generators, max_in_flight)
        for block, (first, last) in zip(blocks, edges, strict=True)
    ]
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(_group(sample.block), []).append(sample)
    too_much = {key for key, own in groups.items() if is_too_much(own)}
    late_ns = {index: late for own in groups.values() for index, late in _late_ns(own).items()}
    return [
        replace(sample, is_overloaded=_group(sample.block) in too_much, late_ns=late_ns.get(sample.block.index, 0))
        for sample in samples
    ]


def _late_ns(samples: Sequence[Sample]) -> dict[int, int]:
    """Returns by how much the window of each block opened late, by its index: how much longer warm-up took than half of
    the warm-ups of its kind. The first of each server process is planned to be longer than later ones."""
    kinds: dict[bool, list[BlockLine]] = {}
    for own in by_process(samples):
        for place, sample in enumerate(own):
            if sample.block.window_ns is not None and sample.block.load.type != "open":
                kinds.setdefault(place == 0, []).append(sample.block)
    late_ns: dict[int, int] = {}
    for blocks in kinds.values():
        warm_ns = np.array([(block.window_ns or (0, 0))[0] - block.start_ns for block in blocks])
        excess_ns = np.maximum(warm_ns - np.median(warm_ns), 0).astype(int)
        late_ns.update(zip((block.index for block in blocks), excess_ns.tolist(), strict=True))
    return late_ns


def _group(block: BlockLine) -> tuple[str, str, str]:
    return block.arm, block.role, label(block.load)


def _places(block: BlockLine, generators: Sequence[str]) -> NDArray[np.uint8]:
    """Returns the index in `generators` by that in the block, which lists only those that sent in it."""
    places = np.arange(MAX_MODELS, dtype=np.uint8)
    names = [machine.generator for machine in block.generator.machines]
    places[: len(names)] = [generators.index(name) for name in names]
    return places


def _limit_ns(header: Header) -> float:
    with suppress(ConditionError):
        limit = parse(str(header.configuration.get("slo")))
        if limit.percentile and limit.op in ("<", "<="):
            return float(limit.limit) * 1e6
    return math.inf


def latencies_ns(rows: Rows) -> Nanoseconds:
    """Returns latencies, which count from the time when a request was due."""
    latencies: Nanoseconds = rows["end_ns"] - rows["scheduled_ns"]
    return latencies


def label(load: LoadLine) -> str:
    """Returns a load in words: "16 at a time", "50/s poisson", "10 to 90/s poisson", "offline"."""
    if load.type == "closed":
        words = f"{load.concurrency} at a time" if load.concurrency else "closed loop"
    elif load.type == "offline":
        words = "offline"
    else:
        rate = "" if load.rate_per_s is None else f"{load.rate_per_s:.6g}/s "
        if load.ramp_per_s is not None:
            rate = "{:.6g} to {:.6g}/s ".format(*load.ramp_per_s)
        if load.stages is not None:
            corners = [load.stages[0][0], *(last for _, last, _ in load.stages)]
            rate = " to ".join(f"{corner:.6g}" for corner in corners) + "/s "
        words = f"{rate}{load.arrivals or 'open loop'}"
        if load.burst > 1:
            words += f", {load.burst} at once"
    return words if load.images_per_request == "1" else f"{words}, {load.images_per_request} images"
