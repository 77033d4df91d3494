"""The event loop that servers use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` to its end."""
    import uvloop  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def in_background(work: Coroutine[Any, Any, None], failed: Callable[[], object] = lambda: None) -> asyncio.Task[None]:
    """Starts what nobody waits for. Where it raises, that is logged, and `failed` is called."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a task failed", exc_info=error)
            failed()

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task
