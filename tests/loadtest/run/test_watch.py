from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from xlaserve_loadtest.run.sender import Live
from xlaserve_loadtest.run.watch import Watch, parse_abort
from xlaserve_loadtest.schedule.conditions import COUNTS, ConditionError


def look(latencies_ms: Sequence[float] = (), *, warm_up: int = 0, errors: int = 0, dropped: int = 0) -> Live:
    """A look; the first `warm_up` answers are not measured."""
    measured = np.arange(len(latencies_ms)) >= warm_up
    images = int(measured.sum())
    return Live(len(latencies_ms), np.array(latencies_ms, np.float32), errors, measured, images, errors, dropped)


def watch(*conditions: str) -> tuple[Watch, list[None]]:
    """A watch in its first block, and a list that grows when a condition is met."""
    made, met = Watch([parse_abort(text) for text in conditions]), list[None]()
    made.on_met = lambda: met.append(None)
    made.begin("xla", "4 at a time")
    return made, met


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("xla/graph upper<0.95", "arms are compared when all of their blocks are there"),
        ("verdict=slower", "arms are compared when all of their blocks are there"),
        ("images/s>100", "images/s is judged over whole blocks"),
        ("mean>1", "mean is judged over whole blocks"),
        ("p99<80ms", "expected > or >="),
        ("errors=0", "expected > or >="),
        ("p99 lower>80ms", "bounds take whole blocks"),
    ],
)
def test_a_condition_not_judged_during_a_run_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConditionError, match=re.escape(why)):
        parse_abort(text)


@pytest.mark.parametrize(
    ("text", "live", "reason"),
    [
        ("errors>0", look([1.0], errors=1), "--abort-if errors>0: xla, 4 at a time: 1 of 2"),
        ("errors>1", look([1.0], errors=1), ""),
        ("errors>1%", look([1.0], errors=1), ""),
        ("errors>1%", look([1.0] * 90, errors=10), "--abort-if errors>1%: xla, 4 at a time: 10 of 100"),
        ("dropped>0%", look([1.0], dropped=1), "--abort-if dropped>0%: xla, 4 at a time: 1 of 2"),
        ("p99>80ms", look([100.0, 100.0]), ""),
        ("p99>80ms", look([100.0] * 4), "--abort-if p99>80ms: xla, 4 at a time: 4 of 4 requests over it"),
        ("p99>80ms", look([100.0] * 4, warm_up=3), ""),
        ("p99>80ms", look([80.0] * 100), ""),
        ("p99>=80ms", look([80.0] * 100), "100 of 100 requests over it"),
        ("p99>80ms", look([1.0] * 90, errors=10), "10 of 100 requests over it"),
        ("max>80ms", look([1.0, 81.0]), "1 of 2 requests over it"),
        ("max>80ms", look([1.0, 79.0]), ""),
    ],
)
def test_a_condition_is_judged_by_the_measured_requests(text: str, live: Live, reason: str) -> None:
    made, met = watch(text)
    made.add(live)
    made.add(look())
    assert reason in made.reason
    assert bool(made.reason) == bool(reason) == (len(met) == 1)
    (judged,) = made.judged()
    assert (judged.is_met, judged.option) == (bool(reason), "--abort-if")


@pytest.mark.parametrize("condition", ["errors>0", "graph:errors>0"])
def test_a_condition_for_which_nothing_was_measured_is_not_judged(condition: str) -> None:
    made, met = watch(condition)
    made.add(look([1.0] * 3, warm_up=3))
    if condition.startswith("graph"):
        made.add(look([1.0]))
    (judged,) = made.judged()
    assert (judged.is_met, judged.is_judged, met) == (True, False, [])


@pytest.mark.parametrize("name", COUNTS)
def test_every_count_of_the_grammar_is_watched(name: str) -> None:
    made, met = watch(f"{name}>0")
    for other in COUNTS:
        made.add(look([1.0], **{other: int(other != name)}))
    assert not met
    made.add(look([1.0], **{name: 1}))
    assert met


def test_a_run_whose_percentile_is_at_the_limit_is_seldom_ended() -> None:
    ended = 0
    for seed in range(50):
        made, met = watch("p99>80ms")
        random = np.random.default_rng(seed)
        # Exactly 1% of the answers take longer than the limit.
        for _ in range(400):
            made.add(look(np.where(random.random(50) < 0.01, 100.0, 10.0).tolist()))
        ended += len(met)
    assert ended <= 1


def test_a_run_whose_percentile_is_over_the_limit_ends_soon() -> None:
    made, met = watch("p99>80ms")
    random = np.random.default_rng(0)
    looks = 0
    while not met:
        looks += 1
        made.add(look(np.where(random.random(50) < 0.05, 100.0, 10.0).tolist()))
    assert looks < 20


def test_arms_and_loads_are_counted_apart() -> None:
    made, met = watch("errors>1")
    made.add(look(errors=1))
    made.begin("graph", "4 at a time")
    made.add(look(errors=1))
    assert not met
    made.begin("xla", "4 at a time")
    made.add(look(errors=1))
    assert len(met) == 1


def test_live_metrics_are_served_while_it_runs_and_not_afterwards() -> None:
    made, _ = watch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/metrics"
    with made.served(("127.0.0.1", port)):
        made.add(look([2.0, 20.0, 20.0], warm_up=1, errors=3, dropped=4))
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        with pytest.raises(OSError, match="ddress already in use"), made.served(("127.0.0.1", port)):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)
    samples = {
        (sample.name.removeprefix("loadtest_live_"), sample.labels.get("le", "")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    values = {key: sample.value for key, sample in samples.items()}
    assert values["images_total", ""] == values["answers_total", ""] == 2
    assert (values["errors_total", ""], values["dropped_total", ""], values["active", ""]) == (3, 4, 1)
    assert samples["errors_total", ""].labels == {"arm": "xla", "load": "4 at a time"}
    assert values["latency_seconds_bucket", "0.01"] == 0
    assert values["latency_seconds_bucket", "0.025"] == values["latency_seconds_count", ""] == 2
    assert values["latency_seconds_sum", ""] == pytest.approx(0.04)
