"""Runs a block on several generators at the same time, as if they were one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from xlaserve_loadtest.record import requests as record
from xlaserve_loadtest.record.blocks import MachineUse
from xlaserve_loadtest.record.requests import REQUEST, Rows, Status
from xlaserve_loadtest.run.generator import MAX_ROWS, Generator
from xlaserve_loadtest.run.sender import LATE_NS, Clock, Live, Result, Task, Window
from xlaserve_loadtest.run.strain import Strain
from xlaserve_loadtest.schedule import arrivals, steady
from xlaserve_loadtest.schedule.arrivals import ClosedLoop
from xlaserve_loadtest.schedule.plan import BlockPlan

WINDOW_S: Final = 1.0
"""Length of the windows whose agreement makes a run steady."""
LATE_SHARE: Final = 0.1
"""A send is late after LATE_NS, or after this share of the mean interval between sends where that is longer."""
COOL_DOWN_S: Final = 2.0
"""How long an open loop's load goes on after its window at most: the last measured requests need batch-mates."""
MAX_IN_FLIGHT: Final = 4096
SILENCE_S: Final = 5.0
"""An arm is given up once every request has failed for this long."""

_POLL_S: Final = 0.25
"""Interval between looks at the answers."""
_LEAD_NS: Final = 20_000_000
"""Long enough for every worker to receive the start time before it."""


@dataclass
class Outcome:
    """The outcome of a block."""

    start_ns: int
    end_ns: int = 0
    window_ns: Window | None = None
    rows: Rows = field(default_factory=lambda: np.empty(0, REQUEST))
    """Requests in the order in which they ended."""
    sends: int = 0
    late_sends: int = 0
    dropped: int = 0
    """Measured requests that could not be sent."""
    dropped_by_model: tuple[int, ...] = ()
    """The same for each of the arm's models; empty where all are of the first."""
    compared: int = 0
    """Answers that were compared with what the same request got alone."""
    differing: int = 0
    """Answers of these that differ."""
    cpu_s: float = 0.0
    strain: Strain = field(default_factory=Strain)
    machines: tuple[MachineUse, ...] = ()
    """Figures of generators on other machines; empty where only this machine sent."""
    windows: list[steady.Window] = field(default_factory=list)
    failures: dict[Status, tuple[int, str]] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def measured(self) -> Rows:
        """The requests that were due in the window."""
        return record.measured(self.rows)

    @property
    def answered(self) -> Rows:
        """The measured requests that were answered."""
        return record.answered(self.rows)

    def window_s(self) -> float:
        """Returns the length of the window; 0 without one."""
        return (self.window_ns[1] - self.window_ns[0]) / 1e9 if self.window_ns else 0.0

    def images_per_s(self) -> float:
        """Returns the images that were due in the window and answered, over its length."""
        return float(self.answered["images"].sum()) / self.window_s() if self.window_s() else 0.0


def tasks(
    block: BlockPlan,
    addresses: Sequence[str],
    workers: int,
    *,
    seed: int,
    max_in_flight: int,
    sample_seed: int | None = None,
) -> list[Task]:
    """Returns each worker's share of a block: a pure split of its slots, or of its schedule and `max_in_flight`.

    A schedule says which request is due when; with `sample_seed` they are drawn at random.

    A worker for which there is nothing, since there are more workers than slots or `max_in_flight`, stays out.
    """
    load = block.load
    if isinstance(load, ClosedLoop):
        return [Task(block.arm, tuple(addresses), slots=own) for own in _spread(load.slots, workers)]
    whole = arrivals.with_margins(
        load,
        before_s=block.warmup_s,
        duration_s=block.duration_s,
        after_s=COOL_DOWN_S,
        seed=seed,
        sample_seed=sample_seed,
    )
    late_ns = max(LATE_NS, LATE_SHARE * 1e9 / load.mean_rate_per_s())
    senders = min(workers, max_in_flight)
    shares = [
        Task(
            block.arm,
            tuple(addresses),
            schedule_ns=own.due_ns,
            requests=own.requests,
            late_ns=late_ns,
            max_in_flight=limit,
        )
        for own, limit in zip(arrivals.split(whole, senders), _spread(max_in_flight, senders), strict=True)
    ]
    return shares + [Task(block.arm, tuple(addresses))] * (workers - senders)


