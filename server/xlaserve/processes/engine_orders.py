"""Orders of an engine's process: the settings, the models and the numbers that a supervisor starts it with."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Final, NamedTuple

from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.processes.engine_replacement import InitialModels
from xlaserve.processes.handover import ClientOverrides

LOADINGS: Final = 2**20
"""Numbers of loadings that each engine has for itself: the numbers of the next engine begin after them."""
ENGINES: Final = 2**12 - 1
"""Engines with numbers of their own; the next one gets those of the first, so that all fit into 32 bits."""

log = logging.getLogger(__name__)


class EngineOrders(NamedTuple):
    """The orders that an engine is started with; plain data, which can be pickled."""

    settings: Settings
    read_settings: Callable[[], Settings]
    number: int = 0
    """Number of engines that were started before."""
    initial_models: bytes = b""
    """Pickled `InitialModels` of another engine; empty if there are none. Then the first engine loads the models of
    `settings`, and every later one those that the configuration has by now."""
    taken_over: ClientOverrides | None = None
    """Models of the server whose place this one takes, as far as its clients had changed them."""
    is_beside: bool = False
    """Whether the engine is started beside one that serves, to take its place."""
    set_aside: Mapping[bytes, str] = {}
    """Versions that crashed engines and are not loaded, by their keys, with the reason."""
    own: Mapping[str, object] = {}
    """Settings of this engine alone, which replace those of the configuration."""

    def read(self) -> Settings:
        """Reads the configuration again. Raises ConfigError."""
        # Only a start decides whether a model that fails ends the engine: that is no change of the configuration.
        failure = {"exit_on_model_failure": self.settings.exit_on_model_failure}
        return self.read_settings().model_copy(update={**self.own, **failure})

    def current(self) -> EngineOrders:
        """Returns these orders with the models to begin with in their settings."""
        if (initial := self.read_initial_models()) is not None:
            models = tuple(chain.from_iterable(model.entries for model in initial.configured.values()))
            return self._replace(settings=self.settings.model_copy(update={"models": models}))
        if not self.number:
            return self
        try:
            models = self.read().models
        except ConfigError as error:
            log.error("the models are those that were configured when the server started: %s", error)
            return self
        return self._replace(settings=self.settings.model_copy(update={"models": models}))

    def read_initial_models(self) -> InitialModels | None:
        """Returns the unpickled `initial_models`; None if there are none."""
        if not self.initial_models:
            return None
        initial: InitialModels = pickle.loads(self.initial_models)
        return initial

    @property
    def first_loading(self) -> int:
        """Number of the engine's first loading: engines that run at the same time have no number in common."""
        return self.number % ENGINES * LOADINGS + 1
