from __future__ import annotations

import pytest

from xlaserve_loadtest.schedule import steady
from xlaserve_loadtest.schedule.steady import Window, is_steady, may_end


def windows(*rates: float, p50_ms: float | None = 10.0) -> list[Window]:
    return [Window(rate, p50_ms) for rate in rates]


def test_windows_that_agree_are_steady() -> None:
    assert is_steady(windows(100, 101, 99, 104, 96))
    assert is_steady(windows(5, 900, 100, 100, 100, 100, 100))


@pytest.mark.parametrize("rates", [(100, 100, 100, 100, 120), (90, 95, 100, 105, 110), (0, 0, 0, 0, 0)])
def test_windows_that_differ_drift_or_hold_nothing_are_not(rates: tuple[float, ...]) -> None:
    assert not is_steady(windows(*rates))


def test_latency_must_agree_as_well_as_throughput() -> None:
    medians = (10, 11, 12, 13, 14)
    assert not is_steady([Window(100, p50_ms) for p50_ms in medians])
    assert not is_steady(windows(100, 100, 100, 100, 100, p50_ms=None))


def test_too_few_windows_say_nothing_and_a_first_agreement_ends_no_run() -> None:
    steady_rates = [100.0] * steady.MIN_WINDOWS
    assert not is_steady(windows(*steady_rates[: steady.WINDOWS - 1]))
    assert is_steady(windows(*steady_rates[: steady.WINDOWS]))
    assert not may_end(windows(*steady_rates[:-1]))
    assert may_end(windows(*steady_rates))
