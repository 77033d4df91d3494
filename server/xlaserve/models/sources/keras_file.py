"""Networks from `.keras` files."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import zipfile
from pathlib import Path
from typing import Any, Final

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network
from xlaserve.models.sources import keras_detectors, keras_library, keras_models

LIBRARY: Final = re.compile(r'"registered_name": "(keras_cv|keras_hub)\b')
"""The name of a library in the configuration of a model that needs KerasCV or KerasHub."""
SAFE_MODE: Final = "safe_mode=False"
"""Keras's advice for a file that it refuses in safe mode."""
UNKNOWN: Final = re.compile(r"Could not locate (?:class|function) '([^']+)'")
"""Keras's message for a custom object that it lacks."""


def keras_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.keras` file; in Keras's safe mode, which the settings may turn off, nothing in it is run as code.

    Raises ModelFailed, or what Keras raises.
    """
    if not zipfile.is_zipfile(file):
        # Keras says that there is no such file.
        raise ModelFailed(
            f"source: expected a .keras file, which is a zip archive, got {file.name} of {file.stat().st_size} bytes,"
            " which is none or has been cut off"
        )
    config = _config(file)
    for library in set(LIBRARY.findall(config)):
        importlib.import_module(library)  # registers its classes with Keras
    custom_objects = {
        known: imported
        for name, path in settings.custom_objects
        for imported in [_import(name, path)]
        for known in [name, *_registered(name, config)]
    }
    try:
        model = keras.saving.load_model(
            file, custom_objects=custom_objects, compile=False, safe_mode=settings.safe_mode
        )
    except (TypeError, ValueError) as error:
        if settings.safe_mode and SAFE_MODE in str(error):
            raise ModelFailed(
                f"safe_mode: {file.name} holds what can run any code, as a Lambda layer does; expected false, which"
                " runs it, for a file that you trust, got true"
            ) from error
        if (unknown := UNKNOWN.search(str(error))) is None:
            raise
        name = unknown.group(1)
        raise ModelFailed(
            f"custom_objects: expected package.module:{name} for {name}, which Keras doesn't know, got nothing"
        ) from error
    how = keras_library.own_preprocess(model) if settings.preprocess == "auto" else settings.preprocess
    if keras_detectors.is_detector(model):
        return keras_detectors.detector(model, settings, preprocessing=how, weights=file.name)
    return keras_models.network(model, settings, preprocessing=how, weights=file.name)


def _config(file: Path) -> str:
    """Returns the configuration of a model, as JSON on one line; empty where it can't be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            return json.dumps(json.loads(archive.read("config.json")))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return ""  # Keras then reports the error


def _registered(name: str, config: str) -> set[str]:
    """Returns the names under which a configuration registers `name`: `Custom>name`, or with another package."""
    return set(re.findall(rf'"registered_name": "([^">]+>{re.escape(name)})"', config))


def _import(name: str, path: str) -> Any:
    """Returns the object that `package.module:attribute` names. Raises ModelFailed."""
    module, _, attribute = path.partition(":")
    if not (module and attribute):
        raise ModelFailed(f"custom_objects.{name}: expected package.module:attribute, got {path}")
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelFailed(f"custom_objects.{name}: {path} can't be imported: {error}") from error
