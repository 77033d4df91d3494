from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.engine.wait_margin import MAX_RATIO, WaitMargin

EXPECTED_S = 0.2


def taught(times: float, requests: int = 1000, spread: float = 0.0) -> WaitMargin:
    expectation = WaitMargin()
    chance = random.Random(0)
    for _ in range(requests):
        expectation.observe(EXPECTED_S, EXPECTED_S * times * (1 + spread * chance.uniform(-1, 1)))
    return expectation


def test_before_any_request_what_is_expected_is_likely() -> None:
    assert WaitMargin().likely_s(EXPECTED_S) == pytest.approx(EXPECTED_S, rel=0.1)


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_what_requests_take_is_learned(times: float) -> None:
    assert taught(times).likely_s(EXPECTED_S) == pytest.approx(times * EXPECTED_S, rel=0.15)


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_few_requests_take_longer_than_is_likely(spread: float) -> None:
    likely_s = taught(1.0, spread=spread).likely_s(EXPECTED_S)
    assert EXPECTED_S * (1 + 0.9 * spread) < likely_s < EXPECTED_S * (1 + 3 * spread)


def test_a_single_request_changes_little() -> None:
    before = taught(1.0)
    likely_s = before.likely_s(EXPECTED_S)
    before.observe(EXPECTED_S, 100.0)
    assert before.likely_s(EXPECTED_S) < 2 * likely_s


def test_a_wrong_lesson_is_forgotten() -> None:
    expectation = taught(8.0)
    for _ in range(1000):
        expectation.observe(EXPECTED_S, EXPECTED_S)
    assert expectation.likely_s(EXPECTED_S) == pytest.approx(EXPECTED_S, rel=0.2)


def test_a_delay_of_the_event_loop_says_little_of_long_waits() -> None:
    expectation = WaitMargin()
    for _ in range(1000):
        expectation.observe(0.0002, 0.002)
    assert expectation.likely_s(1.0) < 1.6


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=100), st.floats(0, 1e6))
def test_whatever_requests_take_likely_times_stay_bounded(requests: list[tuple[float, float]], asked_s: float) -> None:
    expectation = WaitMargin()
    for expected_s, took_s in requests:
        expectation.observe(expected_s, took_s)
    assert 0 <= expectation.likely_s(asked_s) <= (asked_s + 1) * MAX_RATIO * 5
