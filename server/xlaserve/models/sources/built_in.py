"""Networks that were trained here and come with xlaserve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from xlaserve.config import ModelSettings
from xlaserve.models.networks.network import Network
from xlaserve.models.sources import digits, keras_models, shapes
from xlaserve.models.task import WithClasses

MODELS: Final[Mapping[str, tuple[Callable[[], Any], tuple[str, ...]]]] = {
    "digits": (digits.load, digits.LABELS),
    "shapes-detector": (shapes.detector, shapes.LABELS),
    "shapes-segmenter": (shapes.segmenter, shapes.MAP_LABELS),
}
"""By the name that follows `builtin:`: the function that makes the Keras model, and the names of its classes."""


def network(name: str, settings: ModelSettings) -> Network:
    """Returns the network of one of MODELS."""
    make, labels = MODELS[name]
    settings = settings.model_copy(update={"classes": len(labels)})
    built = keras_models.network(make(), settings, preprocessing="none", weights="built in")
    assert isinstance(built.task, WithClasses)
    return replace(built, task=built.task.labelled(labels))
