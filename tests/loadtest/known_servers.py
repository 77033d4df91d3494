"""Servers of exactly known behaviour, and a way to measure them in virtual time as a session does."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.loadtest.run_files import ENVIRONMENT
from tests.required import required

from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.record.blocks import ServerUse
from xlaserve_loadtest.record.lines import Arm, End, Header
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.record.run_file import RunWriter, read_run
from xlaserve_loadtest.run import crew
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.run.recorder import Recorder
from xlaserve_loadtest.schedule import plan
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, Replay
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import ModelInfo, Reply

if TYPE_CHECKING:
    from tests.loadtest.conftest import FakeTarget

Handle = Callable[[Request], Awaitable[Reply]]
Measured = Callable[..., Summary]

OFFLINE = ClosedLoop(16, is_offline=True)


class Lane:
    """Serves one request at a time, in order, each in `seconds`; one that finds `limit` waiting is refused at once."""

    def __init__(self, seconds: float, limit: float = float("inf")) -> None:
        self.seconds = seconds
        self.limit = limit
        self.free_at_s = 0.0

    async def __call__(self, request: Request) -> Reply:
        now_s = asyncio.get_running_loop().time()
        if self.free_at_s - now_s > self.limit * self.seconds:
            return Reply(Status.RESOURCE_EXHAUSTED, detail="full")
        self.free_at_s = max(now_s, self.free_at_s) + self.seconds
        await asyncio.sleep(self.free_at_s - now_s)
        return Reply(Status.OK)


def hanging(share: float, seconds: float) -> Callable[[], Handle]:
    """Answers after `seconds`, but every so often never."""

    def start() -> Handle:
        calls = itertools.count(1)

        async def handle(request: Request) -> Reply:
            await asyncio.sleep(1e9 if next(calls) % round(1 / share) == 0 else seconds)
            return Reply(Status.OK)

        return handle

    return start


def answering(seconds: float, *, rejects: float = 0.0, slow: float = 0.0, seed: int = 0) -> Callable[[], Handle]:
    """Answers after `seconds`, a share `slow` of requests after four times that; a share is rejected at once."""
    generator = random.Random(seed)

    def start() -> Handle:
        async def handle(request: Request) -> Reply:
            if generator.random() < rejects:
                return Reply(Status.RESOURCE_EXHAUSTED, detail="full")
            await asyncio.sleep(seconds * generator.uniform(0.9, 1.1) * (4 if generator.random() < slow else 1))
            return Reply(Status.OK)

        return handle

    return start


@pytest.fixture
def measured(
    in_virtual_time: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    fake_target: type[FakeTarget],
    model_info: ModelInfo,
    tmp_path: Path,
) -> Measured:
    """Measures arms, each a way to handle a request, as a session does, and sums the run file up."""

    def run(
        arms: Mapping[str, Callable[[], Handle]],
        load: Load,
        *,
        images: int = 1,
        duration_s: float = 5.0,
        warmup_s: float = 1.0,
        deadline_s: float = 10.0,
        max_in_flight: int = 4096,
        block_s: float | None = None,
        scenario: str | None = None,
        **configuration: object,
    ) -> Summary:
        path = tmp_path / "known.run.jsonl.gz"
        names = list(arms)
        described = tuple(Arm(name, name, "digits", "embedded") for name in names)
        header = {
            "started_at": "2026-01-02T03:04:05+00:00",
            "command": ("loadtest",),
            "configuration": {
                "duration_s": duration_s,
                "deadline_s": deadline_s,
                "most_in_flight": max_in_flight,
                **configuration,
            },
            "seed": 0,
            "scenario": scenario,
            "baseline": names[-1],
            "arms": described,
            "environment": ENVIRONMENT,
        }

        async def main() -> None:
            now = asyncio.get_running_loop()
            with RunWriter(path) as writer:
                recorder = Recorder(writer)
                recorder.write(Header(**header))  # type: ignore[arg-type]
                for block in plan.mirrored(
                    names, load, duration_s=duration_s, warmup_s=warmup_s, block_s=block_s, seed=0
                ):
                    generator = Generator(
                        target=fake_target(_with_deadline(arms[block.arm](), deadline_s)),
                        models={block.arm: [model_info]},
                        requests={block.arm: [Request(b"", images, block.arm)]},
                        clock=lambda: round(now.time() * 1e9),
                        spin_s=0,
                    )
                    shares = crew.tasks(block, ("fake",), 1, seed=block.round or 0, max_in_flight=max_in_flight)
                    outcome = await crew.run_block(block, [generator], shares, clock=lambda: round(now.time() * 1e9))
                    recorder.block(
                        block,
                        outcome,
                        images_per_request=str(images),
                        server=names.index(block.arm),
                        workers=1,
                        ceiling=None,
                        use=ServerUse(),
                        counters=None,
                        others=None,
                        is_last=False,
                    )
                recorder.end(End(interrupted=False, complete=True))

        in_virtual_time(main)
        return summarize(read_run(path))

    return run


def _with_deadline(handle: Handle, deadline_s: float) -> Handle:
    async def send(request: Request) -> Reply:
        try:
            async with asyncio.timeout(deadline_s):
                return await handle(request)
        except TimeoutError:
            return Reply(Status.DEADLINE_EXCEEDED, detail="deadline")

    return send


def images_per_s(point: Point) -> float:
    return required(point.images_per_s).value


def trace(*at_s: float) -> Replay:
    return Replay(np.round(np.array(at_s) * 1e9).astype(np.int64))
