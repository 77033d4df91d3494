"""Networks from `keras.applications`."""

from __future__ import annotations

import difflib
import inspect
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preparation import IMAGENET, KERAS
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.models.sources import keras_models, random_weights
from xlaserve.models.task import Classification

DEFAULT_SIZES: Final = {"mobilenet_v3": (224, 224)}
"""Families of `keras.applications` that Keras builds without a size of their own."""
STALL_TIMEOUT_S: Final = 30.0
"""Longest time for which a download may receive no data."""


def names() -> tuple[str, ...]:
    """Returns the names of all of `keras.applications`."""
    return tuple(sorted(_constructors()))


def application(name: str, settings: ModelSettings) -> Network:
    """Builds `keras.applications.<name>`; downloads weights where the settings ask for them."""
    constructor = find_application(name)
    weights = settings.weights or "imagenet"
    size = settings.input_size or DEFAULT_SIZES.get(_family(constructor))
    arguments: dict[str, Any] = {} if size is None else {"input_shape": (*size, 3)}
    if settings.classes is not None:
        arguments["classes"] = settings.classes
    how = family_preprocess(constructor) if settings.preprocess == "auto" else settings.preprocess
    if weights == "random":
        with random_weights.seeded():
            model = constructor(weights=None, **arguments)
        random_weights.settle(
            model, model.input_shape[1:3], lambda pixels: model(preprocess.apply(pixels, how), training=True)
        )
    elif weights != "imagenet":
        check_file(weights, expected="imagenet, random or a file's path")
        model = constructor(weights=weights, **arguments)
    else:
        model = _download(constructor, arguments)
    if settings.task == "embedding":
        model = keras_models.features(model)
    stated = weights if weights in ("imagenet", "random") else Path(weights).name
    network = keras_models.network(model, settings, preprocessing=how, weights=stated)
    network = replace(network, preparation=IMAGENET if weights == "imagenet" else KERAS)
    if weights != "imagenet" or network.task != Classification(class_names.IMAGENET_CLASSES):
        return network
    known = class_names.imagenet()
    return replace(network, task=Classification(class_names.IMAGENET_CLASSES, known))


def check_file(weights: str, *, expected: str) -> None:
    """Raises ModelFailed where no such file of weights is."""
    if not Path(weights).is_file():
        raise ModelFailed(
            f"weights: expected {expected}, found no file {Path(weights).name}; write weights: random for none"
        )


def find_application(name: str) -> Callable[..., Any]:
    """Returns the constructor `keras.applications.<name>`. Raises ModelFailed with the names that come close."""
    constructors = _constructors()
    if name not in constructors:
        raise ModelFailed(f"source: keras.applications has no {name}; {advise(name, constructors)}")
    return constructors[name]


def advise(name: str, known: Iterable[str]) -> str:
    """Returns the names of `known` that come close to `name`, or all of them, as advice."""
    by_lower_case = {one.lower(): one for one in known}
    close = [by_lower_case[match] for match in difflib.get_close_matches(name.lower(), by_lower_case)]
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(sorted(known))}"


def family_preprocess(constructor: Callable[..., Any]) -> Preprocess:
    """Returns the preprocessing that Keras defines for the family of an application. Raises ModelFailed."""
    family = _family(constructor)
    if family not in preprocess.FAMILIES:
        raise ModelFailed(
            f"preprocess: not known for the family {family}; write preprocess: unit, tf, torch, caffe or none"
        )
    return preprocess.FAMILIES[family]


def _constructors() -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}


def _family(constructor: Callable[..., Any]) -> str:
    return constructor.__module__.rpartition(".")[2]


def _download(constructor: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Builds a model with weights from the network. Raises ModelFailed with what to do where they can't be had."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_TIMEOUT_S)  # Keras bounds no wait, and all models load on one thread
    try:
        return constructor(weights="imagenet", **arguments)
    except Exception as error:
        if fetch := re.search(r"URL fetch failure on (\S+): (?:\S+ -- )?(.*)", str(error)):
            url, reason = fetch.groups()
        elif isinstance(error, TimeoutError):  # a download that began and stalled
            url, reason = "the file", f"nothing came for {STALL_TIMEOUT_S:g} s"
        else:
            raise
        raise ModelFailed(
            f"weights: {url} could not be downloaded: {reason}; put the file into ~/.keras/models (or"
            " KERAS_HOME/models), or set weights to the path of a weights file, or to random"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
