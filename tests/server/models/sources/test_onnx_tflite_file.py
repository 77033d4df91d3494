from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import convert_to_constants
from tests.server.models.sources.onnx_writer import model, node, outside, tensor

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.models import catalog
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources.onnx_tflite import openvino_operations, tflite_weights
from xlaserve.models.sources.onnx_tflite.openvino_to_tensorflow import Translator
from xlaserve.models.task import Segmentation

ov = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset15")

SIDE = 8
PIXELS = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
RANDOM = np.random.default_rng(1)

Build = Callable[[Any], Any]


def weights(*shape: int) -> NDArray[np.float32]:
    return RANDOM.uniform(-1, 1, shape).astype(np.float32)


def settings(source: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=str(source), **({"buckets": (BucketSettings(3),)} | fields))


def run(model: ModelSettings, mode: Mode) -> Any:
    (answer,) = catalog.load(model).program.compile(mode, Bucket(3, SIDE, SIDE)).executable(PIXELS)
    return answer


PAIR, NONE = np.array([1, 1]), np.array([0, 0])
WINDOW = {"strides": [2, 2], "pads_begin": [0, 1], "pads_end": [1, 2]}
POOL = {**WINDOW, "kernel_shape": [3, 3]}
CASES: dict[str, Build] = {
    "convolution": lambda x: ops.convolution(x, weights(5, 4, 3, 2), [2, 1], [1, 0], [2, 1], [1, 2]),
    "convolution-same": lambda x: ops.convolution(x, weights(5, 4, 3, 3), [2, 2], NONE, NONE, PAIR, "same_upper"),
    "convolution-lower": lambda x: ops.convolution(x, weights(5, 4, 2, 2), PAIR, NONE, NONE, PAIR, "same_lower"),
    "depthwise": lambda x: ops.group_convolution(x, weights(4, 2, 1, 3, 3), PAIR, PAIR, PAIR, PAIR),
    "grouped": lambda x: ops.group_convolution(x, weights(2, 3, 2, 3, 3), [2, 1], PAIR, PAIR, PAIR),
    "transposed": lambda x: ops.convolution_backprop_data(
        x, weights(4, 5, 3, 3), strides=[2, 2], pads_begin=[1, 1], pads_end=[0, 1], output_padding=[1, 0]
    ),
    "max-pool": lambda x: ops.max_pool(x, [2, 2], PAIR, [0, 1], [1, 2], [3, 3], "ceil").output(0),
    "max-pool-floor": lambda x: ops.max_pool(x, [2, 2], PAIR, NONE, NONE, [3, 3]).output(0),
    "average-pool": lambda x: ops.avg_pool(x, [2, 2], [0, 1], [1, 1], [3, 3], True),
    "average-pool-padded": lambda x: ops.avg_pool(x, [2, 2], [0, 1], [1, 1], [3, 3], False),
    "batch-normalization": lambda x: ops.batch_norm_inference(
        x, weights(4), weights(4), weights(4), np.abs(weights(4)) + 0.1, 1e-3
    ),
    "channels-are-scaled": lambda x: ops.multiply(ops.add(x, weights(4, 1, 1)), weights(1, 4, 1, 1)),
    "sides-are-added": lambda x: ops.add(ops.relu(ops.transpose(x, [0, 2, 3, 1])), weights(4)),
    "prelu": lambda x: ops.prelu(x, weights(4)),
    "clamp": lambda x: ops.clamp(x, -0.5, 0.5),
    "activations": lambda x: ops.concat(
        [ops.hswish(x), ops.mish(x), ops.elu(x, 0.5), ops.swish(x), ops.gelu(x, "erf"), ops.hsigmoid(x)], 1
    ),
    "scaled-activations": lambda x: ops.concat(
        [ops.selu(x, np.float32(1.5), np.float32(1.1)), ops.hard_sigmoid(x, np.float32(0.2), np.float32(0.5))], 1
    ),
    "softmax": lambda x: ops.softmax(x, 1),
    "log-softmax": lambda x: ops.log_softmax(x, -1),
    "means": lambda x: ops.reduce_mean(x, [2, 3], True),
    "largest": lambda x: ops.reduce_max(x, [1], False),
    "norms": lambda x: ops.reduce_l2(x, [-1], False),
    "mvn": lambda x: ops.mvn(x, [2, 3], True, 1e-5, "inside_sqrt"),
    "normalize": lambda x: ops.normalize_l2(x, [1], 1e-6, "add"),
    "product": lambda x: ops.matmul(ops.reshape(x, [0, -1], True), weights(5, 4 * 36), False, True),
    "transposition": lambda x: ops.transpose(x, [0, 3, 1, 2]),
    "split": lambda x: ops.concat([*reversed(ops.split(x, 1, 2).outputs())], 1),
    "variadic-split": lambda x: ops.variadic_split(x, 1, [1, 3]).output(1),
    "squeeze": lambda x: ops.unsqueeze(ops.squeeze(ops.reduce_sum(x, [2], True), [2]), [1, -1]),
    "gather": lambda x: ops.gather(x, [2, -1, 0], 1),
    "strided-slice": lambda x: ops.strided_slice(
        x, [0, 1, 0, 5], [0, 3, -1, 0], [1, 1, 2, -1], [1, 0, 0, 0], [1, 0, 0, 0]
    ),
    "slice": lambda x: ops.slice(x, [1, -1], [4, -7], [1, -2], [1, 2]),
    "pad": lambda x: ops.pad(x, [0, 0, 1, 2], [0, 1, 0, 1], "constant", np.float32(0.5)),
    "pad-reflect": lambda x: ops.pad(x, [0, 0, 1, 2], [0, 0, 0, 1], "reflect"),
    "pad-edge": lambda x: ops.pad(x, [0, 0, 1, 2], [0, 0, 0, 1], "edge"),
    "shape": lambda x: ops.reshape(x, ops.concat([ops.gather(ops.shape_of(x), [0], 0), np.array([-1])], 0), False),
    "broadcast": lambda x: ops.add(x, ops.broadcast(weights(1, 4, 1, 1), ops.shape_of(x))),
    "tile": lambda x: ops.tile(x, [1, 2, 1, 3]),
    "depth-to-space": lambda x: ops.depth_to_space(x, "blocks_first", 2),
    "depth-first-to-space": lambda x: ops.depth_to_space(x, "depth_first", 2),
    "space-to-depth": lambda x: ops.space_to_depth(x, "blocks_first", 2),
    "largest-first": lambda x: ops.topk(x, 2, 1, "max", "value").output(0),
    "places-of-smallest": lambda x: ops.convert(ops.topk(x, 2, 2, "min", "value").output(1), "f32"),
    "select": lambda x: ops.select(ops.greater(x, np.float32(0)), x, ops.multiply(x, np.float32(0.1))),
    "resize-nearest": lambda x: resized(x, "nearest", "asymmetric", "floor"),
    "resize-nearest-half": lambda x: resized(x, "nearest", "half_pixel", "round_prefer_floor"),
    "resize-linear": lambda x: resized(x, "linear_onnx", "half_pixel"),
    "resize-of-channels-last": lambda x: ops.interpolate(
        ops.transpose(x, [0, 2, 3, 1]), [9, 4], "linear_onnx", "sizes", axes=[1, 2]
    ),
    "resize-corners": lambda x: resized(x, "linear_onnx", "align_corners"),
    "levels": lambda x: ops.fake_quantize(
        x, np.float32(-0.5), weights(1, 4, 1, 1) + 2, np.float32(0), np.float32(255), 256
    ),
    "narrow": lambda x: ops.convert(ops.multiply(ops.convert(x, "f16"), np.float16(0.5)), "f32"),
}


