"""Every kind of load on a server of exactly known times, in virtual time: figures are the truth, within 1%."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from tests.loadtest.conftest import FakeTarget
from tests.loadtest.known_servers import OFFLINE, Lane, Measured, images_per_s, trace

from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.run import crew
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.run.highest_rate import RateSearch
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.schedule import plan
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, OpenLoop, Profile
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.search import Slo
from xlaserve_loadtest.targets.target import ModelInfo

CONSTANT = OpenLoop(50.0, "constant")
PROFILE = Profile.parse("20..90:4,90:4,0:1,50..20:3")


def queue_ms(due_ns: np.ndarray[Any, Any], seconds: float) -> list[float]:
    """Returns the latencies of requests that are due at these times and are served one after the other."""
    free_s, latencies_ms = 0.0, []
    for at_s in due_ns / 1e9:
        free_s = max(free_s, at_s) + seconds
        latencies_ms.append((free_s - at_s) * 1000)
    return latencies_ms


@pytest.mark.parametrize(("slots", "images"), [(1, 1), (4, 1), (16, 8)])
def test_a_closed_loop_reports_the_rate_and_latency_of_one_lane(measured: Measured, slots: int, images: int) -> None:
    (point,) = measured({"xla": lambda: Lane(0.01)}, ClosedLoop(slots), images=images).points
    assert images_per_s(point) == pytest.approx(100 * images, rel=0.01)
    for name in ("p50", "p90", "p99"):
        assert point.percentile(name).value_ms == pytest.approx(10 * slots, rel=0.01)


@pytest.mark.parametrize(
    "load", [CONSTANT, OpenLoop(70.0), OpenLoop(50.0, burst=4), OpenLoop(20.0, end_rate_per_s=80.0), PROFILE, "replay"]
)
def test_an_open_loop_reports_the_rate_and_the_queue_of_one_lane(
    measured: Measured, tmp_path: Path, load: Load | str
) -> None:
    offered = trace(*sorted(np.random.default_rng(0).uniform(0, 10, 600))) if isinstance(load, str) else load
    (point,) = measured({"xla": lambda: Lane(0.01)}, offered, duration_s=10).points
    rows = np.sort(read_run(tmp_path / "known.run.jsonl.gz").requests, order="scheduled_ns")
    true_ms = np.array(queue_ms(rows["scheduled_ns"], 0.01))[rows["measured"]]
    for name, percentile in (("p50", 50), ("p90", 90), ("p99", 99)):
        true = float(np.percentile(true_ms, percentile, method="inverted_cdf"))
        if (value_ms := point.percentile(name).value_ms) is not None:
            assert value_ms == pytest.approx(true, rel=0.01)
    window_s = offered.duration_s() or 10
    assert images_per_s(point) == pytest.approx(true_ms.size / window_s, rel=0.01)


@pytest.mark.parametrize(
    ("scenario", "load", "images", "true"),
    [("single-stream", ClosedLoop(1), 1, 10), ("multi-stream", ClosedLoop(1), 8, 10), ("offline", OFFLINE, 8, 800)],
)
def test_a_scenario_reports_the_metric_of_one_lane(
    measured: Measured, scenario: str, load: Load, images: int, true: float
) -> None:
    summary = measured({"xla": lambda: Lane(0.01)}, load, images=images, duration_s=8, scenario=scenario)
    (result,) = summary.scenario
    assert result.value == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_a_search_brackets_the_highest_rate_of_one_lane(
    in_virtual_time: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    fake_target: type[FakeTarget],
    model_info: ModelInfo,
    arrivals: str,
) -> None:
    events: list[str] = []
    rates: dict[str, list[float]] = {}

    async def run_block(block: plan.BlockPlan) -> crew.Outcome:
        now = asyncio.get_running_loop()
        clock = lambda: round(now.time() * 1e9)  # noqa: E731
        generator = Generator(
            target=fake_target(Lane(0.01)),
            models={"xla": [model_info]},
            requests={"xla": [Request(b"", 1, "xla")]},
            clock=clock,
            spin_s=0,
        )
        shares = crew.tasks(block, ("fake",), 1, seed=len(rates), max_in_flight=4096)
        outcome = await crew.run_block(block, [generator], shares, clock=clock)
        if isinstance(block.load, OpenLoop):
            due_per_s = outcome.measured.size / outcome.window_s()
            assert due_per_s == pytest.approx(block.load.rate_per_s, rel=0.01 if arrivals == "constant" else 0.3)
            rates.setdefault(block.role, []).append(block.load.rate_per_s)
        return outcome

    async def main() -> None:
        settings = SimpleNamespace(slo=Slo(90, 30), duration_s=5.0, warmup_s=1.0, search_arrivals=arrivals)
        recorder = SimpleNamespace(event=lambda at_ns, what, text: events.append(text))
        search = RateSearch(cast(Any, settings), run_block, Progress(Console(file=io.StringIO())), cast(Any, recorder))
        await search.run(["xla"])

    in_virtual_time(main)
    assert not events
    # Of evenly spaced requests a lane of 10 ms holds 100/s; M/D/1 keeps its p90 under 30 ms up to a load of 0.586.
    true = 100.0 if arrivals == "constant" else 58.6
    assert 0.85 * true < rates["confirm"][-1] <= true
