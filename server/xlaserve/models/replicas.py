"""A model on several devices at once."""

from __future__ import annotations

from dataclasses import replace

from xlaserve.config import ModelSettings
from xlaserve.models import catalog
from xlaserve.models.catalog import Model
from xlaserve.programs.tf.device_replicas import Replicas, ReplicatedProgram


def load(settings: ModelSettings, replicas: Replicas) -> Model:
    """Builds the model once on each device, with its weights there; blocks. Raises ModelFailed.

    Built again rather than copied, which works however a source holds its variables. Random weights are drawn from the
    same seed each time.
    """
    models = []
    for index in range(len(replicas.devices)):
        with replicas.on(index):
            models.append(catalog.load(settings))
    return replace(models[0], program=ReplicatedProgram([model.program for model in models], replicas))
