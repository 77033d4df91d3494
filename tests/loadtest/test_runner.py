from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from xlaserve_loadtest import runner
from xlaserve_loadtest.arrivals import ClosedLoop, interleave
from xlaserve_loadtest.payload import Request
from xlaserve_loadtest.record import Record, Status
from xlaserve_loadtest.stats import summarize
from xlaserve_loadtest.target import Reply

OK = Reply(Status.OK)


@pytest.fixture
def attack(in_virtual_time, fake_target, model_info):
    """Runs a closed loop against a handler, in virtual time; returns the record and the target."""

    def run(handle, *, arms=("xla",), slots=4, duration_s=10.0, warmup_s=1.0, images=1):
        target = fake_target(handle)
        record = Record()
        plan = interleave(arms, duration_s=duration_s, warmup_s=warmup_s, seed=0)
        requests = {arm: [Request(bytes([n]), images, arm) for n in range(3)] for arm in arms}

        async def main():
            loop = asyncio.get_running_loop()
            clock = lambda: round(loop.time() * 1e9)  # noqa: E731
            await runner.run(plan, target, model_info, requests, ClosedLoop(slots), record=record, clock=clock)

        in_virtual_time(main)
        return record, target

    return run


def summary(record, arm="xla"):
    return summarize(arm, record.blocks, record.requests())


def test_a_constant_latency_comes_out_as_it_is(attack):
    async def handle(request):
        await asyncio.sleep(0.02)
        return OK

    record, target = attack(handle)
    result = summary(record)
    assert result.mean_ms == pytest.approx(20, rel=0.001)
    assert result.percentiles_ms == pytest.approx({"p50": 20, "p90": 20, "p95": 20, "p99": 20}, rel=0.001)
    assert result.requests_per_s == pytest.approx(200, rel=0.001)
    assert target.most_in_flight == 4


def test_known_latencies_come_out_within_one_percent(attack):
    generator = random.Random(0)
    injected_s = []

    async def handle(request):
        injected_s.append(generator.lognormvariate(-4, 0.5))
        await asyncio.sleep(injected_s[-1])
        return OK

    record, _ = attack(handle, slots=8, duration_s=120)
    result = summary(record)
    for name, percentile in [("p50", 50), ("p90", 90), ("p99", 99)]:
        assert result.percentiles_ms[name] == pytest.approx(np.percentile(injected_s, percentile) * 1000, rel=0.01)
    assert result.requests_per_s == pytest.approx(8 / np.mean(injected_s), rel=0.01)


def test_the_rate_of_a_slow_batching_server_is_right_though_blocks_hold_one_batch_each(attack):
    waiting = []
    running = False

    def run_batch():
        batch = waiting.copy()
        waiting.clear()
        asyncio.get_running_loop().call_later(0.93, finish, batch)

    def finish(batch):
        nonlocal running
        running = False
        for answer in batch:
            answer.set_result(OK)

    async def handle(request):
        nonlocal running
        waiting.append(asyncio.get_running_loop().create_future())
        answer = waiting[-1]
        if not running:
            running = True
            asyncio.get_running_loop().call_later(0.01, run_batch)
        return await answer

    record, _ = attack(handle, slots=16, duration_s=4, warmup_s=0.3)
    assert summary(record).images_per_s == pytest.approx(16 / 0.94, rel=0.001)


def test_warm_up_lasts_until_every_slot_was_answered_and_stays_out_of_the_figures(attack):
    calls = 0

    async def handle(request):
        nonlocal calls
        calls += 1
        await asyncio.sleep(5 if calls <= 4 else 0.01)
        return OK

    record, _ = attack(handle, warmup_s=0.1)
    assert summary(record).mean_ms == pytest.approx(10, rel=0.01)
    first = record.blocks[0]
    assert first.window_ns is not None
    assert (first.window_ns[0] - first.start_ns) / 1e9 == pytest.approx(5, rel=0.01)


def test_a_slow_request_at_the_end_of_the_window_is_waited_for_under_load(attack):
    calls = 0

    async def handle(request):
        nonlocal calls
        calls += 1
        slow = calls == 700
        await asyncio.sleep(3 if slow else 0.01)
        return OK

    record, _ = attack(handle, duration_s=2)
    rows = record.requests()
    slowest = rows[np.argmax(rows["end_ns"] - rows["scheduled_ns"])]
    assert slowest["measured"]
    after = rows[(rows["scheduled_ns"] > slowest["scheduled_ns"]) & (rows["end_ns"] < slowest["end_ns"])]
    assert after.size > 800
    assert (after["end_ns"] - after["scheduled_ns"]).max() < 20_000_000


