"""A whole load test: a target, a plan, the run, and what is kept of it."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from xlaserve_loadtest import arrivals, payload, runner
from xlaserve_loadtest.arrivals import Block, ClosedLoop
from xlaserve_loadtest.embedded import EmbeddedServer, configuration
from xlaserve_loadtest.record import Record
from xlaserve_loadtest.target import GrpcTarget, ModelInfo, TargetError


@dataclass(frozen=True)
class Settings:
    """What to measure, and how."""

    model: str
    modes: tuple[str, ...]
    duration_s: float
    """Measured seconds for each mode."""
    warmup_s: float
    concurrency: int
    images_per_request: int
    payload: payload.Kind
    size: tuple[int, int] | None
    """Height and width of the images; the model's own by default."""
    target: str | None
    """HOST:PORT of a running server; None starts one."""
    config: Path | None
    """Configuration of the server to start."""
    seed: int
    deadline_s: float
    """For each request."""
    start_timeout_s: float


class Progress(Protocol):
    """Somebody to tell how far it is."""

    def say(self, text: str) -> None:
        """A step was taken."""

    def show(self, text: str) -> None:
        """What is going on right now; replaces what was shown before."""


@dataclass
class Session:
    """One load test; what it has learnt stands, however it ends."""

    settings: Settings
    plan: tuple[Block, ...] = ()
    record: Record = field(default_factory=Record)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    info: ModelInfo | None = None
    address: str = ""
    obituary: str | None = None
    """How the embedded server ended, where it did so before its time."""

    async def run(self, progress: Progress) -> None:
        """Runs to the end. Raises TargetError when there is nothing to measure; may be cancelled at any time."""
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            model = settings.model
            server: EmbeddedServer | None = None
            if settings.target is None:
                config: Path | str | None = settings.config
                if config is None:
                    config, model = configuration(model, settings.modes)
                progress.say(f"starting a server for {model} ({', '.join(settings.modes)})")
                server = EmbeddedServer(config, start_timeout_s=settings.start_timeout_s, on_output=progress.show)
                await stack.enter_async_context(server)
                self.address = server.address
                progress.say(f"server is ready at {self.address}")
            else:
                self.address = settings.target
            try:
                await self._measure(model, progress)
            finally:
                self.obituary = server.obituary() if server else None

    async def _measure(self, model: str, progress: Progress) -> None:
        settings = self.settings
        target = GrpcTarget(self.address, deadline_s=settings.deadline_s)
        self.info = await target.describe(model)
        size = settings.size or self.info.size
        if size is None:
            raise TargetError(f"{model} takes images of several sizes: choose one with --size HEIGHTxWIDTH")
        images = payload.synthetic_images(payload.DISTINCT_IMAGES, height=size[0], width=size[1], seed=settings.seed)
        requests = payload.make_requests(
            images,
            model=model,
            modes=settings.modes,
            kind=settings.payload,
            images_per_request=settings.images_per_request,
        )
        plan = self.plan = arrivals.interleave(
            settings.modes, duration_s=settings.duration_s, warmup_s=settings.warmup_s, seed=settings.seed
        )

        def on_block(block: Block) -> None:
            left_s = sum(later.warmup_s + later.duration_s for later in plan[block.index :])
            progress.show(f"{block.arm}: block {block.index + 1} of {len(plan)}, about {left_s:.0f} s left")

        progress.say(f"measuring {model}, {settings.duration_s:g} s for each of {', '.join(settings.modes)}")
        # What was made so far stays: the collector need not look at it again between two requests.
        gc.collect()
        gc.freeze()
        loop = ClosedLoop(settings.concurrency)
        await runner.run(plan, target, self.info, requests, loop, record=self.record, on_block=on_block)
