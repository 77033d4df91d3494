from __future__ import annotations

import re

import pytest
from bench.peers.__main__ import AUTO, FOLDER, OURS, PEERS, compared

RATES = {OURS: [230.0, 240.0], "bare": [200.0, 200.0], "other": [100.0, 240.0]}


def test_each_other_is_compared_and_the_target_is_over_the_best_of_them() -> None:
    figures = {figure.name: figure for figure in compared(8, RATES)}
    assert {name: figure.median for name, figure in figures.items()} == {
        "images/s at 8, xlaserve / bare": pytest.approx(1.175),
        "images/s at 8, xlaserve / other": pytest.approx(1.65),
        "images/s at 8, xlaserve / the best": pytest.approx(1.175),
    }
    assert [name for name, figure in figures.items() if figure.target] == ["images/s at 8, xlaserve / the best"]
    assert figures["images/s at 8, xlaserve / the best"].is_met
    (*_, missed) = compared(8, {**RATES, "bare": [210.0, 210.0]})
    assert not missed.is_met


def test_our_fastest_mode_is_compared_with_the_best_of_the_others_too() -> None:
    *_, figure = compared(8, {**RATES, AUTO: [300.0, 320.0]})
    assert figure.name == "images/s at 8, xlaserve, auto / the best"
    assert figure.median == pytest.approx(1.55)
    assert figure.is_met


def test_without_any_other_nothing_is_said() -> None:
    assert not [*compared(8, {OURS: [1.0]})]


@pytest.mark.parametrize("environment", sorted({peer.environment for peer in PEERS.values()}))
def test_what_is_installed_for_others_is_pinned(environment: str) -> None:
    lines = (FOLDER / f"{environment}.txt").read_text().splitlines()
    assert lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
