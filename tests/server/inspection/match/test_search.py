from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xlaserve.config import Decoding, Fit, ResizeFilter, ResizeLibrary, ResizeSettings
from xlaserve.engine.warmup.difference import Difference
from xlaserve.inspection.match.answers import Rows
from xlaserve.inspection.match.choices import RECIPES, Changes, Choice, Part, combinations, is_possible, recipe_rank
from xlaserve.inspection.match.search import FEW_IMAGES, NEAREST, search
from xlaserve.models.examples import Compared

SCALE = Choice("scale", Part.SCALE, "a", ("a", "b", "c"))
COLOR = Choice("color", Part.COLOR, "rgb", ("rgb", "bgr"))
FIT = Choice("fit", Part.PLACE, "resize", ("resize", "pad", "letterbox"))
FILTER = Choice("filter", Part.PLACE, 0, tuple(range(5)))
CHOICES = (SCALE, COLOR, FIT, FILTER)
TOTAL = 3 * 2 * 3 * 5


class World:
    """Answers that are off by a number for each setting that is not as in `truth`; with rows, only for those."""

    def __init__(self, offs: dict[str, float], truth: Changes, *, rows: Rows | None = None, least: float = 0.0) -> None:
        self.offs, self.truth, self.rows, self.least = offs, truth, rows, least
        self.compared: list[tuple[dict[str, Any], Rows]] = []

    def compare(self, changes: Changes, rows: Rows) -> Compared:
        self.compared.append((dict(changes), rows))
        wrong = [name for name, value in self.truth.items() if changes.get(name) != value]
        off = self.least + sum(self.offs[name] for name in wrong)
        apart = np.array([off if self.rows is None or row in self.rows else 0.0 for row in rows])
        agreement = float(np.mean(apart < 0.5))
        return Compared(Difference(float(apart.max()), agreement, len(rows)), apart, int(apart.argmax()))


OFFS = {"scale": 0.8, "color": 0.3, "fit": 0.1, "filter": 0.05}
TRUTH = {"scale": "c", "color": "bgr", "fit": "pad", "filter": 3}


def test_what_is_expected_is_found_and_nothing_is_tried_after_it() -> None:
    world = World(OFFS, TRUTH)
    result = search(CHOICES, world, 20)
    assert result.nearest[0].changes == TRUTH
    assert result.nearest[0].is_exact
    assert result.nearest[0].compared.difference == Difference(0.0, 1.0, 20)
    assert (result.total, len(result.nearest)) == (TOTAL, 1)
    assert result.tried <= TOTAL / 2, "the scale and the colour first, and then one place after the other"
    assert not result.undecided


def test_usual_values_of_all_settings_come_before_a_rare_one() -> None:
    places = [(one["fit"], one["filter"]) for one in combinations((FIT, FILTER))]
    assert places[0] == ("resize", 0)
    assert places.index(("letterbox", 0)) < places.index(("resize", 4))
    assert places.index(("pad", 1)) < places.index(("resize", 4))
    assert len(set(places)) == len(places) == len(FIT.values) * len(FILTER.values)


def test_a_usual_scale_is_tried_early_though_it_is_not_the_nearest() -> None:
    class Misled(World):
        """With another fit than the notebook's, the last scale is the nearest."""

        def compare(self, changes: Changes, rows: Rows) -> Compared:
            compared = super().compare(changes, rows)
            if changes["fit"] == self.truth["fit"]:
                return compared
            apart = np.full(len(rows), 0.9 - 0.001 * scales.index(changes["scale"]))
            return Compared(Difference(float(apart.max()), 0.0, len(rows)), apart, 0)

    scales = tuple(range(30))
    choices = (Choice("scale", Part.SCALE, 0, scales), FIT, FILTER)
    truth = {"scale": 0, "fit": "letterbox", "filter": 1}
    result = search(choices, Misled({"scale": 0.8, "fit": 0.1, "filter": 0.05}, truth), 20)
    assert result.nearest[0].changes == truth
    assert result.tried <= result.total / 4


def test_few_images_are_compared_before_all_are() -> None:
    world = World(OFFS, TRUTH)
    search(CHOICES, world, 20, few=(7, 3, 9, 1, 2, 5))
    assert len([rows for _, rows in world.compared if rows == (7, 3, 9, 1)]) > FEW_IMAGES
    assert {rows for _, rows in world.compared} == {(7, 3, 9, 1), tuple(range(20))}


