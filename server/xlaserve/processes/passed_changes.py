"""Changes of models that clients request from a server which another one has replaced, and which the other one makes.

Each server listens for such changes on a Unix socket. All its fronts accept them there, over a link without models, and
make them like the changes of their own clients: changes wait while a third server starts, and are passed on to that one
once it serves. The caller is checked before a change is passed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from xlaserve.errors import EngineLost, ModelNotFound, QueueFull, ShuttingDown
from xlaserve.processes.link.arena import PAGE_BYTES
from xlaserve.processes.link.engine_end.front_link import MAX_QUESTIONS
from xlaserve.processes.link.engine_end.host import Host
from xlaserve.processes.link.front_end import engine_link as link
from xlaserve.wire.shared.backend import Backend

REACH_S: Final = 10.0
"""Time for which a front tries to reach the server that has taken this one's place."""
RETRY_S: Final = 0.05
REPLACED: Final = (
    "another server has taken this one's place, and this change was not begun: make it on a new connection"
)

log = logging.getLogger(__name__)

PassOn = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Has another server make a change: load, update or unload, and its arguments, with the `name` of the model."""


def taking(backend: Backend) -> Host:
    """Returns a host at which other servers have `backend` make changes."""
    changes: Mapping[str, Callable[..., Awaitable[None]]] = {
        "load": backend.load,
        "update": backend.update,
        "unload": backend.unload,
    }

    async def make(question: str, arguments: Mapping[str, Any]) -> None:
        await changes[question](**arguments)

    return Host(make)


class OtherServer:
    """The server that has taken this one's place, which accepts changes at `address` shortly after it serves."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._under_way = 0

    async def make(self, question: str, arguments: Mapping[str, object]) -> None:
        """Makes a change in the other server, and returns once it is made.

        Raises any error of the change there; EngineLost if that server ends meanwhile; ShuttingDown if it is not
        reached, so that nothing has begun; and QueueFull if too many changes are under way.
        """
        if self._under_way >= MAX_QUESTIONS:
            raise QueueFull(f"{MAX_QUESTIONS} such calls are under way")
        self._under_way += 1
        try:
            linked = await _reached(self._address)
            try:
                await linked.ask(question, **arguments)
            finally:
                linked.close()
        except ModelNotFound:
            # The other server's own words list models, of which this caller may know only some.
            raise ModelNotFound(f"no model {str(arguments['name'])[:128]!r} is configured") from None
        finally:
            self._under_way -= 1


async def refuse(question: str, arguments: Mapping[str, object]) -> None:
    """Raises ShuttingDown: no server is known that could make a change."""
    raise ShuttingDown(REPLACED)


async def _reached(address: Path) -> link.EngineLink:
    """Returns a link to the server at `address`, which is there shortly after it serves. Raises ShuttingDown."""
    try:
        async with asyncio.timeout(REACH_S):
            while True:
                try:
                    return await link.connect(address, arena_bytes=PAGE_BYTES, max_jobs=1)
                except OSError as error:
                    log.debug("no link to the server that has taken this one's place: %r", error)
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        log.warning("the server that has taken this one's place can't be reached: a change was refused")
    except EngineLost:  # it has just ended, or is of a version with another protocol
        log.warning("the server that has taken this one's place ended the link: a change was refused")
    raise ShuttingDown(REPLACED)
