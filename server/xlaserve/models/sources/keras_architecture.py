"""Weights in a file, loaded into a Keras model that the settings name."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import keras_content, keras_custom_objects
from xlaserve.models.sources.keras_content import KerasContent, complete


def with_config(content: KerasContent, file: Path) -> KerasContent:
    """Returns the weights of a file with the configuration in another, as `model.to_json()` writes it.

    Raises ModelFailed.
    """
    try:
        config = json.loads(file.read_text())
        if not keras_content.is_config(config):
            raise ValueError("it is no model's configuration")
    except (OSError, ValueError) as error:
        raise ModelFailed(
            f"architecture: expected a file that model.to_json() wrote, got {file.name}: {cause(error)}; write it where"
            f' the model is: pathlib.Path("{file.stem}.json").write_text(model.to_json())'
        ) from error
    return content.with_config(config)


def with_weights(content: KerasContent, architecture: str) -> Any:
    """Returns the Keras model of `architecture`, the path of a function, with the weights of a file.

    Raises ModelFailed, and what the function raises.
    """
    model = keras_custom_objects.import_object("architecture", architecture)()
    if not isinstance(model, keras.Model):
        raise ModelFailed(
            "architecture: expected a function that returns a Keras model, got"
            f" {type(model).__name__} of {architecture}; return keras.Model(inputs, outputs) from it"
        )
    suffix = ".h5" if content.has_old_weights else ".keras" if content.is_zip else ".weights.h5"
    with TemporaryDirectory(prefix="xlaserve-keras-") as folder:
        file = Path(folder, f"model{suffix}")  # Keras reads a file as its suffix says
        file.symlink_to(content.file.resolve())
        try:
            with complete():
                model.load_weights(file)
        except (ValueError, KeyError) as error:
            raise unfit(content, architecture, error) from error
    return model


def unfit(content: KerasContent, architecture: str, error: Exception) -> ModelFailed:
    """Returns the error of weights that do not fit an architecture."""
    return ModelFailed(
        f"architecture: expected the model whose weights are in {content.file.name}, got {Path(architecture).name},"
        f" which they do not fit: {cause(error)}; name the function that made it: architecture:"
        ' my_package.my_module:build; or, where the model is, write all of it: model.save("model.keras")'
    )
