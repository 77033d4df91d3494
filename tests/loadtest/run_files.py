from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from xlaserve_loadtest.record.blocks import BlockLine, GeneratorUse, LoadLine
from xlaserve_loadtest.record.lines import Arm, End, Environment, Header, LedgerEntry, Line, Requests, Run, Server
from xlaserve_loadtest.record.requests import REQUEST, STAGES, Status
from xlaserve_loadtest.record.run_file import RunWriter, read_run

CLOSED = LoadLine("closed", concurrency=4)
ENVIRONMENT = Environment("a processor", 2, (), "a system", "3.11", {"xlaserve": "0.1.0"}, {})

NewRun = Callable[..., "RunFile"]


class RunFile:
    """A synthetic run on a clock of its own, written block by block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self.now_ns = 10**12
        self.blocks = 0

    def header(self, arms: Sequence[str] = ("xla", "graph"), control: bool = False, **more: Any) -> RunFile:
        found = [Arm(name, name, "digits", "embedded") for name in arms]
        if control:
            found.append(Arm("graph again", "graph", "digits", "embedded", is_control_of="graph"))
        options: dict[str, Any] = {
            "started_at": "2026-01-02T03:04:05+00:00",
            "command": ("loadtest",),
            "configuration": {"duration_s": 5.0},
            "seed": 0,
            "scenario": None,
            "baseline": "graph" if "graph" in arms else None,
            "arms": tuple(found),
            "environment": ENVIRONMENT,
        }
        self.lines.append(Header(**{**options, **more}))
        return self

    def server(self, *, compile_s: Mapping[str, float] | None = None, **more: Any) -> RunFile:
        ledger = [
            LedgerEntry(mode, (batch, 8, 8), trace_s=0.5, compile_s=seconds, run_s=0.001)
            for mode, seconds in (compile_s or {}).items()
            for batch in (4, 1)
        ]
        options = {"id": 0, "arms": ("xla", "graph"), "address": "127.0.0.1:1", "name": "xlaserve 0.1.0"}
        self.lines.append(Server(**{**options, "ledger": tuple(ledger), **more}))
        return self

    def block(
        self,
        arm: str,
        latencies_ms: Sequence[float] | np.ndarray[Any, Any],
        *,
        load: LoadLine = CLOSED,
        status: Status = Status.OK,
        images: int = 1,
        stages_s: Mapping[str, float] | None = None,
        due_ns: np.ndarray[Any, Any] | None = None,
        generator: GeneratorUse | None = None,
        model: int | np.ndarray[Any, Any] = 0,
        columns: Mapping[str, Any] = MappingProxyType({}),
        ends: bool = True,
        **more: Any,
    ) -> RunFile:
        """Adds a block; a closed loop's slots take turns, everything else is due at `due_ns` from its start."""
        latencies_ns = np.round(np.asarray(latencies_ms, float) * 1e6).astype(np.int64)
        rows = np.zeros(latencies_ns.size, REQUEST)
        if due_ns is None:
            due_ns = np.empty(latencies_ns.size, np.int64)
            slots = load.concurrency or 1
            for slot in range(slots):
                taken = latencies_ns[slot::slots]
                due_ns[slot::slots] = np.cumsum(taken) - taken
        rows["block"] = self.blocks
        rows["measured"] = True
        rows["scheduled_ns"] = rows["start_ns"] = self.now_ns + due_ns
        rows["end_ns"] = rows["scheduled_ns"] + latencies_ns
        rows["status"] = status
        rows["images"] = images
        rows["model"] = model
        for column, values in columns.items():
            rows[column] = values
        for stage in STAGES:
            rows[stage] = (stages_s or {}).get(stage, np.nan)
        end_ns = int(rows["end_ns"].max()) + 1 if rows.size else self.now_ns + 10**9
        self.lines.append(Requests(self.blocks, rows))
        if ends:
            options: dict[str, Any] = {
                "window_ns": (self.now_ns, end_ns) if rows.size else None,
                "generator": generator or GeneratorUse(workers=1, cpu_s=0.1, sends=max(rows.size, 1)),
                "server": 0,
            }
            self.lines.append(
                BlockLine(self.blocks, arm, load, start_ns=self.now_ns, end_ns=end_ns, **{**options, **more})
            )
        self.blocks += 1
        self.now_ns = end_ns
        return self

    def write(self, *lines: Line, ends: bool = True) -> Path:
        with RunWriter(self.path) as writer:
            for line in (*self.lines, *lines, *([End(interrupted=False, complete=True)] if ends else [])):
                writer.write(line)
        return self.path

    def read(self, *lines: Line, ends: bool = True) -> Run:
        return read_run(self.write(*lines, ends=ends))


@pytest.fixture
def run_file(tmp_path: Path) -> NewRun:
    """Starts a run file."""
    return lambda name="a": RunFile(tmp_path / f"{name}.run.jsonl.gz")


@pytest.fixture
def compared(run_file: NewRun) -> NewRun:
    """A run of xla against graph, mirrored, with block-to-block noise; `xla_ms` and `graph_ms` are mean latencies."""

    def make(
        *,
        xla_ms: float = 10.0,
        graph_ms: float = 20.0,
        control_ms: float | None = None,
        pairs: int = 8,
        seed: int = 0,
        noise: float = 0.02,
        requests: int = 100,
        load: LoadLine = CLOSED,
        name: str = "a",
        generators: Mapping[str, GeneratorUse] = MappingProxyType({}),
        **header: Any,
    ) -> RunFile:
        random = np.random.default_rng(seed)
        run = run_file(name).header(control=control_ms is not None, **header)
        means = {"xla": xla_ms, "graph": graph_ms} | ({} if control_ms is None else {"graph again": control_ms})
        run.server(compile_s={"xla": 4.0, "graph": 0.0}, models={"digits": {"weights": "random"}})
        for turn in range(pairs):
            for arm in list(means)[:: 1 if turn % 2 == 0 else -1]:
                mean_ms = means[arm] * np.exp(random.normal(0, noise))
                latencies_ms = mean_ms * random.lognormal(0, 0.1, requests)
                run.block(arm, latencies_ms, load=load, round=turn // 2, generator=generators.get(arm))
        return run

    return make
