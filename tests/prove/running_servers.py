"""Comparisons of running servers, which are one process each: false verdicts, wrong directions, and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tests.prove.intervals import holds
from tests.prove.registry import Row, Trials, part, share
from tests.prove.runs import header

from xlaserve_loadtest.analysis.compare import Comparison, compare
from xlaserve_loadtest.analysis.samples import Sample, collect, rate
from xlaserve_loadtest.record.blocks import BlockLine, GeneratorUse, LoadLine
from xlaserve_loadtest.record.lines import Run
from xlaserve_loadtest.record.requests import REQUEST, STAGES
from xlaserve_loadtest.schedule import plan
from xlaserve_loadtest.schedule.arrivals import ClosedLoop

SLOTS: Final = 4
TURNOVER_S: Final = 0.15
WARMUP_S: Final = 1.0
PAUSE_S: Final = 1.0
EACH_S: Final = 8.0

Seconds = NDArray[np.float64]
Speed = Callable[[NDArray[np.int64]], Seconds]
"""Requests/s of a busy server, by how many requests it has served."""


@dataclass
class Server:
    """A server that takes requests one after the other, and stands still for `pause_s` of each EACH_S."""

    speed: Speed
    pause_s: float = 0.0
    phase_s: float = 0.0
    served: int = 0

    def ends_s(self, start_s: float, slowness: float, count: int) -> Seconds:
        """Returns when `count` requests end that are there from `start_s` on."""
        at_work_s = np.cumsum(slowness / self.speed(self.served + np.arange(count)))
        works_s = EACH_S - self.pause_s
        # Time is counted from the end of a pause; a start inside of a pause is one at its end.
        periods, into_s = divmod(start_s - self.phase_s, EACH_S)
        at_work_s += periods * works_s + min(into_s, works_s)
        return self.phase_s + at_work_s + np.floor(at_work_s / works_s) * self.pause_s


@dataclass
class Session:
    """A session with arms on running servers, simulated block by block."""

    random: np.random.Generator
    servers: Sequence[Server]
    duration_s: float = 5.0
    noise: float = 0.02
    """Deviation from block to block."""
    now_s: float = 0.0
    blocks: list[BlockLine] = field(default_factory=list)
    rows: list[NDArray[np.void]] = field(default_factory=list)

    def run(self) -> tuple[list[Comparison], list[Sample]]:
        """Returns the comparisons and the blocks."""
        head = header(len(self.servers))
        control = next(arm for arm in head.arms if arm.is_control_of)
        places = {arm.name: 0 if arm is control else number for number, arm in enumerate(head.arms)}
        seed = int(self.random.integers(2**31))
        plans = plan.mirrored(
            [arm.name for arm in head.arms],
            ClosedLoop(SLOTS),
            duration_s=self.duration_s,
            warmup_s=WARMUP_S,
            seed=seed,
            twins={str(control.is_control_of): control.name},
        )
        for block in plans:
            self._block(block, places[block.arm])
        requests, none = np.concatenate(self.rows), ()
        run = Run(Path(), replace(head, seed=seed), none, tuple(self.blocks), requests, none, none, none, end=None)
        samples = collect(run)
        return list(compare(run.header, samples)), samples

    def _block(self, block: plan.BlockPlan, place: int) -> None:
        server, start_s = self.servers[place], self.now_s
        fastest = float(server.speed(np.array([server.served])).max()) * 2
        count = SLOTS + math.ceil(fastest * (block.warmup_s + block.duration_s + PAUSE_S))
        ends_s = server.ends_s(start_s, math.exp(self.random.normal(0, self.noise)), count)
        due_s = np.concatenate([np.full(SLOTS, start_s), ends_s[:-SLOTS]])
        # The window opens once each slot has had an answer, and load goes on until its requests have ended.
        opens_s = max(start_s + block.warmup_s, ends_s[SLOTS - 1])
        closes_s = opens_s + block.duration_s
        is_sent = due_s < closes_s
        assert not is_sent.all()
        rows = np.zeros(int(is_sent.sum()), REQUEST)
        rows["block"], rows["images"] = len(self.blocks), 1
        rows["scheduled_ns"] = rows["start_ns"] = due_s[is_sent] * 1e9
        rows["end_ns"] = ends_s[is_sent] * 1e9
        rows["measured"] = due_s[is_sent] >= opens_s
        for stage in STAGES:
            rows[stage] = np.nan
        server.served += rows.size
        self.now_s = float(ends_s[is_sent][-1]) + TURNOVER_S
        self.rows.append(rows)
        self.blocks.append(
            BlockLine(
                len(self.blocks),
                block.arm,
                LoadLine("closed", concurrency=SLOTS),
                start_ns=round(start_s * 1e9),
                end_ns=round(self.now_s * 1e9),
                window_ns=(round(opens_s * 1e9), round(closes_s * 1e9)),
                generator=GeneratorUse(workers=1, cpu_s=0.1, sends=rows.size),
                server=place,
                round=block.round,
            )
        )


def steady(per_s: float) -> Speed:
    return lambda served: np.full(served.size, per_s)


AGING: Final[dict[str, Speed]] = {
    "warms up by 20% in 1,000 requests": lambda served: 200 * (1 - 0.2 * np.exp(-served / 1000)),
    "warms up by 50% in 300 requests": lambda served: 200 * (1 - 0.5 * np.exp(-served / 300)),
    "leaks, and is half as fast after 10,000 requests": lambda served: 200 / (1 + served / 10_000),
}
"""Servers whose speed depends on how many requests they have served."""


@part
def aging_servers(trials: Trials) -> Iterator[Row]:
    """Equal running servers whose speed depends on the requests that they served: sessions with a verdict."""
    runs = trials.number(200)
    for arms in trials.some(2, 3):
        for what, speed in AGING.items():
            wrong = 0
            for _ in range(runs):
                found, _ = Session(trials.random, [Server(speed) for _ in range(arms)]).run()
                wrong += any(one.verdict != "inconclusive" for one in found if not one.is_control)
            yield share(
                "sessions of equal servers with any verdict", f"{arms} servers, {what}", wrong, runs, at_most=0.05
            )


@part
def pausing_servers(trials: Trials) -> Iterator[Row]:
    """A server that is faster by 7% and stands still for 1 s in each 8: its direction, and its interval."""
    runs = trials.number(200)
    for duration_s in trials.some(5.0, 10.0, 20.0, 40.0):
        wrong = held = ratios = 0
        truth = 200 * 1.07 * (1 - PAUSE_S / EACH_S)
        for _ in range(runs):
            phase_s = float(trials.random.uniform(0, EACH_S))
            servers = [Server(steady(200)), Server(steady(200 * 1.07), PAUSE_S, phase_s)]
            found, samples = Session(trials.random, servers, duration_s).run()
            (one,) = (each for each in found if not each.is_control)
            wrong += one.verdict == "faster"
            own = rate([sample for sample in samples if sample.block.arm == one.arm], "images")
            held += holds(own, truth)
            ratios += holds(one.ratios["images_per_s"], truth / 200)
        where = f"7% faster, 1 s in each 8 s still, {duration_s:g} s"
        yield share("a slower server is called faster", where, wrong, runs, at_most=0.05)
        yield share("95% interval of images/s holds the truth", where, held, runs, at_least=0.93)
        yield share("95% interval of their ratio holds the truth", where, ratios, runs, at_least=0.93)