def test_measured_requests_are_those_due_in_the_window(attack):
    async def handle(request):
        await asyncio.sleep(0.013)
        return OK

    record, _ = attack(handle, arms=("xla", "graph"))
    rows = record.requests()
    for block in record.blocks:
        own = rows[rows["block"] == block.index]
        start, end = block.window_ns
        assert (end - start) / 1e9 == pytest.approx(1)
        np.testing.assert_array_equal(own["measured"], (own["scheduled_ns"] >= start) & (own["scheduled_ns"] < end))
        cycles = own[own["measured"]]
        assert block.slot_ns == (cycles["end_ns"] - cycles["scheduled_ns"]).sum()


def test_every_block_has_a_fresh_connection_and_sends_only_its_arms_requests(attack):
    seen = []

    async def handle(request):
        seen.append(request)
        await asyncio.sleep(0.1)
        return OK

    record, target = attack(handle, arms=("xla", "graph"), images=5)
    assert target.connections == len(record.blocks) == 20
    assert {request.mode for request in seen} == {"xla", "graph"}
    assert len({request.data for request in seen}) == 3
    assert summary(record).images == 5 * summary(record).requests


def test_failures_are_counted_by_status_and_do_not_end_the_run(attack):
    calls = 0

    async def handle(request):
        nonlocal calls
        calls += 1
        reply = Reply(Status.INTERNAL, detail="every tenth") if calls % 10 == 0 else OK
        await asyncio.sleep(0.01)
        return reply

    record, _ = attack(handle)
    result = summary(record)
    assert set(result.errors) == {"INTERNAL"}
    assert result.errors["INTERNAL"] / (result.requests + result.errors["INTERNAL"]) == pytest.approx(0.1, rel=0.02)
    assert result.mean_ms == pytest.approx(10, rel=0.001)
    # Nine answers cost 10 ms each, and the tenth its 10 ms and the pause.
    assert result.requests_per_s == pytest.approx(4 * 9 / (0.1 + runner.FAILURE_PAUSE_S), rel=0.01)
    assert record.failures == {("xla", Status.INTERNAL): "every tenth"}


def test_an_arm_that_never_answers_is_left_out_and_the_others_go_on(attack):
    async def handle(request):
        await asyncio.sleep(0.01)
        return OK if request.mode == "xla" else Reply(Status.INVALID_ARGUMENT, detail="no such mode")

    record, _ = attack(handle, arms=("xla", "eager"))
    assert summary(record).block_images_per_s == pytest.approx((400,) * 10, rel=0.01)
    assert [block.arm for block in record.blocks].count("eager") == 1
    assert summary(record, "eager").requests == 0
    assert summary(record, "eager").warmup_errors["INVALID_ARGUMENT"] > 0


def test_a_target_that_dies_in_mid_run_is_given_up_after_a_block(attack):
    calls = 0

    async def handle(request):
        nonlocal calls
        calls += 1
        if calls > 1000:
            return Reply(Status.UNAVAILABLE, detail="gone")
        await asyncio.sleep(0.01)
        return OK

    record, _ = attack(handle)
    result = summary(record)
    assert 0 < result.requests < 1000
    assert result.errors["UNAVAILABLE"] > 0
    assert len(record.blocks) == 3
    assert record.blocks[-1].window_ns is None
    # At most one failure for each slot and pause.
    assert calls - 1000 < 4 * 4 / runner.FAILURE_PAUSE_S


def test_a_late_answer_does_not_open_the_window_after_a_slot_gave_up(attack):
    calls = 0

    async def handle(request):
        nonlocal calls
        calls += 1
        if calls == 6:
            await asyncio.sleep(1)
            return OK
        return Reply(Status.UNAVAILABLE, detail="gone")

    record, _ = attack(handle, duration_s=2, warmup_s=0.08)
    first = record.blocks[0]
    assert first.window_ns is None
    assert first.end_ns is not None


def test_what_was_recorded_stands_when_the_run_is_cancelled(in_virtual_time, fake_target, model_info):
    async def handle(request):
        await asyncio.sleep(0.01)
        return OK

    record = Record()

    async def main():
        loop = asyncio.get_running_loop()
        plan = interleave(("xla",), duration_s=60, warmup_s=1, seed=0)
        requests = {"xla": [Request(b"", 1, "xla")]}
        task = asyncio.create_task(
            runner.run(
                plan,
                fake_target(handle),
                model_info,
                requests,
                ClosedLoop(4),
                record=record,
                clock=lambda: round(loop.time() * 1e9),
            )
        )
        await asyncio.sleep(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_virtual_time(main)
    assert summary(record).requests_per_s == pytest.approx(400, rel=0.01)
    assert record.blocks[-1].end_ns is None
