from __future__ import annotations

import pytest

from xlaserve.wire.shared.loop_time import COUNTED, FEW, LoopTime


class Thread:
    """The event loop's thread: what it was used for so far."""

    def __init__(self) -> None:
        self.used_s = 0.0

    def __call__(self) -> float:
        return self.used_s


def answer(loop_time: LoopTime, thread: Thread, requests: int, each_s: float) -> None:
    for _ in range(requests):
        thread.used_s += each_s
        loop_time.count()


def test_a_request_costs_what_the_thread_used_from_the_first_to_the_last() -> None:
    thread = Thread()
    loop_time = LoopTime(thread)
    thread.used_s = 30.0  # start-up
    answer(loop_time, thread, 1, 0.5)
    answer(loop_time, thread, FEW, 0.002)
    assert loop_time.of_a_request_s() == pytest.approx(0.002)


def test_few_requests_say_nothing() -> None:
    thread = Thread()
    loop_time = LoopTime(thread)
    assert loop_time.of_a_request_s() == 0
    answer(loop_time, thread, FEW, 0.002)
    assert loop_time.of_a_request_s() == 0


def test_only_the_latest_requests_count() -> None:
    thread = Thread()
    loop_time = LoopTime(thread)
    answer(loop_time, thread, COUNTED + 1, 0.002)
    answer(loop_time, thread, COUNTED, 0.004)
    assert loop_time.of_a_request_s() == pytest.approx(0.004)
    answer(loop_time, thread, COUNTED // 2, 0.001)
    assert loop_time.of_a_request_s() == pytest.approx(0.003)
