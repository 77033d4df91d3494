"""Blocks on fake targets in virtual time, through the crew that runs them in earnest."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
from tests.loadtest.conftest import FakeTarget
from tests.required import required

from xlaserve_loadtest.record.requests import Rows, Status
from xlaserve_loadtest.run import crew, sender
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.generator import Generator, drawn, stamped
from xlaserve_loadtest.run.sender import Live, Result, Task
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, OpenLoop, Replay
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.targets.target import ModelInfo, Reply, TargetError

OK = Reply(Status.OK)

Handle = Callable[[Request], Awaitable[Reply]]
Attack = Callable[..., tuple[Outcome, FakeTarget]]


@pytest.fixture
def attack(
    in_virtual_time: Callable[[Callable[[], Coroutine[Any, Any, Outcome]]], Outcome],
    fake_target: type[FakeTarget],
    model_info: ModelInfo,
) -> Attack:
    """Runs a block against a handler, in virtual time; returns its outcome and the target."""

    def run(
        handle: Handle,
        load: Load,
        *,
        duration_s: float = 10.0,
        warmup_s: float = 1.0,
        images: int = 1,
        workers: int = 1,
        after: float | None = None,
        **more: Any,
    ) -> tuple[Outcome, FakeTarget]:
        target = fake_target(handle)
        requests = {"xla": [Request(bytes([n]), images, "xla") for n in range(3)]}
        block = BlockPlan("xla", load, warmup_s, duration_s)

        async def main() -> Outcome:
            now = asyncio.get_running_loop()
            clock = lambda: round(now.time() * 1e9)  # noqa: E731
            generators = [
                Generator(
                    target=target,
                    models={"xla": [model_info]},
                    requests=requests,
                    offset=index,
                    clock=clock,
                    spin_s=0,
                )
                for index in range(workers)
            ]
            shares = crew.tasks(block, ("fake",), workers, seed=0, max_in_flight=more.pop("max_in_flight", 4096))
            task = asyncio.create_task(crew.run_block(block, generators, shares, clock=clock, **more))
            if after is not None:
                await asyncio.sleep(after)
                task.cancel()
            return await task

        return in_virtual_time(main), target

    return run


def answering(seconds: float, reply: Reply = OK) -> Handle:
    async def handle(request: Request) -> Reply:
        await asyncio.sleep(seconds)
        return reply

    return handle


def latencies_ms(outcome: Outcome) -> np.ndarray[Any, Any]:
    answered = outcome.answered
    return np.asarray((answered["end_ns"] - answered["scheduled_ns"]) / 1e6)


def percentile(outcome: Outcome, rank: float) -> float:
    return float(np.percentile(latencies_ms(outcome), rank))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_closed_loop_keeps_its_slots_busy(attack: Attack, workers: int) -> None:
    outcome, target = attack(answering(0.02), ClosedLoop(4), workers=workers)
    assert latencies_ms(outcome) == pytest.approx(20, rel=0.001)
    assert outcome.images_per_s() == pytest.approx(200, rel=0.01)
    assert target.peak_in_flight == 4
    assert target.connections == workers
    assert outcome.window_s() == pytest.approx(10)


def test_checking_answers_delays_a_closed_loop_and_not_an_open_one(attack: Attack) -> None:
    async def handle(request: Request) -> Reply:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.02)
        arrived_ns = round(loop.time() * 1e9)
        await asyncio.sleep(0.005)
        return OK._replace(arrived_ns=arrived_ns)

    outcome, _ = attack(handle, OpenLoop(20.0))
    assert latencies_ms(outcome) == pytest.approx(20, rel=0.001)
    outcome, _ = attack(handle, ClosedLoop(1))
    # The next request was due when the answer came, and was sent once it had been checked.
    assert latencies_ms(outcome) == pytest.approx(25, rel=0.001)
    assert outcome.images_per_s() == pytest.approx(40, rel=0.01)


@pytest.mark.parametrize("load", [ClosedLoop(8), OpenLoop(100.0)])
def test_known_latencies_come_out_within_one_percent(attack: Attack, load: Load) -> None:
    generator = random.Random(0)
    injected_s = []

    async def handle(request: Request) -> Reply:
        injected_s.append(generator.lognormvariate(-4, 0.5))
        await asyncio.sleep(injected_s[-1])
        return OK

    outcome, _ = attack(handle, load, duration_s=120)
    for rank in (50, 90, 99):
        assert percentile(outcome, rank) == pytest.approx(np.percentile(injected_s, rank) * 1000, rel=0.01)


def test_an_open_loop_keeps_to_its_schedule_however_slow_the_target(attack: Attack) -> None:
    slow, target = attack(answering(2.0), OpenLoop(50, "constant"))
    fast, _ = attack(answering(0.001), OpenLoop(50, "constant"))
    for outcome in (slow, fast):
        np.testing.assert_allclose(np.diff(np.sort(outcome.measured["start_ns"])), 20_000_000, atol=2000)
        assert len(outcome.measured) == 500
        assert outcome.late_sends == outcome.dropped == 0
    assert target.peak_in_flight == 100
    assert latencies_ms(slow) == pytest.approx(2000, rel=0.001)


def test_a_stall_of_half_the_run_shows_in_the_p90_of_an_open_loop(attack: Attack) -> None:
    async def handle(request: Request) -> Reply:
        now_s = asyncio.get_running_loop().time()
        # Warm-up ends at 1; the stall lasts from 6 to 11.
        await asyncio.sleep(11 - now_s if 6 <= now_s < 11 else 0.001)
        return OK

    open_loop, _ = attack(handle, OpenLoop(100.0))
    assert percentile(open_loop, 90) == pytest.approx(0.8 * 5000, rel=0.05)
    closed_loop, _ = attack(handle, ClosedLoop(4))
    assert percentile(closed_loop, 90) < 2


def test_what_is_beyond_the_bound_is_dropped_and_counted(attack: Attack) -> None:
    outcome, target = attack(answering(10), OpenLoop(10, "constant"), max_in_flight=20)
    assert target.peak_in_flight == 20
    # The first twenty are under way from -1 s to 1 s of the window, and again from 9 s on.
    assert len(outcome.measured) + outcome.dropped == 100
    assert outcome.dropped == pytest.approx(80, abs=2)


@pytest.mark.parametrize(("bound", "workers"), [(2, 3), (5, 3), (1, 8)])
def test_the_bound_is_that_of_all_workers_together(attack: Attack, bound: int, workers: int) -> None:
    slow, target = attack(answering(10), OpenLoop(50, "constant"), workers=workers, max_in_flight=bound)
    assert target.peak_in_flight == bound
    assert slow.dropped > 0
    fast, _ = attack(answering(0.01), OpenLoop(10, "constant"), workers=workers, max_in_flight=bound)
    assert (fast.dropped, len(fast.answered)) == (0, 100)


def test_warm_up_lasts_until_every_slot_was_answered_and_is_not_measured(attack: Attack) -> None:
    calls = 0

    async def handle(request: Request) -> Reply:
        nonlocal calls
        calls += 1
        await asyncio.sleep(5 if calls <= 4 else 0.01)
        return OK

    outcome, _ = attack(handle, ClosedLoop(4), warmup_s=0.1)
    assert latencies_ms(outcome) == pytest.approx(10, rel=0.01)
    assert (required(outcome.window_ns)[0] - outcome.start_ns) / 1e9 == pytest.approx(5, rel=0.01)


@pytest.mark.parametrize("load", [ClosedLoop(4), OpenLoop(400.0)])
def test_a_slow_request_at_the_end_of_the_window_is_waited_for_under_load(attack: Attack, load: Load) -> None:
    calls = 0

    async def handle(request: Request) -> Reply:
        nonlocal calls
        calls += 1
        await asyncio.sleep(1.5 if calls == 1000 else 0.01)
        return OK

    outcome, _ = attack(handle, load, duration_s=2)
    slowest = outcome.rows[np.argmax(outcome.rows["end_ns"] - outcome.rows["scheduled_ns"])]
    assert slowest["measured"]
    after = outcome.rows[(outcome.rows["scheduled_ns"] > slowest["scheduled_ns"])]
    assert (after["end_ns"] < slowest["end_ns"]).sum() > 300


@pytest.mark.parametrize("load", [ClosedLoop(4), OpenLoop(300.0)])
def test_measured_requests_are_those_due_in_the_window(attack: Attack, load: Load) -> None:
    outcome, _ = attack(answering(0.013), load, workers=2)
    rows, (start, end) = outcome.rows, required(outcome.window_ns)
    np.testing.assert_array_equal(rows["measured"], (rows["scheduled_ns"] >= start) & (rows["scheduled_ns"] < end))
    assert 0 < rows["measured"].sum() < len(rows)
    assert (np.diff(rows["end_ns"]) >= 0).all()


def test_several_workers_send_the_same_schedule_as_one(attack: Attack) -> None:
    one, _ = attack(answering(0.01), OpenLoop(100.0), workers=1)
    three, _ = attack(answering(0.01), OpenLoop(100.0), workers=3)
    first, second = (
        np.sort(outcome.measured["scheduled_ns"]) - required(outcome.window_ns)[0] for outcome in (one, three)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_replayed_requests_are_sent_at_their_times_with_any_workers(attack: Attack, workers: int) -> None:
    sent: list[tuple[int, bytes]] = []

    async def handle(request: Request) -> Reply:
        sent.append((round(asyncio.get_running_loop().time() * 1e9), request.data))
        await asyncio.sleep(0.2)
        return OK

    due_ns = np.array([0, 10, 20, 1_000_000_000, 1_000_000_000, 2_500_000_001])
    outcome, _ = attack(handle, Replay(due_ns), duration_s=2.6, workers=workers)
    first, last = required(outcome.window_ns)
    inside = sorted((at_ns - first, data) for at_ns, data in sent if first <= at_ns < last)
    assert [at_ns for at_ns, _ in inside] == pytest.approx(due_ns.tolist(), abs=2000)
    by_time = sorted(zip(due_ns.tolist(), [bytes([place % 3]) for place in range(6)], strict=True))
    assert [data for _, data in inside[:3]] == [data for _, data in by_time[:3]]
    assert {data for _, data in inside[3:5]} == {b"\x00", b"\x01"}
    assert inside[5][1] == b"\x02"


def test_what_is_dropped_of_a_schedule_is_passed_over(attack: Attack) -> None:
    sent: list[bytes] = []

    async def handle(request: Request) -> Reply:
        sent.append(request.data)
        await asyncio.sleep(1.5)
        return OK

    due_ns = np.array([0, 1, 2]) * 10**9
    outcome, _ = attack(handle, Replay(due_ns), duration_s=3, warmup_s=0, max_in_flight=1)
    assert outcome.dropped == 1
    assert sent[:2] == [b"\x00", b"\x02"]


def test_a_run_that_is_steady_ends_before_its_time(attack: Attack) -> None:
    outcome, _ = attack(answering(0.02), ClosedLoop(4), duration_s=60, end_when_steady=True)
    assert 10 <= outcome.window_s() < 20
    assert outcome.images_per_s() == pytest.approx(200, rel=0.01)
    assert len(outcome.windows) >= 10
    kept_on, _ = attack(answering(0.02), ClosedLoop(4), duration_s=30)
    assert kept_on.window_s() == pytest.approx(30)


def test_a_run_whose_latency_grows_goes_on_to_its_end(attack: Attack) -> None:
    calls = 0

    async def handle(request: Request) -> Reply:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01 * 1.0005**calls)
        return OK

    outcome, _ = attack(handle, ClosedLoop(4), duration_s=30, end_when_steady=True)
    assert outcome.window_s() == pytest.approx(30)


def test_failures_are_counted_by_status_and_do_not_end_the_run(attack: Attack) -> None:
    calls = 0

    async def handle(request: Request) -> Reply:
        nonlocal calls
        calls += 1
        reply = Reply(Status.INTERNAL, detail="every tenth") if calls % 10 == 0 else OK
        await asyncio.sleep(0.01)
        return reply

    outcome, _ = attack(handle, ClosedLoop(4))
    failed = (outcome.measured["status"] == Status.INTERNAL).sum()
    assert failed / len(outcome.measured) == pytest.approx(0.1, rel=0.03)
    (count, message) = outcome.failures[Status.INTERNAL]
    assert (count, message) == ((outcome.rows["status"] == Status.INTERNAL).sum(), "every tenth")
    # Nine answers cost 10 ms each, and the tenth its 10 ms and the pause.
    assert outcome.images_per_s() == pytest.approx(4 * 9 / (0.1 + sender.FAILURE_PAUSE_S), rel=0.01)


def test_a_target_that_never_answers_right_ends_the_block_in_warm_up(attack: Attack) -> None:
    outcome, _ = attack(answering(0.01, Reply(Status.INVALID_ARGUMENT, detail="no such mode")), ClosedLoop(4))
    assert outcome.window_ns is None
    assert not outcome.measured.size
    assert outcome.failures[Status.INVALID_ARGUMENT][1] == "no such mode"
    assert (outcome.end_ns - outcome.start_ns) / 1e9 == pytest.approx(crew.SILENCE_S, rel=0.1)
    # At most one failure for each slot and pause.
    assert outcome.sends < 4 * (outcome.end_ns - outcome.start_ns) / 1e9 / sender.FAILURE_PAUSE_S + 8


@pytest.mark.parametrize("workers", [1, 2])
def test_a_target_that_fails_the_first_requests_of_each_slot_is_awaited(attack: Attack, workers: int) -> None:
    calls = 0

    async def handle(request: Request) -> Reply:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return OK if calls > 40 else Reply(Status.UNAVAILABLE, detail="warming up")

    outcome, _ = attack(handle, ClosedLoop(4), workers=workers, warmup_s=0.1)
    assert outcome.failures[Status.UNAVAILABLE][0] == 40
    assert outcome.window_s() == pytest.approx(10)
    assert outcome.measured.size == outcome.answered.size == pytest.approx(4000, rel=0.01)


@pytest.mark.parametrize("load", [ClosedLoop(4), OpenLoop(100.0)])
def test_a_target_that_dies_in_mid_block_is_counted_and_does_not_hang(attack: Attack, load: Load) -> None:
    calls = 0

    async def handle(request: Request) -> Reply:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return OK if calls < 500 else Reply(Status.UNAVAILABLE, detail="gone")

    outcome, _ = attack(handle, load)
    assert outcome.answered.size > 0
    assert outcome.failures[Status.UNAVAILABLE][0] > 20
    assert (outcome.end_ns - outcome.start_ns) / 1e9 < 20


@pytest.mark.parametrize("load", [ClosedLoop(4), OpenLoop(100.0)])
def test_what_was_measured_stands_when_the_block_is_interrupted(attack: Attack, load: Load) -> None:
    outcome, target = attack(answering(0.04), load, duration_s=60, workers=2, after=11)
    assert outcome.interrupted
    assert outcome.window_s() == pytest.approx(10, rel=0.01)
    assert outcome.images_per_s() == pytest.approx(100, rel=0.1)
    assert target.in_flight == 0


@pytest.mark.parametrize("slow", ["finish", "rows"])
def test_what_was_measured_stands_when_its_end_is_interrupted(
    attack: Attack, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    whole = getattr(Generator, slow)

    async def slowly(*arguments: Any, **options: Any) -> Any:
        found = await whole(*arguments, **options)
        await asyncio.sleep(2)
        return found

    monkeypatch.setattr(Generator, slow, slowly)
    outcome, _ = attack(answering(0.04), OpenLoop(100.0), workers=2, after=12)
    assert outcome.interrupted
    assert len(outcome.measured) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("looks", [False, True])
def test_a_closed_loop_ends_when_its_coordinator_stands_still(
    in_virtual_time: Callable[[Callable[[], Coroutine[Any, Any, int]]], int],
    fake_target: type[FakeTarget],
    model_info: ModelInfo,
    looks: bool,
) -> None:
    sent_at_s: list[float] = []

    async def handle(request: Request) -> Reply:
        sent_at_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.1)
        return OK

    async def main() -> int:
        loop = asyncio.get_running_loop()
        generator = Generator(
            target=fake_target(handle),
            models={"xla": [model_info]},
            requests={"xla": [Request(b"", 1, "xla")]},
            clock=lambda: round(loop.time() * 1e9),
            spin_s=0,
        )
        await generator.prepare(Task("xla", ("fake",), slots=2))
        await generator.begin(0)
        for _ in range(20):
            await asyncio.sleep(sender.MAX_SILENCE_S / 4)
            if looks:
                await generator.live()
        if not looks:
            with pytest.raises(TargetError, match="nobody looked at the answers for 30 s: the load was ended"):
                await generator.live()
        return (await generator.finish()).sends

    assert in_virtual_time(main) == len(sent_at_s)
    assert max(sent_at_s) == pytest.approx((5 if looks else 1) * sender.MAX_SILENCE_S, rel=0.05)


def test_a_closed_loop_goes_on_at_once_after_an_answer_that_differs(attack: Attack) -> None:
    outcome, _ = attack(answering(0.02, Reply(Status.DIFFERING_REPLY)), ClosedLoop(1))
    assert outcome.window_s() == pytest.approx(10)
    assert len(outcome.measured) == pytest.approx(500, abs=2)


def test_requests_are_passed_on_in_pieces_and_none_is_lost(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve_loadtest.run.generator.MAX_ROWS", 64)
    monkeypatch.setattr(crew, "MAX_ROWS", 64)
    outcome, _ = attack(answering(0.02), OpenLoop(100.0), workers=3)
    assert len(outcome.rows) == outcome.sends > 1000
    assert np.unique(outcome.rows["scheduled_ns"]).size == outcome.sends
    assert (np.diff(outcome.rows["end_ns"]) >= 0).all()


def test_requests_of_a_generator_are_given_up_once_they_are_merged(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = crew._merged

    def merged(ended: list[tuple[Result, Rows]], machines: Sequence[str]) -> Rows:
        given = [weakref.ref(rows) for _, rows in ended]
        found = merge(ended, machines)
        assert [own() is None for own in given] == [True] * 3
        return found

    monkeypatch.setattr(crew, "_merged", merged)
    assert attack(answering(0.02), OpenLoop(100.0), workers=3)[0].sends > 1000


def test_live_figures_add_up_to_what_was_answered(attack: Attack) -> None:
    seen: list[Live] = []
    outcome, _ = attack(answering(0.02), ClosedLoop(4), images=5, on_live=seen.append)
    images = sum(live.images for live in seen)
    assert 0.95 * outcome.rows["images"].sum() < images <= outcome.rows["images"].sum()
    assert np.concatenate([live.latencies_ms for live in seen]) == pytest.approx(20, rel=0.001)


def test_live_figures_tell_the_measured_requests_from_those_of_warm_up(attack: Attack) -> None:
    seen: list[Live] = []
    outcome, _ = attack(answering(0.02), ClosedLoop(4), images=5, on_live=seen.append)
    measured = np.concatenate([live.measured for live in seen])
    assert 0.95 * outcome.answered.size < measured.sum() <= outcome.answered.size < measured.size
    assert sum(live.measured_images for live in seen) == measured.sum() * 5


def test_live_figures_count_measured_failures_and_dropped_requests(attack: Attack) -> None:
    async def handle(request: Request) -> Reply:
        await asyncio.sleep(0.5)
        return Reply(Status.UNAVAILABLE)

    seen: list[Live] = []
    outcome, _ = attack(handle, OpenLoop(100.0), max_in_flight=10, on_live=seen.append)
    failed = outcome.measured.size
    assert 0.8 * failed < sum(live.measured_errors for live in seen) <= failed < sum(live.errors for live in seen)
    assert 0.8 * outcome.dropped < sum(live.dropped for live in seen) <= outcome.dropped


def test_workers_share_slots_and_begin_at_different_requests(attack: Attack) -> None:
    seen = []

    async def handle(request: Request) -> Reply:
        seen.append(request.data)
        await asyncio.sleep(0.1)
        return OK

    attack(handle, ClosedLoop(3), workers=3)
    assert set(seen[:3]) == {b"\x00", b"\x01", b"\x02"}


def test_a_worker_without_a_slot_stays_out_of_the_block(attack: Attack) -> None:
    outcome, target = attack(answering(0.01), ClosedLoop(2), workers=3)
    assert target.connections == 2
    assert outcome.images_per_s() == pytest.approx(200, rel=0.01)


def test_drawn_requests_are_uniform_seeded_and_without_an_end() -> None:
    requests = [Request(b"", 1, str(number)) for number in range(16)]
    modes = [request.mode for request in islice(drawn(requests, np.random.default_rng(3)), 16_000)]
    counts = np.bincount(np.array(modes, int), minlength=16)
    assert counts.min() > 800
    assert counts.max() < 1200
    again = [request.mode for request in islice(drawn(requests, np.random.default_rng(3)), 16_000)]
    other = [request.mode for request in islice(drawn(requests, np.random.default_rng(4)), 16_000)]
    assert modes == again
    assert modes != other


def test_stamped_requests_are_all_different_in_every_worker_and_run() -> None:
    requests = cycle([Request(bytes(20), 1, "", stamp_at=8)])
    sent = [request.data for _ in range(2) for request in islice(stamped(requests), 1000)]
    assert len(set(sent)) == 2000
    assert {len(data) for data in sent} == {20}
    assert {data[:8] + data[16:] for data in sent} == {bytes(12)}


def test_what_is_dropped_is_passed_over(
    in_virtual_time: Callable[[Callable[[], Coroutine[Any, Any, Outcome]]], Outcome],
    fake_target: type[FakeTarget],
    model_info: ModelInfo,
) -> None:
    async def slow(request: Request) -> Reply:
        await asyncio.sleep(0.25)
        return OK

    async def main() -> Outcome:
        now = asyncio.get_running_loop()
        clock = lambda: round(now.time() * 1e9)  # noqa: E731
        requests = {"mix": [Request(b"", 1, "", model) for model in (0, 0, 0, 1)]}
        models = {"mix": [model_info] * 2}
        generator = Generator(target=fake_target(slow), models=models, requests=requests, clock=clock, spin_s=0)
        block = BlockPlan("mix", OpenLoop(10, "constant"), 0.0, 4.0)
        shares = crew.tasks(block, ("a",), 1, seed=0, max_in_flight=1)
        return await crew.run_block(block, [generator], shares, clock=clock)

    outcome = in_virtual_time(main)
    # Due at 0, 0.3, 0.6 ...: every third is sent, and models come as they are due.
    assert outcome.measured["model"].tolist() == [[0, 0, 0, 1][place % 4] for place in range(0, 40, 3)]
    assert outcome.dropped == 26 == sum(outcome.dropped_by_model)
    assert outcome.dropped_by_model[1] == 10 - int((outcome.measured["model"] == 1).sum())
