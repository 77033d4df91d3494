from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Color, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import reading
from xlaserve.models.networks.heads import Head, Sampled, TensorShape
from xlaserve.models.task import (
    Classification,
    ClassSequence,
    Detection,
    Embedding,
    ImageToImage,
    Keypoints,
    Regression,
    Segmentation,
    Tensors,
    TensorSpec,
    reading_of,
)

SIZE = (8, 6)
Shape = list[int | None] | None


def shapes(**outputs: Shape) -> dict[str, TensorShape]:
    return {name: TensorShape(shape, "float32") for name, shape in outputs.items()}


def choose(raw: Mapping[str, TensorShape], /, *, probed: Any = None, first: bool = False, **fields: Any) -> Head:
    """Chooses a reading, where a probe gives `probed` for the output `it`."""
    sampled = None if probed is None else Sampled(SIZE, {"it": probed})
    return reading.choose(raw, ModelSettings(name="m", source="m.keras", **fields), lambda: sampled, lambda _: first)


def softmax(*shape: int) -> Any:
    values = np.random.default_rng(0).random(shape)
    return (values / values.sum(axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "fields", "kind"),
    [
        ([None, 10], {}, Classification),
        ([None, 2], {}, Classification),
        ([None, 1], {}, Tensors),
        ([None], {}, Tensors),
        ([None, None], {}, Tensors),
        ([None, 30, 3], {}, Tensors),
        ([None, 8, 6, 1], {}, Tensors),
        ([None, 1], {"labels": ["no", "yes"]}, Classification),
        ([None, 8, 6, 1], {"labels": ["no", "yes"]}, Segmentation),
        ([None, 8, 6, 3], {"labels": ["sky", "road", "tree"]}, Segmentation),
        ([None, 8, 6, 3], {"classes": 3}, Segmentation),
        ([None, 2], {"values": {"x": "m", "y": "m"}}, Regression),
        ([None, 2], {"output_names": {"embedding": "it"}}, Embedding),
        ([None, 30, 3], {"blank": "last"}, ClassSequence),
        ([None, 30], {"keypoint_format": "rel_xy"}, Keypoints),
        ([None, 17, 3], {"output_names": {"keypoints": "it"}}, Keypoints),
        ([None, None, 3], {"blank": "first"}, ClassSequence),
        ([None, 8, 6, 1], {"output_names": {"image": "it"}}, ImageToImage),
        ([None, 8, 6, 3], {"output_range": "0..1"}, ImageToImage),
    ],
)
def test_an_only_output_is_read_by_its_shape_and_the_settings(shape: Shape, fields: Any, kind: type) -> None:
    head = choose(shapes(it=shape), **fields)
    assert type(head.task) is kind
    assert head.reason


@pytest.mark.parametrize(
    ("shape", "values", "kind"),
    [
        ([None, 8, 6, 3], softmax(2, 8, 6, 3), Segmentation),
        ([None, 4, 3, 16], softmax(2, 4, 3, 16), Segmentation),
        ([None, 8, 6, 21], np.full((2, 8, 6, 21), 3.0, np.float32), Segmentation),
        ([None, None, None, 21], np.full((2, 8, 6, 21), 3.0, np.float32), Segmentation),
        ([None, 8, 6, 3], np.full((2, 8, 6, 3), 0.9, np.float32), Tensors),
        ([None, 8, 6, 1024], np.full((2, 8, 6, 1024), 3.0, np.float32), Tensors),
        ([None, 1, 1, 16], np.full((2, 1, 1, 16), 3.0, np.float32), Tensors),
        ([None, 8, 6, 21], None, Tensors),
    ],
)
def test_a_map_is_of_classes_only_where_its_numbers_or_its_size_say_so(shape: Shape, values: Any, kind: type) -> None:
    assert type(choose(shapes(it=shape), probed=values).task) is kind


@pytest.mark.parametrize(
    ("channels", "fields"),
    [
        (3, {}),
        (3, {"labels": ["sky", "road", "tree"]}),
        (3, {"task": "segmentation"}),
        (3, {"outputs": {"it": {"task": "segmentation"}}}),
        (1, {"labels": ["no", "yes"]}),
        (1, {"task": "segmentation"}),
    ],
)
def test_maps_may_have_their_channels_first(channels: int, fields: Any) -> None:
    maps = np.moveaxis(softmax(2, *SIZE, 3), -1, 1)[:, :channels]
    head = choose(shapes(it=[None, channels, *SIZE]), probed=maps, first=True, **fields)
    (classes,) = head.finish({"it": tf.constant(maps)}, tf.zeros((2, *SIZE, 3)))
    np.testing.assert_array_equal(classes, maps.argmax(1) if channels > 1 else maps[:, 0] >= 0.5)


