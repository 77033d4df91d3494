"""The settings that are tried: a registry of functions from a model to the values of one setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any, Final

from xlaserve.config import (
    OF_RGB,
    PILLOW_BILINEAR,
    TENSORFLOW_BILINEAR,
    Color,
    Decoding,
    Fit,
    ResizeFilter,
    ResizeLibrary,
    ResizeSettings,
    ScalingSettings,
    sources,
)
from xlaserve.config.image_settings import CUTS
from xlaserve.config.resize_settings import FILTERS
from xlaserve.images import tensorflow_jpeg
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification, ImageToImage, Segmentation, readings_of

Changes = Mapping[str, Any]
"""Values of settings by their names."""


class Part(StrEnum):
    """The part of the way from a file to an answer that a setting is about."""

    PLACE = "place"
    """Which of the file's pixels the model gets, and how they are resized."""
    COLOR = "color"
    """The colours of the pixels' channels."""
    SCALE = "scale"
    """Which numbers the levels of the pixels become."""
    OUTPUT = "output"
    """The function that is applied to the network's outputs."""


@dataclass(frozen=True)
class Choice:
    """A setting, and the values to try."""

    field: str
    part: Part
    own: Any
    """The value that the model has as it is configured."""
    values: tuple[Any, ...]
    """The values to try: the model's own first, where it is one of them, then the most usual ones."""


TENSORFLOW, PILLOW, OPENCV = ResizeLibrary.TENSORFLOW, ResizeLibrary.PILLOW, ResizeLibrary.OPENCV
_USUAL: Final = (
    (TENSORFLOW, ResizeFilter.BILINEAR, False),  # tf.image.resize, image_dataset_from_directory
    (PILLOW, ResizeFilter.NEAREST, False),  # load_img, ImageDataGenerator
    (PILLOW, ResizeFilter.BILINEAR, True),  # torchvision
    (OPENCV, ResizeFilter.BILINEAR, False),  # cv2.resize
    (OPENCV, ResizeFilter.AREA, True),
    (PILLOW, ResizeFilter.BICUBIC, True),
    (TENSORFLOW, ResizeFilter.NEAREST, False),
    (TENSORFLOW, ResizeFilter.AREA, True),
    (TENSORFLOW, ResizeFilter.BILINEAR, True),
    (PILLOW, ResizeFilter.LANCZOS, True),
)
"""Libraries, filters and antialiasing that notebooks use most."""


def _resizings() -> Iterator[ResizeSettings]:
    """Yields every way to resize, the most usual first."""
    for library, name, antialias in _USUAL:
        yield ResizeSettings.of(library, name, antialias=antialias)
    for library, names in FILTERS.items():
        for name in names:
            for antialias in (False, True):
                yield ResizeSettings.of(library, name, antialias=antialias)


RESIZINGS: Final = tuple(dict.fromkeys(_resizings()))
"""Every way to resize, the most usual first."""


SCALINGS_OF_RGB: Final = (
    ScalingSettings(divisor=255, mean=(0.4914, 0.4822, 0.4465), deviation=(0.247, 0.2435, 0.2616)),  # CIFAR-10
    ScalingSettings(divisor=255, mean=(0.4914, 0.4822, 0.4465), deviation=(0.2023, 0.1994, 0.201)),
    ScalingSettings(
        divisor=255, mean=(0.48145466, 0.4578275, 0.40821073), deviation=(0.26862954, 0.26130258, 0.27577711)
    ),  # CLIP
)
"""Means and deviations that are published for RGB, besides those of `torch` and `caffe`."""
_OF_GREY: Final = (
    ScalingSettings(divisor=255, mean=1, deviation=-1),  # 255 - x, divided by 255: ink on paper for MNIST
    ScalingSettings(mean=255, deviation=-1),
    ScalingSettings(divisor=255, mean=0.1307, deviation=0.3081),  # MNIST
)
BORDERS: Final = (None, 0, 128)
"""Levels of a border: that of the fit, then black as of `tf.image.resize_with_pad`, and grey."""


_OPENCV_BILINEAR: Final = ResizeSettings(library=OPENCV)
_PILLOW_NEAREST: Final = ResizeSettings(library=PILLOW, filter=ResizeFilter.NEAREST)
_PILLOW_BICUBIC: Final = ResizeSettings(library=PILLOW, filter=ResizeFilter.BICUBIC)
_PILLOW_LANCZOS: Final = ResizeSettings(library=PILLOW, filter=ResizeFilter.LANCZOS)
_OF_TENSORFLOW: Final = {"resize": TENSORFLOW_BILINEAR, "decode": Decoding.TENSORFLOW}

RECIPES: Final[tuple[Changes, ...]] = (
    {"fit": Fit.RESIZE, **_OF_TENSORFLOW},  # image_dataset_from_directory
    {"fit": Fit.RESIZE, "resize": _PILLOW_NEAREST, "decode": Decoding.EXACT},
    {"fit": Fit.RESIZE, "resize": _OPENCV_BILINEAR, "decode": Decoding.EXACT},  # cv2.imread, cv2.resize
    {"fit": Fit.CENTER_CROP, "resize": PILLOW_BILINEAR, "decode": Decoding.EXACT},  # torchvision's weights
    # What Teachable Machine gives with its models:
    {"fit": Fit.CROP, "resize": _PILLOW_LANCZOS, "decode": Decoding.EXACT},
    {"fit": Fit.CROP, **_OF_TENSORFLOW},  # crop_to_aspect_ratio
    {"fit": Fit.RESIZE, "resize": PILLOW_BILINEAR, "decode": Decoding.EXACT},
    {"fit": Fit.LETTERBOX, "resize": _OPENCV_BILINEAR, "decode": Decoding.EXACT},  # YOLO
    {"fit": Fit.LETTERBOX, **_OF_TENSORFLOW, "border": 0},  # tf.image.resize_with_pad
    {"fit": Fit.RESIZE, "resize": _PILLOW_BICUBIC, "decode": Decoding.EXACT},
)
"""Ways to place pixels that tutorials have as a whole, each with all of its settings; `load_img` is the second."""


