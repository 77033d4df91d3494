"""The preparation of images in training as sources state it before they are loaded, by name or in their files.

Nothing here imports Keras: `xlaserve config --show` tells the defaults of models without loading them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from xlaserve.config import ModelSettings, sources
from xlaserve.config.sources import Source
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.preparation import (
    IMAGENET,
    KERAS,
    TEACHABLE_MACHINE,
    UNKNOWN,
    Preparation,
    of_image_converter,
)
from xlaserve.models.sources.keras_config import Json, is_of_teachable_machine

CONVERTER_FILE: Final = "image_converter.json"
"""The configuration of its image converter in the folder of a preset of KerasHub."""


def stated(settings: ModelSettings) -> Preparation | None:
    """Returns the preparation that a model has by its source's kind, its weights and its files; None where only loading
    it tells."""
    weights, found = settings.weights, None
    match sources.kind_of(settings.source):
        case Source.APPLICATIONS:
            found = IMAGENET if weights in (None, "imagenet") else KERAS
        case Source.KERAS_CV:
            found = KERAS
        case Source.KERAS_FILE:
            found = _of_file(settings)
        case Source.KERAS_HUB if weights == "random" or str(weights).endswith(".h5"):
            found = KERAS
        case Source.KERAS_HUB if weights is not None and not sources.is_handle(weights):
            found = _of_preset(Path(weights))
        case Source.BUILT_IN | Source.NOOP | Source.JAX_FILE | Source.ONNX_TFLITE_FILE:
            found = UNKNOWN
    return found


def _of_file(settings: ModelSettings) -> Preparation | None:
    """Returns what the configuration in a `.keras` or `.h5` file states; None where there is none that can be read, or
    where the settings have another."""
    if settings.architecture is not None:
        return None
    try:
        from xlaserve.models.sources import keras_content  # noqa: PLC0415 - it needs h5py

        config = keras_content.read(Path(settings.source)).config
    except (ImportError, OSError, ModelFailed):
        return None
    if config is None:
        return None
    if is_of_teachable_machine(config):
        return TEACHABLE_MACHINE
    return _of_converter(_part(_part(config, "preprocessor"), "image_converter"))


def _of_preset(folder: Path) -> Preparation | None:
    """Returns what the image converter in the folder of a preset states; None where it has none that can be read."""
    try:
        converter = json.loads((folder / CONVERTER_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _of_converter(converter) if isinstance(converter, dict) else None


def _part(config: Json | None, name: str) -> Json | None:
    """Returns the part of this name of what a configuration describes; None where it has none."""
    own: Any = (config or {}).get("config")
    part = own.get(name) if isinstance(own, dict) else None
    return part if isinstance(part, dict) else None


def _of_converter(converter: Json | None) -> Preparation | None:
    """Returns the preparation of a model with an image converter of this configuration, or without one."""
    own = (converter or {}).get("config")
    if not isinstance(own, dict):
        return KERAS
    resizes = own.get("image_size") is not None or {"height", "width"} <= own.keys()  # as earlier versions name it
    try:
        return (
            of_image_converter(
                own.get("interpolation", "bilinear"),
                antialias=own.get("antialias", False),
                crops=own.get("crop_to_aspect_ratio", True),
            )
            if resizes
            else KERAS
        )
    except ValueError:  # of a filter that is not known
        return None
