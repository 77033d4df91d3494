"""The configuration of a server that runs: read again at a signal and for new versions, and applied to the models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from xlaserve.config import ModelSettings, Settings
from xlaserve.errors import ConfigError
from xlaserve.models.poll import Poll

log = logging.getLogger(__name__)

Reconfigure = Callable[[Iterable[ModelSettings], Collection[str] | None], Awaitable[list[str]]]
"""Has these models served, or only the named ones of them, and returns what changed; see `Repository.reconfigure`."""


class ConfigurationFollower:
    """Reads the configuration again with `read_settings`, on a thread, and has `reconfigure` apply its models.

    `settings` are those that the process began with. On the event loop.
    """

    def __init__(self, settings: Settings, read_settings: Callable[[], Settings], reconfigure: Reconfigure) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._reconfigure = reconfigure
        self._is_due = asyncio.Event()
        """Set from a request to read the configuration again until that begins."""
        self._applying: set[asyncio.Task[None]] = set()
        """Changes under way: none waits for those before it, as a model may never end to load."""

    def request(self) -> None:
        """Has `follow` read the configuration again: at once, or as soon as it is called."""
        self._is_due.set()

    async def follow(
        self, stopping: asyncio.Event, *, on_reload: Callable[[], None], on_reloaded: Callable[[], None]
    ) -> None:
        """Reads the configuration again for new versions and at each `request`, until `stopping` is set.

        `on_reload` is called before a requested reading, `on_reloaded` once the changes of all requested readings were
        made or have failed.
        """
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(self._poll()), group.create_task(self._answer(on_reload, on_reloaded))]
            await stopping.wait()
            for task in (*following, *self._applying):
                task.cancel()

    async def _answer(self, on_reload: Callable[[], None], on_reloaded: Callable[[], None]) -> None:
        requested: set[asyncio.Task[None]] = set()

        def end(applying: asyncio.Task[None]) -> None:
            requested.remove(applying)
            if not (requested or applying.cancelled()):
                on_reloaded()

        while True:
            await self._is_due.wait()
            self._is_due.clear()
            log.info("reading the configuration again")
            on_reload()
            requested.add(applying := await self._begin())
            applying.add_done_callback(end)

    async def _poll(self) -> None:
        if every_s := self._settings.poll_versions_s:
            poll = Poll(lambda: self._read_settings().models, self._begin, every_s)
            await poll.follow(self._settings.models)

    async def _begin(self, only: Collection[str] | None = None) -> asyncio.Task[None]:
        applying = asyncio.create_task(self._apply(only))
        self._applying.add(applying)
        applying.add_done_callback(self._applying.discard)
        return applying

    async def _apply(self, only: Collection[str] | None = None) -> None:
        """Reads the configuration and applies it to all models, or to `only` the named ones; logs any error."""
        try:
            settings = await asyncio.to_thread(self._read_settings)
            fixed = [name for name in Settings.model_fields if name != "models"]
            if waiting := [name for name in fixed if getattr(settings, name) != getattr(self._settings, name)]:
                log.warning("changed in the configuration, but only a restart applies it: %s", ", ".join(waiting))
            done = await self._reconfigure(settings.models, only)
            log.info("read the configuration again: %s", "; ".join(done) or "no model changed")
        except ConfigError as error:
            log.error("the configuration is as before: %s", error)
        except Exception:
            log.exception("the configuration could not be read again")
