"""Keras on TensorFlow. Everything here imports `keras` from this module, so that the backend is chosen before Keras is.

The user's keras.json has no say: Keras reads the backend from the environment first, and images are `[n, h, w, 3]`.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras

keras.config.set_image_data_format("channels_last")
keras.config.set_floatx("float32")

__all__ = ["keras"]
