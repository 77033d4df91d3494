"""Networks from KerasHub: built from its generic classes, which asks for no network, or loaded from a preset."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from xlaserve.models.networks.keras_runtime import keras  # chooses the backend before KerasHub imports Keras

# isort: split

import keras_hub

from xlaserve.config import ModelSettings, sources
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preparation import KERAS
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.models.sources import kaggle, keras_library, random_weights
from xlaserve.models.sources.applications import advise, check_file
from xlaserve.models.sources.keras_hub_table import CLASSES, REFUSED, HubClass, arguments

WEIGHTS: Final = "random, a preset such as resnet_50_imagenet, or the path of a preset's folder or of a file of weights"


def keras_hub_model(name: str, settings: ModelSettings) -> Network:
    """Builds the class `name` of `keras_hub.models`, with weights as the settings say.

    Raises ModelFailed.
    """
    row = find(name)
    keras_library.check_task(settings, ("classification", "embedding") if row.task == "classification" else (row.task,))
    weights = settings.weights
    if weights is None:
        raise ModelFailed(f"weights: expected {WEIGHTS}, got nothing; write weights: random")
    if sources.is_handle(weights) or Path(weights).is_dir():
        model, size, own = _preset(name, row, settings, weights)
        stated = weights if sources.is_handle(weights) else Path(weights).name
        how = own if settings.preprocess == "auto" else settings.preprocess
        prepared = keras_library.own_preparation(model)
    else:
        prepared = KERAS
        if weights != "random":
            check_file(weights, expected=WEIGHTS)
        size = keras_library.input_size(settings, row.side, row.multiple)
        how = row.preprocess if settings.preprocess == "auto" else settings.preprocess
        with random_weights.seeded():
            model = _built(name, row, settings.classes or row.classes, size)
        stated = keras_library.give_weights(model, weights, size, how)
    if settings.task != "embedding":
        model = _with_answers(model, row)
    built = keras_library.network(
        model,
        settings.model_copy(update={"task": row.task}) if settings.task == "auto" else settings,
        preprocessing=how,
        weights=stated,
        size=size,
        multiple=row.multiple,
    )
    return replace(built, preparation=prepared if prepared.reason else KERAS)


def find(name: str) -> HubClass:
    """Returns the row of a class. Raises ModelFailed with why it is refused, or the names that come close."""
    if name in REFUSED:
        raise ModelFailed(
            f"source: {name} of KerasHub can't be served: {REFUSED[name]}; a file of it may be, with its own"
            f' inputs, and as tensors: model.save("{name}.keras")'
        )
    if name not in CLASSES:
        raise ModelFailed(f"source: KerasHub has no {name} for images; {advise(name, CLASSES)}")
    return CLASSES[name]


def _built(name: str, row: HubClass, classes: int, size: tuple[int, int]) -> Any:
    constructor = getattr(keras_hub.models, name)
    given = arguments(row, keras_hub.models, classes, size)
    if "num_classes" in inspect.signature(constructor).parameters:  # BASNet's backbone has it
        given["num_classes"] = classes
    return constructor(**given)


def _preset(name: str, row: HubClass, settings: ModelSettings, weights: str) -> tuple[Any, tuple[int, int], Preprocess]:
    """Returns the model of a preset, its size and what it does to pixels. Raises ModelFailed."""
    constructor = getattr(keras_hub.models, name)
    is_name = sources.is_handle(weights) and "/" not in weights
    if is_name and weights not in constructor.presets:
        raise ModelFailed(f"weights: {name} has no preset {weights}; {advise(weights, constructor.presets)}")
    try:
        with kaggle.quiet():
            model = constructor.from_preset(weights)
    except Exception as error:
        reason = cause(error)[:300].rstrip(".:")
        if sources.is_handle(weights):
            raise ModelFailed(
                f"weights: the preset {weights} can't be loaded as {name}: {reason}; where there is no network, name"
                " the folder that save_to_preset wrote, as ./folder, or set weights to random"
            ) from error
        raise ModelFailed(
            f"weights: the preset in {Path(weights).name} can't be loaded as {name}:"
            f" {reason.replace(weights, Path(weights).name)}; write it once more:"
            ' model.save_to_preset("./folder")'
        ) from error
    classes = getattr(model, "num_classes", None) or model.backbone.num_classes
    if settings.classes not in (None, classes):
        raise ModelFailed(f"classes: expected {classes}, as the preset has, got {settings.classes}; leave classes out")
    own_size = getattr(keras_library.image_converter(model), "image_size", None)
    size = settings.input_size or own_size or (row.side, row.side)
    return model, (int(size[0]), int(size[1])), keras_library.own_preprocess(model)


def _with_answers(model: Any, row: HubClass) -> Any:
    """Returns a classifier of logits with a softmax behind it, and a segmenter of one class with the background's
    probability beside that of what it finds. Others stay as they are."""
    activation = keras.activations.get(getattr(model, "activation", None))
    if row.task == "classification" and activation is keras.activations.linear:
        return keras.Model(model.input, keras.layers.Softmax(dtype="float32", name="scores")(model.output))
    if row.task == "segmentation" and model.output.shape[-1] == 1:
        found = model.output
        return keras.Model(model.input, keras.ops.concatenate([1 - found, found], axis=-1))
    return model
