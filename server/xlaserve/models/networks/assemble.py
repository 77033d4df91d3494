"""Assembly of a `Network` from a TensorFlow callable of one image input: preprocessing, the callable, a task's head."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.config import Color, ModelSettings, Precision
from xlaserve.engine.inputs import pixels as inputs
from xlaserve.engine.warmup.sample import make_images
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.heads import Head
from xlaserve.models.networks.image_tensor import Call, ImageTensor
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.models.networks.reading import Sampled
from xlaserve.programs.openvino.calibration import read
from xlaserve.programs.tf.lowered_function import Lower
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

_log = logging.getLogger(__name__)

PROBED_IMAGES: Final = 2


def assemble(
    call: Call,
    head: Head,
    *,
    pixels: ImageTensor,
    preprocessing: Preprocess,
    weights: str = "",
    lower: Lower | None = None,
    openvino_precision: Precision = Precision.FLOAT32,
    calibration: Path | None = None,
) -> Network:
    """Returns the network that calls `call` with preprocessed pixels and turns its answer into the head's outputs.

    `call` takes the channels of its pixels last (`ImageTensor.last`). XLA runs what
    `lower` makes of it, OpenVINO computes in `openvino_precision`, in int8 as the folder `calibration` has it. Raises
    ModelFailed where the preprocessing does not fit the pixels, or that folder can't be read.
    """
    _check_preprocessing(preprocessing, pixels)
    batch = pixels.batch

    def bare(values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        given = tf.cast(values, pixels.dtype)
        if batch is not None:  # an export for one batch size refuses a tensor of an unknown one
            given = tf.ensure_shape(given, (batch, *given.shape[1:]))
        return head.finish(call(given), values)

    def forward(images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return bare(_preprocessed(images, pixels, preprocessing))

    calibrated = None if calibration is None else read(calibration)
    program = TensorFlowProgram(forward, lower, openvino_precision, calibrated, inputs=inputs(pixels.image.channels))
    program.bare = bare
    return Network(
        program,
        pixels.size,
        head.task,
        weights,
        reason=head.reason,
        image=pixels.image,
        batch=batch,
        is_unscaled=preprocessing == "none" and not pixels.takes_levels,
        reference=program.reference,
        calibrated="" if calibrated is None else str(calibrated.calibration),
    )


def probe(call: Call, pixels: ImageTensor, preprocessing: Preprocess, settings: ModelSettings) -> Sampled | None:
    """Returns sample images and the outputs of `call` for them; None where it can't be run, or no size is known.

    Runs once, operation by operation, and only where names and shapes of the outputs leave the task open.
    """
    sized = [(bucket.height, bucket.width) for bucket in settings.buckets if bucket.height is not None]
    height, width = next(filter(None, (settings.input_size, *settings.resolutions, *sized, pixels.size)))
    if height is None or width is None:
        return None
    images = make_images(pixels.batch or PROBED_IMAGES, height, width, pixels.image.channels)
    try:
        outputs = call(_preprocessed(tf.constant(images), pixels, preprocessing))
        return Sampled((height, width), {name: np.asarray(values) for name, values in outputs.items()})
    except Exception:  # an operation for one device, or with a gradient alone
        _log.debug("no sample of a network's outputs", exc_info=True)
        return None


def _preprocessed(images: tf.Tensor, pixels: ImageTensor, preprocessing: Preprocess) -> tf.Tensor:
    """Returns images as the network takes them, their channels last."""
    return tf.cast(images if pixels.takes_levels else preprocess.apply(images, preprocessing), pixels.dtype)


def _check_preprocessing(preprocessing: Preprocess, pixels: ImageTensor) -> None:
    if pixels.takes_levels and preprocessing != "none":
        raise ModelFailed(
            f"preprocess: the model takes {pixels.dtype} pixels as they are, expected none, got {preprocessing}"
        )
    if preprocessing in ("torch", "caffe") and pixels.image.color is not Color.RGB:
        kind = pixels.image.color or f"{pixels.image.channels} channels"
        raise ModelFailed(f"preprocess: {preprocessing} has the means of RGB, expected another for {kind}")
