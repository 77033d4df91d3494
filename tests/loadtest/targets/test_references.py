from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.references import MAX_NUMBERS, TIME_SHARE, References
from xlaserve_loadtest.targets.target import Array


class Clock:
    """A clock that moves by `step_s` at each look."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 100.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


SCORES, CLASSES = np.linspace(0, 1, 20).reshape(2, 10), np.arange(2000).reshape(2, 1000)


def requests(count: int) -> list[Request]:
    return [Request(b"", 2, "xla") for _ in range(count)]


def learned(clock: Clock, own: Sequence[Request]) -> References:
    references = References(clock)
    references.learn(own, [[SCORES + place, CLASSES + place] for place in range(len(own))])
    return references


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        ([SCORES, CLASSES], True),
        ([SCORES * 1.005, CLASSES], True),
        ([SCORES[::-1], CLASSES], False),
        ([SCORES, CLASSES[::-1]], False),
        ([SCORES, np.where(CLASSES == 7, 8, CLASSES)], True),
        ([SCORES[:1], CLASSES], False),
        ([SCORES], False),
        ([SCORES + 1, CLASSES + 1], False),
    ],
)
def test_scores_and_classes_are_those_that_the_same_request_got_alone(outputs: list[Array], *, is_right: bool) -> None:
    own = requests(2)
    references = learned(Clock(), own)
    assert (references.fault(own[0], lambda: outputs) == "") == is_right
    assert (references.compared, references.differing) == (1, int(not is_right))
    references.reset()
    assert references.fault(own[1], lambda: [SCORES + 1, CLASSES + 1]) == ""
    assert (references.compared, references.differing) == (1, 0)


def test_what_was_not_asked_alone_is_not_compared() -> None:
    references = learned(Clock(), requests(1))
    assert references.fault(requests(1)[0], list) == ""
    assert references.compared == 0


def test_comparing_takes_a_hundredth_of_the_time_at_most() -> None:
    own, clock = requests(1), Clock()
    references = learned(clock, own)

    def slow() -> list[Array]:
        clock.now_s += 0.5
        return [SCORES, CLASSES]

    began_s = clock.now_s
    for _ in range(100_000):
        references.fault(own[0], slow)
        clock.now_s += 0.01
    # The first comparison is due at once.
    assert (references.compared - 1) * 0.5 == pytest.approx(TIME_SHARE * (clock.now_s - began_s), rel=0.03)


def test_each_model_of_a_mix_has_a_tolerance_of_its_own() -> None:
    own = [Request(b"", 1, "xla", model) for model in (0, 1)]
    references = References(Clock())
    references.learn(own, [[np.array([[1000.0, 0.0]])], [np.array([[1.0, 0.0]])]])
    assert references.fault(own[0], lambda: [np.array([[1000.0, 0.5]])]) == ""
    assert references.fault(own[1], lambda: [np.array([[1.0, 0.5]])])


def test_scores_beside_boxes_in_pixels_have_a_tolerance_of_their_own() -> None:
    boxes = np.array([[[0.0, 0.0, 640.0, 640.0]]])
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [[boxes, np.array([[0.9]])]])
    assert references.fault(own, lambda: [boxes + 0.5, np.array([[0.3]])])
    assert references.fault(own, lambda: [boxes + 0.5, np.array([[0.9]])]) == ""


def test_every_number_of_a_large_output_is_compared_in_turn() -> None:
    alone = np.ones((3, MAX_NUMBERS))
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [[alone]])
    wrong = alone.copy()
    wrong[2, -1] = 2.0
    found = [references.fault(own, lambda: [wrong]) for _ in range(3)]
    assert [bool(fault) for fault in found].count(True) == 1
    assert references.fault(own, lambda: [alone[:2]])
