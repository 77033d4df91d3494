"""The configured models, read again when a change needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from xlaserve.config import ModelSettings
from xlaserve.config.versions import VersionSet, grouped
from xlaserve.errors import ConfigError, ModelFailed, ModelNotFound
from xlaserve.models.change_queue import Shared

log = logging.getLogger(__name__)


class ConfiguredModels:
    """Finds models in the configuration, which `read_models` reads on a thread and may raise ConfigError."""

    def __init__(self, read_models: Callable[[], Iterable[ModelSettings]]) -> None:
        self._read = Shared(lambda: grouped(read_models()))

    async def find(self, name: str) -> VersionSet:
        """Reads how a model is configured now. Raises ModelNotFound, or ModelFailed where that can't be read."""
        try:
            models = await self._read()
        except ConfigError as error:
            log.error("model %s: %s", name[:128], error)
            raise ModelFailed("the configuration is no longer valid; the server's log says why") from error
        if name not in models:
            # Other names are not for every caller, and an engine doesn't know which caller asks.
            raise ModelNotFound(f"no model {name[:128]!r} is configured; add it to `models` in the configuration first")
        return models[name]
