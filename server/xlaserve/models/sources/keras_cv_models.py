"""Networks from KerasCV, built from its generic classes: nothing here touches the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import xlaserve.models.networks.keras_runtime  # noqa: F401 - chooses the backend before KerasCV imports Keras

# isort: split

import keras_cv

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preparation import KERAS
from xlaserve.models.sources import keras_detectors, keras_library, random_weights
from xlaserve.models.sources.applications import advise, check_file
from xlaserve.models.sources.keras_cv_table import BACKBONES, HEADS, KerasCvHead, names


def keras_cv_model(name: str, settings: ModelSettings) -> Network:
    """Builds `<Backbone>` as a classifier or an embedding, or `<Head>-<Backbone>`, with weights as the settings say.

    Raises ModelFailed.
    """
    head, backbone_name = find(name)
    backbone = BACKBONES[backbone_name]
    tasks = ("classification", "embedding") if head is None else (head.task,)
    keras_library.check_task(settings, tasks)
    if settings.weights is None:
        raise ModelFailed(
            "weights: expected random or the path of a file that save_weights wrote, as KerasCV's own lie on a hub; "
            "got nothing; write weights: random"
        )
    if settings.weights != "random":
        check_file(settings.weights, expected="random or a file's path")
    side = backbone.side if head is None else head.side
    multiple = backbone.multiple if head is None else keras_detectors.MULTIPLE
    size = keras_library.input_size(settings, side, multiple)
    with random_weights.seeded():
        # With a preprocessing of the settings the network does without its own.
        body = getattr(keras_cv.models, backbone.constructor)(
            include_rescaling=settings.preprocess == "auto",
            input_shape=(*size, 3) if backbone.fixed_size else (None, None, 3),
            **backbone.arguments,
        )
        if head is None:
            classes = settings.classes or class_names.IMAGENET_CLASSES
            model = keras_cv.models.ImageClassifier(backbone=body, num_classes=classes)
        else:
            model = _with_head(body, head, backbone_name, settings)
    how = "none" if settings.preprocess == "auto" else settings.preprocess
    stated = keras_library.give_weights(model, settings.weights, size, how)
    if head is not None:
        settings = settings.model_copy(update={"task": head.task})
    built = keras_library.network(model, settings, preprocessing=how, weights=stated, size=size, multiple=multiple)
    return replace(built, preparation=KERAS)


def find(name: str) -> tuple[KerasCvHead | None, str]:
    """Returns the head and the name of the backbone. Raises ModelFailed with the names that come close."""
    head_name, dash, backbone_name = name.rpartition("-")
    if backbone_name not in BACKBONES or (dash and head_name not in HEADS):
        raise ModelFailed(f"source: KerasCV has no {name}; {advise(name, names())}")
    if not dash:
        return None, backbone_name
    head = HEADS[head_name]
    # MiT numbers its feature maps from P1, and only SegFormer takes what it has.
    if (head.constructor == "SegFormer") != (BACKBONES[backbone_name].constructor == "MiTBackbone"):
        expected = ", ".join(f"{head_name}-{known}" for known in head.backbones)
        raise ModelFailed(f"source: {head_name} can't be built on {backbone_name}; expected one of {expected}")
    return head, backbone_name


def _with_head(body: Any, head: KerasCvHead, backbone_name: str, settings: ModelSettings) -> Any:
    arguments = dict(head.arguments.get(backbone_name, {}))
    if head.task == "detection":
        arguments["bounding_box_format"] = "xyxy"
    constructor = getattr(keras_cv.models, head.constructor)
    return constructor(backbone=body, num_classes=settings.classes or head.classes, **arguments)
