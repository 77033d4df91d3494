from __future__ import annotations

import numpy as np
import pytest

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets import Cost
from xlaserve.engine.compiler import Warmed
from xlaserve.engine.difference import LEAST_IMAGES, Difference, compare, make_images, measure
from xlaserve.engine.program import Images, Outputs


class TopClass:
    def comparable(self, outputs: Outputs) -> Outputs:
        return outputs

    def agreement(self, wanted: Outputs, got: Outputs) -> float:
        return float(np.mean(wanted[0].argmax(axis=1) == got[0].argmax(axis=1)))


def scores(*rows: list[float]) -> Outputs:
    return (np.array(rows, np.float32),)


def test_the_largest_difference_is_a_share_of_the_largest_number() -> None:
    wanted = [scores([0.0, 10.0]), scores([4.0, -20.0])]
    got = [scores([1.0, 10.0]), scores([4.0, -20.0])]
    assert compare(wanted, got, TopClass()) == Difference(largest=0.05, agreement=1.0, images=2)


def test_the_agreement_is_of_all_batches() -> None:
    wanted = [scores([0, 1], [1, 0]), scores([0, 1], [1, 0])]
    got = [scores([1, 0], [1, 0]), scores([0, 1], [1, 0])]
    assert compare(wanted, got, TopClass()).agreement == 0.75


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_no_number_is_infinitely_far(broken: float) -> None:
    found = compare([scores([1, 0])], [scores([broken, 0])], TopClass())
    assert found.largest == np.inf
    assert found.is_large


def test_whole_numbers_have_no_distance() -> None:
    maps = (np.array([[1, 2]], np.int32),)
    found = compare([maps], [(maps[0] + 1,)], TopClass())
    assert found.largest == 0.0


@pytest.mark.parametrize(
    ("largest", "agreement", "is_large"), [(0.05, 1.0, False), (0.05, None, False), (0.2, 1.0, True), (0.0, 0.9, True)]
)
def test_a_large_difference_or_a_small_agreement_deserves_a_warning(
    largest: float, agreement: float | None, is_large: bool
) -> None:
    assert Difference(largest, agreement, 16).is_large is is_large


@pytest.mark.parametrize("batch", [1, 3, 16, 40])
def test_images_fill_batches_and_are_the_same_each_time(batch: int) -> None:
    batches = make_images(Bucket(batch, 20, 12))
    assert {images.shape for images in batches} == {(batch, 20, 12, 3)}
    assert len(batches) * batch >= LEAST_IMAGES
    np.testing.assert_array_equal(batches, make_images(Bucket(batch, 20, 12)))
    assert len(np.unique(np.concatenate(batches), axis=0)) == len(batches) * batch


def test_every_mode_is_held_against_the_reference_on_one_bucket() -> None:
    ran: list[tuple[Mode | None, int]] = []

    def run(mode: Mode | None, factor: float) -> Warmed:
        def executable(images: Images) -> Outputs:
            ran.append((mode, len(images)))
            return (images.reshape(len(images), -1) * np.float32(factor),)

        return Warmed(executable, Cost(1, 1))

    programs = {
        (mode, Bucket(batch, 4, 4)): run(mode, factor)
        for mode, factor in ((Mode.XLA, 1.0), (Mode.GRAPH, 1.5))
        for batch in (1, 8, 64)
    }
    found = measure(programs, run(None, 1.0).executable, TopClass())
    assert {mode: difference.largest for mode, difference in found.items()} == {Mode.XLA: 0.0, Mode.GRAPH: 0.5}
    assert {batch for _, batch in ran} == {8}


def test_only_what_can_be_compared_counts() -> None:
    class Scores(TopClass):
        def comparable(self, outputs: Outputs) -> Outputs:
            return outputs[1:]

    boxes, sure = np.ones((2, 4), np.float32), np.ones((2, 1), np.float32)
    assert compare([(boxes, sure)], [(boxes * 9, sure)], Scores()).largest == 0.0
