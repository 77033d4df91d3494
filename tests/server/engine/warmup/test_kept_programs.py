"""Programs that are made again: of the compile cache, and without lowerings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from tests.server.engine.warmup.verified_model import BUCKETS, Checked, doubled, rolled, scores

from xlaserve.config import Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs
from xlaserve.engine.warmup.difference import MAX_RELATIVE
from xlaserve.errors import ModelFailed
from xlaserve.models.task import Segmentation


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


def test_a_kept_program_as_far_off_as_when_made_is_not_made_again() -> None:
    kept = Kept(doubled, verification="warn")
    assert kept.known == pytest.approx(1.0)
    kept.start()
    kept.start(lambda images: (scores(images)[0] * np.float32(2.05),))
    assert kept.made_again == 0
    assert kept.known == pytest.approx(1.0)
    kept.start(by_half)
    assert kept.made_again == 1


def test_how_far_class_maps_are_off_is_counted_in_pixels() -> None:
    kept = Kept(partial(classes, off_by=1), task=Segmentation(300), reference=classes, verification="warn")
    assert kept.known == pytest.approx(0.75)
    kept.start()
    assert kept.made_again == 0
    kept.start(lambda images: (classes(images)[0] + np.uint8(1),))
    assert kept.made_again == 1


def test_a_right_program_clears_the_record_of_a_wrong_one_before_it() -> None:
    kept = Kept(doubled, verification="warn")
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


def test_a_program_with_varying_answers_is_made_again_each_time() -> None:
    calls = count(2)
    kept = Kept(lambda images: (scores(images)[0] * np.float32(next(calls)),))
    kept.start()
    assert (kept.made_again, kept.known) == (1, None)


def test_a_program_to_be_refused_is_made_again_whatever_is_known_of_it() -> None:
    kept = Kept(doubled, narrow={}, verification="warn")
    kept.start()
    assert kept.made_again == 0
    assert kept.known == pytest.approx(1.0)
    with pytest.raises(ModelFailed):
        kept.start(verification="refuse")
    assert kept.made_again == 1
