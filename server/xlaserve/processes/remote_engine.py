"""One engine of a front, in another process that may end and be followed by another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from xlaserve.errors import EngineLost, ModelNotFound
from xlaserve.processes.link.front_end import engine_link as link
from xlaserve.processes.published import EngineReport

RETRY_S: Final = 0.05
"""Interval between attempts to reach an engine that is not there."""
FAILED_RETRY_S: Final = 1.0
"""Interval between attempts after another error, for example when no file descriptors are left."""

log = logging.getLogger(__name__)


class RemoteEngine:
    """The engine at `address`, to which it keeps a link. On the event loop.

    `on_models` is called whenever the engine publishes its models: with the link to the engine before it if this one
    has just taken its place, else with None. `on_lost` is called once the engine has ended without a successor. `tally`
    returns this front's counts of the models, as plain data, when the engine asks for them.
    """

    def __init__(
        self,
        address: Path,
        *,
        on_models: Callable[[link.EngineLink | None], object],
        on_lost: Callable[[], object],
        tally: Callable[[], object],
    ) -> None:
        self.link: link.EngineLink | None = None
        """The link to the engine that requests are sent to, or were sent to last; None before the first one."""
        self.is_known = False
        """Whether the engine is there and has published its models."""
        self._address = address
        self._title = address.name if " " in address.name else f"the {address.name}"
        self._on_models = on_models
        self._on_lost = on_lost
        self._tally = tally

    @property
    def report(self) -> EngineReport:
        """The last report of the engine. Raises EngineLost if there was no engine yet."""
        return cast(EngineReport, self.linked.details)

    @property
    def linked(self) -> link.EngineLink:
        """The present link, or the last one. Raises EngineLost if there was no engine yet."""
        if self.link is None:
            raise EngineLost("the process that runs the models is starting")
        return self.link

    async def follow(self) -> None:
        """Links to the engine, to an engine that takes its place, and to the next one after a crash. Never returns."""
        try:
            while True:
                linked = await self._reached()
                if not await linked.superseded():
                    log.warning("%s is lost: %s", self._title, await linked.lost())
                    self._lose()
        finally:
            if self.link is not None:
                self.link.close()
            self._lose()

    async def change(self, name: str, question: str, **arguments: object) -> None:
        """Has the engine make a change of a model, or the engine that takes its place meanwhile.

        `question` is the kind of change: load, update or unload. Raises any error of the change, ModelNotFound without
        the names of other models, and EngineLost if the engine ends or is not there.
        """
        while True:
            linked = self.linked
            try:
                await linked.ask(question, name=name, **arguments)
            except ModelNotFound:
                # The engine's own words list models, of which this caller may know only some.
                raise ModelNotFound(f"no model {name[:128]!r} is configured") from None
            except EngineLost:
                if not linked.is_superseded:
                    raise
                await linked.moved()  # the engine in its place makes the change
            else:
                return

    async def _reached(self) -> link.EngineLink:
        """Tries until a link to the engine can be made, and returns it."""
        while True:
            try:
                linked = await link.connect(self._address, on_models=self._take, tally=self._tally)
            except (EngineLost, ConnectionError) as error:
                log.debug("no link to %s: %r", self._title, error)
                if self.link is None or self.link.is_lost:
                    self._lose()  # it may have ended right after it had published its models
                await asyncio.sleep(RETRY_S)
            except TimeoutError:
                log.info("%s does not answer yet", self._title)  # it may take long to import libraries
                await asyncio.sleep(RETRY_S)
            except OSError as error:
                log.warning("%s can't be reached, next attempt in %g s: %s", self._title, FAILED_RETRY_S, error)
                await asyncio.sleep(FAILED_RETRY_S)
            else:
                log.debug("linked to %s", self._title)
                return linked

    def _take(self, linked: link.EngineLink) -> None:
        before, self.link, self.is_known = self.link, linked, True
        self._on_models(None if before is linked else before)

    def _lose(self) -> None:
        if self.is_known:
            self.is_known = False
            self._on_lost()
