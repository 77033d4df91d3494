"""Polls the configuration and folders of versions, and applies changes once they have settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from xlaserve.config import ModelSettings, model_files
from xlaserve.config.versions import VersionSet, grouped
from xlaserve.errors import ConfigError

log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """The settings and files of a model, as one look has found them."""

    model: VersionSet
    files: frozenset[model_files.File]


@dataclass(eq=False)
class Poll:
    """Calls `apply` with the names of models that are no longer as they were, once two looks have shown the same.

    A model whose files are still being copied is thus left alone, and one that failed is tried again when its files
    have changed. `read_models` reads the configuration and folders of versions again, on a thread, and may raise
    ConfigError.
    """

    read_models: Callable[[], Iterable[ModelSettings]]
    apply: Callable[[Collection[str]], Awaitable[object]]
    every_s: float
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def follow(self, served: Iterable[ModelSettings]) -> None:
        """Polls for changes of the models, which are `served` at first. Never returns."""
        applied = await asyncio.to_thread(_look, served)
        last = applied
        while True:
            await self.sleep(self.every_s)
            try:
                now = await asyncio.to_thread(lambda: _look(self.read_models()))
            except ConfigError as error:
                log.warning("versions are as before: %s", error)
                continue
            except Exception:  # the next look may be better
                log.exception("versions are as before: a look at them failed")
                continue
            settled = {name for name in {*now, *last} if now.get(name) == last.get(name)}
            changed = {name for name in settled if now.get(name) != applied.get(name)}
            last = now
            if changed:
                applied = {name: seen for name, seen in applied.items() if name not in changed}
                applied |= {name: now[name] for name in changed & now.keys()}
                await self.apply(changed)


def _look(models: Iterable[ModelSettings]) -> dict[str, Seen]:
    return {
        name: Seen(model, frozenset().union(*map(model_files.state, model.versions.values())))
        for name, model in grouped(models).items()
    }
