"""From a TensorFlow callable with one image input and one output to a `Network`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import tensorflow as tf

from xlaserve.engine.executable import Forward, TensorFlowProgram
from xlaserve.errors import ModelFailed
from xlaserve.model import preprocess
from xlaserve.model.network import Network
from xlaserve.model.preprocess import Preprocess
from xlaserve.model.task import Classification

Call = Callable[[tf.Tensor], tf.Tensor]
PIXEL_DTYPES: Final = ("float32", "uint8")


class TensorShape(NamedTuple):
    """A tensor of a model as the model declares it."""

    shape: Sequence[int | None] | None
    """None is an unknown rank, or an unknown size."""
    dtype: str

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of unknown rank"
        return f"{self.dtype} [{', '.join(str(side) for side in self.shape)}]"


def classifier(
    call: Call,
    *,
    pixels: TensorShape,
    scores: TensorShape,
    preprocessing: Preprocess,
    weights: str,
    labels: tuple[str, ...] | None = None,
    lowered_call: Call | None = None,
    lowerings: str = "",
) -> Network:
    """Returns the network that gives `call` its preprocessed pixels and takes its answer for scores.

    `call` maps `pixels`, float32 or uint8 `[None, height, width, 3]`, to `scores` `[None, classes]`. Raises ModelFailed
    where they are anything else. `lowered_call` does the same for XLA, with `lowerings`.
    """
    match pixels.shape:
        case (None, height, width, 3) if pixels.dtype in PIXEL_DTYPES:
            pass
        case _:
            raise ModelFailed(f"source: expected an input of float32 or uint8 [None, height, width, 3], got {pixels}")
    match scores.shape:
        case (_, int(classes)):
            pass
        case _:
            raise ModelFailed(f"source: expected an output of scores [None, classes], got {scores}")
    takes_bytes = pixels.dtype == "uint8"
    if takes_bytes and preprocessing != "none":
        raise ModelFailed(f"preprocess: the model takes uint8 pixels as they are, expected none, got {preprocessing}")

    def forward(call: Call) -> Forward:
        def run(images: tf.Tensor) -> tuple[tf.Tensor, ...]:
            answer = call(images if takes_bytes else preprocess.apply(images, preprocessing))
            return (tf.cast(answer, tf.float32),)

        return run

    program = TensorFlowProgram(forward(call), forward(lowered_call) if lowered_call else None)
    return Network(program, (height, width), Classification(classes, labels), weights, lowerings)
