from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from xlaserve_loadtest.run.alarm import Alarm


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_alarm_wakes_at_its_moment_and_never_before(new_loop: object) -> None:
    async def main() -> list[float]:
        alarm = Alarm()
        late_ms = []
        for wait_us in range(100, 5000, 250):
            at_ns = time.monotonic_ns() + wait_us * 1000
            await alarm.wait_until(at_ns)
            late_ms.append((time.monotonic_ns() - at_ns) / 1e6)
        alarm.close()
        return late_ms

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        late_ms = runner.run(main())
    assert min(late_ms) >= 0
    # The best of twenty, as other processes run on this machine; the loops' own timers are up to a millisecond late.
    assert min(late_ms) < 0.5


async def test_a_past_moment_is_now_and_an_abandoned_one_wakes_nobody() -> None:
    alarm = Alarm()
    await alarm.wait_until(time.monotonic_ns() - 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(alarm.wait_until(time.monotonic_ns() + 200_000_000), 0.001)
    at_ns = time.monotonic_ns() + 250_000_000
    await alarm.wait_until(at_ns)
    assert time.monotonic_ns() >= at_ns
    alarm.close()
