"""The resizing of encoded images: the filter, antialiasing, and the library whose arithmetic it follows."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

from pydantic import model_validator

from xlaserve.config.base import Frozen


class ResizeLibrary(StrEnum):
    """A library whose resizing is followed to the bit."""

    TENSORFLOW = "tensorflow"
    """`tf.image.resize`, which Keras's layers and `image_dataset_from_directory` use as well."""
    PILLOW = "pillow"
    """`PIL.Image.resize`, which torchvision uses for Pillow's images and Keras's `load_img` as well."""
    OPENCV = "opencv"
    """`cv2.resize`, of levels of 8 bits."""


class ResizeFilter(StrEnum):
    """A filter for resizing, named as in its library; OpenCV's INTER_LINEAR is `bilinear`, INTER_CUBIC `bicubic`."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    AREA = "area"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"
    GAUSSIAN = "gaussian"
    MITCHELLCUBIC = "mitchellcubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
    LANCZOS4 = "lanczos4"


FILTERS: Final = {
    ResizeLibrary.TENSORFLOW: (
        ResizeFilter.NEAREST,
        ResizeFilter.BILINEAR,
        ResizeFilter.BICUBIC,
        ResizeFilter.AREA,
        ResizeFilter.LANCZOS3,
        ResizeFilter.LANCZOS5,
        ResizeFilter.GAUSSIAN,
        ResizeFilter.MITCHELLCUBIC,
    ),
    ResizeLibrary.PILLOW: (
        ResizeFilter.NEAREST,
        ResizeFilter.BOX,
        ResizeFilter.BILINEAR,
        ResizeFilter.HAMMING,
        ResizeFilter.BICUBIC,
        ResizeFilter.LANCZOS,
    ),
    ResizeLibrary.OPENCV: (
        ResizeFilter.NEAREST,
        ResizeFilter.BILINEAR,
        ResizeFilter.AREA,
        ResizeFilter.BICUBIC,
        ResizeFilter.LANCZOS4,
    ),
}
"""The filters that each library has."""
_NEVER_ANTIALIASED: Final = {ResizeFilter.NEAREST}
_ALWAYS_ANTIALIASED: Final = {ResizeFilter.AREA}


class ResizeSettings(Frozen):
    """How encoded images are resized."""

    library: ResizeLibrary
    """The library whose results are followed: `tensorflow` (`tf.image.resize`, and so Keras's layers and
    `image_dataset_from_directory`), `pillow` (`PIL.Image.resize`, and so torchvision on Pillow's images and Keras's
    `load_img`) or `opencv` (`cv2.resize`)."""
    filter: ResizeFilter = ResizeFilter.BILINEAR
    """With `tensorflow` `nearest`, `bilinear`, `bicubic`, `area`, `lanczos3`, `lanczos5`, `gaussian` or
    `mitchellcubic`; with `pillow` `nearest`, `box`, `bilinear`, `hamming`, `bicubic` or `lanczos`; with `opencv`
    `nearest`, `bilinear` (INTER_LINEAR), `area`, `bicubic` (INTER_CUBIC) or `lanczos4`."""
    antialias: bool | None = None
    """Whether an image that shrinks is smoothed, so that every pixel counts. Pillow always does; TensorFlow does not
    unless told to, which is the default here too. OpenCV does with `area` alone. `nearest` never does, `area`
    always."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.filter not in FILTERS[self.library]:
            raise ValueError(
                f"filter: expected one of {', '.join(FILTERS[self.library])} for {self.library}, got {self.filter}"
            )
        if self.antialias is not None and self.antialias is not self.is_antialiased:
            always = f"{self.filter} of {self.library} {'always' if self.is_antialiased else 'never'} antialiases"
            raise ValueError(f"antialias: {always}, expected {str(self.is_antialiased).lower()} or nothing")
        return self

    @classmethod
    def of(cls, library: ResizeLibrary, filter_: ResizeFilter, *, antialias: bool) -> Self:
        """Returns a way to resize, with `antialias` where the filter leaves a choice."""
        usual = cls(library=library, filter=filter_)
        return cls(library=library, filter=filter_, antialias=True) if antialias and usual.has_choice else usual

    @property
    def is_antialiased(self) -> bool:
        """Whether every pixel of an image that shrinks counts."""
        if self.filter in _NEVER_ANTIALIASED:
            return False
        if self.filter in _ALWAYS_ANTIALIASED or self.library is ResizeLibrary.PILLOW:
            return True
        return self.library is ResizeLibrary.TENSORFLOW and bool(self.antialias)

    @property
    def has_choice(self) -> bool:
        """Whether `antialias` chooses."""
        has_both = self.filter not in _NEVER_ANTIALIASED | _ALWAYS_ANTIALIASED
        return self.library is ResizeLibrary.TENSORFLOW and has_both

    def __str__(self) -> str:
        return f"{self.library} {self.filter}, {'antialiased' if self.is_antialiased else 'not antialiased'}"


PILLOW_BILINEAR: Final = ResizeSettings(library=ResizeLibrary.PILLOW)
"""Pillow's bilinear filter, the default for models whose training is not known."""
TENSORFLOW_BILINEAR: Final = ResizeSettings(library=ResizeLibrary.TENSORFLOW)
"""The default of `tf.image.resize`, of Keras's `Resizing` layer and of `image_dataset_from_directory`."""
