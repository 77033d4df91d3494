from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax import export
from jax import numpy as jnp
from numpy.typing import NDArray

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.sources import jax_export, jax_file
from xlaserve.models.task import Classification, Detection
from xlaserve.programs.xla_refusal import explain

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
Params = dict[str, Any]


def params() -> Params:
    random = np.random.default_rng(1)
    return {
        "kernels": [random.normal(0, 0.2, (3, 3, 3, 64)), random.normal(0, 0.1, (64, 10))],
        "bias": np.linspace(-1, 1, 10),
    } | {"narrow": jnp.asarray(random.normal(0, 0.1, (64, 64)), jnp.bfloat16)}


PARAMS: Params = jax.tree.map(
    lambda leaf: jnp.asarray(leaf, leaf.dtype if leaf.dtype == jnp.bfloat16 else None), params()
)


def forward(params: Params, images: Any) -> Any:
    first, last = params["kernels"]
    layout = ("NHWC", "HWIO", "NHWC")
    # A function of its own in the module, of which weights that it closes over are taken out as well.
    convolve = jax.jit(
        lambda x: jax.nn.relu(jax.lax.conv_general_dilated(x, first, (2, 2), "SAME", dimension_numbers=layout))
    )
    mixed = convolve(images / 255).mean((1, 2)) @ params["narrow"].astype(jnp.float32)
    return jax.nn.softmax(mixed @ last + params["bias"])


def net(images: Any) -> Any:
    return forward(PARAMS, images)


def image(batch: Any = "b", *sides: Any, dtype: Any = jnp.float32) -> Any:
    shape = export.symbolic_shape(", ".join(map(str, (batch, *(sides or (8, 8, 3))))))
    return jax.ShapeDtypeStruct(shape, dtype)


def write(path: Path, function: Any, *inputs: Any, platforms: Sequence[str] = ("cpu", "cuda")) -> str:
    path.write_bytes(export.export(jax.jit(function), platforms=platforms)(*inputs).serialize())
    return str(path)


def settings(source: str, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(2),)} | fields))


def run(model: ModelSettings, mode: Mode = Mode.XLA, images: NDArray[Any] = PIXELS) -> NDArray[Any]:
    program = catalog.load(model).program
    (scores,) = program.compile(mode, Bucket(*images.shape[:3])).executable(images)
    return scores


@pytest.mark.parametrize("batch", ["b", 2])
@pytest.mark.parametrize("mode", [mode for mode in Mode if mode not in (Mode.AUTO, Mode.OPENVINO)])
def test_an_export_answers_as_jax_does(tmp_path: Path, batch: object, mode: Mode) -> None:
    source = write(tmp_path / "net.jax", net, image(batch))
    model = catalog.load(settings(source))
    assert (model.task, model.weights, model.size) == (Classification(10), "net.jax", (8, 8))
    assert model.batch == (None if batch == "b" else 2)
    np.testing.assert_allclose(run(settings(source), mode), net(PIXELS), atol=1e-6)


def looped(images: Any) -> Any:
    """Has a loop, and an operation that JAX names (a composite), which stay StableHLO."""
    kernel = PARAMS["narrow"].astype(jnp.float32)
    values = jnp.tile(images.mean((1, 2)) / 255, 22)[:, :64]
    largest, _ = jax.lax.top_k(jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ kernel), values), 8)
    return largest


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode not in (Mode.AUTO, Mode.OPENVINO)])
def test_what_stays_stablehlo_runs_in_all_modes_of_tensorflow(tmp_path: Path, mode: Mode) -> None:
    source = write(tmp_path / "loop.jax", looped, image())
    np.testing.assert_allclose(run(settings(source), mode), looped(PIXELS.astype(np.float32)), atol=1e-6)


def test_openvino_says_that_it_runs_no_stablehlo(tmp_path: Path) -> None:
    source = write(tmp_path / "loop.jax", looped, image())
    with pytest.raises(ModelFailed, match="it has operations of XLA's own"):
        run(settings(source), Mode.OPENVINO)


def test_of_a_symbolic_batch_any_number_runs(tmp_path: Path) -> None:
    source = write(tmp_path / "net.jax", net, image())
    program = catalog.load(settings(source)).program
    for batch in (1, 3):
        images = np.repeat(PIXELS, 2, axis=0)[:batch]
        (scores,) = program.compile(Mode.XLA, Bucket(batch, 8, 8)).executable(images)
        np.testing.assert_allclose(scores, net(images), atol=1e-6)


def test_what_it_closes_over_becomes_arguments() -> None:
    exported = export.export(jax.jit(net), platforms=["cpu", "cuda"])(image())
    model = jax_export.exported_model(exported, "net.jax", ())
    weights = [argument for argument in model.arguments if argument is not None]
    assert model.arguments[0] is None
    # Smaller ones, such as the bias, are left to XLA.
    assert {(weight.shape, weight.dtype.name) for weight in weights} == {
        ((3, 3, 3, 64), "float32"),
        ((64, 64), "bfloat16"),
    }
    assert len(model.module) < len(exported.mlir_module_serialized) - sum(weight.nbytes for weight in weights) // 2