@pytest.mark.parametrize(
    ("shape", "is_possible"),
    [
        ([None, 8, 6, 1], True),
        ([None, 8, 6, 3], True),
        ([None, 4, 3, 4], True),
        ([None, 8, 6, 2], False),
        ([None, 8, 6, 1024], False),
        ([None, 9], False),
    ],
)
def test_auto_names_the_task_of_images_where_an_output_may_be_one(shape: Shape, is_possible: bool) -> None:
    assert ("task: image" in choose(shapes(it=shape)).reason) == is_possible


@pytest.mark.parametrize(
    ("shape", "fields", "task"),
    [
        ([None, 8, 6, 3], {}, ImageToImage(Color.RGB, (8, 6))),
        ([None, None, None, 3], {"color": "bgr"}, ImageToImage(Color.BGR)),
        ([None, 16, 12, 1], {"color": "bgr"}, ImageToImage(Color.GREY, (16, 12))),
        ([None, 8, 6], {}, ImageToImage(Color.GREY, (8, 6))),
        ([None, 8, 6, 4], {}, ImageToImage(Color.RGBA, (8, 6))),
    ],
)
def test_an_image_has_the_inputs_colours_where_it_has_as_many(shape: Shape, fields: Any, task: ImageToImage) -> None:
    head = choose(shapes(it=shape), task="image", **fields)
    assert head.task == task
    assert head.task.outputs == (TensorSpec("image", "UINT8", (-1, *task.size, task.color.channels)),)


@pytest.mark.parametrize(
    ("output_range", "values"),
    [
        ("0..1", [0.5 / 255, 1.5 / 255, 2.25 / 255, -3.0, 1.0, 7.0, np.nan, np.inf]),
        ("-1..1", [-1.0, 0.0, 1.0, 0.25, -7.0, 7.0, np.nan, -np.inf]),
        ("0..255", [0.5, 1.5, 2.5, 254.5, -0.5, 300.0, np.nan, np.inf]),
    ],
)
def test_images_are_scaled_rounded_and_clipped(output_range: str, values: list[float]) -> None:
    given = np.array(values, np.float32).reshape(1, 2, 4, 1)
    head = choose(shapes(it=[None, 2, 4, 1]), task="image", output_range=output_range)
    (levels,) = head.finish({"it": tf.constant(given)}, tf.zeros((1, 2, 4, 3)))
    scaled = {"0..1": given * np.float32(255), "-1..1": (given + 1) * np.float32(127.5), "0..255": given}[output_range]
    expected = np.nan_to_num(np.clip(np.rint(scaled), 0, 255))
    assert levels.dtype == tf.uint8
    np.testing.assert_array_equal(levels, expected)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
def test_images_of_whole_numbers_are_clipped_alone(dtype: str) -> None:
    given = np.array([[[0, 1], [100, 127]]], dtype) - (100 if dtype == "int32" else 0)
    head = choose({"it": TensorShape([None, 2, 2], dtype)}, task="image")
    (levels,) = head.finish({"it": tf.constant(given)}, tf.zeros((1, 2, 2, 1)))
    np.testing.assert_array_equal(levels[..., 0], np.clip(given, 0, 255))


def test_images_may_have_their_channels_first() -> None:
    given = np.random.default_rng(0).random((2, 3, *SIZE)).astype(np.float32)
    head = choose(shapes(it=[None, 3, *SIZE]), first=True, task="image")
    assert head.task == ImageToImage(Color.RGB, SIZE)
    (levels,) = head.finish({"it": tf.constant(given)}, tf.zeros((2, *SIZE, 3)))
    np.testing.assert_array_equal(levels, np.rint(np.moveaxis(given, 1, -1) * 255))


@pytest.mark.parametrize(
    ("shape", "dtype", "fields", "says"),
    [
        ([None, 8, 6, 2], "float32", {}, "source: expected an output of images"),
        ([None, 8, 6, None], "float32", {}, "source: expected an output of images"),
        ([None, 9], "float32", {}, "source: expected an output of images"),
        ([None, 8, 6, 3], "bool", {}, "source: expected images of numbers, got it"),
        ([None, 8, 6, 3], "uint8", {"output_range": "0..1"}, "output_range: expected 0..255 for it"),
    ],
)
def test_outputs_that_are_no_images_are_refused(shape: Shape, dtype: str, fields: Any, says: str) -> None:
    with pytest.raises(ModelFailed, match=says):
        choose({"it": TensorShape(shape, dtype)}, task="image", **fields)


