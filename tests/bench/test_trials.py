from __future__ import annotations

from collections.abc import Iterator

from bench.trials import ROUNDS, fastest


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