def test_weights_within_a_loop_become_arguments_too() -> None:
    exported = export.export(jax.jit(looped), platforms=["cpu"])(image())
    arguments = jax_export.exported_model(exported, "loop.jax", ()).arguments
    assert [argument.shape for argument in arguments if argument is not None] == [(64, 64)]


def composed(images: Any) -> Any:
    """Has an operation that jax 0.10 writes in a version of StableHLO that TensorFlow 2.21 does not read."""
    kernel = PARAMS["narrow"].astype(jnp.float32)
    layer = jax.jit(lambda x: jnp.tanh(x @ kernel))
    values = jnp.tile(images.mean((1, 2)) / 255, 22)[:, :64]
    return jax.lax.composite(lambda x: x * 2, "test.double")(layer(layer(values)))


def test_newer_operations_are_written_as_tensorflow_reads_them(tmp_path: Path) -> None:
    source = write(tmp_path / "it.jax", composed, image(2), platforms=["cpu"])
    np.testing.assert_allclose(run(settings(source)), composed(PIXELS.astype(np.float32)), atol=1e-6)


def test_operations_that_tensorflow_does_not_read_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "it.jax", lambda images: jnp.tan(images.mean((1, 2))), image(2), platforms=["cpu"])
    monkeypatch.setattr("xlaserve.models.sources.stablehlo_weights.NEWEST", "0.10.0")
    with pytest.raises(
        ModelFailed, match=r"source: expected StableHLO 0\.10\.0 or older, .* got it\.jax, which can't be"
    ):
        catalog.load(settings(source))


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def test_weights_that_it_takes_come_from_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "net.jax", forward, shapes(PARAMS), image())
    np.savez(weights := tmp_path / "net.npz", *jax.tree.leaves(PARAMS))
    np.testing.assert_allclose(run(settings(source, weights=str(weights))), net(PIXELS), atol=1e-6)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (None, "weights: expected a .npz file of net.jax's inputs before the image, as it takes args[0]['bias'], "
         "args[0]['kernels'][0], args[0]['kernels'][1], args[0]['narrow'], got nothing"),
        ([np.zeros(10, np.float32)], "weights: expected net.jax's inputs before the image, 4, got 1"),
        ([np.zeros(9, np.float32), *[np.zeros(1)] * 3],
         "weights: expected float32 [10] for net.jax's args[0]['bias'], got float32 [9]"),
        ([np.zeros(10, np.float64), *[np.zeros(1)] * 3],
         "weights: expected float32 [10] for net.jax's args[0]['bias'], got float64 [10]"),
        ([np.array([{}]), *[np.zeros(1)] * 3], "weights: expected a .npz file of arrays, got net.npz: Object arrays "
         "cannot be loaded when allow_pickle=False"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_told_of(
    tmp_path: Path, arrays: Sequence[NDArray[Any]] | None, expected: str
) -> None:
    source = write(tmp_path / "net.jax", forward, shapes(PARAMS), image())
    fields = {}
    if arrays is not None:
        np.savez(weights := tmp_path / "net.npz", *arrays)
        fields["weights"] = str(weights)
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(source, **fields))
    assert str(failure.value).partition("; ")[0] == expected


def sums(images: Any) -> Any:
    return images.sum((1, 2))


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda rows: rows @ jnp.ones((8, 3)), [image("b", 8)], "source: expected an input of images, such as [None, "
         "height, width, channels], of float32, float16, bfloat16, float64, uint8, uint16 or int32, got float32 [None, "
         "8]"),
        (sums, [image(dtype=jnp.int16)], "source: expected an input of images, such as [None, height, width, "
         "channels], of float32, float16, bfloat16, float64, uint8, uint16 or int32, got int16 [None, 8, 8, 3]"),
        (lambda images: jnp.ones((1, 3)), [image(1)], "source: expected a function of images, got it.jax, which does "
         "not use its last input"),
        (lambda: jnp.ones((1, 3)), [], "source: expected a function of images, got it.jax, which does not use its last "
         "input"),
    ],
)  # fmt: skip
def test_an_export_that_does_not_fit_fails_with_what_it_is(
    tmp_path: Path, function: Any, inputs: Sequence[Any], expected: str
) -> None:
    source = write(tmp_path / "it.jax", function, *inputs)
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(source))
    assert str(failure.value).partition("; ")[0] == expected


