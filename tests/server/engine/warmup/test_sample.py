from __future__ import annotations

import numpy as np
import pytest
from tests.server.engine.warmup.verified_model import BUCKETS, SIDE, Checked, dark, scores

from xlaserve.config import Bucket, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.engine.warmup.sample import make_images
from xlaserve.engine.warmup.verify import SAMPLE_IMAGES
from xlaserve.errors import ModelFailed


def test_images_differ_and_are_the_same_each_time() -> None:
    images = make_images(16, 20, 12)
    assert images.shape == (16, 20, 12, 3)
    np.testing.assert_array_equal(images, make_images(16, 20, 12))
    assert len(np.unique(images, axis=0)) == 16


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_images_have_the_models_channels_and_differ(channels: int) -> None:
    images = make_images(16, 20, 12, channels)
    assert images.shape == (16, 20, 12, channels)
    assert len(np.unique(images, axis=0)) == 16


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


def test_a_reference_that_leaves_images_out_refuses_what_fills_their_rows() -> None:
    def rest(images: Images) -> Outputs:
        return (scores(images)[0][~dark(images)],)

    with pytest.raises(ModelFailed, match="output scores: expected 1 row, one for each image of the batch, got 0 "):
        Checked(rest)(scores, BUCKETS[3])


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
