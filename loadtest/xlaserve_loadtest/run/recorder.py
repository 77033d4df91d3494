"""Turns what happened into the lines of a run file, as it happens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from xlaserve_loadtest.printable import shortened
from xlaserve_loadtest.record.blocks import BlockLine, Counters, GeneratorUse, LoadLine, ServerUse
from xlaserve_loadtest.record.lines import End, Event, Failure, Line, Requests
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.record.run_file import RunWriter
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.schedule import steady
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, Profile, Replay
from xlaserve_loadtest.schedule.plan import BlockPlan

_CHUNK_ROWS: Final = 8192


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The generator's ceiling: its rate with a server on its own machine that answers at once with nothing."""

    per_s: float
    """Requests each second at most."""
    own_ms: float | None
    """Median latency of one request at a time."""
    others: float | None = None
    """Share of the machine's processor time that others used meanwhile."""


class Recorder:
    """Writes to `writer`, and keeps the totals for the end of the file."""

    def __init__(self, writer: RunWriter) -> None:
        self.windows: dict[str, list[steady.Window]] = {}
        """Windows of each arm under the present load."""
        self.blocks = 0
        """How many were written."""
        self._writer = writer
        self._failures: dict[tuple[str, Status], tuple[int, str]] = {}

    def write(self, line: Line) -> None:
        """Writes a line as it is."""
        self._writer.write(line)

    def event(self, at_ns: int, what: Literal["compile", "error", "note"], text: str) -> None:
        """Writes that something happened."""
        self.write(Event(at_ns, what, text))

    def block(
        self,
        block: BlockPlan,
        outcome: Outcome,
        *,
        images_per_request: str,
        server: int,
        workers: int,
        ceiling: Ceiling | None,
        use: ServerUse,
        counters: Counters | None,
        others: float | None,
        is_last: bool,
    ) -> None:
        """Writes a block with its requests, and its events.

        Whether an arm became steady is recorded with its last block under a load.
        """
        index = self.blocks
        for start in range(0, len(outcome.rows), _CHUNK_ROWS):
            self.write(Requests(index, outcome.rows[start : start + _CHUNK_ROWS]))
        windows = self.windows.setdefault(block.arm, [])
        windows += outcome.windows if block.round is None else [_as_window(outcome)]
        self.write(
            BlockLine(
                index=index,
                arm=block.arm,
                load=load_line(block.load, images_per_request),
                start_ns=outcome.start_ns,
                end_ns=outcome.end_ns,
                role=block.role,
                server=server,
                window_ns=outcome.window_ns,
                steady=steady.is_steady(windows) if is_last and len(windows) >= steady.WINDOWS else None,
                round=block.round,
                generator=_generator_use(outcome, workers, ceiling, others),
                server_use=use,
                counters=counters,
            )
        )
        self.blocks += 1
        for status, (count, message) in outcome.failures.items():
            before, first = self._failures.get((block.arm, status), (0, shortened(message)))
            self._failures[block.arm, status] = (before + count, first)
        for compiled, how in (
            (counters and counters.serving_compilations, "while requests waited"),
            (counters and counters.compilations, "beside traffic"),
        ):
            if compiled:
                self.event(outcome.end_ns, "compile", f"{block.arm}: programs compiled {how}: {compiled}")

    def end(self, end: End) -> None:
        """Writes the last lines."""
        for (arm, status), (count, message) in self._failures.items():
            self.write(Failure(arm, status.name, count, message))
        self.write(end)


def load_line(load: Load, images_per_request: str) -> LoadLine:
    """Returns a load as the record names it."""
    if isinstance(load, ClosedLoop):
        kind: Literal["offline", "closed"] = "offline" if load.is_offline else "closed"
        return LoadLine(kind, concurrency=load.slots, images_per_request=images_per_request)
    line = LoadLine("open", rate_per_s=load.mean_rate_per_s(), images_per_request=images_per_request)
    if isinstance(load, Replay):
        return replace(line, arrivals="replay")
    line = replace(line, arrivals=load.process, burst=load.burst)
    if isinstance(load, Profile):
        stages = tuple((stage.rate_per_s, stage.end_rate_per_s, stage.duration_s) for stage in load.stages)
        return replace(line, stages=stages)
    ramp = None if load.end_rate_per_s is None else (load.rate_per_s, load.end_rate_per_s)
    return replace(line, ramp_per_s=ramp)


def _generator_use(outcome: Outcome, workers: int, ceiling: Ceiling | None, others: float | None) -> GeneratorUse:
    share = None
    if ceiling and ceiling.per_s and outcome.window_s():
        share = len(outcome.measured) / outcome.window_s() / ceiling.per_s
    return GeneratorUse(
        workers=workers,
        cpu_s=outcome.cpu_s,
        sends=outcome.sends,
        late_sends=outcome.late_sends,
        dropped=outcome.dropped,
        dropped_by_model=outcome.dropped_by_model,
        compared=outcome.compared,
        differing=outcome.differing,
        busy=share,
        own_ms=ceiling.own_ms if ceiling else None,
        others=others,
        ceiling_others=ceiling.others if ceiling else None,
        wait_ms=outcome.strain.wait_ms,
        longest_wait_ms=outcome.strain.longest_ms,
        preemptions=outcome.strain.preemptions,
        steal=outcome.strain.steal,
        machines=outcome.machines,
    )


def _as_window(outcome: Outcome) -> steady.Window:
    answered = outcome.answered
    latencies_ms = (answered["end_ns"] - answered["scheduled_ns"]) / 1e6
    return steady.Window(outcome.images_per_s(), float(np.median(latencies_ms)) if latencies_ms.size else None)
