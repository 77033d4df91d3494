"""Networks from Keras: `keras.applications`, `.keras` files and `builtin:digits`."""

from __future__ import annotations

import difflib
import inspect
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.model import digits, labels, preprocess
from xlaserve.model.classifier import TensorShape, classifier
from xlaserve.model.keras_runtime import keras
from xlaserve.model.network import Network
from xlaserve.model.preprocess import Preprocess

RANDOM_SEED: Final = 1

_seeding = threading.Lock()


def application(name: str, settings: ModelSettings) -> Network:
    """Builds `keras.applications.<name>` with its classifier; downloads weights where the settings ask for them."""
    constructor = _constructor(name)
    weights = settings.weights or "imagenet"
    shape = {} if settings.input_size is None else {"input_shape": (*settings.input_size, 3)}
    how = _family_preprocess(name) if settings.preprocess == "auto" else settings.preprocess
    if weights == "random":
        with _seeded():
            model = constructor(weights=None, **shape)
        return _network(model, how, weights)
    if weights != "imagenet":
        if not Path(weights).is_file():
            raise ModelFailed(
                f"weights: expected imagenet, random or a file's path, found no file {Path(weights).name}"
            )
        return _network(constructor(weights=weights, **shape), how, Path(weights).name)
    try:
        model = constructor(weights=weights, **shape)
    except Exception as error:
        raise _explain_download(error) from error
    names = labels.imagenet() if model.output_shape[-1] == labels.IMAGENET_CLASSES else None
    return _network(model, how, weights, names)


def keras_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.keras` file, in Keras's safe mode: nothing in it is run as Python code."""
    model = keras.saving.load_model(file, compile=False, safe_mode=True)
    return _network(model, "none" if settings.preprocess == "auto" else settings.preprocess, file.name)


def builtin_digits() -> Network:
    """Reads `builtin:digits`."""
    return _network(digits.load(), "none", "built in", digits.LABELS)


def _network(model: Any, how: Preprocess, weights: str, names: tuple[str, ...] | None = None) -> Network:
    inputs, outputs = list(model.inputs or ()), list(model.outputs or ())
    if len(inputs) != 1 or len(outputs) != 1:
        raise ModelFailed(f"source: expected a model of one input and one output, got {len(inputs)} and {len(outputs)}")
    return classifier(
        lambda pixels: model(pixels, training=False),
        pixels=TensorShape(inputs[0].shape, inputs[0].dtype),
        scores=TensorShape(outputs[0].shape, outputs[0].dtype),
        preprocessing=how,
        weights=weights,
        labels=names,
    )


def _constructor(name: str) -> Callable[..., Any]:
    constructors = {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    if name in constructors:
        constructor: Callable[..., Any] = constructors[name]
        return constructor
    by_lower_case = {known.lower(): known for known in constructors}
    close = [by_lower_case[match] for match in difflib.get_close_matches(name.lower(), by_lower_case)]
    advice = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(sorted(constructors))}"
    raise ModelFailed(f"source: keras.applications has no {name}; {advice}")


def _family_preprocess(name: str) -> Preprocess:
    modules = {family for family, module in vars(keras.applications).items() if hasattr(module, name)}
    for family in modules & preprocess.FAMILIES.keys():
        return preprocess.FAMILIES[family]
    raise ModelFailed(f"preprocess: not known for {name}; set it")


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


def _explain_download(error: Exception) -> Exception:
    """Returns `error` as ModelFailed with the ways out, if it comes from fetching weights; else `error`."""
    failure = re.search(r"URL fetch failure on (\S+): (?:\S+ -- )?(.*)", str(error))
    if failure is None:
        return error
    url, reason = failure.groups()
    return ModelFailed(
        f"weights: {url} could not be downloaded: {reason}; put the file into ~/.keras/models (or KERAS_HOME/models), "
        "or set weights to the path of a weights file, or to random"
    )
