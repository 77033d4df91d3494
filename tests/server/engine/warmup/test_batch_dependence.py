"""Models whose rows depend on each other, told apart from wrong programs."""

from __future__ import annotations

import numpy as np
import pytest
from tests.server.engine.warmup.verified_model import (
    BUCKETS,
    SIDE,
    Checked,
    Chosen,
    bright,
    by_place,
    by_size,
    centred,
    dark,
    plain,
    rolled,
    scores,
    summed,
)

from xlaserve.config import Bucket, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Executable, Outputs
from xlaserve.engine.warmup.sample import make_images
from xlaserve.engine.warmup.verify import EXACT, SAMPLE_IMAGES
from xlaserve.errors import ModelFailed


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
def test_a_program_that_divides_dependent_batches_is_not_taken_for_wrong(model: Executable) -> None:
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
    assert str(verified.fault).startswith("it answers the same batch differently each time: perhaps augmentation")
    assert not verified.is_dependent


@pytest.mark.parametrize("bucket", BUCKETS[1:])
def test_rows_whose_shape_depends_on_the_batch_make_a_model_dependent(bucket: Bucket) -> None:
    def beside_the_others(images: Images) -> Outputs:
        return (np.tile(scores(images)[0], (1, len(images))),)

    verified = Checked(beside_the_others)(beside_the_others, bucket)
    assert verified.is_dependent
    assert verified.fault is None


def test_rows_whose_shape_depends_on_the_image_are_refused() -> None:
    def found(images: Images) -> Outputs:
        return (np.zeros((len(images), int(images[0].max()) // 64), np.float32),)

    for reference in (found, None):
        with pytest.raises(ModelFailed, match="rows of one shape"):
            Checked(reference)(found, BUCKETS[0])
