"""Exports of JAX as TensorFlow's operations: the same numbers, and lowered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax import export, lax
from jax import numpy as jnp

from xlaserve.config import Bucket, BucketSettings, Lowering, Mode, ModelSettings
from xlaserve.models import catalog
from xlaserve.models.sources import jax_export, jax_file, stablehlo_graph
from xlaserve.models.sources.stablehlo_values import UntranslatableModuleError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(0, 1, (3, 9, 8, 3)).astype(np.float32)
CHANNELS_FIRST = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2))
TOLERANCE = 1e-5
BF16, LIMITS = jnp.bfloat16, (-np.inf, 0.3, -2)
Function = Callable[[Any], Any]


def weights(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(0, 0.3, shape), jnp.float32)


def exported(function: Function, images: Any = IMAGES, batch: str = "b", platforms: Any = ("cpu", "cuda")) -> Any:
    shape = (*export.symbolic_shape(batch), *images.shape[1:])
    made = export.export(jax.jit(function), platforms=platforms)(jax.ShapeDtypeStruct(shape, images.dtype))
    return jax_export.exported_model(made, "it.jax", ())


def translated(function: Function, images: Any = IMAGES, batch: str = "b") -> stablehlo_graph.Translated:
    model = exported(function, images, batch)
    return stablehlo_graph.translate(model, model.image)


def kinds(made: stablehlo_graph.Translated) -> Counter[str]:
    """Returns the operations that the outputs are computed with."""
    graph = made.run.graph
    definition = tf.compat.v1.graph_util.extract_sub_graph(
        graph.as_graph_def(), [output.op.name for output in made.run.outputs]
    )
    return Counter(node.op for node in definition.node)


def convolve(groups: int = 1, dilation: int = 1, **options: Any) -> Function:
    def function(images: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        given = {"window_strides": (1, 1), "padding": "SAME", **options}
        kernel = weights(3, 3, images.shape[-1] // groups, 2 * groups)
        return lax.conv_general_dilated(
            images, kernel, dimension_numbers=layout, feature_group_count=groups, rhs_dilation=(dilation,) * 2, **given
        )

    return function


def pool(identity: float, combine: Any, padding: Any = "SAME") -> Function:
    return lambda images: lax.reduce_window(images, identity, combine, (1, 3, 2, 1), (1, 2, 2, 1), padding)


def average(images: Any) -> Any:
    total, count = (pool(0.0, lax.add)(each) for each in (images, jnp.ones_like(images)))
    return total / count


def normalize(images: Any) -> Any:
    mean = images.mean(-1, keepdims=True)
    return (images - mean) * lax.rsqrt(jnp.square(images - mean).mean(-1, keepdims=True) + 1e-6) * weights(3)


def attend(images: Any) -> Any:
    tokens = images.reshape(images.shape[0], -1, 3) @ weights(3, 8)
    split = tokens.reshape(*tokens.shape[:2], 2, 4).transpose(0, 2, 1, 3)
    scores = jax.nn.softmax(jnp.einsum("nhqc,nhkc->nhqk", split, split))
    return jnp.einsum("nhqk,nhkc->nqhc", scores, split)


FUNCTIONS: dict[str, Function] = {
    "convolution": convolve(),
    "strides, padding on one side": convolve(window_strides=(2, 1), padding=[(0, 1), (2, 0)]),
    "dilation": convolve(dilation=2),
    "depthwise": convolve(groups=3, window_strides=(2, 2)),
    "depthwise, uneven strides": convolve(groups=3, window_strides=(2, 1)),
    "depthwise, dilated": convolve(groups=3, dilation=2, padding="VALID"),
    "transposed": lambda x: lax.conv_transpose(x, weights(3, 2, 3, 5), (3, 2), "SAME"),
    "transposed, cropped": convolve(lhs_dilation=(2, 1), padding=[(1, 2), (0, 1)]),
    "largest": pool(-jnp.inf, lax.max),
    "largest of padded": pool(-jnp.inf, lax.max, [(0, 0), (1, 1), (0, 1), (0, 0)]),
    "average": average,
    "normalization": normalize,
    "attention": attend,
    "activations": lambda x: jax.nn.relu6(x) + jax.nn.sigmoid(x) * jnp.clip(x, 0, 6) + jax.nn.gelu(x) + jnp.tanh(x),
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "hard swish": lambda x: x * jax.nn.relu6(x + 3) / 6,
    "slices": lambda x: x[:, 1:, :-1] + x[:, :-1, 1:] + x[:, ::2, ::2].mean((1, 2), keepdims=True),
    "one slice": lambda x: x[:, 3],
    "a part from a place": lambda x: lax.dynamic_slice_in_dim(x, 7, 3, 1),
    "taken": lambda x: jnp.take(x, jnp.array([2, 0]), axis=2).mean(1) + x[:, jnp.array([8, 1])].mean(2),
    "taken from all images": lambda x: x.ravel()[jnp.arange(x.shape[0])[:, None] * 216 + jnp.arange(5)],
    "what nothing reads": lambda x: (jnp.sort(x), jnp.argmax(x, -1) + 1, x.max(-1))[2],
    "padding": lambda x: jnp.pad(x, [(0, 0), (1, 2), (0, 1), (0, 0)], constant_values=2),
    "cropping": lambda x: lax.pad(x, jnp.float32(0), [(0, 0, 0), (-1, 2, 0), (3, -2, 0), (0, 0, 0)]),
    "concatenation": lambda x: jnp.concatenate([x, x * 2, jnp.ones_like(x)], -1),
    "repeated": lambda x: jnp.broadcast_to(x.mean((1, 2), keepdims=True), (*x.shape[:3], 3)).reshape(x.shape[0], -1),
    "repeated and reduced": lambda x: jnp.ones((x.shape[0], 4, 3)).sum(1).T + x.mean((1, 2)).T,
    "repeated rows": lambda x: jnp.repeat(x, 2, axis=1),
    "positions": lambda x: x + jnp.arange(9.0)[:, None, None] * jnp.arange(8.0)[:, None],
    "choice": lambda x: jnp.where((x > 0) & ~(x > 1) | (x < -1), x, x**2),
    "whole numbers": lambda x: (jnp.round(x * 10).astype(jnp.int32) // 3 % 4).sum(-1),
    "reductions": lambda x: jnp.stack([x.max((1, 2)), x.min((1, 2)), x.sum((1, 2)), x.var((1, 2))]),
    "a function within": lambda x: 2 * jax.jit(lambda y: jax.nn.relu(y) @ weights(3, 5))(x),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) @ weights(3, 5).astype(jnp.bfloat16)).astype(jnp.float32),
    "largest, from 0": pool(0.0, lax.max),
    "turned": lambda x: x[:, ::-1, ::-1] * jnp.asarray([1.0, 2.0, 3.0])[::-1],
    "an operation that JAX names": lambda x: lax.erf(x) + jnp.sinh(x),
    "numbers beyond a type": lambda x: (x * 300).astype(jnp.uint8).sum(-1) + (x * 1e12).astype(jnp.int32).max(-1) // 7,
    "no number as a whole one": lambda x: jnp.log(x).astype(jnp.int32),
    "few numbers in bfloat16": lambda x: jnp.maximum(x * jnp.asarray([1, -2.5, 0], BF16), jnp.asarray(LIMITS, BF16)),
    "one number many times": lambda x: x @ np.full((3, 4), 0.5, np.float32) + np.full(4, 2, np.float32),
    "what is finite": lambda x: (jnp.isfinite(jnp.log(x)) ^ (x > 1)).astype(jnp.float32) + lax.atan2(x, x + 1),
    "resizing": lambda x: jax.image.resize(x, (x.shape[0], 18, 16, 3), "bilinear"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_translation_computes_the_same(name: str) -> None:
    function = FUNCTIONS[name]
    made = translated(function)
    for count in (1, 3):
        (got,), wanted = made.run(tf.constant(IMAGES[:count])), np.asarray(jax.jit(function)(IMAGES[:count]))
        assert (got.shape, got.dtype.name) == (wanted.shape, wanted.dtype.name)
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE * max(1, np.abs(wanted).max()))


def test_channels_that_come_first_flow_on_as_the_last() -> None:
    def block(images: Any) -> Any:
        layout = ("NCHW", "OIHW", "NCHW")
        for kernel in (weights(8, 3, 3, 3), weights(8, 1, 3, 3)):
            groups = images.shape[1] // kernel.shape[1]
            images = lax.conv_general_dilated(
                images, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
            )
            shifted = (images - weights(8)[:, None, None]) * weights(8)[:, None, None] + 1
            images = lax.reduce_window(jax.nn.relu(shifted), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")
        images = jnp.concatenate([images, 2 * images], 1)
        return images.mean((2, 3)) @ weights(16, 4)

    model = exported(block, CHANNELS_FIRST)
    function = jax_file.ImageFunction(model, has_channels_first=True)
    made = stablehlo_graph.translate(model, function.pixels)
    (got,) = made.run(tf.constant(IMAGES))
    np.testing.assert_allclose(got, block(CHANNELS_FIRST), atol=TOLERANCE)
    found = kinds(made)
    assert (found["Conv2D"], found["DepthwiseConv2dNative"], found["MaxPool"]) == (1, 1, 2)
    assert "Transpose" not in found


def test_what_weights_alone_determine_is_computed_once() -> None:
    mean, variance = weights(3), jnp.abs(weights(3)) + 1
    found = kinds(translated(lambda x: x * lax.rsqrt(variance + 1e-3) - mean * lax.rsqrt(variance + 1e-3)))
    assert "Rsqrt" not in found
    assert (found["Mul"], found["Sub"] + found["AddV2"]) == (1, 1)


def test_activations_become_one_operation() -> None:
    found = kinds(translated(lambda x: jax.nn.relu6(x) + jax.nn.sigmoid(x) + jnp.clip(x, 0, 6) + jax.nn.relu(x)))
    assert (found["Relu6"], found["Sigmoid"], found["Relu"]) == (2, 1, 1)
    assert not {"Exp", "Minimum", "Maximum", "RealDiv"} & set(found)


@pytest.mark.parametrize("name", ["turned", "transposed"])
def test_what_is_turned_is_a_slice_as_openvino_has_no_operation_for_it(name: str) -> None:
    found = kinds(translated(FUNCTIONS[name]))
    assert "StridedSlice" in found
    assert "ReverseV2" not in found


def test_large_weights_become_variables() -> None:
    made = translated(lambda x: (x.mean((1, 2)) @ weights(3, 2048)) @ weights(2048, 3))
    assert sorted(variable.shape.as_list() for variable in made.weights) == [[3, 2048], [2048, 3]]


def test_a_batch_of_any_size_may_be_asserted_as_pytorch_does() -> None:
    batch = export.symbolic_shape("b", constraints=["b >= 0"])
    images = jax.ShapeDtypeStruct((*batch, *IMAGES.shape[1:]), jnp.float32)
    model = jax_export.exported_model(export.export(jax.jit(jnp.tanh))(images), "it.jax", ())
    (got,) = stablehlo_graph.translate(model, model.image).run(tf.constant(IMAGES))
    np.testing.assert_allclose(got, np.tanh(IMAGES), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("function", "batch", "expected"),
    [
        (lambda x: lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y), x), "b", "stablehlo.while is not translated"),
        (pool(1.0, lax.add), "b", "stablehlo.add of windows, from 1.0, is not translated"),
        (jnp.sort, "b", "stablehlo.sort is not translated"),
        (lambda x: jnp.argmax(x, -1), "b", "a reduction of several values is not translated"),
        (lambda x: x.reshape(x.shape[0] // 2, -1), "2*b", "stablehlo.custom_call is not translated"),
        (lambda x: lax.conv_transpose(x, weights(1, 1, 3, 3), (2, 2), "SAME"), "b", "more padding than its kernel"),
        (
            convolve(lhs_dilation=(2, 2), window_strides=(2, 2), padding=[(1, 1)] * 2),
            "b",
            "a transposed convolution of this form is not",
        ),
    ],
)
def test_what_is_not_translated_says_what_it_is(function: Function, batch: str, expected: str) -> None:
    with pytest.raises(UntranslatableModuleError, match=expected):
        translated(function, batch=batch)


def net(images: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    for kernel, strides in ((weights(3, 3, 3, 16), 2), (weights(3, 3, 1, 16), 1), (weights(1, 1, 16, 24), 1)):
        images = lax.conv_general_dilated(
            images,
            kernel,
            (strides, strides),
            "SAME",
            dimension_numbers=layout,
            feature_group_count=images.shape[-1] // kernel.shape[2],
        )
        images = jax.nn.relu6(images * weights(images.shape[-1]) * 10 + 3)
    return jax.nn.softmax(images.mean((1, 2)) @ weights(24, 5))


def settings(source: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=str(source), buckets=(BucketSettings(2),), **fields)


PIXELS = RANDOM.integers(0, 3, (2, 16, 16, 3), np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    shape = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), 16, 16, 3), jnp.float32)
    (file := tmp_path / "net.jax").write_bytes(export.export(jax.jit(net))(shape).serialize())
    return file


def test_an_export_is_lowered_and_runs_in_every_mode(file: Path) -> None:
    jax_file.save(jax_export.read(file, None), file.parent / "saved")
    for source in (file, file.parent / "saved"):
        model = catalog.load(settings(source))
        assert model.lowerings == "depthwise 1, stem 2, pooling 1"
        for mode in (Mode.XLA, Mode.GRAPH, Mode.OPENVINO):
            (scores,) = model.program.compile(mode, Bucket(2, 16, 16)).executable(PIXELS)
            np.testing.assert_allclose(scores, net(PIXELS.astype(np.float32)), atol=1e-5)
    assert not catalog.load(settings(file, disable_lowerings=tuple(Lowering))).lowerings


def test_float32_that_comes_from_bfloat16_is_compared_as_bfloat16(tmp_path: Path) -> None:
    def mixed(images: Any) -> Any:
        features = jnp.tanh(images.mean((1, 2)) @ weights(3, 64)).astype(BF16)
        return (features @ weights(64, 64).astype(BF16)).astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), 16, 16, 3), jnp.float16)
    (file := tmp_path / "mixed.jax").write_bytes(export.export(jax.jit(mixed))(shape).serialize())
    assert catalog.load(settings(file)).lowerings == "float32 3, pooling 1"


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_a_translation_that_is_wrong_or_fails_is_left_out(
    file: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def relu6(values: Any) -> Any:
        if fault == "failing":
            raise ZeroDivisionError("it fails")
        return tf.nn.relu(values)

    monkeypatch.setattr(tf.nn, "relu6", relu6)
    caplog.set_level("INFO")
    model = catalog.load(settings(file))
    assert not model.lowerings
    reason = {"wrong": "output 0 differs by ", "failing": "it fails"}[fault]
    assert f"the model stays StableHLO, which XLA runs in every mode, and is not lowered: {reason}" in caplog.text
    (scores,) = model.program.compile(Mode.XLA, Bucket(2, 16, 16)).executable(PIXELS)
    np.testing.assert_allclose(scores, net(PIXELS.astype(np.float32)), atol=1e-5)
