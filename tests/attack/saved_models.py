"""Writes SavedModels of `[n, side, side, 3]`: `python -m tests.attack.saved_models KIND FOLDER SIDE [NUMBER]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 180.0


def write(kind: str, folder: Path, side: int, *number: int) -> None:
    """Has another process write the model that the function `kind` makes: TensorFlow stays out of this one."""
    command = [sys.executable, "-m", "tests.attack.saved_models", kind, str(folder), str(side), *map(str, number)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def leaving_out(folder: str, side: int, level: int) -> None:
    """Writes a model that has no row for images of one level; its scores are the means of each colour of the others."""
    import tensorflow as tf

    def rest(module: Any, pixels: tf.Tensor) -> tf.Tensor:
        means = tf.reduce_mean(pixels, [1, 2])
        is_left_out = tf.reduce_all(pixels == float(level), [1, 2, 3])
        return tf.ensure_shape(tf.boolean_mask(means + module.weight, ~is_left_out), (None, 3))

    _save(folder, side, rest)


def shifted(folder: str, side: int, number: int) -> None:
    """Writes a model whose scores are the means of each colour, and a number more: its weight."""
    import tensorflow as tf

    _save(folder, side, lambda module, pixels: tf.reduce_mean(pixels, [1, 2]) + module.weight, float(number))


def without_boxes(folder: str, side: int) -> None:
    """Writes a model on which XLA ends its process by a signal: it suppresses the overlaps of no boxes."""
    import tensorflow as tf

    def scores(module: Any, pixels: tf.Tensor) -> tf.Tensor:
        boxes = tf.reshape(tf.pad(pixels, ((0, 0), (0, 0), (0, 0), (0, 1))), (-1, 4))[:0]
        limits = {"max_output_size": 4, "iou_threshold": 0.5, "score_threshold": 0.5}
        found = tf.raw_ops.NonMaxSuppressionV4(boxes=boxes, scores=boxes[:, 0], **limits, pad_to_max_output_size=True)
        return tf.reduce_mean(pixels, [1, 2]) + module.weight + tf.cast(found.valid_outputs, tf.float32)

    _save(folder, side, scores)


def _save(folder: str, side: int, scores: Any, weight: float = 0.0) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.weight = tf.Variable(tf.fill((3,), weight))

    @tf.function(input_signature=[tf.TensorSpec((None, side, side, 3), tf.float32, name="pixels")])
    def call(pixels: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"scores": scores(module, pixels)}

    module.call = call
    tf.saved_model.save(module, folder, signatures=call)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
