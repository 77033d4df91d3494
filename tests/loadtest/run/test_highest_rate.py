from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from rich.console import Console
from tests.loadtest.queues import MM1, Seconds

from xlaserve_loadtest.record.lines import Event
from xlaserve_loadtest.record.requests import REQUEST
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.highest_rate import RateSearch
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.recorder import Recorder
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, OpenLoop, with_margins
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.schedule.search import Slo
from xlaserve_loadtest.settings import Settings


class Lab:
    """Runs a block on M/M/1 of `speed` requests/s without waiting."""

    def __init__(self, speed: float, slo: Slo, arrivals: str = "poisson") -> None:
        self.speed = speed
        self.blocks: list[BlockPlan] = []
        self.events: list[Event] = []
        self.console = Console(file=io.StringIO(), width=200)
        self.settings = cast(Settings, SimpleNamespace(slo=slo, duration_s=2.0, warmup_s=1.0, search_arrivals=arrivals))
        self._random = np.random.default_rng(0)

    async def run_block(self, block: BlockPlan) -> Outcome:
        self.blocks.append(block)
        first_ns = int(block.warmup_s * 1e9)
        window_ns = (first_ns, first_ns + int(block.duration_s * 1e9))
        if isinstance(block.load, ClosedLoop):
            due_ns = np.arange(int(window_ns[1] * self.speed / 1e9), dtype=np.float64) * 1e9 / max(self.speed, 1.0)
            latencies_s = np.full(due_ns.size, block.load.slots / max(self.speed, 1.0))
        else:
            assert isinstance(block.load, OpenLoop)
            due_ns = with_margins(
                block.load, before_s=block.warmup_s, duration_s=block.duration_s, after_s=0.0, seed=len(self.blocks)
            ).due_ns.astype(np.float64)
            arrivals: Seconds = due_ns / 1e9 * self.speed
            latencies_s = MM1(arrivals, self._random) / self.speed
        rows = np.zeros(due_ns.size, REQUEST)
        rows["scheduled_ns"], rows["end_ns"] = due_ns, due_ns + latencies_s * 1e9
        rows["images"] = 1
        rows["measured"] = due_ns >= first_ns
        return Outcome(0, window_ns[1], window_ns, rows)

    async def search(self, *arms: str) -> str:
        recorder = SimpleNamespace(event=lambda at_ns, what, text: self.events.append(Event(at_ns, what, text)))
        await RateSearch(
            self.settings, self.run_block, Progress(self.console), cast(Recorder, cast(Any, recorder))
        ).run(arms)
        return cast(io.StringIO, self.console.file).getvalue()


async def test_each_arm_is_searched_after_all_were_asked_for_a_first_guess() -> None:
    lab = Lab(1000.0, Slo(95, 12))
    said = await lab.search("xla", "graph")
    assert [(block.arm, block.role) for block in lab.blocks[:2]] == [("xla", "curve"), ("graph", "curve")]
    assert said.index("it takes about") < said.index("xla: trying")
    assert "of 1" in said
    assert said.count("confirmed") >= 2
    for arm in ("xla", "graph"):
        own = [block for block in lab.blocks[2:] if block.arm == arm]
        roles = [block.role for block in own]
        assert roles == sorted(roles, reverse=True)
        assert {"search", "confirm"} == set(roles)
        confirming = own[-1]
        # P(W > 12 ms) of M/M/1 is 5% at 750/s.
        assert 550 < cast(OpenLoop, confirming.load).rate_per_s < 750
        assert confirming.duration_s > max(block.duration_s for block in own if block.role == "search")
        assert confirming.warmup_s >= 0.05 * confirming.duration_s


async def test_a_search_offers_the_arrivals_that_were_asked_for() -> None:
    lab = Lab(1000.0, Slo(95, 12), arrivals="constant")
    await lab.search("xla")
    assert {cast(OpenLoop, block.load).process for block in lab.blocks[1:]} == {"constant"}


async def test_a_target_dead_or_too_slow_for_the_percentile_is_not_searched() -> None:
    dead = Lab(0.0, Slo(99, 50))
    await dead.search("xla")
    assert [event.text for event in dead.events] == ["xla: nothing was answered, so there is no rate to search"]
    slow = Lab(5.0, Slo(99.9, 5000))
    await slow.search("xla")
    assert len(slow.blocks) == 1
    assert "too slow for p99.9: 10 min hold too few requests" in slow.events[0].text
