"""The state of the server and its models, as the page at `/` shows it.

However many ask, the state is read once in READ_S: a look is a few milliseconds of the event loop where there are
hundreds of models, in steps between which others get it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from xlaserve.admission.caller import CURRENT
from xlaserve.models.version import Version
from xlaserve.telemetry.gpus import Gpus
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, separated, to_json
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.overview import Overview
from xlaserve.wire.shared.parts import Part

READ_S: Final = 0.9
"""Less than the second after which pages ask again."""
STEP: Final = 20
"""Models that are read before others get the event loop."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The state at one moment, in JSON."""

    at: float
    server: bytes
    models: list[tuple[str, bytes]]
    """Each after its name."""
    failures: list[tuple[str, bytes]]
    """Each after the name of its model."""


@dataclass(eq=False)
class Status:
    """Its methods, as `routes` names them."""

    overview: Overview
    models: Models
    gpus: Gpus
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._look: _Look | None = None
        self._looking = asyncio.Lock()
        self._details: WeakKeyDictionary[Version, tuple[float, bytes]] = WeakKeyDictionary()

    async def status(self, request: HttpRequest) -> HttpAnswer:
        """Shows the server, its models and the last requests that failed, as they are now. Callers see the models that
        they may use."""
        async with self._looking:
            if self._look is None or self.clock() - self._look.at >= READ_S:
                self._look = await self._read()
        look, caller = self._look, CURRENT.get()
        # Who may not use all models is not told of what named none: it may have been about any.
        failures = (shown for model, shown in look.failures if caller.may_use_all or (model and caller.may_use(model)))
        models = (shown for model, shown in look.models if caller.may_use(model))
        parts = [look.server[:-1], *_listed("models", models), *_listed("failures", failures), b"}"]
        return HttpAnswer(parts, headers=NOT_KEPT)

    async def model(self, request: HttpRequest) -> HttpAnswer:
        """Shows all that is known of one version: its buckets, stages, warnings and compilations."""
        (version,) = self.models.versions(request.path["model"], request.path["version"])
        at, shown = self._details.get(version, (0.0, b""))
        now = self.clock()
        if not shown or now - at >= READ_S:
            await self.overview.count()
            shown = to_json(self.overview.model(version))
            self._details[version] = now, shown
        return HttpAnswer([shown], headers=NOT_KEPT)

    async def _read(self) -> _Look:
        gpus = await asyncio.to_thread(self.gpus.levels) if len(self.gpus) else []
        await self.overview.count()
        at = self.clock()
        server = to_json(await self.overview.server() | {"gpus": gpus})
        models: list[tuple[str, bytes]] = []
        for number, model in enumerate(self.overview.models(self.overview.versions()), start=1):
            models.append((model["name"], to_json(model)))
            if number % STEP == 0:
                await asyncio.sleep(0)
        return _Look(at, server, models, [(name, to_json(one)) for name, one in self.overview.failures()])


NOT_KEPT: Final = (("cache-control", "no-store"),)


def _listed(name: str, parts: Iterable[bytes]) -> list[Part]:
    return [b',"%b":[' % name.encode(), *separated([*parts]), b"]"]
