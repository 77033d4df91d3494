"""Preprocessing of pixels before the network, traced into the compiled program."""

from __future__ import annotations

from typing import Final, NamedTuple

import tensorflow as tf

from xlaserve.config import Preprocess as Configured
from xlaserve.config import ScalingSettings


class Scaling(NamedTuple):
    """A factor for each channel, and an offset that is added after it."""

    scale: tuple[float, ...]
    offset: tuple[float, ...]


Preprocess = Configured | Scaling

FAMILIES: Final[dict[str, Preprocess]] = {
    "convnext": "none",
    "densenet": "torch",
    "efficientnet": "none",
    "efficientnet_v2": "none",
    "inception_resnet_v2": "tf",
    "inception_v3": "tf",
    "mobilenet": "tf",
    "mobilenet_v2": "tf",
    "mobilenet_v3": "none",
    "nasnet": "tf",
    "resnet": "caffe",
    "resnet50": "caffe",
    "resnet_v2": "tf",
    "vgg16": "caffe",
    "vgg19": "caffe",
    "xception": "tf",
}
"""The preprocessing of each family of `keras.applications`, by its module's name; `none` where the model scales."""

_IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)  # of RGB from 0 to 1
_IMAGENET_DEVIATION: Final = (0.229, 0.224, 0.225)
_CAFFE_MEAN: Final = (103.939, 116.779, 123.68)  # of BGR from 0 to 255


def apply(pixels: tf.Tensor, how: Preprocess) -> tf.Tensor:  # noqa: PLR0911 - one each
    """Turns `pixels` `[n, height, width, channels]` from 0 to 255 into float32 of the same shape.

    `torch` and `caffe` are for RGB.
    """
    values = tf.cast(pixels, tf.float32)
    match how:
        case Scaling(scale, offset):
            return values * scale + offset
        case ScalingSettings():
            return (values / how.divisor - how.mean) / how.deviation
        case "none":
            return values
        case "unit":
            return values / 255.0
        case "tf":
            return values / 127.5 - 1.0
        case "torch":
            return (values / 255.0 - _IMAGENET_MEAN) / _IMAGENET_DEVIATION
        case "caffe":
            return tf.reverse(values, axis=[-1]) - _CAFFE_MEAN
        case "standardize":
            return tf.image.per_image_standardization(values)
