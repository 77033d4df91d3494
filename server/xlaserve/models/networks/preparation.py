"""The preparation of images in training: how they became pixels, as far as a network's source says it."""

from __future__ import annotations

from typing import Final, NamedTuple

from xlaserve.config import (
    PILLOW_BILINEAR,
    TENSORFLOW_BILINEAR,
    Decoding,
    Fit,
    ModelSettings,
    ResizeFilter,
    ResizeLibrary,
    ResizeSettings,
    sources,
)
from xlaserve.config.sources import Source


class Preparation(NamedTuple):
    """Facts that a source knows of its training; defaults of the settings of the same names."""

    resize: ResizeSettings = PILLOW_BILINEAR
    fit: Fit | None = None
    """None where the task decides."""
    decode: Decoding = Decoding.EXACT
    reason: str = ""
    """The reason for all of them; empty where nothing is known."""


UNKNOWN: Final = Preparation()
"""The defaults where a source says nothing."""

KERAS: Final = Preparation(
    TENSORFLOW_BILINEAR, decode=Decoding.TENSORFLOW, reason="Keras's image_dataset_from_directory does"
)
"""The defaults of Keras, which most models are trained with that are saved by it."""

TEACHABLE_MACHINE: Final = Preparation(
    ResizeSettings(library=ResizeLibrary.PILLOW, filter=ResizeFilter.LANCZOS),
    Fit.CROP,
    reason="the code that Teachable Machine gives with its models does",
)
"""Teachable Machine's own: the middle of each image."""

IMAGENET: Final = Preparation(
    PILLOW_BILINEAR, Fit.CENTER_CROP, reason="the published accuracy of Keras Applications is that of a centre crop"
)
"""The evaluation of the weights that Keras Applications publish. Of its filter nothing is published."""


OF_GRAPH: Final = Preparation(TENSORFLOW_BILINEAR, Fit.RESIZE, reason="its own graph resized encoded images")
"""The resizing of a graph that decoded images itself, by the filter that most have."""


def stated(settings: ModelSettings) -> Preparation | None:
    """Returns the preparation that a model has by its source's kind and its weights; None where only loading it tells.

    A `.keras` or `.h5` file of a KerasHub task or of Teachable Machine has its own all the same.
    """
    kind, weights = sources.kind_of(settings.source), settings.weights
    match kind:
        case Source.APPLICATIONS:
            return IMAGENET if weights in (None, "imagenet") else KERAS
        case Source.KERAS_CV | Source.KERAS_FILE:
            return KERAS
        case Source.KERAS_HUB if weights == "random" or str(weights).endswith(".h5"):
            return KERAS
        case Source.BUILT_IN | Source.NOOP | Source.JAX_FILE | Source.OPENVINO_FILE:
            return UNKNOWN
        case _:
            return None


def fit_of(usual: Fit, trained: Fit | None) -> Fit:
    """Returns the fit of a model by its task's usual one and its training's: answers for every pixel are not for a part
    of an image."""
    return usual if trained is None or Fit.RESIZE not in (usual, trained) else trained


def of_keras_layer(interpolation: str, *, antialias: bool, crops: bool, reason: str) -> Preparation:
    """Returns the preparation of a `Resizing` layer of Keras with these arguments."""
    how = ResizeSettings.of(ResizeLibrary.TENSORFLOW, ResizeFilter(interpolation), antialias=antialias)
    return Preparation(how, Fit.CROP if crops else None, reason=reason)
