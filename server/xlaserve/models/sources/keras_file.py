"""Networks from files of Keras: whole models and weights, of Keras 3 and, in a process of its own, of Keras 2."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from xlaserve.config import ModelSettings
from xlaserve.config.sources import is_architecture_path
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preparation import KERAS, TEACHABLE_MACHINE
from xlaserve.models.sources import (
    keras2,
    keras_architecture,
    keras_content,
    keras_custom_objects,
    keras_detectors,
    keras_library,
    keras_models,
    saved_model,
)
from xlaserve.models.sources.conversions import Conversions
from xlaserve.models.sources.keras_config import is_of_teachable_machine
from xlaserve.models.sources.keras_content import KerasContent, complete

LIBRARY: Final = re.compile(r'"registered_name": "(keras_cv|keras_hub)\b')
"""The name of a library in the configuration of a model that needs KerasCV or KerasHub."""
SAFE_MODE: Final = "safe_mode=False"
"""Keras's advice for a file that it refuses in safe mode."""
PACKAGES: Final = ("tensorflow", "tensorflow-cpu", "tf_keras")
"""Distributions whose versions matter for what Keras 2 makes of a file."""


def keras_file(file: Path, settings: ModelSettings, conversions: Conversions) -> Network:
    """Returns the network of a `.keras` or `.h5` file, with the preparation of images in its training."""
    content = keras_content.read(file)
    own = _read(content, settings, conversions)
    if content.config is not None and is_of_teachable_machine(content.config):
        return replace(own, preparation=TEACHABLE_MACHINE)
    return own if own.preparation.reason else replace(own, preparation=KERAS)  # a preset's comes first


def _read(content: KerasContent, settings: ModelSettings, conversions: Conversions) -> Network:
    """Reads a `.keras` or `.h5` file; in Keras's safe mode, which the settings may turn off, nothing in it is run as
    code.

    A file that only Keras 2 reads becomes a SavedModel. Raises ModelFailed, or what Keras raises.
    """
    file = content.file
    if settings.architecture is not None and is_architecture_path(settings.architecture):
        content = keras_architecture.with_config(content, Path(settings.architecture))
    elif settings.architecture is not None:
        return _network(keras_architecture.with_weights(content, settings.architecture), settings, file)
    if content.config is None:
        raise keras_content.without_model(content)
    lambdas = keras_custom_objects.replaced_lambdas(file.name, content.config, settings)
    paths = keras_custom_objects.paths(content.config, lambdas, settings)
    if content.is_zip and content.is_of_keras_2:
        return _of_keras_2(content, lambdas, paths, settings, conversions=conversions)
    for library in set(LIBRARY.findall(json.dumps(content.config))):
        importlib.import_module(library)  # registers its classes with Keras
    objects = keras_custom_objects.imported(paths)
    try:
        with content.readable(lambdas) as readable, complete():
            model = keras.saving.load_model(readable, objects, compile=False, safe_mode=settings.safe_mode)
    except Exception as error:  # of any kind: Keras does not foresee what an older one wrote
        if content.is_of_keras_2:
            return _of_keras_2(content, lambdas, paths, settings, conversions=conversions, of_keras_3=error)
        if settings.architecture is not None and isinstance(error, (ValueError, KeyError)):
            raise keras_architecture.unfit(content, settings.architecture, error) from error
        if settings.safe_mode and SAFE_MODE in str(error):
            raise ModelFailed(
                f"safe_mode: {file.name} holds what can run any code; for a file that you trust, write"
                " safe_mode: false, which runs it"
            ) from error
        if (unknown := keras_custom_objects.unknown(str(error))) is not None:
            raise unknown from error
        raise
    return _network(model, settings, file)


def _network(model: Any, settings: ModelSettings, file: Path) -> Network:
    how = keras_library.own_preprocess(model) if settings.preprocess == "auto" else settings.preprocess
    if keras_detectors.is_detector(model):
        built = keras_detectors.detector(model, settings, preprocessing=how, weights=file.name)
    else:
        built = keras_models.network(model, settings, preprocessing=how, weights=file.name)
    return replace(built, preparation=keras_library.own_preparation(model))


def _of_keras_2(
    content: KerasContent,
    lambdas: frozenset[str],
    paths: dict[str, str],
    settings: ModelSettings,
    *,
    conversions: Conversions,
    of_keras_3: Exception | None = None,
) -> Network:
    """Loads a SavedModel that Keras 2 makes of a file. Raises ModelFailed.

    `of_keras_3` is the error of Keras 3, where that has tried.
    """
    name, version = content.file.name, content.version
    if importlib.util.find_spec("tf_keras") is None:
        if of_keras_3 is not None and (unknown := keras_custom_objects.unknown(str(of_keras_3))) is not None:
            raise unknown
        why = "" if of_keras_3 is None else f", as Keras {keras.__version__} can't: {cause(of_keras_3)}"
        raise ModelFailed(
            f"source: {name} was written by Keras {version}; reading it needs tf_keras{why};"
            " pip install --no-deps 'tf_keras>=2.21,<2.22'"
        )

    def convert(folder: Path) -> None:
        with content.readable(lambdas) as readable:
            try:
                keras2.export(readable, folder, paths, safe_mode=settings.safe_mode)
            except keras2.Keras2Error as error:
                raise _explained(content, error) from error

    is_kept = settings.safe_mode and not paths and content.has_own_config
    with conversions.saved_model(content.file, PACKAGES, convert, is_kept=is_kept) as folder:
        return saved_model.saved_model(folder, settings, weights=name)


def _explained(content: KerasContent, error: keras2.Keras2Error) -> ModelFailed:
    if (unknown := keras_custom_objects.unknown(str(error))) is not None:
        return unknown
    if keras2.NOT_IMPORTED in str(error):
        return ModelFailed(str(error))
    return ModelFailed(
        f"source: {content.file.name}, which Keras {content.version} wrote, can't be read by tf_keras: {cause(error)};"
        " name a function that returns the model, for its weights: architecture: my_package.my_module:build; or where"
        f" it loads, export it: model.export({content.file.stem!r})"
    )
