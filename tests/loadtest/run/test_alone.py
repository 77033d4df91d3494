from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from xlaserve_loadtest.run.alone import are_indistinct, references_of
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.references import References
from xlaserve_loadtest.targets.target import Array

ITEMS = 20
REQUESTS = [Request(b"", 2, "xla") for _ in range(4)]


def detections(seed: int) -> list[Array]:
    """Returns boxes, scores and classes of two images."""
    random = np.random.default_rng(seed)
    scores = -np.sort(-random.random((2, ITEMS)), axis=1)
    return [random.random((2, ITEMS, 4)) * 640, scores, random.integers(0, 80, (2, ITEMS))]


ALONE = [detections(seed) for seed in range(len(REQUESTS))]


def flickering(outputs: Sequence[Array], item: int) -> list[Array]:
    """Returns outputs with another box for one item, as where two boxes of equal score suppress each other."""
    boxes, *others = (output.copy() for output in outputs)
    boxes[1, item] += 20
    return [boxes, *others]


def shares(outputs: list[list[Array]], again: list[list[Array]]) -> list[float | None]:
    return [reference.share for reference in references_of(REQUESTS, outputs, again)]


def test_where_both_answers_are_the_same_nothing_may_differ() -> None:
    assert shares(ALONE, ALONE) == [0.0] * 4


def test_twice_as_much_may_differ_of_every_request_as_of_one_alone() -> None:
    again = [*ALONE[:2], flickering(ALONE[2], 7), ALONE[3]]
    assert shares(ALONE, again) == pytest.approx([2 / ITEMS] * 4)


def test_answers_mixed_up_are_found_where_others_differ_from_themselves() -> None:
    again = [flickering(own, 7) for own in ALONE]
    references = References(lambda: 0.0)
    references.learn(REQUESTS, references_of(REQUESTS, ALONE, again))
    for place, request in enumerate(REQUESTS):
        for outputs, is_right in (
            (flickering(ALONE[place], 3), True),
            (ALONE[place - 1], False),
            ([np.stack([own[0], other[1]]) for own, other in zip(ALONE[place], ALONE[place - 1], strict=True)], False),
        ):
            assert (references.fault(request, partial(list, outputs)) == "") == is_right


def test_answers_that_differ_alone_as_much_as_others_tell_nothing() -> None:
    again = [detections(100 + seed) for seed in range(len(REQUESTS))]
    assert shares(ALONE, again) == [None] * 4


def test_as_little_is_allowed_as_tells_a_request_from_those_like_it() -> None:
    alone = [ALONE[0], flickering(flickering(flickering(ALONE[0], 1), 2), 3), *ALONE[2:]]
    again = [*alone[:2], flickering(ALONE[2], 7), ALONE[3]]
    assert shares(alone, again) == pytest.approx([1.5 / ITEMS, 1.5 / ITEMS, 2 / ITEMS, 2 / ITEMS])


def test_requests_of_one_image_have_no_other_to_be_taken_for() -> None:
    outputs = [ALONE[0]] * 4
    assert shares(outputs, [flickering(ALONE[0], 7)] * 4) == pytest.approx([2 / ITEMS] * 4)


def test_answers_without_numbers_are_alike() -> None:
    assert shares([[]] * 4, [[]] * 4) == [0.0] * 4


def test_answers_to_other_requests_are_told_apart() -> None:
    near: list[list[Array]] = [[np.asarray(ALONE[0][1] * (1 + place / 1000), np.float64)] for place in range(4)]
    assert are_indistinct(REQUESTS, near)
    assert not are_indistinct(REQUESTS, [*near[:3], ALONE[3][1:2]])


def test_each_model_of_a_mix_has_a_share_of_its_own() -> None:
    requests = [Request(b"", 2, "xla", model) for model in (0, 0, 1, 1)]
    again = [flickering(ALONE[0], 7), *ALONE[1:]]
    found = [reference.share for reference in references_of(requests, ALONE, again)]
    assert found == pytest.approx([2 / ITEMS, 2 / ITEMS, 0, 0])
