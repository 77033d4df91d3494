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
from xlaserve.model.networks.keras_runtime import keras
from xlaserve.model.networks.network import Network
from xlaserve.model.sources import keras_cv_detector, keras_models

KERAS_CV: Final = '"registered_name": "keras_cv'
"""How the configuration of a model says that it needs KerasCV."""
SAFE_MODE: Final = "safe_mode=False"
"""What Keras advises for a file that it loads in no other way."""
UNKNOWN: Final = re.compile(r"Could not locate (?:class|function) '([^']+)'")
"""How Keras says that it lacks a custom object."""


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
    if _needs_keras_cv(file):
        importlib.import_module("keras_cv")  # registers its classes with Keras
    custom_objects = {name: _import(name, path) for name, path in settings.custom_objects}
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
    how = "none" if settings.preprocess == "auto" else settings.preprocess
    if keras_cv_detector.is_detector(model):
        return keras_cv_detector.detector(model, settings, preprocessing=how, weights=file.name)
    return keras_models.network(model, settings, preprocessing=how, weights=file.name)


def _needs_keras_cv(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return KERAS_CV in json.dumps(json.loads(archive.read("config.json")))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return False  # what is wrong with it, Keras says


def _import(name: str, path: str) -> Any:
    """Returns what `package.module:attribute` names."""
    module, _, attribute = path.partition(":")
    if not (module and attribute):
        raise ModelFailed(f"custom_objects.{name}: expected package.module:attribute, got {path}")
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelFailed(f"custom_objects.{name}: {path} can't be imported: {error}") from error
