"""Decoding against another one, in plain NumPy, and against that of KerasCV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml
from numpy.typing import NDArray

from xlaserve.config import BoxDecoding, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import reading
from xlaserve.models.networks.anchors import anchors
from xlaserve.models.networks.heads import Head, Sampled, TensorShape
from xlaserve.models.task import Detection, Tensors

Array = NDArray[Any]

IMAGES, HEIGHT, WIDTH = 3, 64, 96
PIXELS = tf.zeros((IMAGES, HEIGHT, WIDTH, 3))
THRESHOLD, OVERLAP, MOST = 0.6, 0.4, 40
SMALL_SSD = {"kind": "ssd", "strides": [16, 32], "scales": [0.25, 0.5, 1.0], "aspect_ratios": [1, 2]}
SHAPES_OF_FACES = {"regressors": [None, 896, 16], "classificators": [None, 896, 1]}


def sigmoid(values: Array) -> Array:
    return 1 / (1 + np.exp(-values))


def softmax(values: Array) -> Array:
    exponents = np.exp(values - values.max(axis=-1, keepdims=True))
    shares: Array = exponents / exponents.sum(axis=-1, keepdims=True)
    return shares


def found_in(boxes: Array, scores: Array) -> list[tuple[float, ...]]:
    """Left, top, right, bottom, class and score of one image's objects, after suppression for each class."""
    classes = scores.argmax(axis=1)
    best = scores.max(axis=1)
    kept: list[int] = []
    for row in np.argsort(-best):
        if best[row] <= THRESHOLD:
            break
        if all(classes[row] != classes[other] or iou(boxes[row], boxes[other]) <= OVERLAP for other in kept):
            kept.append(int(row))
    limits = [WIDTH, HEIGHT, WIDTH, HEIGHT]
    cut = [(np.clip(boxes[row], 0, limits), classes[row], best[row]) for row in kept]
    return [(*box, float(kind), float(score)) for box, kind, score in cut if (box[2:] > box[:2]).all()][:MOST]


def iou(one: Array, other: Array) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = float(np.prod(np.maximum(sides, 0)))
    return shared / (float(np.prod(one[2:] - one[:2])) + float(np.prod(other[2:] - other[:2])) - shared)


def corners(x: Array, y: Array, w: Array, h: Array) -> Array:
    return np.stack((x - w / 2, y - h / 2, x + w / 2, y + h / 2), axis=-1)


def head(shapes: Mapping[str, Sequence[int | None]], decoding: Any, /, *, first: bool = False, **fields: Any) -> Head:
    settings = ModelSettings(
        name="m",
        source="m.keras",
        box_decoding=decoding,
        score_threshold=THRESHOLD,
        iou_threshold=OVERLAP,
        max_detections=MOST,
        **fields,
    )
    outputs = {name: TensorShape(shape, "float32") for name, shape in shapes.items()}
    return reading.choose(outputs, settings, is_first=lambda _: first)


def check(raw: Mapping[str, Array], decoding: Any, wanted: Callable[[int], tuple[Array, Array]], **fields: Any) -> Head:
    """Compares the objects in each image with those of the boxes and scores that `wanted` gives of it."""
    chosen = head({name: [None, *values.shape[1:]] for name, values in raw.items()}, decoding, **fields)
    tensors = {name: tf.constant(values, tf.float32) for name, values in raw.items()}
    boxes, scores, classes, count = (values.numpy() for values in chosen.finish(tensors, PIXELS))
    for image in range(IMAGES):
        objects = found_in(*wanted(image))
        assert len(objects) > 3
        assert count[image] == len(objects)
        got = np.column_stack((boxes[image], classes[image], scores[image]))[: count[image]]
        np.testing.assert_allclose(got, objects, atol=1e-3)
    return chosen


