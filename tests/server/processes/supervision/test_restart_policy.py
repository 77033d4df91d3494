from __future__ import annotations

from xlaserve.processes.supervision.restart_policy import RestartPolicy, Restarts

POLICY = RestartPolicy(window_s=60, at_once=1, first_wait_s=0.5, longest_wait_s=4, most=6, jitter=0.5)


def test_the_first_is_replaced_at_once_and_the_next_ever_later() -> None:
    restarts = Restarts(POLICY, draw=lambda: 0.0)
    assert [restarts.wait_s(now) for now in range(6)] == [0, 0.5, 1, 2, 4, 4]


def test_a_process_ready_for_long_is_replaced_at_once_and_delays_restart() -> None:
    restarts = Restarts(POLICY, draw=lambda: 0.0)
    for now in (0, 1, 2):
        restarts.wait_s(now)
    restarts.became_ready(10)
    restarts.became_ready(13)
    assert [restarts.wait_s(now) for now in (14, 15, 16)] == [0, 0, 0.5]


def test_one_that_ends_soon_after_it_was_ready_is_waited_for_as_any() -> None:
    restarts = Restarts(POLICY, draw=lambda: 0.0)
    waits_s = []
    for now in range(0, 12, 2):
        restarts.became_ready(now)
        waits_s.append(restarts.wait_s(now + 1))
    assert waits_s == [0, 0.5, 1, 2, 4, 4]


def test_restarts_in_a_window_are_bounded_even_for_long_ready_processes() -> None:
    restarts = Restarts(POLICY)
    for now in range(0, 36, 6):
        restarts.became_ready(now)
        assert restarts.wait_s(now + 5) == 0
    assert restarts.wait_s(40) is None


def test_after_too_many_within_the_window_there_is_no_use() -> None:
    restarts = Restarts(POLICY)
    assert None not in [restarts.wait_s(now) for now in range(6)]
    assert restarts.wait_s(59) is None


def test_ends_are_forgotten_after_the_window() -> None:
    restarts = Restarts(POLICY)
    assert [restarts.wait_s(now) for now in range(0, 6000, 60)] == [0.0] * 100


def test_waits_differ_by_chance_and_are_never_longer() -> None:
    for drawn, wait_s in ((0.0, 0.5), (0.5, 0.375), (1.0, 0.25)):
        restarts = Restarts(POLICY, draw=lambda drawn=drawn: drawn)  # type: ignore[misc]
        restarts.wait_s(0)
        assert restarts.wait_s(0) == wait_s
