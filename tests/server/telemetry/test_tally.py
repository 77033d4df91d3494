from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes import Clock

from xlaserve.config import Bucket, Mode
from xlaserve.telemetry import tally
from xlaserve.telemetry.failures import KEPT, Failures
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.model import ModelTelemetry
from xlaserve.telemetry.tally import Counted
from xlaserve.timings import Timings


@pytest.fixture(autouse=True)
def _at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.telemetry.model.time.time", lambda: 1000.0)


def counted_in(processes: int, seed: int = 1) -> tuple[list[tally.Json], tally.Json]:
    """Returns the tallies of some processes, and that of one which counted all of it."""
    draw = random.Random(seed)
    everything = Metrics()
    of_all = {1: ModelTelemetry(everything, "cats", "1"), 2: ModelTelemetry(everything, "dogs", "7")}
    tallies = []
    for _ in range(processes):
        metrics = Metrics()
        here = {1: ModelTelemetry(metrics, "cats", "1"), 2: ModelTelemetry(metrics, "dogs", "7")}
        for _ in range(draw.randrange(30)):
            number, seconds, images = draw.choice((1, 2)), draw.randrange(1, 64) / 64, draw.randrange(1, 4)
            ran: Any = SimpleNamespace(gather_s=seconds, execute_s=seconds, is_finite=True)
            for one in (here[number], of_all[number]):
                one.request_answered("infer", Mode.XLA, images, Timings(queue_s=seconds, total_s=2 * seconds))
                one.request_failed("infer", "xla", "UNAVAILABLE", seconds)
                one.batch_ran(Mode.XLA, Bucket(4, 8, 8), images, ran)
        tallies.append(tally.tally(Counted.here(metrics), {key: one.statistics for key, one in here.items()}, 3))
    of_one = {key: one.statistics for key, one in of_all.items()}
    return tallies, tally.tally(Counted.here(everything), of_one, 3 * processes)


def test_the_sum_of_what_processes_counted_is_what_one_would_have_counted() -> None:
    for seed in range(20):
        tallies, wanted = counted_in(4, seed)
        total = tally.NOTHING
        for one in tallies:
            total = tally.added(total, json.loads(json.dumps(one)))
        assert total == json.loads(json.dumps(wanted))


def test_a_tally_is_read_as_it_was_counted() -> None:
    _, total = counted_in(3)
    read = Counted.read(json.loads(json.dumps(total)))
    again = tally.tally(read, {number: tally.statistics_of(total, number) for number in (1, 2)}, total["in_flight"])
    assert again == total
    assert tally.statistics_of(total, 3).images == 0


def test_only_what_is_still_there_and_has_happened_is_kept_of_a_process_that_has_gone() -> None:
    _, total = counted_in(3)
    kept = tally.of(tally.lasting(total), [2], {("dogs", "7")})
    assert kept["in_flight"] == 0
    assert {*kept["statistics"]} == {"2"}
    assert {labels[:2] for labels in Counted.read(kept).request_s} == {("dogs", "7")}
    assert kept["request_s"] == {key: one for key, one in total["request_s"].items() if key.startswith("dogs")}


def test_the_last_failures_of_all_are_kept_those_of_the_server_apart() -> None:
    clock = Clock(100.0)
    total, everything = tally.NOTHING, Failures(clock)
    for process in range(3):
        failures = Failures(clock)
        for number in range(KEPT):
            clock.now += 1
            for noted in (failures, everything):
                noted.note("infer", "INVALID_ARGUMENT", f"{process} {number}")
                if number % 5 == 0:
                    noted.note("infer", "INTERNAL", f"{process} {number}")
        here = tally.tally(Counted.here(Metrics()), {}, 0, failures)
        total = tally.added(total, tally.lasting(json.loads(json.dumps(here))))
    found = [*tally.failures_of(total)]
    assert len(found) == KEPT + 12
    assert {*found} == {*everything}