def test_what_few_images_do_not_show_does_not_end_the_search() -> None:
    class Deceptive(World):
        def compare(self, changes: Changes, rows: Rows) -> Compared:
            compared = super().compare(changes, rows)
            is_deceived = len(rows) == FEW_IMAGES and compared.difference.largest < 0.1
            return Compared(Difference(0.0, 1.0, len(rows)), np.zeros(len(rows)), 0) if is_deceived else compared

    assert search(CHOICES, Deceptive(OFFS, TRUTH), 20).nearest[0].changes == TRUTH


def test_every_combination_is_tried_once_where_none_is_exact() -> None:
    world = World(OFFS, TRUTH, least=0.01)
    counts: list[tuple[int, int]] = []
    result = search(CHOICES, world, 20, on_tried=lambda tried, total: counts.append((tried, total)))
    tried = [changes for changes, rows in world.compared if len(rows) == FEW_IMAGES]
    assert sorted(map(repr, tried), key=str) == sorted(
        (repr({name: one[name] for name in tried[0]}) for one in combinations(CHOICES)), key=str
    )
    assert counts == [(number, TOTAL) for number in range(1, TOTAL + 1)]
    assert (result.tried, len(result.nearest)) == (TOTAL, NEAREST)
    assert result.nearest[0].changes == TRUTH
    assert not result.nearest[0].is_exact
    distances = [found.compared.difference.largest for found in result.nearest]
    assert distances == sorted(distances)


def test_nothing_more_is_tried_once_it_is_late() -> None:
    world, times = World(OFFS, TRUTH, least=0.01), iter(range(1000))
    result = search(CHOICES, world, 20, timeout_s=10, clock=lambda: float(next(times)))
    assert result.tried == 9
    assert result.total == TOTAL
    assert len(result.nearest) == NEAREST


def test_settings_that_the_images_leave_open_are_named() -> None:
    truth = {name: value for name, value in TRUTH.items() if name not in ("fit", "filter")}
    result = search(CHOICES, World(OFFS, truth), 20)
    assert result.undecided == {"fit": FIT.values, "filter": FILTER.values}
    assert {name: result.nearest[0].changes[name] for name in ("fit", "filter")} == {"fit": "resize", "filter": 0}


@pytest.mark.parametrize(("exact", "is_exact"), [(1e-3, True), (1e-5, False)])
def test_answers_are_exact_up_to_a_difference(exact: float, is_exact: bool) -> None:
    result = search(CHOICES, World(OFFS, TRUTH, least=1e-4), 3, exact=exact)
    assert result.nearest[0].changes == TRUTH
    assert result.nearest[0].is_exact is is_exact


def test_another_likeliest_class_is_never_exact() -> None:
    class Close(World):
        def compare(self, changes: Changes, rows: Rows) -> Compared:
            return Compared(Difference(0.0, 0.75, len(rows)), np.zeros(len(rows)), 0)

    assert not search(CHOICES, Close(OFFS, TRUTH), 3).nearest[0].is_exact


def test_without_a_choice_the_model_is_compared_as_it_is() -> None:
    result = search((), World({}, {}), 3)
    assert (result.tried, result.total, result.nearest[0].is_exact) == (1, 1, True)


def test_places_of_pixels_of_tutorials_are_known_as_a_whole() -> None:
    assert all(is_possible(recipe) for recipe in RECIPES)
    lanczos = ResizeSettings(library=ResizeLibrary.PILLOW, filter=ResizeFilter.LANCZOS)
    teachable_machine = {"fit": Fit.CROP, "resize": lanczos, "decode": Decoding.EXACT, "border": None}
    assert recipe_rank(teachable_machine) < 5
    assert recipe_rank({**teachable_machine, "decode": Decoding.TENSORFLOW}) == len(RECIPES)
    assert recipe_rank({"fit": Fit.CROP, "resize": lanczos}) == recipe_rank(teachable_machine)  # it has PNG files alone
    assert [*map(recipe_rank, RECIPES)] == [*range(len(RECIPES))]
