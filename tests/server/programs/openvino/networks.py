"""Networks for tests of OpenVINO's programs."""

from __future__ import annotations

import tensorflow as tf

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import Executable
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.tf.lowered_function import Forward
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

SMALL = Bucket(3, 12, 14)


def small_network() -> Forward:
    keras.utils.set_random_seed(0)
    pixels = keras.Input((None, None, 3))
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(pixels)
    x = keras.layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.DepthwiseConv2D(3, padding="same", activation="relu6")(x)
    x = keras.layers.Conv2D(8, 3, groups=2)(x)  # which Keras has XLA compile, as a function of its own
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(pixels, (keras.layers.Dense(5, activation="softmax")(x), x))
    return lambda images: tuple(model(tf.cast(images, tf.float32), training=False))


def compiled(program: TensorFlowProgram, bucket: Bucket, mode: Mode = Mode.OPENVINO) -> Executable:
    return program.compile(mode, bucket).executable
