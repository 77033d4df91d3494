from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes import Clock

from xlaserve.config import Bucket, Mode
from xlaserve.engine.timings import Timings
from xlaserve.telemetry import tally
from xlaserve.telemetry.failures import KEPT, Failures
from xlaserve.telemetry.findings import KEPT_PAIRS, Findings, Likeness, Pair, TimeRatio
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.tally import Counted, ShadowKey
from xlaserve.telemetry.version_metrics import ModelTelemetry


@pytest.fixture(autouse=True)
def _at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.telemetry.version_metrics.time.time", lambda: 1000.0)


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


def test_of_an_ended_process_only_counts_of_present_versions_are_kept() -> None:
    _, total = counted_in(3)
    kept = tally.select(tally.lasting(total), [2], {("dogs", "7")})
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


def found_in(processes: int) -> tuple[tally.Json, Findings]:
    """Returns what some processes have found of version 7 (loading 2) as the shadow of loading 1, and what one would
    have that did all of it."""
    draw, total, everything = random.Random(5), tally.NOTHING, Findings()
    for process in range(processes):
        here = Findings()
        for at in range(KEPT_PAIRS // 2):
            iou, difference = draw.choice((None, 0.5)), draw.choice((None, draw.randrange(64) / 64))
            for findings in (here, everything):
                findings.add(Likeness(draw.choice((1.0, 1.0)), iou, difference))
                findings.dropped["busy"] += 1
            here.time_ratios.append(TimeRatio(at * processes + process, 1 + at))
        shadows = {1: {ShadowKey(Mode.XLA, 2, Mode.GRAPH): here}}
        total = tally.added(total, json.loads(json.dumps(tally.tally(Counted.here(Metrics()), {}, 0, shadows=shadows))))
    newest = range(processes * KEPT_PAIRS // 2 - KEPT_PAIRS, processes * KEPT_PAIRS // 2)
    everything.time_ratios.extend(TimeRatio(at, 1 + at // processes) for at in newest)
    return total, everything


def test_what_processes_have_found_of_shadows_is_what_one_would_have_found() -> None:
    total, everything = found_in(3)
    assert tally.findings_of(total, 1, {1: "6", 2: "7"}) == {Pair(Mode.XLA, "7", Mode.GRAPH): everything}
    assert tally.findings_of(total, 2, {1: "6", 2: "7"}) == {}


def test_what_was_found_of_a_shadow_goes_with_either_loading() -> None:
    total, everything = found_in(2)
    assert tally.findings_of(total, 1, {1: "6"}) == {}
    for numbers in ({1: 11}, {2: 12}):
        assert not any(tally.renumbered(total, numbers)["shadows"].values())
    shown = tally.renumbered(total, {1: 11, 2: 12})
    assert tally.findings_of(shown, 11, {11: "6", 12: "7"}) == {Pair(Mode.XLA, "7", Mode.GRAPH): everything}
    assert tally.select(total, [1, 2], {("cats", "1")})["shadows"] == total["shadows"]
    assert not any(tally.select(total, [1, 3], {("cats", "1")})["shadows"].values())