@pytest.mark.parametrize("order", ["xywh", "yxhw"])
@pytest.mark.parametrize("background", ["first", "last", "none"])
def test_offsets_of_ssd_are_from_its_anchors(order: str, background: str) -> None:
    given = {**SMALL_SSD, "order": order, "background": background, "variances": [0.2, 0.1, 0.3, 0.4]}
    found = anchors(BoxDecoding.model_validate(given), HEIGHT, WIDTH).astype(np.float64)
    rng = np.random.default_rng(1)
    offsets = rng.normal(0, 1, (IMAGES, len(found), 4))
    logits = rng.normal(0, 2, (IMAGES, len(found), 4))

    def wanted(image: int) -> tuple[Array, Array]:
        boxes = []
        for (cx, cy, w, h), numbers in zip(found, offsets[image], strict=True):
            dx, dy, dw, dh = numbers if order == "xywh" else numbers[[1, 0, 3, 2]]
            boxes.append((cx + dx * 0.2 * w, cy + dy * 0.1 * h, w * np.exp(dw * 0.3), h * np.exp(dh * 0.4)))
        kept = {"first": slice(1, None), "last": slice(-1), "none": slice(None)}[background]
        return corners(*np.array(boxes).T), softmax(logits[image])[:, kept]

    names = {"boxes": "offsets", "scores": "classes"}
    raw = {"offsets": offsets, "classes": logits}
    chosen = check(raw, given, wanted, activation="softmax", output_names=names)
    assert chosen.task == Detection(4 - (background != "none"), max_detections=MOST)


def test_a_background_among_the_labels_stays_a_class_without_objects() -> None:
    for background, decoding in (("first", SMALL_SSD), ("none", {"kind": "retinanet"})):
        names: dict[str, Any] = {"labels": ["background", "cat"], "output_names": {"boxes": "a", "scores": "b"}}
        count = len(anchors(BoxDecoding.model_validate(decoding), HEIGHT, WIDTH))
        chosen = head({"a": [None, count, 4], "b": [None, count, 2]}, {**decoding, "background": background}, **names)
        assert chosen.task == Detection(2, max_detections=MOST)
        scores = np.full((1, count, 2), [0.9, 0.1], np.float32)
        scores[0, 5, 1] = 0.8
        _, _, classes, found = chosen.finish({"a": tf.zeros((1, count, 4)), "b": tf.constant(scores)}, PIXELS)
        assert (int(found[0]), int(classes[0, 0])) == (1, 1)


def test_outputs_are_told_by_their_shapes_and_may_have_a_side_of_one() -> None:
    found = anchors(BoxDecoding.model_validate({"kind": "retinanet"}), HEIGHT, WIDTH).astype(np.float64)
    rng = np.random.default_rng(2)
    offsets = rng.normal(0, 1, (IMAGES, len(found), 4))
    logits = rng.normal(-1, 1, (IMAGES, len(found), 2))

    def wanted(image: int) -> tuple[Array, Array]:
        dx, dy, dw, dh = offsets[image].T
        x, y, w, h = found.T
        boxes = corners(x + dx * 0.1 * w, y + dy * 0.1 * h, w * np.exp(dw * 0.2), h * np.exp(dh * 0.2))
        return boxes, sigmoid(logits[image])

    check({"a": logits, "b": offsets[:, :, None]}, "retinanet", wanted, activation="sigmoid")


def test_faces_are_in_pixels_from_the_centres_of_cells() -> None:
    """Facts: MediaPipe's TensorsToDetectionsCalculator, with reverse_output_order: x, y, width and height over the
    input's side, added to the anchor's centre; a sigmoid of the score."""
    side = 128
    images = tf.zeros((IMAGES, side, side, 3))
    rng = np.random.default_rng(3)
    numbers = rng.normal(0, 8, (IMAGES, 896, 16))
    numbers[..., 2:4] = rng.uniform(4, 40, (IMAGES, 896, 2))
    logits = rng.normal(-2, 2, (IMAGES, 896, 1))
    chosen = head(SHAPES_OF_FACES, None)
    assert chosen.task == Detection(1, max_detections=MOST), "nothing else has such outputs"
    assert head(SHAPES_OF_FACES, None, task="detection").task == chosen.task
    assert "blazeface" in chosen.reason
    raw = {"regressors": tf.constant(numbers, tf.float32), "classificators": tf.constant(logits, tf.float32)}
    boxes, scores, _, count = (values.numpy() for values in chosen.finish(raw, images))
    cells = [
        (x, y) for side in (16, 8) for y in range(side) for x in range(side) for _ in range(2 if side == 16 else 6)
    ]
    sizes = np.repeat([8, 16], [512, 384])
    for image in range(IMAGES):
        x, y = (np.array(cells) + 0.5).T * sizes
        dx, dy, w, h = numbers[image, :, :4].T
        best = np.argmax(logits[image, :, 0])
        wanted = corners(x + dx, y + dy, w, h)[best]
        assert count[image] > 3
        np.testing.assert_allclose(boxes[image, 0], np.clip(wanted, 0, side), atol=1e-3)
        assert scores[image, 0] == pytest.approx(sigmoid(logits[image, best, 0]), abs=1e-5)


