"""Turns of loads: one version of any model is loaded at a time, unless a step of its load takes more than a minute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Final, NamedTuple, Protocol

PATIENCE_S: Final = 60.0
"""Time that a load may spend on one step before others begin beside it, and the interval between its warnings."""

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Steps of a load, which other threads may change."""

    @property
    def step(self) -> str:
        """The step that is under way, such as `building the model`; empty without one."""
        ...

    @property
    def since_s(self) -> float:
        """Time of the last change of steps, in seconds of the monotonic clock; 0.0 before the first."""
        ...


class Step(NamedTuple):
    """The only step of a load."""

    step: str
    since_s: float = 0.0


class Turn:
    """The turn of one load."""

    progress: Progress | None = None
    """The steps of the load; None until it has begun."""


class LoadTurns:
    """One load at a time has the turn, in the order in which they came. On the event loop.

    A load that spends `patience_s` seconds on one step gives its turn to the next one and goes on beside it, as a
    model's own code may never return. A warning says so every `patience_s` seconds.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._turn = asyncio.Lock()
        self._given_up = asyncio.Event()
        """Set whenever a load gives up its turn."""

    async def until_done_or_given_up(self, load: asyncio.Task[None]) -> None:
        """Returns once `load` has ended, or a load gives its turn to the next. Raises the error of `load`."""
        self._given_up.clear()
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait([load, given_up], return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up.cancel()
        if load.done():
            load.result()

    @asynccontextmanager
    async def turn(self, title: str, step: str = "") -> AsyncIterator[Turn]:
        """Waits for the turn and holds it until the block ends, at the latest. `title` names the version, and `step`
        its only step."""
        await self._turn.acquire()
        with ExitStack() as held:
            held.callback(self._turn.release)
            turn = Turn()
            turn.progress = Step(step) if step else None
            watching = asyncio.create_task(self._watch(title, turn, held.close))
            try:
                yield turn
            finally:
                watching.cancel()

    async def _watch(self, title: str, turn: Turn, give_up_turn: Callable[[], None]) -> None:
        began_s = since_s = time.monotonic()
        waited_s = self._patience_s
        while True:
            await asyncio.sleep(since_s + waited_s - time.monotonic())
            step, changed_s = (turn.progress.step, turn.progress.since_s) if turn.progress else ("", began_s)
            if (changed_s := max(began_s, changed_s)) != since_s:
                since_s, waited_s = changed_s, self._patience_s
                continue
            give_up_turn()
            self._given_up.set()
            said = "model %s: %s has taken %.0f s so far; other models are loaded beside it. Unload it if it never ends"
            log.warning(said, title, step or "loading", waited_s)
            waited_s += self._patience_s
