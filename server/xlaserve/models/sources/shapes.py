"""`builtin:shapes-detector` and `builtin:shapes-segmenter`: small networks that find circles, squares and triangles.

`scripts/train_shapes.py` trains them on the scenes of `scripts/shapes_data.py`; the weights in `data/` are what it
wrote.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources.digits import trained

LABELS: Final = ("circle", "square", "triangle")
SIDE: Final = 128
STRIDE: Final = 8
"""Pixels of the input along each side of a cell of the detector's grid."""
MAP_LABELS: Final = ("background", *LABELS)
DETECTOR_WEIGHTS: Final = "shapes_detector.npz"
SEGMENTER_WEIGHTS: Final = "shapes_segmenter.npz"


def build_detector() -> Any:
    """Returns the untrained Keras detector, anchor-free in the way of FCOS (Tian et al. 2019).

    RGB `[n, 128, 128, 3]` from 0 to 255 in. Out `[n, 16, 16, 4 + 3]`: for each cell the distances from its centre to
    the left, top, right and bottom of a box, in strides, at least 0; and a logit for each label.
    """
    pixels = keras.Input((SIDE, SIDE, 3), name="pixels")
    x = keras.layers.Rescaling(1 / 127.5, offset=-1, name="scale")(pixels)
    x = _convolution(x, 16, "stem", strides=2)
    x = _convolution(x, 32, "down4", strides=2)
    x = _convolution(x, 64, "down8", strides=2)
    x = fine = _convolution(x, 64, "fine")
    x = _convolution(x, 64, "down16", strides=2)
    x = _convolution(x, 64, "coarse")
    x = keras.layers.UpSampling2D(name="up8")(x)
    x = keras.layers.Add(name="join8")([x, fine])
    x = _convolution(x, 64, "head")
    distances = keras.layers.Conv2D(4, 1, activation="softplus", name="distances")(x)
    # Few cells hold a shape: to begin with, none is thought to.
    rare = keras.initializers.Constant(float(np.log(0.01 / 0.99)))
    logits = keras.layers.Conv2D(len(LABELS), 1, bias_initializer=rare, name="logits")(x)
    return keras.Model(pixels, keras.layers.Concatenate(name="grid")([distances, logits]), name="shapes_detector")


def build_segmenter() -> Any:
    """Returns the untrained Keras segmenter, a small U-Net (Ronneberger et al. 2015).

    RGB `[n, 128, 128, 3]` from 0 to 255 in, logits `[n, 128, 128, 4]` out, in the order of MAP_LABELS.
    """
    pixels = keras.Input((SIDE, SIDE, 3), name="pixels")
    x = keras.layers.Rescaling(1 / 127.5, offset=-1, name="scale")(pixels)
    x = at2 = _convolution(x, 16, "down2", strides=2)
    x = at4 = _convolution(x, 32, "down4", strides=2)
    x = _convolution(x, 48, "down8", strides=2)
    x = at8 = _convolution(x, 48, "fine8")
    x = _convolution(x, 64, "down16", strides=2)
    x = _convolution(x, 64, "bottom")
    for skip, filters, name in ((at8, 48, "up8"), (at4, 32, "up4"), (at2, 16, "up2")):
        x = keras.layers.UpSampling2D(name=f"{name}_enlarge")(x)
        x = keras.layers.Concatenate(name=f"{name}_join")([x, skip])
        x = _convolution(x, filters, name)
    x = keras.layers.Conv2D(len(MAP_LABELS), 1, name="logits_at2")(x)
    logits = keras.layers.UpSampling2D(interpolation="bilinear", name="logits")(x)
    return keras.Model(pixels, logits, name="shapes_segmenter")


def _convolution(x: Any, filters: int, name: str, strides: int = 1) -> Any:
    x = keras.layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False, name=name)(x)
    x = keras.layers.BatchNormalization(name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)


def detector() -> Any:
    """Returns the trained Keras detector: RGB `[n, 128, 128, 3]` from 0 to 255 in, candidates out.

    `boxes` `[n, 256, 4]`, left, top, right and bottom in pixels of the input, and `scores` `[n, 256, 3]`, probabilities
    of the labels, are still to be suppressed.
    """
    grid = trained(build_detector(), DETECTOR_WEIGHTS)
    cells = SIDE // STRIDE
    y, x = (np.mgrid[:cells, :cells].astype(np.float32) + 0.5) * STRIDE
    centres = np.stack([x, y], axis=-1)
    distances = grid.output[..., :4] * STRIDE
    corners = keras.ops.subtract(centres, distances[..., :2]), keras.ops.add(centres, distances[..., 2:])
    outputs = {
        "boxes": keras.layers.Reshape((cells * cells, 4), name="boxes")(keras.ops.concatenate(corners, axis=-1)),
        "scores": keras.layers.Reshape((cells * cells, len(LABELS)), name="scores")(
            keras.ops.sigmoid(grid.output[..., 4:])
        ),
    }
    return keras.Model(grid.input, outputs, name="shapes_detector")


def segmenter() -> Any:
    """Returns the trained Keras segmenter."""
    return trained(build_segmenter(), SEGMENTER_WEIGHTS)
