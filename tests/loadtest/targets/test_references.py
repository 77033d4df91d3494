from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets import ties
from xlaserve_loadtest.targets.references import MAX_NUMBERS, TIME_SHARE, Reference, References
from xlaserve_loadtest.targets.target import Array
from xlaserve_loadtest.targets.tolerance import slacks_of, within


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
    references.learn(own, [Reference([SCORES + place, CLASSES + place]) for place in range(len(own))])
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
    references.learn(own, [Reference([np.array([[most, 0.0]])]) for most in (1000.0, 1.0)])
    assert references.fault(own[0], lambda: [np.array([[1000.0, 0.5]])]) == ""
    assert references.fault(own[1], lambda: [np.array([[1.0, 0.5]])])


def test_scores_beside_boxes_in_pixels_have_a_tolerance_of_their_own() -> None:
    boxes = np.array([[[0.0, 0.0, 640.0, 640.0]]])
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [Reference([boxes, np.array([[0.9]])])])
    assert references.fault(own, lambda: [boxes + 0.5, np.array([[0.3]])])
    assert references.fault(own, lambda: [boxes + 0.5, np.array([[0.9]])]) == ""


def test_every_number_of_a_large_output_is_compared_in_turn() -> None:
    alone = np.ones((3, MAX_NUMBERS))
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [Reference([alone])])
    wrong = alone.copy()
    wrong[2, -1] = 2.0
    found = [references.fault(own, lambda: [wrong]) for _ in range(3)]
    assert [bool(fault) for fault in found].count(True) == 1
    assert references.fault(own, lambda: [alone[:2]])


ITEMS = 20


def detections(seed: int, images: int = 2) -> list[Array]:
    """Returns boxes, scores and classes of an image and its copies: the second and third object are as good."""
    random = np.random.default_rng(seed)
    scores = np.sort(random.random(ITEMS))[::-1].copy()
    scores[2] = scores[1]
    boxes, classes = random.random((ITEMS, 4)) * 640, random.integers(0, 80, ITEMS)
    return [np.stack([output] * images) for output in (boxes, scores, classes)]


def moved(outputs: Sequence[Array], image: int, order: Sequence[int]) -> list[Array]:
    """Returns outputs of which the first items of an image are in another order."""
    found = [output.copy() for output in outputs]
    for ours, theirs in zip(found, outputs, strict=True):
        ours[image, : len(order)] = theirs[image, order]
    return found


def mixed_up(image: int) -> list[Array]:
    found = [output.copy() for output in detections(0)]
    for ours, others in zip(found, detections(1), strict=True):
        ours[image] = others[image]
    return found


def with_another_box(image: int) -> list[Array]:
    boxes, scores, classes = (output.copy() for output in detections(0))
    boxes[image, 5] += 20
    return [boxes, scores, classes]


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        (detections(0), True),
        (moved(detections(0), 1, [0, 2, 1]), True),
        (moved(detections(0), 1, [1, 0, 2]), False),
        (moved(detections(0), 0, [19, *range(1, 19), 0]), False),
        (mixed_up(0), False),
        (mixed_up(1), False),
        (with_another_box(1), False),
        ([output[:1] for output in detections(0)], False),
    ],
    ids=["same", "tie", "no tie", "ends", "first mixed up", "second mixed up", "other box", "fewer images"],
)
def test_objects_of_equal_score_may_change_places_and_nothing_else(outputs: list[Array], *, is_right: bool) -> None:
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [Reference(detections(0))])
    assert (references.fault(own, lambda: outputs) == "") == is_right


def test_scores_of_a_classifier_never_change_places() -> None:
    (own,) = requests(1)
    scores = np.array([[0.9, 0.5, 0.5, 0.2]])
    references = References(Clock())
    references.learn([own], [Reference([scores, scores[:, :2]])])
    assert references.fault(own, lambda: [scores[:, [1, 0, 2, 3]], scores[:, :2]])


def test_where_all_scores_are_equal_nothing_changes_places() -> None:
    (own,) = requests(1)
    ones, numbers = np.ones((2, 4)), np.arange(8.0).reshape(2, 4)
    references = References(Clock())
    references.learn([own], [Reference([ones, numbers])])
    assert references.fault(own, lambda: [ones, numbers[:, ::-1]])


@pytest.mark.parametrize("share", [0.0, 2 / ITEMS])
def test_what_differs_alone_may_differ_as_much_under_load(share: float) -> None:
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [Reference(detections(0), share)])
    assert (references.fault(own, lambda: with_another_box(1)) == "") == (share > 0)
    assert references.fault(own, lambda: mixed_up(1))


def test_what_differs_alone_may_differ_in_a_large_output_too() -> None:
    alone = np.ones((2, MAX_NUMBERS))
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [Reference([alone], share=0.25)])
    for columns, is_right in ((MAX_NUMBERS // 5, True), (MAX_NUMBERS // 2, False)):
        other = alone.copy()
        other[:, :columns] = 2.0
        assert (references.fault(own, partial(list, [other])) == "") == is_right


def test_a_request_whose_answers_tell_nothing_is_not_compared() -> None:
    (own,) = requests(1)
    references = References(Clock())
    references.learn([own], [Reference([SCORES], share=None)])
    assert references.fault(own, lambda: [SCORES + 1]) == ""
    assert references.compared == 0


def test_telling_answers_apart_compares_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, items = 0, 300

    def counted(ours: Array, theirs: Array, slack: float) -> NDArray[np.bool_]:
        nonlocal compared
        same = within(ours, theirs, slack)
        compared += same.size
        return same

    monkeypatch.setattr(ties, "within", counted)
    random = np.random.default_rng(0)
    scores = np.linspace(1, 0, items)[None]
    ours: list[Array] = [random.random((1, items, 4)), scores, random.integers(0, 80, (1, items))]
    theirs: list[Array] = [random.random((1, items, 4)), scores, ours[2]]
    assert not ties.are_all_alike(ours, theirs, slacks_of([theirs]))
    assert items**2 <= compared < 2 * items**2
