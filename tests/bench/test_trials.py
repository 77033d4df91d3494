from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.trials import ROUNDS, fastest, interleaved


def test_the_fastest_is_that_with_the_highest_median() -> None:
    rates: dict[str, Iterator[float]] = {"steady": iter([10.0, 10.0, 10.0]), "one burst": iter([1.0, 99.0, 9.0])}
    assert fastest(["one burst", "steady"], lambda candidate: next(rates[candidate])) == "steady"


def test_candidates_take_turns() -> None:
    tried: list[str] = []

    def images_per_s(candidate: str) -> float:
        tried.append(candidate)
        return 1.0

    fastest("ab", images_per_s)
    assert tried == ["a", "b"] * ROUNDS


def test_arms_take_turns_forwards_and_backwards() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    arms = {name: partial(run, name) for name in "abc"}
    assert interleaved(arms, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert "".join(order) == "abccbaabc"
