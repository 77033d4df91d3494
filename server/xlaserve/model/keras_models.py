"""Networks from Keras: `keras.applications`, `.keras` files and `builtin:digits`."""

from __future__ import annotations

import difflib
import inspect
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.model import digits, labels, lowering, preprocess
from xlaserve.model.classifier import Call, TensorShape, classifier
from xlaserve.model.keras_runtime import keras
from xlaserve.model.network import Network
from xlaserve.model.preprocess import Preprocess

DEFAULT_SIZES: Final = {"mobilenet_v3": (224, 224)}
"""Families of `keras.applications` that Keras builds without a size of their own."""
RANDOM_SEED: Final = 1
STALL_TIMEOUT_S: Final = 30.0
"""How long a download may bring nothing at all."""

_seeding = threading.Lock()


def application(name: str, settings: ModelSettings) -> Network:
    """Builds `keras.applications.<name>` with its classifier; downloads weights where the settings ask for them."""
    constructor = find_application(name)
    weights = settings.weights or "imagenet"
    size = settings.input_size or DEFAULT_SIZES.get(_family(constructor))
    shape = {} if size is None else {"input_shape": (*size, 3)}
    how = family_preprocess(constructor) if settings.preprocess == "auto" else settings.preprocess
    if weights == "random":
        with _seeded():
            model = constructor(weights=None, **shape)
        _settle(model, how)
        return _network(model, settings, how, weights)
    if weights != "imagenet":
        if not Path(weights).is_file():
            raise ModelFailed(
                f"weights: expected imagenet, random or a file's path, found no file {Path(weights).name}"
            )
        return _network(constructor(weights=weights, **shape), settings, how, Path(weights).name)
    try:
        with _no_endless_wait():
            model = constructor(weights=weights, **shape)
    except Exception as error:
        if (failure := _download_failure(error)) is None:
            raise
        raise failure from error
    names = labels.imagenet() if model.output_shape[-1] == labels.IMAGENET_CLASSES else None
    return _network(model, settings, how, weights, names)


def keras_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.keras` file, in Keras's safe mode: nothing in it is run as Python code."""
    model = keras.saving.load_model(file, compile=False, safe_mode=True)
    how: Preprocess = "none" if settings.preprocess == "auto" else settings.preprocess
    return _network(model, settings, how, file.name)


def builtin_digits(settings: ModelSettings) -> Network:
    """Reads `builtin:digits`."""
    return _network(digits.load(), settings, "none", "built in", digits.LABELS)


def find_application(name: str) -> Callable[..., Any]:
    """Returns the constructor `keras.applications.<name>`. Raises ModelFailed with the names that come close."""
    constructors = applications()
    if name in constructors:
        return constructors[name]
    by_lower_case = {known.lower(): known for known in constructors}
    close = [by_lower_case[match] for match in difflib.get_close_matches(name.lower(), by_lower_case)]
    advice = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(sorted(constructors))}"
    raise ModelFailed(f"source: keras.applications has no {name}; {advice}")


def applications() -> dict[str, Callable[..., Any]]:
    """Returns the constructors of `keras.applications` by name."""
    return {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}


def family_preprocess(constructor: Callable[..., Any]) -> Preprocess:
    """Returns what Keras defines for the family of an application."""
    family = _family(constructor)
    if family not in preprocess.FAMILIES:
        raise ModelFailed(f"preprocess: not known for the family {family}; set it")
    return preprocess.FAMILIES[family]


def _family(constructor: Callable[..., Any]) -> str:
    return constructor.__module__.rpartition(".")[2]


def _network(
    model: Any, settings: ModelSettings, how: Preprocess, weights: str, names: tuple[str, ...] | None = None
) -> Network:
    inputs, outputs = list(model.inputs or ()), list(model.outputs or ())
    if len(inputs) != 1 or len(outputs) != 1:
        raise ModelFailed(f"source: expected a model of one input and one output, got {len(inputs)} and {len(outputs)}")
    lowered = lowering.for_settings(model, settings)
    return classifier(
        _inference(model),
        pixels=TensorShape(inputs[0].shape, inputs[0].dtype),
        scores=TensorShape(outputs[0].shape, outputs[0].dtype),
        preprocessing=how,
        weights=weights,
        labels=names,
        lowered_call=_inference(lowered.model) if lowered else None,
        lowerings=lowering.describe(lowered.counts) if lowered else "",
    )


def _inference(model: Any) -> Call:
    return lambda pixels: model(pixels, training=False)


@contextmanager
def _seeded() -> Iterator[None]:
    """Makes initial weights the same every time; Keras draws the seeds of its initializers from Python's generator."""
    with _seeding:
        state = random.getstate()
        random.seed(RANDOM_SEED)
        try:
            yield
        finally:
            random.setstate(state)


def _settle(model: Any, how: Preprocess) -> None:
    """Gives batch normalization the statistics of two random images, a coarse and a fine one.

    As Keras builds it, it normalizes nothing, and the signal dies out on its way through a deep network: every image
    would get the same answer.
    """
    normalizations = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    if not normalizations:
        return
    for layer in normalizations:
        layer.momentum = 0.0
    noise = np.random.default_rng(RANDOM_SEED)
    size = model.input_shape[1:3]
    images = [tf.image.resize(noise.uniform(0, 255, (1, side, side, 3)), size) for side in (8, 128)]
    model(preprocess.apply(tf.concat(images, axis=0), how), training=True)


@contextmanager
def _no_endless_wait() -> Iterator[None]:
    """Bounds each wait for the network; Keras bounds none, and all models load on one thread."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _download_failure(error: Exception) -> ModelFailed | None:
    """Returns the reason and the ways out, where `error` comes from fetching weights."""
    fetch = re.search(r"URL fetch failure on (\S+): (?:\S+ -- )?(.*)", str(error))
    if fetch is not None:
        url, reason = fetch.groups()
    elif isinstance(error, TimeoutError):  # what was begun and stalled
        url, reason = "the file", f"nothing came for {STALL_TIMEOUT_S:g} s"
    else:
        return None
    return ModelFailed(
        f"weights: {url} could not be downloaded: {reason}; put the file into ~/.keras/models (or KERAS_HOME/models), "
        "or set weights to the path of a weights file, or to random"
    )
