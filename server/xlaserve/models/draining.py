"""The end of versions: accepted requests are finished, then the models are freed."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Collection
from contextlib import suppress

from xlaserve.engine.program import Dismantled
from xlaserve.models.catalog import Model
from xlaserve.models.version import State, Version


async def drain_and_free(versions: Collection[Version], timeout_s: float) -> None:
    """Drains versions at the same time, each for at most `timeout_s` seconds, and frees their models."""
    models = [*map(_to_dismantle, versions)]
    await asyncio.gather(*(drain(version, timeout_s) for version in versions))
    await asyncio.to_thread(_free, models)


async def drain(version: Version, timeout_s: float) -> None:
    """Finishes the accepted requests of a version and drops its parts; it is then UNLOADED, or still FAILED.

    Requests that do not finish within `timeout_s` seconds fail.
    """
    if (served := version.served) is not None:
        version.enter(State.DRAINING)
        batcher, background = served.local or (None, None)
        if background is not None:
            background.stop_compiling()
        if version.growth is not None:
            version.growth.cancel()
            await asyncio.wait([version.growth])
        began = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await served.left()  # accepted requests may still be parsed
        if batcher is not None:
            await batcher.drain(max(0.0, timeout_s - (time.monotonic() - began)))
        if background is not None:
            await background.close()
    if version.state not in (State.FAILED, State.UNLOADED):
        version.enter(State.UNLOADED)
    version.model = version.served = version.growth = None


def _to_dismantle(version: Version) -> Model | None:
    """Returns the version's model, None while it may still compile something in the background."""
    return None if version.growth or (version.served and version.served.takes_unmatched) else version.model


def _free(ended: list[Model | None]) -> None:
    """Frees models that are no longer in use, and empties the list; blocks."""
    while ended:
        model = ended.pop()
        if model is not None and isinstance(model.program, Dismantled):
            model.program.dismantle()
        del model
    gc.collect()  # the rest of a model is in reference cycles
