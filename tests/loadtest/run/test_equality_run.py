from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.required import required

from xlaserve_loadtest.record.lines import Equality
from xlaserve_loadtest.run.equality_run import compare_outputs, incomparable
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets.target import ModelInfo

Outputs = Sequence[Sequence[np.ndarray[Any, Any]]]


@pytest.fixture
def scores() -> Outputs:
    return [[np.random.default_rng(seed).random((4, 10))] for seed in range(3)]


def compare(own: Outputs, other: Outputs) -> Equality:
    return compare_outputs("xla", "graph", [len(outputs[0]) for outputs in other], own, other)


def test_the_same_outputs_are_equal(scores: Outputs) -> None:
    found = compare(scores, scores)
    assert found.is_equal
    assert (found.largest_absolute, found.largest_relative, found.top1_agreement, found.images) == (0, 0, 1, 12)


def test_rounding_is_equal_and_its_size_is_told(scores: Outputs) -> None:
    shifted = [[output + 1e-4] for (output,) in scores]
    found = compare(shifted, scores)
    assert found.is_equal
    assert found.largest_absolute == pytest.approx(1e-4)
    assert 0 < found.largest_relative < 0.2


def test_one_wrong_number_is_not_equal(scores: Outputs) -> None:
    wrong = [[output.copy()] for (output,) in scores]
    wrong[2][0][3, 5] += 0.05
    found = compare(wrong, scores)
    assert not found.is_equal
    assert (found.differing, found.images) == (4, 12)
    assert found.largest_absolute == pytest.approx(0.05)


def test_another_order_of_images_is_seen_in_the_best_class(scores: Outputs) -> None:
    found = compare([[output[::-1]] for (output,) in scores], scores)
    assert not found.is_equal
    assert required(found.top1_agreement) < 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_is_not_equal(scores: Outputs, bad: float) -> None:
    wrong = [[output.copy()] for (output,) in scores]
    wrong[0][0][0, 0] = bad
    assert not compare(wrong, scores).is_equal
    assert not compare(wrong, wrong).is_equal


def test_minus_infinity_is_the_logarithm_of_0_where_both_have_it(scores: Outputs) -> None:
    logarithms = [[output.copy()] for (output,) in scores]
    logarithms[0][0][0, 0] = -np.inf
    assert compare(logarithms, logarithms).is_equal
    assert not compare(logarithms, scores).is_equal
    assert not compare(scores, logarithms).is_equal


def test_outputs_of_unknown_types_can_not_be_compared() -> None:
    info = ModelInfo("words", None, (Tensor("text", "BF16", (-1, 1)),), {}, "foreign")
    assert incomparable([info], [info]) == "they answer neither numbers nor strings"


def test_outputs_of_strings_can_be_compared() -> None:
    info = ModelInfo("words", None, (Tensor("text", "BYTES", (-1, 1)),), {}, "foreign")
    assert not incomparable([info], [info])


def test_why_outputs_can_not_be_compared_names_them_and_their_shapes() -> None:
    own, other = (
        ModelInfo("m", None, (Tensor("y", "FP32", (-1, sides, -1)), Tensor("z", "INT64", (-1,))), {}, "foreign")
        for sides in (4, 8)
    )
    assert incomparable([own], [other]) == "m answers y FP32 [n,4,?], z INT64 [n] against y FP32 [n,8,?], z INT64 [n]"


def test_other_shapes_are_not_equal(scores: Outputs) -> None:
    assert not compare([[output[:, :9]] for (output,) in scores], scores).is_equal


def test_small_scores_are_held_against_the_largest_not_against_one() -> None:
    small = [[np.full((2, 1000), 1e-3)]]
    wrong = [[np.full((2, 1000), 1.5e-3)]]
    assert not compare(wrong, small).is_equal


def test_outputs_that_are_not_scores_have_no_best_class() -> None:
    boxes = [[np.ones((2, 100, 4))]]
    assert compare(boxes, boxes).top1_agreement is None


def test_whole_numbers_are_the_same_or_not() -> None:
    maps = [[np.zeros((2, 100, 100), np.int64)]]
    hardly = [[maps[0][0].copy()]]
    hardly[0][0][0, 0, :20] = 9
    assert compare(hardly, maps).is_equal
    hardly[0][0][0, 0, 20] = 9
    assert not compare(hardly, maps).is_equal
    assert compare(maps, maps).top1_agreement is None


def test_the_tolerance_is_that_of_the_output_which_is_furthest_off() -> None:
    boxes = np.array([[[0.0, 0.0, 640.0, 640.0]]])
    found = compare([[boxes + 0.5, np.array([[0.3]])]], [[boxes, np.array([[0.9]])]])
    assert not found.is_equal
    assert (found.largest_absolute, found.tolerance_absolute) == pytest.approx((0.6, 0.0009))
