from __future__ import annotations

import numpy as np
import pytest

from xlaserve.engine.program import Outputs
from xlaserve.engine.warmup.difference import Difference, by_row, compare, relative


class TopClass:
    outputs = ()
    least_alike = 1.0
    rounding = 0.0

    def comparable(self, outputs: Outputs) -> Outputs:
        return outputs

    def agreement(self, wanted: Outputs, got: Outputs) -> float:
        return float(np.mean(wanted[0].argmax(axis=1) == got[0].argmax(axis=1)))


def scores(*rows: list[float]) -> Outputs:
    return (np.array(rows, np.float32),)


def test_the_largest_difference_is_a_share_of_the_largest_number() -> None:
    wanted = scores([0.0, 10.0], [4.0, -20.0])
    got = scores([1.0, 10.0], [4.0, -20.0])
    assert compare(wanted, got, TopClass()) == Difference(largest=0.05, agreement=1.0, images=2)


def test_the_agreement_is_of_all_images() -> None:
    wanted = scores([0, 1], [1, 0], [0, 1], [1, 0])
    got = scores([1, 0], [1, 0], [0, 1], [1, 0])
    assert compare(wanted, got, TopClass()).agreement == 0.75


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_no_number_is_infinitely_far(broken: float) -> None:
    found = compare(scores([1, 0]), scores([broken, 0]), TopClass())
    assert found.largest == np.inf
    assert found.is_large()


def test_whole_numbers_have_no_distance() -> None:
    maps = (np.array([[1, 2]], np.int32),)
    found = compare(maps, (maps[0] + 1,), TopClass())
    assert found.largest == 0.0


@pytest.mark.parametrize(
    ("largest", "agreement", "is_large"), [(0.05, 1.0, False), (0.05, None, False), (0.2, 1.0, True), (0.0, 0.9, True)]
)
def test_a_large_difference_or_a_small_agreement_deserves_a_warning(
    largest: float, agreement: float | None, is_large: bool
) -> None:
    assert Difference(largest, agreement, 16).is_large() is is_large


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_the_same_that_is_no_number_is_no_difference(broken: float) -> None:
    wanted, got = np.array([[broken, 4.0]], np.float32), np.array([[broken, 5.0]], np.float32)
    assert relative(wanted, got) == 0.25
    assert relative(wanted, -wanted) == (2.0 if np.isnan(broken) else np.inf)


def test_each_row_is_as_far_as_its_furthest_number_or_share_of_integers() -> None:
    floats, integers = scores([0.0, 10.0], [0.0, 1.0], [0.0, 1.0])[0], np.zeros((3, 4), np.int32)
    off, other = floats.copy(), integers.copy()
    off[1, 0], other[2, :3] = 5.0, 1
    np.testing.assert_array_equal(by_row((floats, integers), (off, other)), [0.0, 0.5, 0.75])


def test_only_what_can_be_compared_counts() -> None:
    class Scores(TopClass):
        def comparable(self, outputs: Outputs) -> Outputs:
            return outputs[1:]

    boxes, sure = np.ones((2, 4), np.float32), np.ones((2, 1), np.float32)
    assert compare((boxes, sure), (boxes * 9, sure), Scores()).largest == 0.0


def test_rows_of_another_shape_are_infinitely_far() -> None:
    wanted, got = scores([0, 1], [1, 0]), scores([0], [1])
    assert compare(wanted, got, TopClass()).largest == np.inf
    assert by_row(wanted, got).tolist() == [np.inf, np.inf]
