"""The measured part of a run, block by block."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.record import lines as record
from xlaserve_loadtest.record.lines import BlockLine, Header, LoadLine, Rows, Run, Status
from xlaserve_loadtest.schedule.conditions import ConditionError, parse


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
        return int((self.latencies_ns <= self.limit_ns).sum())

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
        measured = record.measured(self.rows)
        measured = measured[np.argsort(measured["scheduled_ns"], kind="stable")]
        slowest_ns = self.waits_ns.max(initial=0)
        successive = np.where(measured["status"] == Status.OK, latencies_ns(measured), slowest_ns)
        return np.concatenate([successive, np.full(self.block.generator.dropped, slowest_ns, np.int64)])

    def of_model(self, index: int) -> Sample:
        """Returns the requests for one model of the arm; rates mean nothing there."""
        generator = self.block.generator
        dropped = dict(enumerate(generator.dropped_by_model or (generator.dropped,))).get(index, 0)
        block = replace(self.block, generator=replace(generator, dropped=dropped, dropped_by_model=()))
        return replace(self, block=block, rows=self.rows[self.rows["model"] == index])

    @property
    def seconds(self) -> float:
        """Length of the measured window."""
        window = self.block.window_ns
        return (window[1] - window[0]) / 1e9 if window else 0.0

    @property
    def requests_per_s(self) -> float | None:
        """Answers each second; None where nothing was answered."""
        return self._rate(images=False)

    @property
    def images_per_s(self) -> float | None:
        """Images answered each second; None where nothing was answered."""
        return self._rate(images=True)

    def _rate(self, *, images: bool) -> float | None:
        """Returns a rate, over whole requests where that is possible.

        A closed loop's rate, offline too, is the answers of its slots for each second of their time: counting answers
        in a window of fixed length would be off by up to a batch, and timing a set of requests to its end by the time
        in which the last slots run empty. Otherwise, and where failures made slots rest, it is the number answered
        inside the window, no matter when they were due.
        """

        def count(rows: Rows) -> int:
            return int(rows["images"].sum()) if images else int(rows.size)

        measured, answered = record.measured(self.rows), self.answered
        window, load = self.block.window_ns, self.block.load
        if not answered.size or window is None:
            return None
        if load.type != "open" and load.concurrency and answered.size == measured.size:
            slot_s = float(latencies_ns(measured).sum()) / 1e9
            return count(answered) * load.concurrency / slot_s if slot_s else None
        ended = self.rows["end_ns"]
        inside = (ended >= window[0]) & (ended < window[1]) & (self.rows["status"] == Status.OK)
        return count(self.rows[inside]) / self.seconds if self.seconds and inside.any() else None


def collect(run: Run) -> list[Sample]:
    """Returns the blocks of a run with their requests, in the order of the run."""
    order = np.argsort(run.requests["block"], kind="stable")
    rows = run.requests[order]
    blocks = sorted(run.blocks, key=lambda block: block.index)
    edges = np.searchsorted(rows["block"], [(block.index, block.index + 1) for block in blocks]).reshape(-1, 2)
    found = run.header.configuration.get("deadline_s")
    deadline_s = float(found) if isinstance(found, int | float) else None
    limit_ns = _limit_ns(run.header)
    return [
        Sample(block, rows[first:last], deadline_s, limit_ns)
        for block, (first, last) in zip(blocks, edges, strict=True)
    ]


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
