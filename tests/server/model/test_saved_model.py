from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.model import catalog

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 6, 5, 3), np.uint8)
FLOAT32 = tf.TensorSpec((None, 6, 5, 3), tf.float32, name="photo")


class Sums(tf.Module):
    """Scores are the channels' sums, scaled by a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(0.5)

    @tf.function(autograph=False)
    def sums(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": self.scale * tf.reduce_sum(tf.cast(photo, tf.float32), axis=(1, 2))}

    @tf.function(autograph=False)
    def two_inputs(self, photo: tf.Tensor, mask: tf.Tensor) -> dict[str, tf.Tensor]:
        return self.sums(photo * mask)

    @tf.function(autograph=False)
    def two_outputs(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {**self.sums(photo), "photo": photo}


def export(folder: Path, *specs: tf.TensorSpec, function: str = "sums", signature: str = "serving_default") -> str:
    module = Sums()
    concrete = getattr(module, function).get_concrete_function(*specs)
    tf.saved_model.save(module, str(folder), signatures={signature: concrete})
    return str(folder)


def settings(source: str, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(2),)} | fields))


@pytest.mark.parametrize("dtype", [tf.float32, tf.uint8])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_saved_model_gets_pixels_from_0_to_255_as_it_takes_them(tmp_path: Path, dtype: tf.DType, mode: Mode) -> None:
    source = export(tmp_path / "sums", tf.TensorSpec((None, 6, 5, 3), dtype, name="photo"))
    model = catalog.load(settings(source))
    assert model.weights == "sums"
    assert model.task.classes == 3
    assert model.buckets == (Bucket(2, 6, 5),)
    (scores,) = model.program.compile(mode, Bucket(2, 6, 5)).executable(PIXELS)
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5, rtol=1e-6)


def test_a_float_saved_model_may_be_preprocessed(tmp_path: Path) -> None:
    model = catalog.load(settings(export(tmp_path / "sums", FLOAT32), preprocess="unit"))
    (scores,) = model.program.compile(Mode.GRAPH, Bucket(2, 6, 5)).executable(PIXELS)
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5 / 255, rtol=1e-5)


def test_a_saved_model_of_any_size_takes_the_one_that_is_set(tmp_path: Path) -> None:
    source = export(tmp_path / "sums", tf.TensorSpec((None, None, None, 3), tf.float32, name="photo"))
    assert catalog.load(settings(source, input_size=(9, 8))).buckets == (Bucket(2, 9, 8),)
    with pytest.raises(ModelFailed, match="input_size: the model takes several sizes"):
        catalog.load(settings(source))


@pytest.mark.parametrize(
    ("options", "specs", "expected"),
    [
        ({"signature": "other"}, [FLOAT32], "source: expected a signature serving_default, got other"),
        (
            {"function": "two_inputs"},
            [FLOAT32, tf.TensorSpec((None, 6, 5, 3), tf.float32, name="mask")],
            "source: expected a signature of one input and one output, got mask, photo and sums",
        ),
        (
            {"function": "two_outputs"},
            [FLOAT32],
            "source: expected a signature of one input and one output, got photo and photo, sums",
        ),
        (
            {},
            [tf.TensorSpec((None, 6, 5), tf.float32, name="photo")],
            "source: expected an input of float32 or uint8 [None, height, width, 3], got float32 [None, 6, 5]",
        ),
        (
            {},
            [tf.TensorSpec((None, 6, 5, 3), tf.int64, name="photo")],
            "source: expected an input of float32 or uint8 [None, height, width, 3], got int64 [None, 6, 5, 3]",
        ),
        (
            {},
            [tf.TensorSpec(None, tf.float32, name="photo")],
            "source: expected an input of float32 or uint8 [None, height, width, 3], got float32 of unknown rank",
        ),
    ],
)
def test_a_signature_that_does_not_fit_fails_with_what_it_is(
    tmp_path: Path, options: dict[str, str], specs: list[tf.TensorSpec], expected: str
) -> None:
    source = export(tmp_path / "sums", *specs, **options)
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(source))
    assert str(failure.value) == expected


def test_a_broken_saved_model_fails_with_its_name_and_not_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "saved_model.pb").write_text("not a model")
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(str(folder)))
    assert str(failure.value).startswith("source: broken can't be loaded: ")
    assert str(tmp_path) not in str(failure.value)