def resized(x: Any, mode: str, how: str, nearest: str = "round_prefer_floor") -> Any:
    return ops.interpolate(
        x, [9, 4], mode, "sizes", axes=[2, 3], coordinate_transformation_mode=how, nearest_mode=nearest
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_channels_last", [False, True])
def test_an_operation_answers_as_in_openvino(case: str, has_channels_last: bool) -> None:
    pixels = ops.parameter([2, 6, 6, 4] if has_channels_last else [2, 4, 6, 6], np.float32)
    end = CASES[case](ops.transpose(pixels, [0, 3, 1, 2]) if has_channels_last else pixels)
    built = ov.Model([end], [pixels])
    translator = Translator(built)
    images = RANDOM.uniform(-1, 1, tuple(translator.inputs[0].shape)).astype(np.float32)
    expected = ov.Core().compile_model(built, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(images)[0]
    answer = tf.function(translator.run, autograph=False)(tf.constant(images))[translator.outputs[0]]
    np.testing.assert_allclose(answer, expected, rtol=2e-3 if case == "narrow" else 1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model in a `.tflite` file, and as it was."""
    pixels = keras.Input((SIDE, SIDE, 3), batch_size=1)
    x = keras.layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(keras.layers.Rescaling(1 / 255)(pixels))
    x = keras.layers.BatchNormalization()(keras.layers.DepthwiseConv2D(3, padding="same")(x))
    x = keras.layers.Flatten()(keras.layers.MaxPooling2D()(x))
    kept = keras.Model(pixels, keras.layers.Dense(3, activation="softmax")(x))
    file = tmp_path_factory.mktemp("tflite") / "flowers.tflite"
    spec = tf.TensorSpec((1, SIDE, SIDE, 3), tf.float32)
    function = tf.function(kept.call, autograph=False).get_concrete_function(spec)
    constant = convert_to_constants.convert_variables_to_constants_v2(function)
    file.write_bytes(tf.lite.TFLiteConverter.from_concrete_functions([constant], kept).convert())
    return file, kept


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.OPENVINO])
def test_a_tflite_file_runs_in_every_mode_and_batch(flowers: tuple[Path, Any], mode: Mode) -> None:
    file, kept = flowers
    expected = np.concatenate([kept(one[None].astype(np.float32)) for one in PIXELS])
    np.testing.assert_allclose(run(settings(file), mode), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Statistics for quantized inputs", "ignore:.*tf.lite.Interpreter")
@pytest.mark.parametrize("levels", [tf.int8, tf.uint8, tf.float32])
def test_a_quantized_tflite_file_takes_pixels_and_gives_numbers(
    tmp_path: Path, flowers: tuple[Path, Any], levels: tf.DType
) -> None:
    _, kept = flowers
    spec = tf.TensorSpec((1, SIDE, SIDE, 3), tf.float32)
    function = tf.function(kept.call, autograph=False).get_concrete_function(spec)
    constant = convert_to_constants.convert_variables_to_constants_v2(function)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([constant], kept)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    noise = RANDOM.uniform(0, 255, (20, 1, SIDE, SIDE, 3)).astype(np.float32)
    noise[0, ..., 0], noise[1, ..., 0] = 0, 255
    converter.representative_dataset = lambda: ([one] for one in noise)
    converter.inference_input_type = converter.inference_output_type = levels
    file = tmp_path / "levels.tflite"
    file.write_bytes(converter.convert())
    interpreter = tf.lite.Interpreter(str(file))
    interpreter.allocate_tensors()
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    expected = []
    for one in PIXELS:
        pixels = (one.astype(np.float32) - 128 if levels is tf.int8 else one)[None].astype(taken["dtype"])
        interpreter.set_tensor(taken["index"], pixels)
        interpreter.invoke()
        scale, zero = given["quantization"] if levels is not tf.float32 else (1.0, 0)
        expected.append((interpreter.get_tensor(given["index"])[0].astype(np.float32) - zero) * scale)
    answer = run(settings(file), Mode.XLA)
    assert answer.dtype == np.float32
    assert catalog.load(settings(file)).is_narrow
    np.testing.assert_allclose(answer, expected, atol=4 / 256)  # TFLite's kernels round whole numbers


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter")
def test_a_tflite_file_of_dynamic_range_is_told(
    tmp_path: Path, flowers: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kernel = tf.constant(np.random.default_rng(0).normal(0, 0.1, (SIDE * SIDE * 3, 20)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32)], autograph=False)
    def scores(photo: Any) -> Any:
        return tf.nn.softmax(tf.reshape(photo / 255, (-1, SIDE * SIDE * 3)) @ kernel)

    converter = tf.lite.TFLiteConverter.from_concrete_functions([scores.get_concrete_function()])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    file = tmp_path / "range.tflite"
    file.write_bytes(converter.convert())
    interpreter = tf.lite.Interpreter(str(file))
    interpreter.resize_tensor_input(0, PIXELS.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], PIXELS.astype(np.float32))
    interpreter.invoke()
    rounded = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    difference = np.abs(run(settings(file), Mode.GRAPH) - rounded).max()
    assert 1e-5 < difference < 0.1, "TensorFlow Lite rounds, and nothing else differs"
    assert len([line for line in caplog.messages if tflite_weights.NOTE in line]) == 1
    assert tflite_weights.NOTE in formats.describe(file).notes
    for other in (flowers[0], tmp_path / "range.onnx"):
        other.touch()
        assert not tflite_weights.are_of_dynamic_range(other)
    assert tflite_weights.NOTE not in formats.describe(flowers[0]).notes


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.OPENVINO])
def test_an_onnx_file_runs_in_every_mode_and_batch(tmp_path: Path, mode: Mode) -> None:
    kernel = weights(4, 3, 1, 1)
    file = tmp_path / "maps.onnx"
    file.write_bytes(
        model(
            [
                node("Transpose", ["pixels"], ["first"], perm=[0, 3, 1, 2]),
                node("Conv", ["first", "kernel"], ["maps"], kernel_shape=[1, 1]),
                node("Transpose", ["maps"], ["scores"], perm=[0, 2, 3, 1]),
            ],
            pixels=("pixels", [1, SIDE, SIDE, 3]),
            scores=("scores", [1, SIDE, SIDE, 4]),
            weights=[tensor("kernel", kernel)],
        )
    )
    assert catalog.load(settings(file)).task == Segmentation(4)
    scores = PIXELS.astype(np.float32) @ kernel[:, :, 0, 0].T
    np.testing.assert_array_equal(run(settings(file), mode), scores.argmax(axis=-1))


@pytest.mark.parametrize(("kind", "reduce"), [("GlobalAveragePool", np.mean), ("GlobalMaxPool", np.max)])
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.OPENVINO])
def test_an_onnx_file_pools_over_all_of_the_image(tmp_path: Path, kind: str, reduce: Any, mode: Mode) -> None:
    file, matrix = tmp_path / "scores.onnx", weights(3, 2)
    file.write_bytes(pooling(kind, matrix.shape, tensor("matrix", matrix)))
    expected = reduce(PIXELS.astype(np.float32), axis=(1, 2)) @ matrix
    np.testing.assert_allclose(run(settings(file), mode), expected, rtol=1e-4)


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.OPENVINO])
def test_an_onnx_file_that_is_quantized_with_qdq_rounds_to_its_levels(tmp_path: Path, mode: Mode) -> None:
    file, matrix, step = tmp_path / "scores.onnx", weights(3, 2), np.float32(3)
    levels = ["step", "zero"]
    nodes = [
        node("QuantizeLinear", ["pixels", *levels], ["levels"]),
        node("DequantizeLinear", ["levels", *levels], ["rounded"]),
        node("GlobalMaxPool", ["rounded"], ["pooled"]),
        node("Flatten", ["pooled"], ["row"]),
        node("MatMul", ["row", "matrix"], ["scores"]),
    ]
    known = [tensor("matrix", matrix), tensor("step", np.array(step)), tensor("zero", np.array(10, np.uint8))]
    file.write_bytes(model(nodes, pixels=("pixels", [1, 3, SIDE, SIDE]), scores=("scores", [1, 2]), weights=known))
    assert catalog.load(settings(file)).is_narrow
    expected = (np.round(PIXELS.astype(np.float32) / step) * step).max(axis=(1, 2)) @ matrix
    np.testing.assert_allclose(run(settings(file), mode), expected, rtol=1e-4, atol=1e-3)


def test_operations_of_onnx_that_are_not_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "scores.onnx"
    file.write_bytes(pooling("QLinearGlobalAveragePool", (3, 2), tensor("matrix", weights(3, 2))))
    with pytest.raises(ModelFailed, match=r"QLinearGlobalAveragePool-13; quantize it with quantize_static\(.*\.QDQ\)$"):
        catalog.load(settings(file))


def test_large_weights_are_frozen_whatever_the_batch(tmp_path: Path) -> None:
    file, matrix = tmp_path / "scores.onnx", weights(3, 2000)
    file.write_bytes(pooling("GlobalAveragePool", matrix.shape, tensor("matrix", matrix)))
    expected = PIXELS.astype(np.float32).mean(axis=(1, 2)) @ matrix
    np.testing.assert_allclose(run(settings(file), Mode.OPENVINO), expected, rtol=1e-4, atol=1e-3)


def pooling(kind: str, shape: tuple[int, ...], matrix: bytes) -> bytes:
    nodes = [
        node(kind, ["pixels"], ["pooled"]),
        node("Flatten", ["pooled"], ["row"]),
        node("MatMul", ["row", "matrix"], ["scores"]),
    ]
    sides = [1, 3, SIDE, SIDE]
    return model(nodes, pixels=("pixels", sides), scores=("scores", [1, shape[1]]), weights=[matrix])


def beside(folder: Path, name: str) -> Path:
    """Writes a model whose matrix is in the file `name`."""
    (file := folder / "scores.onnx").write_bytes(pooling("GlobalAveragePool", (3, 2), outside("matrix", (3, 2), name)))
    return file


def refused(file: Path) -> str:
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(file))
    return str(failure.value)


def test_weights_that_are_missing_beside_an_onnx_file_are_named(tmp_path: Path) -> None:
    file, matrix = beside(tmp_path, "below/w.bin"), weights(3, 2)
    assert "below/w.bin, which is missing; copy that beside scores.onnx" in refused(file)
    (stored := tmp_path / "below" / "w.bin").parent.mkdir()
    stored.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n")
    assert refused(file).endswith("git lfs pull --include '*w.bin'")
    stored.write_bytes(matrix.tobytes()[:-4])
    assert refused(file).endswith("sha256sum scores.onnx below/w.bin")
    stored.write_bytes(matrix.tobytes())
    np.testing.assert_allclose(run(settings(file), Mode.XLA), PIXELS.mean(axis=(1, 2)) @ matrix, rtol=1e-4)


@pytest.mark.parametrize("name", ["../w.bin", "{folder}/w.bin", "", "below/../../w.bin", "nul\0"])
def test_weights_that_are_not_named_as_in_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "net").mkdir()
    (tmp_path / "w.bin").write_bytes(weights(3, 2).tobytes())
    said = refused(beside(folder, name.format(folder=tmp_path)))
    assert "not named as in its own folder" in said
    assert "onnx.save_model(" in said
    assert str(tmp_path) not in said


def test_weights_behind_a_link_are_read_only_in_the_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "net").mkdir()
    file, matrix = beside(folder, "w.bin"), weights(3, 2)
    for stored in (tmp_path / "blob", folder / "blob"):
        stored.write_bytes(matrix.tobytes())
    (link := folder / "w.bin").symlink_to("../blob")
    assert refused(file).endswith('cp --remove-destination "$(readlink -f w.bin)" w.bin')
    link.unlink()
    link.symlink_to("blob")
    np.testing.assert_allclose(run(settings(file), Mode.XLA), PIXELS.mean(axis=(1, 2)) @ matrix, rtol=1e-4)


def test_an_operation_of_tflite_alone_is_named(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec((1, SIDE, SIDE, 3), tf.float32)], autograph=False)
    def call(pixels: tf.Tensor) -> tf.Tensor:
        return tf.math.igamma(pixels + 1.0, pixels)

    converter = tf.lite.TFLiteConverter.from_concrete_functions([call.get_concrete_function()], tf.Module())
    converter.allow_custom_ops = True
    file = tmp_path / "gamma.tflite"
    file.write_bytes(converter.convert())
    with pytest.raises(ModelFailed, match=r"its operation Igamma is of TensorFlow Lite alone; serve"):
        catalog.load(settings(file))


def test_what_can_not_be_read_or_translated_is_refused_with_what_to_do(
    tmp_path: Path, flowers: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(file: Path) -> str:
        with pytest.raises(ModelFailed) as failure:
            catalog.load(settings(file))
        return str(failure.value)

    (tmp_path / "other.onnx").write_bytes(b"no model")
    assert reason(tmp_path / "other.onnx").endswith("sha256sum other.onnx")
    file, _ = flowers
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        assert reason(file).endswith("pip install --no-deps 'openvino>=2026.4,<2026.5'")
    with monkeypatch.context() as without:
        without.setattr(openvino_operations, "TABLE", {})
        said = reason(file)
        assert said.startswith("source: flowers.tflite holds what is not translated: the operation ")
        assert said.endswith("pip install onnx2tf && onnx2tf -osd -i flowers.tflite")
    with monkeypatch.context() as wrong:
        table = openvino_operations.TABLE
        wrong.setattr(openvino_operations, "TABLE", {**table, "Softmax": table["LogSoftmax"]})
        assert "once the model is translated; make a SavedModel of it elsewhere: " in reason(file)
