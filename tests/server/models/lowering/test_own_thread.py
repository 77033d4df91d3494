from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
from xlaserve.config import Lowering, Settings
from xlaserve.programs.tf.device import configure

configure(Settings(device="cpu", lanes=2, threads_per_lane=1), uses_tensorflow=True)

import numpy as np
import tensorflow as tf
from xlaserve.models import lowering
from xlaserve.models.networks.keras_runtime import keras

def block(inputs):
    outputs = keras.layers.Conv2D(64, 3, padding="same", activation="relu")(inputs)
    outputs = keras.layers.DepthwiseConv2D(3, padding="same")(outputs)
    outputs = keras.layers.BatchNormalization()(keras.layers.Conv2D(64, 1)(outputs))
    squeezed = keras.layers.GlobalAveragePooling2D(keepdims=True)(outputs)
    return keras.layers.Add()([inputs, keras.layers.Multiply()([outputs, squeezed])])

def wide(inputs):
    outputs = keras.layers.Conv2D(320, 1, strides=2)(inputs)
    outputs = keras.layers.DepthwiseConv2D(7, padding="same")(outputs)
    outputs = keras.layers.Conv2D(320, 3, groups=64, activation="relu")(outputs)
    return keras.layers.LayerNormalization()(outputs)

# What waits for nothing, of four loops, is ready next to the six parts of the first 3 x 3 convolution.
pixels = keras.Input((28, 28, 64))
model = keras.Model(pixels, wide(wide(block(block(pixels)))))
images = tf.constant(np.ones((1, 28, 28, 64), np.float32))
traced = tf.function(model, autograph=False).get_concrete_function(tf.TensorSpec((None, 28, 28, 64)))
lowered = lowering.lower(traced, list(Lowering))
run = tf.function(lowered.forward, jit_compile=True, autograph=False).get_concrete_function(images)
run(images)
own_s, all_s = time.thread_time(), time.process_time()
for _ in range(100):
    run(images)
print((time.thread_time() - own_s) / (time.process_time() - all_s))
"""


def test_a_lowered_network_runs_on_the_lanes_own_thread() -> None:
    command = (sys.executable, "-c", SCRIPT)
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(run.stdout) > 0.95
