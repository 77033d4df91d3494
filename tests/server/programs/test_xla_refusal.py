from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from xlaserve.config import Bucket, Mode
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.openvino.openvino_program import UntranslatableGraphError
from xlaserve.programs.tf.lowered_function import Forward
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.programs.xla_refusal import explain

BUCKET = Bucket(1, 8, 8)


def refused(forward: Forward) -> BaseException:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        TensorFlowProgram(forward).compile(Mode.XLA, BUCKET)
    error: BaseException = caught.value
    return error


def test_the_operation_and_the_line_that_made_it_are_named() -> None:
    def shrink(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.image.resize(tf.cast(pixels, tf.float32), (4, 4), "bicubic"),)  # this line

    refusal = explain(refused(shrink))
    assert refusal.message == "XLA has no kernel for ResizeBicubic"
    assert refusal.operation == "ResizeBicubic"
    assert refusal.line is not None
    assert refusal.line.startswith(f"{Path(__file__).name}:")
    assert refusal.line.endswith('"bicubic"),)  # this line')


def test_a_layer_of_ones_own_is_named_rather_than_keras_around_it() -> None:
    @keras.saving.register_keras_serializable()
    class Crop(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.image.crop_and_resize(x, [[0.0, 0.0, 1.0, 1.0]], [0], (4, 4))

    model = keras.Sequential([keras.Input((8, 8, 3)), Crop(name="my_crop"), keras.layers.Flatten()])
    refusal = explain(refused(lambda pixels: (model(tf.cast(pixels, tf.float32)),)))
    assert refusal.operation == "CropAndResize"
    assert refusal.node is not None
    assert "my_crop" in refusal.node
    assert refusal.line is not None
    assert "in call: return tf.image.crop_and_resize" in refusal.line


def test_a_layer_of_keras_is_named_where_the_model_has_no_code_of_its_own() -> None:
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Resizing(4, 4, "bicubic", name="shrink")])
    refusal = explain(refused(lambda pixels: (model(pixels),)))
    assert refusal.node is not None
    assert "shrink" in refusal.node
    assert refusal.line is not None


def frames(*files: str) -> str:
    return "\n".join(("No.", "The op is created at:", *(f'File "{file}", line 3, in f' for file in files)))


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (("a/run.py", "b/site-packages/keras/src/ops/x.py", "a/own.py", "b/site-packages/tensorflow/y.py"), "own.py:3"),
        (
            ("a/run.py", "s/xlaserve/models/z.py", "b/site-packages/keras/src/layers/deep/resizing.py"),
            "keras/src/layers/deep/resizing.py:3",
        ),
        (
            ("xlaserve/models/z.py", "p/site-packages/keras_cv/src/a.py", "p/site-packages/keras/src/layers/layer.py"),
            "keras_cv/src/a.py:3",
        ),
        (("p/site-packages/tensorflow/a.py",), "tensorflow/a.py:3"),
    ],
)
def test_the_frame_that_tells_most_is_picked(files: tuple[str, ...], line: str) -> None:
    assert explain(ValueError(frames(*files))).line == f"{line} in f"


@pytest.mark.parametrize(
    "said",
    [
        "No FFI handler registered for theirs on a platform Host (canonical host) [Op:__inference_1]",
        "No registered implementation for untyped custom call to theirs for Host",
        "Custom call target theirs is not implemented.",
    ],
)
def test_a_call_that_another_frameworks_xla_has_is_named(said: str) -> None:
    refusal = explain(tf.errors.NotFoundError(None, None, said))
    assert (refusal.operation, refusal.message) == ("theirs", "XLA has no kernel for theirs")


def test_a_failed_model_keeps_its_message_and_the_unknown_operation() -> None:
    refusal = explain(ModelFailed("output scores: expected 2 rows"))
    assert (refusal.message, refusal.operation) == ("output scores: expected 2 rows", None)
    refusal = explain(UntranslatableGraphError("Zeta"))
    assert (refusal.message, refusal.operation) == ("OpenVINO has no translation of Zeta", "Zeta")


def test_any_other_error_is_one_line_with_its_type() -> None:
    refusal = explain(MemoryError("out of memory\nallocator says\nmuch more"))
    assert refusal.message == "MemoryError: out of memory"
    assert (refusal.operation, refusal.node, refusal.line) == (None, None, None)
    assert explain(ValueError()).message == "ValueError"
    assert len(explain(ValueError("x" * 10_000)).message) <= 300
