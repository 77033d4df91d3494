"""`fronts: auto`: one process on a CPU, and on a GPU as many fronts as bring it what it computes."""

from __future__ import annotations

import math

from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.models import catalog
from xlaserve.processes.capacity import needed
from xlaserve.processes.engines import shares_of_machine
from xlaserve.programs.tf.device import usable_cores
from xlaserve.telemetry import gpus


def resolved(settings: Settings) -> Settings:
    """Returns `settings` with the most fronts that the server may come to have, where they leave that to it.

    They stay as they are on a CPU, where one process is to do all. Nothing of a GPU is touched, nor TensorFlow
    imported. Raises ConfigError.
    """
    if settings.fronts != "auto":
        return settings
    if not _is_on_gpu(settings):
        if settings.has_several_engines:
            expected = "fronts: 1 or more as well, as fronts: auto is one process here"
            raise ConfigError(f"engines: expected {expected}, got engines: {settings.engines}")
        return settings
    most = needed(math.inf, usable_cores(), len(shares_of_machine(settings)))
    return settings.model_copy(update={"fronts": most})


def _is_on_gpu(settings: Settings) -> bool:
    is_named = settings.device.startswith("gpu")
    has_gpu = is_named or (settings.device == "auto" and gpus.count_visible() > 0)
    return has_gpu and any(map(catalog.uses_tensorflow, settings.models))
