"""Writes a SavedModel that leaves out images of one level: `python -m tests.attack.leaving_out FOLDER SIDE LEVEL`.

Its scores are the means of each colour of the others.
"""

from __future__ import annotations

import sys


def save(folder: str, side: int, level: int) -> None:
    """Writes the model into `folder`, for images `[n, side, side, 3]`."""
    import tensorflow as tf

    module = tf.Module()
    module.zero = tf.Variable(tf.zeros(3))

    @tf.function(input_signature=[tf.TensorSpec((None, side, side, 3), tf.float32, name="pixels")])
    def rest(pixels: tf.Tensor) -> dict[str, tf.Tensor]:
        means = tf.reduce_mean(pixels, [1, 2])
        is_left_out = tf.reduce_all(pixels == float(level), [1, 2, 3])
        return {"scores": tf.ensure_shape(tf.boolean_mask(means + module.zero, ~is_left_out), (None, 3))}

    module.rest = rest
    tf.saved_model.save(module, folder, signatures=rest)


if __name__ == "__main__":
    save(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