@pytest.mark.parametrize("form", ["two", "rows", "columns"])
def test_distributions_of_yolov8_are_those_of_keras_cv(form: str) -> None:
    from keras_cv.src.models.object_detection.yolo_v8.yolo_v8_detector import (
        decode_regression_to_boxes,
        dist2bbox,
        get_anchors,
    )

    points, strides = get_anchors((HEIGHT, WIDTH))
    rng = np.random.default_rng(4)
    bins = rng.normal(0, 2, (IMAGES, len(points), 64)).astype(np.float32)
    logits = rng.normal(-2, 2, (IMAGES, len(points), 3)).astype(np.float32)
    theirs = dist2bbox(decode_regression_to_boxes(tf.constant(bins)), points) * strides[:, None]

    def wanted(image: int) -> tuple[Array, Array]:
        return theirs.numpy()[image], sigmoid(logits[image])

    together = np.concatenate((bins, logits), axis=2)
    raw = {
        "two": {"boxes": bins, "classes": logits},
        "rows": {"it": together},
        "columns": {"it": together.transpose(0, 2, 1)},
    }[form]
    check(raw, "yolov8", wanted)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("are_apart", [False, True])
def test_outputs_of_several_feature_maps_are_joined(first: bool, are_apart: bool) -> None:
    rng = np.random.default_rng(7)
    sides = [(HEIGHT // stride, WIDTH // stride) for stride in (8, 16, 32)]
    levels = [rng.normal(0, 2, (IMAGES, *side, 67)).astype(np.float32) for side in sides]
    parts = {f"boxes{n}": level[..., :64] for n, level in enumerate(levels)}
    parts |= {f"classes{n}": level[..., 64:] for n, level in enumerate(levels)}
    maps = parts if are_apart else {f"level{n}": level for n, level in enumerate(levels)}
    whole = np.concatenate([level.reshape(IMAGES, -1, 67) for level in levels], axis=1)
    wanted = head({"it": [None, *whole.shape[1:]]}, "yolov8").finish({"it": tf.constant(whole)}, PIXELS)
    given = {name: np.moveaxis(values, -1, 1) if first else values for name, values in reversed([*maps.items()])}
    chosen = head({name: [None, *values.shape[1:]] for name, values in given.items()}, "yolov8", first=first)
    assert chosen.task == Detection(3, max_detections=MOST)
    found = chosen.finish({name: tf.constant(values) for name, values in given.items()}, PIXELS)
    assert int(wanted[3][0]) > 3
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rows_of_several_feature_maps_are_joined() -> None:
    rng = np.random.default_rng(8)
    images = tf.zeros((IMAGES, 128, 128, 3))
    numbers = rng.normal(0, 8, (IMAGES, 896, 16)).astype(np.float32) ** 2
    logits = rng.normal(-2, 2, (IMAGES, 896, 1)).astype(np.float32)
    whole = {"regressors": numbers, "classificators": logits}
    wanted = head(SHAPES_OF_FACES, None).finish({name: tf.constant(one) for name, one in whole.items()}, images)
    parts = {"a": numbers[:, 512:], "b": numbers[:, :512], "c": logits[:, :512], "d": logits[:, 512:]}
    chosen = head({name: [None, *values.shape[1:]] for name, values in parts.items()}, "blazeface")
    found = chosen.finish({name: tf.constant(values) for name, values in parts.items()}, images)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("how", ["center_xywh", "rel_center_xywh"])
def test_boxes_of_yolo_are_suppressed(is_transposed: bool, how: str) -> None:
    rng = np.random.default_rng(5)
    count = 126
    places = rng.uniform(0, 1, (IMAGES, count, 4)) * [WIDTH, HEIGHT, 40, 40]
    scores = rng.uniform(0, 1, (IMAGES, count, 3)) ** 3
    scale = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT] if how.startswith("rel_") else 1)
    masks = rng.normal(0, 100, (IMAGES, count, 7))
    output = np.concatenate((places / scale, scores, masks), axis=2)

    def wanted(image: int) -> tuple[Array, Array]:
        return corners(*places[image].T), scores[image]

    raw = {"output0": output.transpose(0, 2, 1) if is_transposed else output, "output1": np.zeros((IMAGES, 8, 8, 7))}
    chosen = check(raw, {"kind": "yolo", "format": how}, wanted, labels=["a", "b", "c"])
    assert chosen.task == Detection(3, max_detections=MOST), "masks are left out"


