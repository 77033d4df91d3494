"""Models whose programs are kept in a compile cache, for tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Compilation
from xlaserve.models.networks.kept_graphs import KINDS
from xlaserve.models.networks.network import Network
from xlaserve.models.task import Classification, Task
from xlaserve.programs.cache.records import SUFFIX
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

DEVICE = Device("cpu", "a processor", 2, 1)
BUCKET = Bucket(2, 4, 5)
SETTINGS = ModelSettings(name="model", source="keras.applications:ResNet50")
COST = Cost(0.5, 0.75)
GRAPHS = tuple(KINDS)


class Source:
    """Builds a network whose scores are a product with `weight`, and counts."""

    def __init__(self, weight: float = 1.0, task: Task | None = None, openvino_knows_it: bool = True) -> None:
        self.built = 0
        self._activation = tf.identity if openvino_knows_it else partial(tf.math.zeta, q=1.0)
        self._weight = tf.Variable(tf.fill((3, 7), weight))
        self._task = task or Classification(7, tuple("abcdefg"))

    def __call__(self) -> Network:
        self.built += 1

        def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
            means = tf.reduce_mean(tf.cast(pixels, tf.float32), axis=(1, 2))
            return (self._activation(means) @ self._weight,)

        program = TensorFlowProgram(forward)
        return Network(
            *(program, (None, 5), self._task, "random"), default_size=(4, 5), multiple=2, reference=program.reference
        )


def scores(network: Network, mode: Mode = Mode.XLA, bucket: Bucket = BUCKET) -> np.ndarray:
    return answers(network.program.compile(mode, bucket), bucket)


def answers(compilation: Compilation, bucket: Bucket = BUCKET) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (*bucket, 3), np.uint8)
    (output,) = compilation.executable(pixels)
    return output


def file_of(folder: Path, name: str) -> Path:
    (file,) = (folder / "cache").rglob(f"{name}*{SUFFIX}")
    return file
