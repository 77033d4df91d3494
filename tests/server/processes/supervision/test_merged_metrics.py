from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Gauge

from xlaserve.processes.supervision.merged_metrics import EVERY_S, PATIENCE_S, AllMetrics, Restarted
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.telemetry import registry_snapshot
from xlaserve.telemetry.counts import LoopCounter

FRONT = Role(name="front 1", target="")

pytestmark = pytest.mark.usefixtures("virtual_time")


class FakeProcess:
    """Answers after `answers_s`; never where that is None."""

    def __init__(self, metrics: AllMetrics, pid: int, answers_s: float | None = 0.0) -> None:
        self.pid, self.answers_s = pid, answers_s
        self.asked = 0
        self._metrics = metrics
        self._registry = CollectorRegistry()
        self.count = LoopCounter("things", "Things.", (), registry=self._registry).labels()

    @property
    def itself(self) -> Process:
        return cast(Process, self)

    def ask_for_metrics(self) -> None:
        self.asked += 1
        if self.answers_s is not None:
            asyncio.get_running_loop().call_later(self.answers_s, self.answer)

    def show_level(self, level: float) -> None:
        """Has a gauge from now on."""
        Gauge("level", "A level.", registry=self._registry).set(level)

    def answer(self) -> None:
        self._metrics.sent_metrics(FRONT, self.itself, registry_snapshot.encode(registry_snapshot.take(self._registry)))


@pytest.fixture
def metrics() -> AllMetrics:
    return AllMetrics(CollectorRegistry())


def things(metrics: AllMetrics) -> Any:
    return [sample.value for family in metrics.merged.collect() for sample in family.samples]


async def test_a_look_waits_for_all_that_are_ready(metrics: AllMetrics) -> None:
    processes = [FakeProcess(metrics, pid, answers_s) for pid, answers_s in ((1, 0.125), (2, 0.25))]
    starting = FakeProcess(metrics, 3)
    for process in processes:
        metrics.became_ready(FRONT, process.itself)
        process.count.inc(process.pid)
    await metrics.refresh()
    assert things(metrics) == [3]
    assert starting.asked == 0
    assert asyncio.get_running_loop().time() == 0.25


async def test_a_hanging_process_is_awaited_briefly_and_not_asked_a_second_time(metrics: AllMetrics) -> None:
    hangs, answers = FakeProcess(metrics, 1, None), FakeProcess(metrics, 2)
    for process in (hangs, answers):
        metrics.became_ready(FRONT, process.itself)
        process.count.inc(process.pid)
    for _ in range(3):
        await metrics.refresh()
    assert asyncio.get_running_loop().time() == pytest.approx(3 * PATIENCE_S)
    assert things(metrics) == [2]
    assert (hangs.asked, answers.asked) == (1, 3)
    hangs.answer()
    assert things(metrics) == [3]
    hangs.answers_s = 0.0
    await metrics.refresh()
    assert hangs.asked == 2


async def test_one_that_ends_meanwhile_is_not_waited_for_and_its_counts_stay(metrics: AllMetrics) -> None:
    process = FakeProcess(metrics, 1, None)
    metrics.became_ready(FRONT, process.itself)
    process.count.inc(5)
    process.answer()
    looking = asyncio.create_task(metrics.refresh())
    await asyncio.sleep(0.125)
    metrics.ended(FRONT, process.itself, -9, True)
    await looking
    assert asyncio.get_running_loop().time() == 0.125
    await metrics.refresh()
    assert things(metrics) == [5]
    assert process.asked == 1


async def test_all_are_looked_at_even_while_nobody_asks(metrics: AllMetrics) -> None:
    process = FakeProcess(metrics, 1)
    metrics.became_ready(FRONT, process.itself)
    following = asyncio.create_task(metrics.follow())
    await asyncio.sleep(2.5 * EVERY_S)
    assert process.asked == 3
    following.cancel()


async def test_processes_that_end_unasked_are_counted_by_role() -> None:
    registry = CollectorRegistry()
    restarted, metrics = Restarted(registry), AllMetrics(registry)
    other = Role(name="engine", target="")
    process = FakeProcess(metrics, 1).itself
    for role in (FRONT, other):
        restarted.began(role, process)
    for role, status in ((FRONT, -9), (FRONT, 1), (other, 0)):
        restarted.ended(role, process, status, True)
    restarted.stopping()
    restarted.ended(other, process, -9, True)
    assert registry.get_sample_value("xlaserve_process_restarts_total", {"role": "front 1"}) == 2
    assert registry.get_sample_value("xlaserve_process_restarts_total", {"role": "engine"}) == 0


async def test_gauges_are_of_the_process_in_its_role_and_counts_of_all(metrics: AllMetrics) -> None:
    old, new = FakeProcess(metrics, 1), FakeProcess(metrics, 2)
    shown = []
    for process in (old, new):
        process.show_level(process.pid)
        process.count.inc(10)
        metrics.began(FRONT, process.itself)

    async def look() -> None:
        await metrics.refresh()
        for process in (old, new):
            process.answer()
        shown.append([sample.value for family in metrics.merged.collect() for sample in family.samples])

    metrics.filled(FRONT, old.itself)
    await look()
    metrics.filled(FRONT, new.itself)
    await look()
    metrics.ended(FRONT, old.itself, 0, True)
    shown.append(things(metrics))
    assert [sorted(values) for values in shown] == [[1, 20], [2, 20], [2, 20]]
