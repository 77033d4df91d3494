from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest

from xlaserve_loadtest.run.strain import Strain, StrainWatch, stolen_share


def watched(in_virtual_time: Callable[..., Any], held_ms: float, every_ms: float) -> Strain:
    """Watches a loop for 10 s that something holds up for `held_ms` every `every_ms`."""

    async def main() -> Strain:
        loop = asyncio.get_running_loop()
        held_ns = 0

        def clock() -> int:
            return round(loop.time() * 1e9) + held_ns

        watch = StrainWatch(clock)
        watch.start()
        for _ in range(round(10_000 / every_ms)):
            await asyncio.sleep((every_ms - held_ms) / 1000)
            held_ns += round(held_ms * 1e6)
        return watch.stop()

    found = in_virtual_time(main)
    assert isinstance(found, Strain)
    return found


@pytest.mark.parametrize("held_ms", [20.0, 50.0])
def test_a_loop_that_is_held_up_is_seen_for_as_long(in_virtual_time: Callable[..., Any], held_ms: float) -> None:
    strain = watched(in_virtual_time, held_ms, every_ms=100)
    assert strain.longest_ms == pytest.approx(held_ms, abs=6)
    # A share held/100 of all moments, which wait for half of the stretch.
    assert strain.wait_ms == pytest.approx(held_ms / 100 * held_ms / 2, rel=0.3)


def test_a_loop_that_runs_freely_shows_nothing(in_virtual_time: Callable[..., Any]) -> None:
    strain = watched(in_virtual_time, 0.0, every_ms=100)
    assert (strain.wait_ms, strain.longest_ms) == (0.0, 0.0)


def test_the_share_that_was_stolen_is_that_between_two_looks() -> None:
    times = namedtuple("times", ("user", "idle", "steal"))
    assert stolen_share(times(10, 10, 5), times(16, 12, 7)) == pytest.approx(0.2)
    assert stolen_share(times(1, 1, 1), times(1, 1, 1)) == 0
    other = namedtuple("other", ("user", "idle"))
    assert stolen_share(other(1, 1), other(2, 2)) == 0