def recipe_rank(places: Changes) -> int:
    """Returns the place among `RECIPES` of settings of `Part.PLACE`, those last that are of none.

    Settings that a model can't choose do not count.
    """
    wanted = {name: value for name, value in places.items() if (name, value) != ("border", None)}
    ranks = (rank for rank, recipe in enumerate(RECIPES) if wanted and wanted.items() <= recipe.items())
    return next(ranks, len(RECIPES))


def choices_of(model: Model) -> tuple[Choice, ...]:
    """Returns what there is to choose for a model: settings with more than one value that it can have."""
    found = (choice(model) for choice in CHOICES)
    return tuple(choice for choice in found if len(choice.values) > 1)


def combinations(choices: tuple[Choice, ...]) -> Iterator[Changes]:
    """Yields every combination of the values of some choices that a model can have.

    The likeliest come first: by the product of the ranks of their values, so that a usual resizing with another fit
    comes before a rare resizing with the usual fit.
    """
    ranked = product(*(enumerate(choice.values, 1) for choice in choices))
    for values in sorted(ranked, key=lambda ranks: math.prod(rank for rank, _ in ranks)):
        changes = {choice.field: value for choice, (_, value) in zip(choices, values, strict=True)}
        if is_possible(changes):
            yield changes


def is_possible(changes: Changes) -> bool:
    """Returns whether settings go together.

    The means of `torch` and `caffe`, and lists of means, are for RGB alone. Only `letterbox` and `pad` have a border,
    and that of `pad` is black without one.
    """
    preprocess, border, fit = changes.get("preprocess"), changes.get("border"), changes.get("fit")
    is_of_rgb = preprocess in OF_RGB or preprocess in SCALINGS_OF_RGB
    has_border = fit is Fit.LETTERBOX or (fit is Fit.PAD and border != 0)
    return (not is_of_rgb or changes.get("color", Color.RGB) is Color.RGB) and (border is None or has_border)


def _choice(field: str, part: Part, own: object, *values: object) -> Choice:
    """Returns a choice whose first value is the model's own, where it has one."""
    return Choice(field, part, own, tuple(dict.fromkeys((own, *values) if own in values else values)))


def _preprocess(model: Model) -> Choice:
    own = model.settings.preprocess
    if not model.is_unscaled:  # it takes whole numbers, which are not scaled
        return Choice("preprocess", Part.SCALE, own, ("none",))
    has_means = model.image.color in (Color.RGB, Color.BGR)
    means = (*OF_RGB, *SCALINGS_OF_RGB) if has_means else _OF_GREY if model.image.channels == 1 else ()
    numbers = (own,) if isinstance(own, ScalingSettings) else ()
    return _choice("preprocess", Part.SCALE, own, "unit", "none", "tf", *means, "standardize", *numbers)


def _color(model: Model) -> Choice:
    own = model.settings.color or model.color
    fitting = [color for color in (Color.RGB, Color.BGR, *Color) if color.channels == model.image.channels]
    return _choice("color", Part.COLOR, own, *fitting)


def _fit(model: Model) -> Choice:
    has_pixels = any(isinstance(one, ImageToImage | Segmentation) for one in (model.task, *readings_of(model.task)))
    cuts = () if has_pixels else CUTS  # which `check_fit` refuses
    return _choice("fit", Part.PLACE, model.fit, Fit.RESIZE, *cuts, Fit.LETTERBOX, Fit.PAD)


def _border(model: Model) -> Choice:
    own = model.settings.border
    return Choice("border", Part.PLACE, own, tuple(dict.fromkeys((own, *BORDERS))))


def _resize(model: Model) -> Choice:
    is_deep = model.image.is_deep  # and then `check_depth` refuses OpenCV
    fitting = [one for one in RESIZINGS if not is_deep or one.library is not OPENCV]
    return _choice("resize", Part.PLACE, model.resize, *fitting)


def _decode(model: Model) -> Choice:
    """No notebook decodes as `fast` does, so that this is tried only where the model has it."""
    own = model.decode
    others = (Decoding.TENSORFLOW, Decoding.EXACT) if tensorflow_jpeg.is_available() else (Decoding.EXACT,)
    return _choice("decode", Part.PLACE, own, own, *others)


def _activation(model: Model) -> Choice:
    """Returns the functions that notebooks apply to logits; that of the settings is in the program already."""
    kind = sources.kind_of(model.settings.source)
    takes = kind is not None and "activation" in (sources.PARTICULAR if kind.value.takes is None else kind.value.takes)
    if not takes or model.settings.activation is not None or not isinstance(model.task, Classification):
        return Choice("activation", Part.OUTPUT, model.settings.activation, (model.settings.activation,))
    of_several = () if model.task.threshold is not None else ("softmax",)
    return Choice("activation", Part.OUTPUT, None, (None, *of_several, "sigmoid"))


CHOICES: Final[tuple[Callable[[Model], Choice], ...]] = (
    _preprocess,
    _color,
    _activation,
    _fit,
    _border,
    _resize,
    _decode,
)
"""The settings that are tried, in the order in which they are printed."""