def test_scores_of_yolov5_are_those_of_any_object_and_of_its_class() -> None:
    rng = np.random.default_rng(6)
    count = 200
    places = rng.uniform(0, 1, (IMAGES, count, 4)) * [WIDTH, HEIGHT, 40, 40]
    scores = rng.uniform(0, 1, (IMAGES, count, 3)) ** 0.25
    wanted_scores = scores[..., :1] * scores[..., 1:]
    chosen = check(
        {"it": np.concatenate((places, scores), axis=2)},
        {"kind": "yolo", "has_objectness": True},
        lambda image: (corners(*places[image].T), wanted_scores[image]),
    )
    assert chosen.task == Detection(2, max_detections=MOST)


def test_offsets_of_yolox_are_from_the_corners_of_cells() -> None:
    """Facts: decode_outputs in YOLOX's yolo_head.py: (xy + cell) * stride, exp(wh) * stride; scores are ready."""
    rng = np.random.default_rng(9)
    cells = [(x, y, s) for s in (8, 16, 32) for y in range(HEIGHT // s) for x in range(WIDTH // s)]
    x, y, strides = np.array(cells).T
    offsets = rng.normal(0, 0.7, (IMAGES, len(cells), 4))
    scores = rng.uniform(0, 1, (IMAGES, len(cells), 4)) ** 0.25

    def wanted(image: int) -> tuple[Array, Array]:
        dx, dy, dw, dh = offsets[image].T
        boxes = corners((x + dx) * strides, (y + dy) * strides, np.exp(dw) * strides, np.exp(dh) * strides)
        return boxes, scores[image, :, :1] * scores[image, :, 1:]

    chosen = check({"it": np.concatenate((offsets, scores), axis=2)}, "yolox", wanted)
    assert chosen.task == Detection(3, max_detections=MOST)


RELATIVE: Array = np.random.default_rng(10).uniform(0, 1, (1, 126, 7)).astype(np.float32)
PIXEL_BOXES: Array = RELATIVE * np.array([WIDTH, HEIGHT, WIDTH, HEIGHT, 1, 1, 1], np.float32)
OFFSETS: Array = np.random.default_rng(11).normal(0, 1, (1, 126, 7)).astype(np.float32)


@pytest.mark.parametrize(
    ("given", "decoding", "line"),
    [
        (RELATIVE, "yolo", "{kind: yolo, format: rel_center_xywh}"),
        (PIXEL_BOXES, {"kind": "yolo", "format": "rel_xyxy"}, "{kind: yolo, format: xyxy}"),
        (
            RELATIVE,
            {"kind": "yolo", "has_objectness": True},
            "{kind: yolo, format: rel_center_xywh, has_objectness: true}",
        ),
        (OFFSETS, {"kind": "yolo", "has_objectness": True}, "yolox"),
        (OFFSETS, {"kind": "yolo", "format": "rel_center_xywh"}, "yolox"),
        (PIXEL_BOXES, "yolox", "{kind: yolo, has_objectness: true}"),
        (PIXEL_BOXES, "yolo", None),
        (RELATIVE, {"kind": "yolo", "format": "rel_center_xywh"}, None),
        (OFFSETS, "yolox", None),
        (OFFSETS * 100, "yolox", None),
        (np.zeros_like(OFFSETS), "yolo", None),
        (np.concatenate([PIXEL_BOXES, np.tile(0 * PIXEL_BOXES, (1, 30, 1))], 1), "yolo", None),
    ],
)
def test_boxes_of_another_form_are_told_with_the_line_to_write(given: Array, decoding: Any, line: str | None) -> None:
    settings = ModelSettings(name="m", source="m.keras", box_decoding=decoding)
    outputs = {"it": TensorShape((None, *given.shape[1:]), "float32")}

    def choose() -> Head:
        return reading.choose(outputs, settings, lambda: Sampled((HEIGHT, WIDTH), {"it": given}))

    if line is None:
        assert isinstance(choose().task, Detection)
        return
    with pytest.raises(ModelFailed) as caught:
        choose()
    assert str(caught.value).endswith(f"write box_decoding: {line}")
    written = yaml.safe_load(line)
    assert reading.choose(outputs, settings.model_copy(update={"box_decoding": BoxDecoding.model_validate(written)}))


def test_offsets_of_no_known_cells_are_served_as_tensors() -> None:
    settings = ModelSettings(name="m", source="m.keras", box_decoding=BoxDecoding(kind="yolo"))
    given = np.tile(OFFSETS, (1, 3, 1))
    outputs = {"it": TensorShape((None, *given.shape[1:]), "float32")}
    with pytest.raises(ModelFailed, match="write task: tensors"):
        reading.choose(outputs, settings, lambda: Sampled((HEIGHT, WIDTH), {"it": given}))


@pytest.mark.parametrize(
    ("shapes", "decoding", "fields", "says"),
    [
        (
            {"a": [None, 9, 4], "b": [None, 9, 4]},
            "ssd",
            {},
            "output_names: expected the name of the output to take for",
        ),
        ({"a": [None, 9, 4], "b": [None, 9]}, "ssd", {}, "output_names: expected the name of the output to take for s"),
        ({"a": [None, 9, 4], "b": [None, 9, 1]}, "ssd", {}, "box_decoding.background: expected none"),
        ({"a": [None, 9, 4], "b": [None, 9, None]}, "ssd", {}, "expected an output of scores"),
        (
            {"a": [None, 9, 4], "b": [None, 9, 2]},
            "ssd",
            {"output_names": {"boxes": "c"}},
            "boxes to be one of a: .*; b: ",
        ),
        ({"a": [None, 9], "b": [None, 4]}, "yolo", {}, r"box_decoding: expected outputs .*, got a: .*\[None, 9\]; b: "),
        (
            {"a": [None, 9, 3], "b": [None, 9, 2]},
            "ssd",
            {"output_names": {"boxes": "a"}},
            "expected an output of boxes",
        ),
        ({"a": [None, 4, 900]}, "yolo", {}, "box_decoding: expected 4 numbers and scores for each box in a, got 4"),
        ({"a": [None, 900, 7]}, "yolo", {"classes": 4}, "expected 4 numbers and 4 scores in a, got 7"),
        ({"a": [None, 60, 900]}, "yolov8", {}, "expected 64 numbers and scores"),
    ],
)
def test_outputs_that_can_not_be_decoded_are_said(shapes: Any, decoding: Any, fields: Any, says: str) -> None:
    with pytest.raises(ModelFailed, match=says):
        head(shapes, decoding, **fields)


def test_anchors_that_are_not_as_many_as_boxes_are_said() -> None:
    chosen = head({"boxes": [None, 900, 4], "scores": [None, 900, 3]}, "ssd")
    raw = {"boxes": tf.zeros((1, 900, 4)), "scores": tf.zeros((1, 900, 3))}
    with pytest.raises(ModelFailed, match=r"for 64x96 pixels, 900, got \d+; set strides"):
        chosen.finish(raw, PIXELS)


@pytest.mark.parametrize(
    ("shapes", "is_hinted"),
    [
        ({"classes": [None, 5376, 2], "offsets": [None, 5376, 8]}, True),
        ({"boxes": [None, 1917, 4], "classes": [None, 1917, 91]}, True),
        ({"a": [None, 100, 4], "b": [None, 100, 80]}, False),
        ({"a": [None, 900, 4], "b": [None, 800, 80]}, False),
        ({"a": [None, 900, 7], "b": [None, 900, 3]}, False),
    ],
)
def test_what_is_not_certain_stays_tensors_with_a_hint(shapes: Any, is_hinted: bool) -> None:
    chosen = head(shapes, None)
    assert isinstance(chosen.task, Tensors)
    assert ("box_decoding" in chosen.reason) == is_hinted