def test_tensors_keep_the_order_of_channels_that_come_first() -> None:
    images = np.zeros((2, 3, *SIZE), np.float32)
    head = choose(shapes(it=[None, 3, *SIZE]), probed=images, first=True)
    assert head.task == Tensors((TensorSpec("it", "FP32", (-1, 3, *SIZE)),))
    (given,) = head.finish({"it": tf.constant(images)}, tf.zeros((2, *SIZE, 3)))
    assert given.shape == images.shape


def test_a_map_that_is_named_for_scores_is_of_classes() -> None:
    assert choose(shapes(softmax_2=[None, 8, 6, 3])).task == Segmentation(3)
    assert choose(shapes(scores=[None, 8, 6, 3])).task == Segmentation(3)
    assert choose(shapes(it=[None, 8, 6, 3]), output_names={"scores": "it"}).task == Segmentation(3)


def test_several_outputs_named_and_shaped_like_a_detection_are_one() -> None:
    found = shapes(boxes=[None, 9, 4], scores=[None, 9, 5])
    assert choose(found).task == Detection(5, max_detections=100)
    assert type(choose(shapes(boxes=[None, 36], scores=[None, 9, 5])).task) is Tensors
    assert type(choose(shapes(boxes=[None, 9, 4], other=[None, 9, 5])).task) is Tensors


def test_tensors_keep_their_names_types_and_shapes() -> None:
    outputs = {
        "kept": TensorShape([None, 3], "bool"),
        "half": TensorShape([4, None, 2, 1], "bfloat16"),
        "wide": TensorShape([None], "float64"),
    }
    assert choose(outputs).task == Tensors(
        (
            TensorSpec("kept", "BOOL", (-1, 3)),
            TensorSpec("half", "FP32", (-1, -1, 2, 1)),
            TensorSpec("wide", "FP64", (-1,)),
        )
    )


def test_an_output_of_unknown_rank_has_that_of_a_sample() -> None:
    head = choose(shapes(it=None), probed=np.zeros((2, 7, 5), np.float32), task="tensors")
    assert head.task.outputs == (TensorSpec("it", "FP32", (-1, 7, 5)),)
    with pytest.raises(ModelFailed, match="it: float32 of unknown rank"):
        choose(shapes(it=None), task="tensors")


@pytest.mark.parametrize(("dtype", "shape"), [("string", [None]), ("complex64", [None, 2]), ("float32", [])])
def test_what_is_no_row_of_numbers_for_each_image_is_refused(dtype: str, shape: Shape) -> None:
    with pytest.raises(ModelFailed, match=r"source: expected outputs .*, got it: "):
        choose({"it": TensorShape(shape, dtype)}, task="tensors")


def test_each_output_may_have_a_reading_of_its_own() -> None:
    outputs = shapes(age=[None, 1], sex=[None, 1], features=[None, 4, 4, 8])
    readings = {
        "age": {"task": "regression", "values": {"age": "years"}},
        "sex": {"task": "classification", "labels": ["female", "male"], "threshold": 0.7},
    }
    task = choose(outputs, outputs=readings).task
    assert task.outputs == (
        TensorSpec("age", "FP32", (-1, 1)),
        TensorSpec("sex", "FP32", (-1, 2)),
        TensorSpec("features", "FP32", (-1, 4, 4, 8)),
    )
    assert reading_of(task, Regression) == Regression(1, (("age", "years"),), at=0)
    assert reading_of(task, Classification) == Classification(2, ("female", "male"), threshold=0.7, at=1)
    with pytest.raises(LookupError):
        reading_of(task, Segmentation)


@pytest.mark.parametrize(
    ("readings", "says"),
    [
        ({"size": {"task": "regression"}}, "outputs: expected names of age, sex, got size"),
        ({"sex": {"task": "classification", "labels": ["a"]}}, "labels: expected 2 names, .* got 1"),
        ({"age": {"task": "regression", "labels": ["a"]}}, "outputs.age.labels: regression has no classes"),
        ({"age": {"task": "regression", "values": {"a": "", "b": ""}}}, "values: expected 1, .* got 2"),
        ({"age": {"task": "segmentation"}}, "source: expected an output of scores"),
    ],
)
def test_readings_that_do_not_fit_their_outputs_are_refused(readings: Any, says: str) -> None:
    with pytest.raises(ModelFailed, match=says):
        choose(shapes(age=[None, 1], sex=[None, 1]), outputs=readings)


def test_names_of_outputs_are_of_no_use_to_tensors() -> None:
    with pytest.raises(ModelFailed, match="output_names: expected none with task: tensors"):
        choose(shapes(it=[None, 2]), task="tensors", output_names={"scores": "it"})
