"""Resolutions without buckets that a front has an engine make a model ready for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from xlaserve.engine.batching.unmatched import refusal
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.processes.link.engine_state import ModelSnapshot


class Openings:
    """Those of one model. `ask` asks the engine, and returns once that is ready. All methods run on the event loop."""

    def __init__(self, ask: Callable[[Resolution], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: dict[Resolution, asyncio.Task[None]] = {}

    def check(self, snapshot: ModelSnapshot, resolution: Resolution) -> None:
        """Raises InvalidArgument where images of a resolution are not taken. The engine looks again."""
        if resolution in snapshot.output_bytes:
            return
        if snapshot.unmatched is None:
            raise refusal(resolution, "a size that has buckets")
        snapshot.unmatched.check(resolution, self._asking)

    def begin(self, snapshot: ModelSnapshot, resolution: Resolution) -> asyncio.Task[None]:
        """Asks the engine, unless it is asked already. Raises InvalidArgument."""
        if (asking := self._asking.get(resolution)) is None:
            self.check(snapshot, resolution)
            asking = asyncio.create_task(self._ask(resolution), name=f"open {resolution}")
            self._asking[resolution] = asking
            asking.add_done_callback(lambda _: self._end(resolution))
        return asking

    def _end(self, resolution: Resolution) -> None:
        asking = self._asking.pop(resolution)
        if not asking.cancelled():
            asking.exception()  # who waits for it knows, and there may be nobody