def _spread(total: int, workers: int) -> list[int]:
    return [total // workers + (worker < total % workers) for worker in range(workers)]


async def run_block(
    block: BlockPlan,
    workers: Sequence[Generator],
    shares: Sequence[Task],
    *,
    end_when_steady: bool = False,
    on_live: Callable[[Live], None] = lambda live: None,
    clock: Clock = time.monotonic_ns,
) -> Outcome:
    """Runs a block over fresh connections: warm-up, then a window, then load until every request of it has ended.

    With `end_when_steady` the window closes early once `steady.may_end`. Cancelled, it returns what was measured with
    `interrupted` set instead of raising: the caller must check that and stop.
    """
    pairs = zip(workers, shares, strict=True)
    assigned = [(worker, share) for worker, share in pairs if share.slots or share.schedule_ns is not None]
    outcome = Outcome(start_ns=clock())
    ended: list[tuple[Result, Rows]] = []
    ends: list[asyncio.Task[tuple[Result, Rows]]] = []
    under_way: list[asyncio.Task[None]] = []
    used = [worker for worker, _ in assigned]
    try:
        delays_ns = await asyncio.gather(*(worker.prepare(share) for worker, share in assigned))
        outcome.start_ns = start_ns = clock() + (_LEAD_NS if len(assigned) > 1 else 0) + max(delays_ns, default=0)
        await asyncio.gather(*(worker.begin(start_ns) for worker in used))
        under_way = [
            asyncio.create_task(_measure(block, used, outcome, clock)),
            asyncio.create_task(_watch(used, outcome, on_live, clock, end_when_steady)),
        ]
        # The watch ends only by the error of a generator that was lost, which then is not waited for.
        done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        under_way.pop().cancel()
        ends = [asyncio.create_task(_finish(worker)) for worker in used]
        # Not copied: the event loop holds this list until the next `await`, and `_merged` empties it.
        ended = await asyncio.shield(asyncio.gather(*ends))
    except asyncio.CancelledError:
        outcome.interrupted = True
        for task in under_way:
            task.cancel()  # it might still open the window
        if outcome.window_ns:
            outcome.window_ns = (outcome.window_ns[0], max(outcome.window_ns[0], min(clock(), outcome.window_ns[1])))
        # A generator gives what it did only once: where it was asked already, that answer is waited for.
        ends = ends or [asyncio.create_task(_finish(worker, at_once=True)) for worker in used]
        await asyncio.wait(ends)
        ended = [end.result() for end in ends if not end.exception()]
    finally:
        for task in under_way:
            task.cancel()
            # Its error is the other's, or that of a generator which is being ended.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
    outcome.end_ns = clock()
    ends.clear()  # each holds the requests of a generator, which `_merged` frees one after the other
    _gather(outcome, ended)
    return outcome


async def _measure(block: BlockPlan, workers: Sequence[Generator], outcome: Outcome, clock: Clock) -> None:
    """Warms up, opens the window, and waits until every request of it has ended."""
    if await _open_window(block, workers, outcome, clock):
        await asyncio.gather(*(worker.settled() for worker in workers))


async def _open_window(block: BlockPlan, workers: Sequence[Generator], outcome: Outcome, clock: Clock) -> bool:
    """Opens the window, once warm-up is over in a closed loop; returns whether there is anything to measure.

    There is not where every request fails for SILENCE_S.
    """
    start_ns = outcome.start_ns + round(block.warmup_s * 1e9)
    if isinstance(block.load, ClosedLoop):
        while not any(await asyncio.gather(*(worker.warm() for worker in workers))):
            if clock() >= outcome.start_ns + SILENCE_S * 1e9:
                return False
            await asyncio.sleep(_POLL_S)
        if (left_s := (start_ns - clock()) / 1e9) > 0:
            await asyncio.sleep(left_s)
        start_ns = clock()
    await _set_window(workers, outcome, (start_ns, start_ns + round(block.duration_s * 1e9)))
    return True


async def _set_window(workers: Sequence[Generator], outcome: Outcome, window_ns: Window) -> None:
    outcome.window_ns = window_ns
    await asyncio.gather(*(worker.open(window_ns) for worker in workers))


async def _watch(
    workers: Sequence[Generator], outcome: Outcome, on_live: Callable[[Live], None], clock: Clock, end_when_steady: bool
) -> None:
    """Watches the answers until it is cancelled, and closes the window early where that is wanted."""
    images, latencies_ms, began_ns = 0, [np.empty(0, np.float32)], 0
    while True:
        await asyncio.sleep(_POLL_S)
        looks = await asyncio.gather(*(worker.live() for worker in workers))
        now_ns = clock()
        live = Live.of(looks)
        on_live(live)
        window_ns = outcome.window_ns
        if window_ns is None or not window_ns[0] <= now_ns < window_ns[1]:
            continue
        if not began_ns:
            began_ns = now_ns
            continue
        images += live.images
        latencies_ms.append(live.latencies_ms)
        if now_ns - began_ns < WINDOW_S * 1e9:
            continue
        seen_ms = np.concatenate(latencies_ms)
        p50_ms = float(np.median(seen_ms)) if seen_ms.size else None
        outcome.windows.append(steady.Window(images / ((now_ns - began_ns) / 1e9), p50_ms))
        images, latencies_ms, began_ns = 0, [], now_ns
        if end_when_steady and steady.may_end(outcome.windows):
            await _set_window(workers, outcome, (window_ns[0], now_ns))
            end_when_steady = False


async def _finish(worker: Generator, *, at_once: bool = False) -> tuple[Result, Rows]:
    """Ends a generator's block, and fetches its requests."""
    result = await worker.finish(at_once=at_once)
    rows = np.empty(result.sends, REQUEST)
    for first in range(0, result.sends, MAX_ROWS):
        rows[first : first + MAX_ROWS] = await worker.rows(first)
    return result, rows


def _merged(ended: list[tuple[Result, Rows]], machines: Sequence[str]) -> Rows:
    """Returns the requests of all generators, which it takes out of `ended`, in the order in which they ended.

    There may be millions: of them only one generator's, or one column, is in memory twice.
    """
    rows = np.empty(sum(len(own) for _, own in ended), REQUEST)
    end = len(rows)
    while ended:
        result, own = ended.pop()
        begin = end - len(own)
        rows[begin:end] = own
        rows["generator"][begin:end] = machines.index(result.generator)
        end = begin
    order = np.argsort(rows["end_ns"], kind="stable")
    for column in REQUEST.names or ():
        rows[column] = rows[column][order]
    return rows


def _gather(outcome: Outcome, ended: list[tuple[Result, Rows]]) -> None:
    results = [result for result, _ in ended]
    by_machine: dict[str, list[Result]] = {}
    for result in results:
        by_machine.setdefault(result.generator, []).append(result)
    rows = _merged(ended, list(by_machine))
    if outcome.interrupted and outcome.window_ns is not None:
        rows["measured"] &= rows["scheduled_ns"] < outcome.window_ns[1]
    dropped = Counter(model for result in results for model in result.dropped_models)
    outcome.dropped = dropped.total()
    if any(dropped):
        outcome.dropped_by_model = tuple(dropped[model] for model in range(max(dropped) + 1))
    outcome.rows = rows
    outcome.sends = sum(result.sends for result in results)
    outcome.late_sends = sum(result.late_sends for result in results)
    outcome.compared = sum(result.compared for result in results)
    outcome.differing = sum(result.differing for result in results)
    outcome.cpu_s = sum(result.cpu_s for result in results)
    strains = {name: Strain.of([result.strain for result in own]) for name, own in by_machine.items()}
    outcome.strain = Strain.worst(list(strains.values()))
    if any(by_machine):
        outcome.machines = tuple(_machine_use(name, own, strains[name]) for name, own in by_machine.items())
    for result in results:
        for status, (number, message) in result.failures.items():
            before, first = outcome.failures.get(status, (0, message))
            outcome.failures[status] = (before + number, first)


def _machine_use(name: str, results: Sequence[Result], strain: Strain) -> MachineUse:
    return MachineUse(
        generator=name,
        workers=len(results),
        cpu_s=sum(result.cpu_s for result in results),
        sends=sum(result.sends for result in results),
        late_sends=sum(result.late_sends for result in results),
        wait_ms=strain.wait_ms,
        longest_wait_ms=strain.longest_ms,
        preemptions=strain.preemptions,
        steal=strain.steal,
        clock_error_ms=max(result.clock_error_ms for result in results),
        clock_drift_ms=max((result.clock_drift_ms for result in results), key=abs),
    )
