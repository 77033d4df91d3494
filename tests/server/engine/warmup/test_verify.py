from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import Compilation, Executable, Images, Outputs, is_finite
from xlaserve.engine.warmup.difference import MAX_RELATIVE, MAX_RELATIVE_INT8, make_images
from xlaserve.engine.warmup.verify import EXACT, GROSS, SAMPLE_IMAGES, Verified, Verifier
from xlaserve.errors import ModelFailed
from xlaserve.models.task import Classification, Detection, Segmentation

SIDE = 12
BUCKETS = tuple(Bucket(batch, SIDE, SIDE) for batch in (1, 2, 3, 4, 8, 16, 20))
WEIGHTS = np.random.default_rng(1).normal(size=(SIDE * SIDE * 3, 5))


def scores(images: Images) -> Outputs:
    """A model whose rows do not depend on each other."""
    return ((images.reshape(len(images), -1) / 255 @ WEIGHTS).astype(np.float32),)


def centred(images: Images) -> Outputs:
    """A model whose rows do."""
    (rows,) = scores(images)
    return (rows - rows.mean(axis=0),)


def summed(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (rows + 0.1 * rows.sum(axis=0),)


def by_place(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (rows * np.arange(1, len(rows) + 1, dtype=np.float32)[:, np.newaxis],)


def by_size(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (rows * np.float32(len(rows)),)


def rolled(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (np.roll(rows, 1, axis=0),)


class Checked:
    """A verifier, and its inputs and warnings."""

    def __init__(self, reference: Callable[[Images], Outputs] | None = scores, **settings: object) -> None:
        self.warnings: list[str] = []
        self.asked: list[int] = []

        def asked(images: Images) -> Outputs:
            self.asked.append(len(images))
            assert reference is not None
            return reference(images)

        given = {"task": Classification(5), "buckets": BUCKETS, **settings}
        self.verifier = Verifier(reference=reference and asked, warn=self.warnings.append, **given)  # type: ignore[arg-type]

    def __call__(self, run: Executable, bucket: Bucket, mode: Mode = Mode.XLA) -> Verified:
        compilation = Compilation(run, 0.0, 0.0)
        _, verified = self.verifier.verify(
            mode, bucket, compilation, lambda: pytest.fail("nothing is to be made again")
        )
        return verified


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


def dark(images: Images) -> Any:
    return images.mean(axis=(1, 2, 3)) < 20


def bright(images: Images) -> Any:
    return images.min(axis=(1, 2, 3)) > 250


def plain(images: Images) -> Any:
    return images.std(axis=(1, 2)).max(axis=1) < 1


Chosen = Callable[[Images], Any]


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


def test_a_reference_that_leaves_images_out_refuses_what_fills_their_rows() -> None:
    def rest(images: Images) -> Outputs:
        return (scores(images)[0][~dark(images)],)

    with pytest.raises(ModelFailed, match="output scores: expected 1 row, one for each image of the batch, got 0 "):
        Checked(rest)(scores, BUCKETS[3])


@pytest.mark.parametrize("chosen", [dark, bright, plain])
@pytest.mark.parametrize(
    ("bucket", "has_reference"),
    [*((bucket, True) for bucket in BUCKETS[1:]), *((bucket, False) for bucket in BUCKETS if bucket.batch >= 8)],
)
def test_a_model_that_moves_other_images_to_the_place_of_one_is_dependent(
    bucket: Bucket, has_reference: bool, chosen: Chosen
) -> None:
    def moved(images: Images) -> Outputs:
        (rows,) = scores(images)
        left = rows[~chosen(images)]
        return (np.concatenate([left, np.zeros((len(rows) - len(left), 5), np.float32)]),)

    assert Checked(moved if has_reference else None)(moved, bucket).is_dependent


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_rounding_errors_that_images_of_one_colour_are_answered_with_are_not_compared(
    bucket: Bucket, mode: Mode
) -> None:
    def rounding(images: Images) -> Outputs:
        (rows,) = scores(images)
        rows[plain(images)] *= 1e3 * np.random.default_rng(len(images)).normal(size=5)
        return (rows,)

    checked = Checked(rounding)
    verified = checked(scores, bucket, mode)
    assert (verified.fault, verified.is_dependent, checked.warnings) == (None, False, [])
    assert verified.difference is not None
    assert verified.difference.largest < 1e-6


def test_a_kept_program_of_other_rows_is_made_anew() -> None:
    kept = Compilation(lambda images: (scores(images)[0][1:],), 0.0, 0.0, from_cache=True)
    again = Compilation(scores, 1.0, 1.0)
    compilation, verified = Checked().verifier.verify(Mode.XLA, BUCKETS[2], kept, lambda: again)
    assert (compilation, verified.fault) == (again, None)


@pytest.mark.parametrize(
    ("verification", "wrong"),
    [
        ("refuse", lambda images: (scores(images)[0] * 2,)),
        ("refuse", rolled),
        *((verification, lambda images: (scores(images)[0][1:],)) for verification in ("refuse", "warn", "off")),
    ],
)
def test_a_program_that_is_wrong_with_lowerings_serves_without(verification: str, wrong: Executable) -> None:
    told = []

    def unlowered(error: Exception) -> Compilation:
        told.append(str(error))
        return Compilation(scores, 0.0, 0.0, warnings=("without lowerings",))

    checked = Checked(verification=verification)
    lowered = Compilation(wrong, 0.0, 0.0, unlowered=unlowered)
    compilation, verified = checked.verifier.verify(Mode.XLA, BUCKETS[3], lowered, lambda: lowered)
    assert compilation.executable is scores
    assert verified.fault is None
    assert len(told) == 1
    assert checked.warnings == ["without lowerings"]


def test_a_program_that_is_right_is_made_once() -> None:
    lowered = Compilation(scores, 0.0, 0.0, unlowered=lambda error: pytest.fail("nothing is to be made again"))
    compilation, _ = Checked().verifier.verify(Mode.XLA, BUCKETS[3], lowered, lambda: lowered)
    assert compilation is lowered


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


def test_a_program_of_xla_that_is_off_by_little_more_than_rounding_is_said_and_serves() -> None:
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


def test_narrow_numbers_may_be_further_off_and_are_never_refused() -> None:
    checked = Checked(narrow={Mode.XLA: MAX_RELATIVE})
    assert checked(lambda images: (scores(images)[0] * np.float32(1.05),), BUCKETS[1]).fault is None
    assert checked(lambda images: (scores(images)[0] * np.float32(1.5),), BUCKETS[1]).fault
    assert len(checked.warnings) == 1


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


def test_the_reference_takes_each_image_alone_and_once_for_all_programs() -> None:
    checked = Checked()
    for bucket in BUCKETS:
        for mode in (Mode.XLA, Mode.GRAPH):
            checked(scores, bucket, mode)
    assert checked.asked == [1] * SAMPLE_IMAGES


def test_a_resolution_that_was_forgotten_is_sampled_anew() -> None:
    checked = Checked()
    checked(scores, BUCKETS[2])
    checked.verifier.forget(SIDE, SIDE)
    checked(scores, BUCKETS[2])
    assert checked.asked == [1] * 2 * SAMPLE_IMAGES


@pytest.mark.parametrize("batch", [3, 32])
def test_a_model_with_one_size_of_batch_is_given_no_other(batch: int) -> None:
    def fixed(images: Images) -> Outputs:
        assert len(images) == batch
        return scores(images)

    bucket = Bucket(batch, SIDE, SIDE)
    checked = Checked(fixed, buckets=[bucket])
    assert checked(fixed, bucket).fault is None
    with pytest.raises(ModelFailed, match="something other than"):
        checked(lambda images: (scores(images)[0] * 2,), bucket)


@pytest.mark.parametrize("bucket", BUCKETS[1:])
@pytest.mark.parametrize(
    ("model", "has_reference"),
    [
        *((model, has_reference) for model in (centred, summed, by_place, rolled) for has_reference in (True, False)),
        (by_size, True),
    ],
)
def test_rows_that_depend_on_each_other_are_found(bucket: Bucket, model: Executable, has_reference: bool) -> None:
    checked = Checked(model if has_reference else None)
    verified = checked(model, bucket)
    assert verified.is_dependent
    assert verified.fault is None
    assert verified.dependence > 0.01
    assert checked.verifier.is_dependent
    assert len(checked.warnings) == 1
    assert "served in batches of one" in checked.warnings[0]


@pytest.mark.parametrize("bucket", BUCKETS[1:4])
@pytest.mark.parametrize("image", range(SAMPLE_IMAGES))
def test_dependence_is_found_whichever_image_is_furthest_off(bucket: Bucket, image: int) -> None:
    furthest = make_images(SAMPLE_IMAGES, SIDE, SIDE)[image]

    def rounded(images: Images) -> Outputs:
        is_furthest = (images == furthest).all(axis=(1, 2, 3))
        return (centred(images)[0] * np.where(is_furthest, 1 + EXACT / 10, 1)[:, np.newaxis],)

    assert Checked(centred, buckets=[bucket])(rounded, bucket).is_dependent


@pytest.mark.parametrize("model", [centred, summed, by_size])
def test_a_program_that_divides_the_batches_of_such_a_model_is_not_taken_for_a_wrong_one(model: Executable) -> None:
    def divided(images: Images) -> Outputs:
        return (np.concatenate([model(images[start : start + 2])[0] for start in range(0, len(images), 2)]),)

    assert Checked(model)(divided, BUCKETS[4]).is_dependent
    if model is not by_size:  # batches of one size only, and no other to compare with
        assert Checked(model, buckets=[BUCKETS[4]])(divided, BUCKETS[4]).is_dependent
        assert Checked(None)(divided, BUCKETS[4]).is_dependent
    with pytest.raises(ModelFailed, match="depends on the others of its batch"):
        Checked(model, batch_dependence="refuse")(divided, BUCKETS[4])
    with pytest.raises(ModelFailed, match="something other than"):
        Checked(model, batch_dependence="allow")(divided, BUCKETS[4])


def test_a_model_that_depends_on_its_company_passes_alone() -> None:
    assert Checked(centred)(centred, BUCKETS[0]).is_dependent is False


def test_a_program_that_mixes_rows_of_a_model_that_does_not_is_refused() -> None:
    with pytest.raises(ModelFailed, match="something other than"):
        Checked(scores)(rolled, BUCKETS[4])


def test_dependence_is_refused_or_allowed_as_configured() -> None:
    with pytest.raises(ModelFailed, match="depends on the others of its batch"):
        Checked(centred, batch_dependence="refuse")(centred, BUCKETS[3])
    checked = Checked(centred, batch_dependence="allow")
    assert checked(centred, BUCKETS[3]).is_dependent
    assert not checked.verifier.is_dependent
    assert len(checked.warnings) == 1


def test_answers_that_change_from_run_to_run_are_no_dependence() -> None:
    runs = 0

    def counting(images: Images) -> Outputs:
        nonlocal runs
        runs += 1
        return (scores(images)[0] + runs,)

    checked = Checked()
    verified = checked(counting, BUCKETS[2], Mode.GRAPH)
    assert str(verified.fault) == "it answers the same batch differently each time"
    assert not verified.is_dependent


def test_nan_and_infinity_are_counted_by_image_and_said_with_mode_and_bucket() -> None:
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
            rows[:1, :1] += 1
        counts = np.zeros(len(rows), np.int32)
        return np.zeros((len(rows), 5, 4), np.float32), rows, np.zeros(rows.shape, np.int32), counts

    detecting = Checked(objects, task=Detection(3, max_detections=5))
    assert detecting(lambda images: objects(images, first_is_other=True), BUCKETS[4]).fault is None
    with pytest.raises(ModelFailed):
        detecting(lambda images: objects(255 - images), BUCKETS[4])


def test_a_wrong_program_of_the_compile_cache_is_forgotten_and_made_anew() -> None:
    forgotten = []
    kept = Compilation(
        lambda images: (scores(images)[0] * 2,), 0.0, 0.0, from_cache=True, forget=lambda: forgotten.append(True)
    )
    again = Compilation(scores, 1.0, 1.0)
    compilation, verified = Checked().verifier.verify(Mode.XLA, BUCKETS[2], kept, lambda: again)
    assert compilation is again
    assert verified.fault is None
    assert forgotten == [True]


def doubled(images: Images) -> Outputs:
    return (scores(images)[0] * 2,)


def classes(images: Images, off_by: int = 0) -> Outputs:
    """Class maps, of which all pixels but every fourth are another class."""
    maps = np.broadcast_to(images.max(axis=(1, 2, 3))[:, None], (len(images), 40)).astype(np.uint8)
    maps[:, np.arange(40) % 4 > 0] += off_by
    return (maps,)


class Kept:
    """A compile cache of one program, and what it knows of it."""

    def __init__(self, run: Executable, **settings: Any) -> None:
        self.settings = {"narrow": {Mode.XLA: MAX_RELATIVE}, **settings}
        self.known: float | None = None
        self.made_again = 0
        self.run = run
        self.start(from_cache=False)

    def start(self, run: Executable | None = None, *, from_cache: bool = True, **settings: Any) -> None:
        """Verifies the kept program, or `run` in its place, as a start does."""
        kept = replace(self._compiled(), executable=run or self.run, from_cache=from_cache)
        Checked(**{**self.settings, **settings}).verifier.verify(Mode.XLA, BUCKETS[2], kept, self._again)

    def _again(self) -> Compilation:
        self.made_again += 1
        return self._compiled()

    def _compiled(self) -> Compilation:
        return Compilation(self.run, 1.0, 1.0, difference=self.known, keep_difference=partial(setattr, self, "known"))


def by_half(images: Images) -> Outputs:
    return (scores(images)[0] * np.float32(1.5),)


def test_a_kept_program_that_is_as_far_off_as_when_it_was_made_is_not_made_again() -> None:
    kept = Kept(doubled)
    assert kept.known == pytest.approx(1.0)
    kept.start()
    kept.start(lambda images: (scores(images)[0] * np.float32(2.05),))
    assert kept.made_again == 0
    assert kept.known == pytest.approx(1.0)
    kept.start(by_half)
    assert kept.made_again == 1


def test_how_far_class_maps_are_off_is_counted_in_pixels() -> None:
    kept = Kept(partial(classes, off_by=1), task=Segmentation(300), reference=classes)
    assert kept.known == pytest.approx(0.75)
    kept.start()
    assert kept.made_again == 0
    kept.start(lambda images: (classes(images)[0] + np.uint8(1),))
    assert kept.made_again == 1


def test_a_program_that_is_right_leaves_nothing_of_one_before_it_that_was_not() -> None:
    kept = Kept(doubled)
    kept.run = scores
    kept.start(by_half)
    assert (kept.made_again, kept.known) == (1, 0.0)
    kept.start()
    kept.start(doubled)
    assert (kept.made_again, kept.known) == (2, 0.0)


def test_how_far_a_program_is_off_is_kept_only_where_it_is_a_number() -> None:
    def broken(images: Images) -> Outputs:
        (rows,) = scores(images)
        rows[0, 0] = np.inf
        return (rows,)

    kept = Kept(broken)
    assert kept.known is None
    kept.start()
    assert kept.made_again == 1


def test_a_program_that_answers_differently_each_time_is_made_again_each_time() -> None:
    calls = count(2)
    kept = Kept(lambda images: (scores(images)[0] * np.float32(next(calls)),))
    kept.start()
    assert (kept.made_again, kept.known) == (1, None)


def test_a_program_that_is_to_be_refused_is_made_again_whatever_is_known_of_it() -> None:
    kept = Kept(doubled, narrow={}, verification="warn")
    kept.start()
    assert kept.made_again == 0
    assert kept.known == pytest.approx(1.0)
    with pytest.raises(ModelFailed):
        kept.start(verification="refuse")
    assert kept.made_again == 1


def test_a_reference_that_fails_fails_no_model_and_is_said() -> None:
    def missing(images: Images) -> Outputs:
        raise NotImplementedError("no kernel")

    checked = Checked(missing)
    for bucket in BUCKETS:
        assert checked(scores, bucket).difference is None
    assert checked.warnings == [
        "its programs are served unverified: TensorFlow can't run the model operation by operation:"
        " NotImplementedError: no kernel"
    ]


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
