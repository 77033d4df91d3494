"""Programs that are compared with their reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.server.engine.warmup.verified_model import (
    BUCKETS,
    SIDE,
    Checked,
    Chosen,
    bright,
    dark,
    doubled,
    plain,
    rolled,
    scores,
    zero,
)

from xlaserve.config import Bucket, Color, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs, is_finite
from xlaserve.engine.warmup.difference import MAX_RELATIVE, MAX_RELATIVE_INT8
from xlaserve.engine.warmup.verify import EXACT, GROSS, SAMPLE_IMAGES, Verified
from xlaserve.errors import ModelFailed
from xlaserve.models.task import Detection, ImageToImage, Segmentation


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_program_that_answers_as_its_reference_passes_without_a_word(bucket: Bucket) -> None:
    checked = Checked()
    verified = checked(scores, bucket)
    assert verified.difference is not None
    assert verified.difference.largest < 1e-6
    assert verified.difference.agreement == 1.0
    assert (verified.fault, verified.is_dependent, verified.not_finite) == (None, False, 0)
    assert not checked.warnings
    assert not checked.verifier.is_dependent


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("chosen", [dark, bright, plain])
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.EAGER, Mode.OPENVINO])
@pytest.mark.parametrize("verification", ["refuse", "off"])
def test_a_model_that_leaves_images_out_is_refused_whatever_is_set(
    bucket: Bucket, chosen: Chosen, mode: Mode, verification: str
) -> None:
    def rest(images: Images) -> Outputs:
        return (scores(images)[0][~chosen(images)],)

    program = f"mode {mode}, bucket {bucket}: " if verification == "off" else ""  # else it is the reference's fault
    expected = rf"^{program}output scores: expected \d+ rows?, .*, got \d+ \(shape \(\d+, 5\)\)$"
    with pytest.raises(ModelFailed, match=expected):
        Checked(rest, verification=verification, batch_dependence="allow")(rest, bucket, mode)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (lambda images: (np.float32(1.0),), r"output scores: expected 4 rows, .* got 0 \(shape \(\)\)"),
        (lambda images: (np.zeros((1, 5), np.float32),), r"output scores: expected 4 rows, .* got 1 \(shape"),
        (lambda images: (np.repeat(scores(images)[0], 2, axis=0),), r"output scores: expected 4 rows, .* got 8 "),
    ],
)
def test_outputs_of_other_rows_are_named_with_both_counts(outputs: Executable, text: str) -> None:
    with pytest.raises(ModelFailed, match=text):
        Checked()(outputs, Bucket(4, SIDE, SIDE))


def test_of_several_outputs_the_one_with_other_rows_is_named() -> None:
    def objects(images: Images) -> Outputs:
        (rows,) = scores(images)
        boxes, counts = np.zeros((len(rows), 5, 4), np.float32), np.zeros(len(rows), np.int32)
        return boxes, rows, rows[:1].astype(np.int32), counts

    with pytest.raises(ModelFailed, match=r"output classes: expected 8 rows, .* got 1 "):
        Checked(None, task=Detection(3, max_detections=5))(objects, BUCKETS[4])


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_rounding_errors_on_images_of_one_colour_are_not_compared(bucket: Bucket, mode: Mode) -> None:
    def rounding(images: Images) -> Outputs:
        (rows,) = scores(images)
        rows[plain(images)] *= 1e3 * np.random.default_rng(len(images)).normal(size=5)
        return (rows,)

    checked = Checked(rounding)
    verified = checked(scores, bucket, mode)
    assert (verified.fault, verified.is_dependent, checked.warnings) == (None, False, [])
    assert verified.difference is not None
    assert verified.difference.largest < 1e-6


def test_what_a_program_says_of_itself_is_said() -> None:
    checked = Checked(verification="off")
    compilation = Compilation(scores, 0.0, 0.0, warnings=("it assigns variables as it runs",))
    checked.verifier.verify(Mode.XLA, BUCKETS[0], compilation, lambda: compilation)
    assert checked.warnings == ["it assigns variables as it runs"]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_program_of_xla_with_one_row_beyond_rounding_is_refused(bucket: Bucket, place: str) -> None:
    def off(images: Images) -> Outputs:
        (rows,) = scores(images)
        rows[0 if place == "first" else -1] *= 1 + 5 * GROSS
        return (rows,)

    with pytest.raises(ModelFailed, match=f"mode xla, bucket {bucket}: it computes something other than its model"):
        Checked()(off, bucket)


def test_an_xla_program_little_beyond_rounding_is_reported_and_serves() -> None:
    checked = Checked()
    verified = checked(lambda images: (scores(images)[0] * np.float32(1 + 5 * EXACT),), BUCKETS[1])
    assert verified.fault is not None
    assert "something other than" in verified.fault.text
    assert not verified.fault.is_gross
    assert len(checked.warnings) == 1
    assert not checked.verifier.is_dependent


def test_rounding_is_not_refused() -> None:
    def rounded(images: Images) -> Outputs:
        (rows,) = scores(images)
        return (rows * np.float32(1 + 1e-4),)

    assert Checked()(rounded, BUCKETS[3]).fault is None


@pytest.mark.parametrize(("settings", "mode"), [({"verification": "warn"}, Mode.XLA), ({}, Mode.GRAPH)])
def test_what_is_not_to_be_refused_is_said(settings: dict[str, Any], mode: Mode) -> None:
    checked = Checked(**settings)
    verified = checked(lambda images: (scores(images)[0] * 2,), BUCKETS[1], mode)
    assert "something other than" in str(verified.fault)
    assert len(checked.warnings) == 1
    assert "bucket 2x12x12" in checked.warnings[0]
    assert not checked.verifier.is_dependent


def test_narrow_numbers_may_be_further_off_before_they_are_refused() -> None:
    checked = Checked(narrow={Mode.XLA: MAX_RELATIVE})
    assert checked(lambda images: (scores(images)[0] * np.float32(1.05),), BUCKETS[1]).fault is None
    assert checked(lambda images: (scores(images)[0] * np.float32(1.5),), BUCKETS[1]).fault
    assert len(checked.warnings) == 1


@pytest.mark.parametrize("most", [MAX_RELATIVE, MAX_RELATIVE_INT8])
@pytest.mark.parametrize("wrong", [rolled, doubled, zero], ids=lambda one: str(one.__name__))
def test_narrow_programs_that_compute_nonsense_are_refused(wrong: Executable, most: float) -> None:
    with pytest.raises(ModelFailed, match="it computes something other than its model"):
        Checked(narrow={Mode.XLA: most})(wrong, BUCKETS[4])
    warned = Checked(narrow={Mode.XLA: most}, verification="warn")
    assert warned(wrong, BUCKETS[4]).fault
    assert len(warned.warnings) == 1


def test_narrow_programs_of_single_numbers_far_off_are_served() -> None:
    def flipped(images: Images) -> Outputs:
        (rows,) = scores(images)
        rows[:, 0] = rows[:, 0] + np.where(np.arange(len(rows)) == 0, np.abs(rows).max(), 0)
        return (rows,)

    checked = Checked(narrow={Mode.XLA: MAX_RELATIVE})
    assert checked(flipped, BUCKETS[4]).fault
    assert len(checked.warnings) == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_programs_that_round_are_accepted(dtype: Any) -> None:
    checked = Checked(narrow={Mode.XLA: MAX_RELATIVE})
    rounded = checked(lambda images: (scores(images)[0].astype(dtype).astype(np.float32),), BUCKETS[4])
    assert rounded.fault is None
    assert not checked.warnings


def test_a_mode_that_is_narrow_does_not_make_another_less_exact() -> None:
    checked = Checked(narrow={Mode.OPENVINO: MAX_RELATIVE_INT8})
    assert checked(lambda images: (scores(images)[0] * np.float32(1.2),), BUCKETS[1], Mode.OPENVINO).fault is None
    with pytest.raises(ModelFailed, match="mode xla, bucket 2x12x12: it computes something other than its model"):
        checked(lambda images: (scores(images)[0] * np.float32(1.05),), BUCKETS[1], Mode.XLA)


def test_what_another_compiler_makes_is_refused_as_what_xla_does() -> None:
    with pytest.raises(ModelFailed, match="mode openvino, bucket"):
        Checked()(lambda images: (scores(images)[0] * 2,), BUCKETS[1], Mode.OPENVINO)


def test_nothing_is_compared_where_that_is_off() -> None:
    checked = Checked(verification="off")
    assert checked(lambda images: (scores(images)[0] * 2,), BUCKETS[2]) == Verified(None)
    assert checked.asked == []


def test_nan_and_infinity_are_counted_by_image_and_reported_by_bucket() -> None:
    def broken(images: Images) -> Outputs:
        (rows,) = scores(images)
        dark = images.mean(axis=(1, 2, 3)) < 127
        rows[dark, 0] = np.nan
        rows[dark, 1] = -np.inf
        return (rows,)

    checked = Checked(broken)
    for bucket in BUCKETS:
        verified = checked(broken, bucket)
        assert 0 < verified.not_finite < SAMPLE_IMAGES
        assert (verified.fault, verified.is_dependent) == (None, False)
    assert len(checked.warnings) == len(BUCKETS)
    assert "mode xla, bucket 4x12x12: NaN or infinity" in checked.warnings[3]


def test_nan_where_the_reference_has_numbers_is_refused() -> None:
    def broken(images: Images) -> Outputs:
        (rows,) = scores(images)
        rows[0, 0] = np.nan
        return (rows,)

    with pytest.raises(ModelFailed, match="largest difference inf"):
        Checked()(broken, BUCKETS[4])


def test_images_may_be_off_by_a_level_and_no_more() -> None:
    def image(images: Images, off_by: int = 0) -> Outputs:
        return (images // 2 + off_by,)

    checked = Checked(image, task=ImageToImage(Color.RGB))
    assert checked(partial(image, off_by=1), BUCKETS[3]).fault is None
    with pytest.raises(ModelFailed, match=r"largest difference 0\.0"):
        checked(partial(image, off_by=5), BUCKETS[3])


def test_class_maps_are_held_to_the_pixel_and_objects_may_change_places() -> None:
    def class_map(images: Images) -> Outputs:
        return (images[..., 0] // 64,)

    def other(images: Images) -> Outputs:
        return (np.where(images[..., 0] < 32, 9, images[..., 0] // 64).astype(np.uint8),)

    segmenting = Checked(class_map, task=Segmentation(10))
    assert segmenting(class_map, BUCKETS[3]).fault is None
    with pytest.raises(ModelFailed, match="agreement"):
        segmenting(other, BUCKETS[3])

    def objects(images: Images, first_is_other: bool = False) -> Outputs:
        (rows,) = scores(images)
        if first_is_other:
            np.add(rows[:1, :1], 1, out=rows[:1, :1])
        counts = np.zeros(len(rows), np.int32)
        return np.zeros((len(rows), 5, 4), np.float32), rows, np.zeros(rows.shape, np.int32), counts

    detecting = Checked(objects, task=Detection(3, max_detections=5))
    assert detecting(lambda images: objects(images, first_is_other=True), BUCKETS[4]).fault is None
    with pytest.raises(ModelFailed):
        detecting(lambda images: objects(255 - images), BUCKETS[4])


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("level", [0.0, 1.0, -3e38])
def test_a_single_number_that_is_none_is_seen(broken: float, rows: int, level: float) -> None:
    output = np.full((rows, 1000), level, np.float32)
    assert is_finite((np.zeros(3, np.int32), output))
    output[2, 500] = broken
    assert not is_finite((np.zeros(3, np.int32), output))
    output[2, 501:503] = np.inf, -np.inf
    assert not is_finite((np.zeros(3, np.int32), output))


def test_the_fastest_of_its_runs_is_noted() -> None:
    now = 0.0
    durations = iter([3.0, 0.5, *[2.0] * SAMPLE_IMAGES])

    def taking(images: Images) -> Outputs:
        nonlocal now
        now += next(durations)
        return scores(images)

    assert Checked(clock=lambda: now)(taking, BUCKETS[0]).fastest_s == 0.5