@pytest.mark.parametrize("contents", ["empty", "text", "zip", "half", "zeros"])
def test_what_is_no_export_is_told_of(tmp_path: Path, contents: str) -> None:
    whole = Path(write(tmp_path / "whole.jax", net, image())).read_bytes()
    data = {"empty": b"", "text": b"a model" * 99, "zip": b"PK\3\4" * 99, "half": whole[:-5000], "zeros": bytes(999)}[
        contents
    ]
    (source := tmp_path / "net.jax").write_bytes(data)
    expected = {"empty": "source: net.jax is empty", "zip": "source: net.jax has been cut off at 396 bytes"}
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(str(source)))
    assert str(failure.value).startswith(expected.get(contents, "source: expected what jax.export's serialize"))


def test_an_export_for_other_devices_is_told_of(tmp_path: Path) -> None:
    source = write(tmp_path / "net.jax", net, image(), platforms=["cuda", "tpu"])
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(source))
    assert str(failure.value) == (
        "source: expected an export for cpu, got net.jax for cuda, tpu; export it with "
        'platforms=["cpu", "cuda"] for both'
    )


def test_without_jax_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "net.jax", net, image())
    monkeypatch.delitem(sys.modules, "xlaserve.models.sources.jax_export")
    monkeypatch.delattr("xlaserve.models.sources.jax_export")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(source))
    assert str(failure.value) == (
        "source: reading net.jax needs jax; install xlaserve[jax], or serve the SavedModel that "
        "`xlaserve import net.jax` makes where jax is installed"
    )


def test_channels_may_come_first(tmp_path: Path) -> None:
    source = write(tmp_path / "first.jax", lambda images: net(images.transpose(0, 2, 3, 1)), image("b", 3, 8, 8))
    assert catalog.load(settings(source)).size == (8, 8)
    np.testing.assert_allclose(run(settings(source)), net(PIXELS), atol=1e-6)


def test_height_and_width_may_be_symbolic(tmp_path: Path) -> None:
    source = write(tmp_path / "sums.jax", sums, image("b", "h", "2*w", 3))
    np.testing.assert_allclose(run(settings(source, input_size=(8, 8))), PIXELS.sum((1, 2)), rtol=1e-6)
    odd = catalog.load(settings(source, input_size=(8, 7)))
    with pytest.raises(Exception, match="Input shapes do not match the polymorphic shapes specification"):
        odd.program.compile(Mode.XLA, Bucket(2, 8, 7))


def test_a_detectors_outputs_are_known_by_their_names(tmp_path: Path) -> None:
    def detect(images: Any) -> Any:
        box = jnp.asarray([[[1.0, 2.0, 5.0, 6.0]]])
        return {"boxes": box * jnp.ones_like(images[:, :1, :1, 0]), "scores": images[:, 0, :1, :2] / 255}

    source = write(tmp_path / "detect.jax", detect, image())
    model = catalog.load(settings(source))
    assert isinstance(model.task, Detection)
    boxes, *_ = model.program.compile(Mode.XLA, Bucket(2, 8, 8)).executable(np.full((2, 8, 8, 3), 255, np.uint8))
    np.testing.assert_allclose(boxes[:, 0], [[1, 2, 5, 6]] * 2)


def test_what_only_jaxs_own_xla_has_is_named(tmp_path: Path) -> None:
    def spectrum(images: Any) -> Any:
        return jnp.linalg.eigvalsh(images[..., 0])[:, :4]

    program = catalog.load(settings(write(tmp_path / "it.jax", spectrum, image()))).program
    with pytest.raises(tf.errors.NotFoundError) as failure:
        program.compile(Mode.XLA, Bucket(2, 8, 8))
    refusal = explain(failure.value)
    assert refusal.operation == "lapack_ssyevd_ffi"
    assert refusal.message == "XLA has no kernel for lapack_ssyevd_ffi"


def test_saved_it_is_a_saved_model_of_the_same_answers(tmp_path: Path) -> None:
    exported = export.export(jax.jit(net), platforms=["cpu", "cuda"])(image())
    jax_file.save(jax_export.exported_model(exported, "net.jax", ()), tmp_path / "net")
    for mode in (Mode.XLA, Mode.GRAPH):
        np.testing.assert_allclose(run(settings(str(tmp_path / "net")), mode), net(PIXELS), atol=1e-6)


@pytest.mark.parametrize("is_saved", [False, True])
def test_maps_of_what_takes_channels_first_have_their_channels_first_too(tmp_path: Path, *, is_saved: bool) -> None:
    kernel = jnp.asarray(np.random.default_rng(2).normal(0, 1, (5, 3, 1, 1)), jnp.float32)

    def segment(images: Any) -> Any:
        return jax.lax.conv(images, kernel, (1, 1), "VALID")  # [n, 5, 8, 8]

    source = write(tmp_path / "s.jax", segment, image("b", 3, 8, 8))
    if is_saved:
        jax_file.save(jax_export.read(Path(source), None), tmp_path / "saved")
        source = f"{tmp_path}/saved/"
    found = run(settings(source, task="segmentation"))
    expected = segment(PIXELS.transpose(0, 3, 1, 2).astype(np.float32)).argmax(1)
    assert np.array_equal(found, expected)
