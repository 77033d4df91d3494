"""Runs that are simulated block by block, without files."""

from __future__ import annotations

import numpy as np

from xlaserve_loadtest.analysis.intervals import Floats
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record.blocks import BlockLine, GeneratorUse, LoadLine
from xlaserve_loadtest.record.lines import Arm, Environment, Header
from xlaserve_loadtest.record.requests import REQUEST, STAGES

CONTROL = "arm0 again"


def header(arms: int) -> Header:
    """Returns the header of a run of `arms` arms, called arm0, arm1 and so on, and a control of arm0, the baseline."""
    names = [Arm(f"arm{number}", f"mode{number}", "digits", "embedded") for number in range(arms)]
    names.append(Arm(CONTROL, "mode0", "digits", "embedded", is_control_of="arm0"))
    return Header(
        started_at="2026-01-02T03:04:05+00:00",
        command=("loadtest",),
        configuration={},
        seed=0,
        scenario=None,
        baseline="arm0",
        arms=tuple(names),
        environment=Environment("a processor", 2, (), "a system", "3.11", {}, {}),
    )


class Blocks:
    """Makes blocks, one after the other."""

    def __init__(self) -> None:
        self._now_ns = 10**12
        self.samples: list[Sample] = []

    def add(self, arm: str, load: LoadLine, latencies_ms: Floats, *, server: int, turn: int) -> None:
        """Adds a block; slots of a closed loop take turns, requests of an open loop are due at even times."""
        index, count = len(self.samples), latencies_ms.size
        latencies_ns = np.round(latencies_ms * 1e6).astype(np.int64)
        if load.type == "open":
            due_ns = np.arange(count) * round(1e9 / (load.rate_per_s or 1))
        else:
            slots = load.concurrency or 1
            due_ns = np.empty(count, np.int64)
            for slot in range(slots):
                taken = latencies_ns[slot::slots]
                due_ns[slot::slots] = np.cumsum(taken) - taken
        rows = np.zeros(count, REQUEST)
        rows["block"] = index
        rows["measured"] = True
        rows["scheduled_ns"] = rows["start_ns"] = self._now_ns + due_ns
        rows["end_ns"] = rows["scheduled_ns"] + latencies_ns
        rows["images"] = 1
        for stage in STAGES:
            rows[stage] = np.nan
        end_ns = int(rows["end_ns"].max()) + 1
        block = BlockLine(
            index,
            arm,
            load,
            start_ns=self._now_ns,
            end_ns=end_ns,
            window_ns=(self._now_ns, end_ns),
            generator=GeneratorUse(workers=1, cpu_s=0.1, sends=count),
            server=server,
            round=turn,
        )
        self.samples.append(Sample(block, rows))
        self._now_ns = end_ns
