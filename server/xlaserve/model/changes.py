"""Changes of models, each model's one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

Kind = Literal["start", "load", "unload"]


class _Change:
    def __init__(self, kind: Kind, work: Callable[[], Awaitable[None]], before: _Change | None) -> None:
        self.kind = kind
        self.has_begun = False
        self.task: asyncio.Task[None] = asyncio.create_task(self._make(work, before.task if before else None))

    async def _make(self, work: Callable[[], Awaitable[None]], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self.has_begun = True
        await work()


class Changes:
    """Makes one change of a model at a time, in the order in which they were asked for.

    A change that waits for its turn is everybody's who asks for the same before anything else, and it goes on when
    they give up: however often one thing is asked for, it is done once more at most.
    """

    def __init__(self) -> None:
        self._newest: dict[str, _Change] = {}

    async def make(self, name: str, kind: Kind, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work` for the model once its turn has come, or waits for who does the same. Raises what that raises."""
        change = self._newest.get(name)
        if change is None or change.has_begun or change.kind != kind:
            change = self._newest[name] = _Change(kind, work, before=change)
            change.task.add_done_callback(partial(self._forget, name, change))
        await asyncio.shield(change.task)

    def _forget(self, name: str, change: _Change, task: asyncio.Task[None]) -> None:
        if self._newest[name] is change:
            del self._newest[name]
