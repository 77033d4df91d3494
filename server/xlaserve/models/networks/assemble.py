"""Assembly of a `Network` from a TensorFlow callable: preprocessing, the callable, a task's head."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.config import OF_RGB, Color, ModelSettings, Precision, ScalingSettings
from xlaserve.engine.warmup.sample import make_rows
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.heads import Head, Sampled
from xlaserve.models.networks.image_tensor import Call, ImageTensor
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.network_inputs import NetworkInput, NetworkInputs
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.programs.openvino.calibration import read
from xlaserve.programs.tf.lowered_function import Lower
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

_log = logging.getLogger(__name__)

PROBED_IMAGES: Final = 2


def assemble(
    call: Call,
    head: Head,
    *,
    inputs: NetworkInputs,
    preprocessing: Preprocess,
    weights: str = "",
    lower: Lower | None = None,
    openvino_precision: Precision = Precision.FLOAT32,
    calibration: Path | None = None,
) -> Network:
    """Returns the network that calls `call` with its inputs, images preprocessed, and turns its answer into the head's
    outputs.

    `call` takes the channels of images last (`NetworkInputs.last`). XLA runs what
    `lower` makes of it, OpenVINO computes in `openvino_precision`, in int8 as the folder `calibration` has it. Raises
    ModelFailed where the preprocessing does not fit the images, or that folder can't be read.
    """
    for each in inputs.tensors:
        if each.image is not None:
            _check_preprocessing(preprocessing, each.image)
    batch, image = inputs.batch, inputs.first

    def taken(each: NetworkInput, value: tf.Tensor) -> tf.Tensor:
        value = tf.cast(value, each.declared.dtype)
        if batch is not None:  # an export for one batch size refuses a tensor of an unknown one
            value = tf.ensure_shape(value, (batch, *value.shape[1:]))
        return value

    def prepared(each: NetworkInput, value: tf.Tensor) -> tf.Tensor:
        return taken(each, _preprocessed(value, each, preprocessing))

    def bare(*given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return head.finish(call(*inputs.prepared(given, taken)), given[0])

    def forward(*given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return head.finish(call(*inputs.prepared(given, prepared)), given[0])

    calibrated = None if calibration is None else read(calibration)
    program = TensorFlowProgram(forward, lower, openvino_precision, calibrated, inputs=inputs.specs)
    program.bare = bare
    return Network(
        program,
        inputs.size,
        head.task,
        weights,
        reason=head.reason,
        image=inputs.image,
        others=inputs.others,
        inputs=inputs.specs,
        batch=batch,
        is_unscaled=preprocessing == "none" and image is not None and not image.takes_levels,
        reference=program.reference,
        calibrated="" if calibrated is None else str(calibrated.calibration),
    )


def probe(call: Call, inputs: NetworkInputs, preprocessing: Preprocess, settings: ModelSettings) -> Sampled | None:
    """Returns sample images and the outputs of `call` for them; None where it can't be run, or no size is known.

    Runs once, operation by operation, and only where names and shapes of the outputs leave the task open.
    """
    sized = [(bucket.height, bucket.width) for bucket in settings.buckets if bucket.height is not None]
    height, width = next(filter(None, (settings.input_size, *settings.resolutions, *sized, inputs.size)))
    if height is None or width is None:
        return None
    rows = make_rows(inputs.specs, inputs.batch or PROBED_IMAGES, height, width)
    try:
        given = tuple(map(tf.constant, rows))
        outputs = call(*inputs.prepared(given, lambda each, value: _preprocessed(value, each, preprocessing)))
        return Sampled((height, width), {name: np.asarray(values) for name, values in outputs.items()})
    except Exception:  # an operation for one device, or with a gradient alone
        _log.debug("no sample of a network's outputs", exc_info=True)
        return None


def _preprocessed(value: tf.Tensor, each: NetworkInput, preprocessing: Preprocess) -> tf.Tensor:
    """Returns an input as the network takes it, images with their channels last."""
    if each.image is not None and not each.image.takes_levels:
        value = preprocess.apply(value, preprocessing)
    return tf.cast(value, each.declared.dtype)


def _check_preprocessing(preprocessing: Preprocess, pixels: ImageTensor) -> None:
    if pixels.takes_levels and preprocessing != "none":
        raise ModelFailed(
            f"preprocess: the model takes {pixels.dtype} pixels as they are, expected none, got {preprocessing}; write"
            " preprocess: none"
        )
    if isinstance(preprocessing, ScalingSettings) and (wrong := preprocessing.channels - {pixels.image.channels}):
        raise ModelFailed(
            f"preprocess: expected numbers for each of {pixels.image.channels} channels, got {min(wrong)}; or one"
            " number for all: {scale: 0.003922, offset: 0}"
        )
    if preprocessing in OF_RGB and pixels.image.color is not Color.RGB:
        kind = pixels.image.color or f"{pixels.image.channels} channels"
        raise ModelFailed(
            f"preprocess: {preprocessing} has the means of RGB, expected another for {kind}; write preprocess: unit,"
            " tf or none"
        )
