"""The preparation of images in training: how they became pixels, as far as a network's source says it."""

from __future__ import annotations

from typing import Final, NamedTuple

from xlaserve.config import (
    PILLOW_BILINEAR,
    TENSORFLOW_BILINEAR,
    Decoding,
    Fit,
    ResizeFilter,
    ResizeLibrary,
    ResizeSettings,
)


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


def fit_of(usual: Fit, trained: Fit | None) -> Fit:
    """Returns the fit of a model by its task's usual one and its training's: answers for every pixel are not for a part
    of an image."""
    return usual if trained is None or Fit.RESIZE not in (usual, trained) else trained


def of_image_converter(interpolation: str, *, antialias: bool, crops: bool) -> Preparation:
    """Returns the preparation of a preset of KerasHub whose image converter, a layer, has these arguments."""
    how = ResizeSettings.of(ResizeLibrary.TENSORFLOW, ResizeFilter(interpolation), antialias=antialias)
    return Preparation(how, Fit.CROP if crops else None, reason="the preset's image converter does")
