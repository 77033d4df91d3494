"""Assembly of a `Network` from a TensorFlow callable of one image input: preprocessing, the callable, a task's head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.config import ModelSettings, Precision
from xlaserve.engine.warmup.sample import make_images
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.heads import Head, Raw, TensorShape
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.models.networks.reading import Sampled
from xlaserve.programs.openvino.calibration import read
from xlaserve.programs.tf.lowered_function import Lower
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

Call = Callable[[tf.Tensor], Raw]
"""Maps pixels, as the network takes them, to its outputs."""

_log = logging.getLogger(__name__)

PROBED_IMAGES: Final = 2
PIXEL_DTYPES: Final = ("float32", "float16", "bfloat16", "uint8")


def assemble(
    call: Call,
    head: Head,
    *,
    pixels: TensorShape,
    preprocessing: Preprocess,
    weights: str = "",
    lower: Lower | None = None,
    openvino_precision: Precision = Precision.FLOAT32,
    calibration: Path | None = None,
) -> Network:
    """Returns the network that calls `call` with preprocessed pixels and turns its answer into the head's outputs.

    XLA runs what `lower` makes of it, OpenVINO computes in `openvino_precision`, in int8 as the folder
    `calibration` has it. Raises ModelFailed where `pixels` are not `[None, height, width, 3]` of PIXEL_DTYPES, or that
    folder can't be read.
    """
    batch, height, width = check_pixels(pixels)
    if pixels.dtype == "uint8" and preprocessing != "none":
        raise ModelFailed(f"preprocess: the model takes uint8 pixels as they are, expected none, got {preprocessing}")

    def forward(images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = _preprocessed(images, pixels, preprocessing)
        if batch is not None:  # an export for one batch size refuses a tensor of an unknown one
            values = tf.ensure_shape(values, (batch, *values.shape[1:]))
        return head.finish(call(values), images)

    calibrated = None if calibration is None else read(calibration)
    program = TensorFlowProgram(forward, lower, openvino_precision, calibrated)
    return Network(
        program,
        (height, width),
        head.task,
        weights,
        reason=head.reason,
        batch=batch,
        reference=program.reference,
        calibrated="" if calibrated is None else str(calibrated.calibration),
    )


def probe(call: Call, pixels: TensorShape, preprocessing: Preprocess, settings: ModelSettings) -> Sampled | None:
    """Returns what `call` gives for images as the network takes them; None where it can't be run, or on no known size.

    It runs operation by operation, once: for what only a network's numbers tell.
    """
    batch, *own = check_pixels(pixels)
    sized = [(bucket.height, bucket.width) for bucket in settings.buckets if bucket.height is not None]
    height, width = next(filter(None, (settings.input_size, *settings.resolutions, *sized, own)))
    if height is None or width is None:
        return None
    images = make_images(batch or PROBED_IMAGES, height, width)
    try:
        outputs = call(_preprocessed(tf.constant(images), pixels, preprocessing))
        return Sampled((height, width), {name: np.asarray(values) for name, values in outputs.items()})
    except Exception:  # an operation for one device, or with a gradient alone
        _log.debug("no sample of a network's outputs", exc_info=True)
        return None


def _preprocessed(images: tf.Tensor, pixels: TensorShape, preprocessing: Preprocess) -> tf.Tensor:
    """Returns images as the network takes them."""
    return images if pixels.dtype == "uint8" else tf.cast(preprocess.apply(images, preprocessing), pixels.dtype)


def check_pixels(pixels: TensorShape) -> tuple[int | None, int | None, int | None]:
    """Returns the batch, height and width of a model's input. Raises ModelFailed where it is not one of images."""
    match pixels.shape:
        case (batch, height, width, 3) if pixels.dtype in PIXEL_DTYPES:
            return batch, height, width
    raise ModelFailed(
        f"source: expected an input of {', '.join(PIXEL_DTYPES[:-1])} or uint8 [None, height, width, 3], got {pixels}"
    )
