from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.generator import GeneratorFigures
from xlaserve_loadtest.analysis.highest_rate import HighestRate
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.mlperf import ScenarioResult
from xlaserve_loadtest.analysis.percentiles import Percentile
from xlaserve_loadtest.analysis.points import CurveValue, Padding, Point, ServerFigures, TimeSlice
from xlaserve_loadtest.analysis.price import Price
from xlaserve_loadtest.analysis.stages import Stage
from xlaserve_loadtest.analysis.summary import BlockSpan, Summary, TimedEvent
from xlaserve_loadtest.record.blocks import LoadLine, Role
from xlaserve_loadtest.record.lines import Arm, End, Environment, Equality, Failure, Header, LedgerEntry, Server

RATE = {"xla": 251.0, "graph": 214.0, "graph (A/A)": 213.1}

MakeSummary = Callable[..., Summary]
MakePoint = Callable[..., Point]


def make_point(arm: str, *, concurrency: int = 16, factor: float = 1.0, role: Role = "measure") -> Point:
    rate = RATE.get(arm, 60.0) * factor
    base_ms = 1000 * 8 / rate
    shares = {
        "send": 0.01,
        "unaccounted": 0.05,
        "decode": 0.06,
        "queue": 0.3,
        "gather": 0.02,
        "execute": 0.54,
        "encode": 0.02,
    }
    ranks = [0.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9]
    return Point(
        arm=arm,
        role=role,
        load=LoadLine("closed", concurrency=concurrency),
        label=f"{concurrency} at a time",
        blocks=8,
        measured_s=5.0,
        requests=1200,
        images=1200,
        images_per_s=Estimate(rate, rate * 0.97, rate * 1.04),
        requests_per_s=Estimate(rate, rate * 0.97, rate * 1.04),
        mean_ms=base_ms,
        percentiles=(
            Percentile("p50", 50, base_ms, base_ms * 0.98, base_ms * 1.02, 7),
            Percentile("p99", 99, base_ms * 2, base_ms * 1.8, None, 459),
            Percentile("p99.9", 99.9, base_ms * 2.5 if arm == "graph" else None, None, None, 4603),
        ),
        max_ms=base_ms * 3,
        errors={},
        warmup_errors={},
        dropped=0,
        comparable=0,
        compared=300,
        differing=0,
        differing_measured=0,
        steady=True,
        generator=GeneratorFigures(2, 0.31, 0.22, 0.3, 1200, 3, 0.0025, 0.1, 0.0, ()),
        server=ServerFigures(9.5, 7.9, 900 * 2**20, None, None, 1.4, 0, 0),
        stages=tuple(Stage(name, base_ms * share, share) for name, share in shares.items()),
        padding=Padding(1200, 90, 0.07, {"1x224x224": 12, "4x224x224": 60, "8x224x224": 118}),
        curve=tuple(CurveValue(rank, base_ms * (0.6 + 0.1 / (1.001 - rank / 100) ** 0.5)) for rank in ranks),
        over_time=tuple(
            TimeSlice(
                0.3 + step / 8, 30, base_ms * (1 + 0.1 * math.sin(step)), base_ms * (1.6 + 0.4 * math.cos(step * 3))
            )
            for step in range(40)
        ),
        block_images_per_s=(rate,) * 8,
    )


def make_summary(**changes: Any) -> Summary:
    arms = (
        Arm("xla", "xla", "ResNet50", "embedded"),
        Arm("graph", "graph", "ResNet50", "embedded"),
        Arm("graph (A/A)", "graph", "ResNet50", "embedded", "graph"),
    )
    points = tuple(make_point(arm.name) for arm in arms)
    loads = [(1, 0.3), (4, 0.8), (16, 1.0), (32, 1.01)]
    ledger = {
        mode: tuple(
            LedgerEntry(
                mode, (batch, 224, 224), 1.1 + batch / 40, compile_s + batch / 10 * (mode == "xla"), batch / 200
            )
            for batch in (1, 4, 8)
        )
        for mode, compile_s in (("xla", 3.0), ("graph", 0.0))
    }
    summary = Summary(
        path=Path("resnet50.run.jsonl.gz"),
        header=Header(
            started_at="2026-11-20T18:00:00Z",
            command=("loadtest", "--mode", "xla,graph", "--model", "ResNet50"),
            configuration={"duration_s": 5, "concurrency": [16], "slo": "p99<50ms"},
            seed=0,
            scenario=None,
            baseline="graph",
            arms=arms,
            environment=Environment(
                "A CPU of 2 cores",
                2,
                (),
                "Linux",
                "3.11.7",
                {"tensorflow": "2.21.0"},
                {"XLA_FLAGS": "--xla_x=1"},
                "abc123",
            ),
        ),
        verdict_sentences=("xla is faster than graph: 1.17 times the images/s (95% interval 1.14 to 1.20).",),
        verdicts=("xla is faster than graph: 1.17 times the images/s (95% interval 1.14 to 1.20).",),
        points=points,
        curve=tuple(
            make_point(arm, concurrency=load, factor=factor, role="curve")
            for arm in ("xla", "graph")
            for load, factor in loads
        ),
        comparisons=(
            Comparison(
                "xla",
                "graph",
                "16 at a time",
                16,
                "blocks",
                {"images_per_s": Estimate(1.17, 1.14, 1.2), "p50": Estimate(0.86, 0.84, 0.88), "p99": None},
                "images_per_s",
                "faster",
                "",
                False,
            ),
            Comparison(
                "graph (A/A)",
                "graph",
                "16 at a time",
                16,
                "blocks",
                {"images_per_s": Estimate(0.996, 0.97, 1.02), "p50": Estimate(1, 0.98, 1.02), "p99": None},
                "images_per_s",
                "inconclusive",
                "the interval contains 1",
                True,
            ),
        ),
        prices=(
            Price("xla", ledger["xla"], 3.6, 10.3, 10.3, 0.69, 14_900, "paid back after 14,900 images, about a minute"),
            Price("graph", ledger["graph"], 3.6, 0.0, None, None, None, "it is the baseline"),
        ),
        highest_rates=(
            HighestRate("xla", "p99<50ms", 200.0, 215.0, 200.0, 41, 9_000, 11),
            HighestRate("graph", "p99<50ms", None, 3.1, None, 0, 0, 5),
        ),
        scenario=(
            ScenarioResult(
                "xla",
                "single-stream",
                "modelled on MLPerf SingleStream",
                "p90 early-stopping estimate, ms",
                31.2,
                160,
                160,
                5.0,
                ("5 s instead of 600 s",),
            ),
        ),
        equalities=(Equality("xla", "graph", 16, 2e-6, 1e-5, 1.0, 1e-3, 1e-3, True),),
        failures=(Failure("graph", "UNAVAILABLE", 2, "connection reset"),),
        servers=(
            Server(
                0,
                ("xla", "graph"),
                "127.0.0.1:1234",
                "xlaserve 0.1.0",
                42,
                {},
                (*ledger["xla"], *ledger["graph"]),
                21.5,
            ),
        ),
        events=(TimedEvent(0.1, "compile", "xla 8x224x224, 4.1 s"), TimedEvent(2.5, "error", "gone")),
        spans=(BlockSpan("xla", "16 at a time", 0.0, 2.0), BlockSpan("graph", "16 at a time", 2.0, 4.0)),
        warnings=("the server's clock was slow",),
        notes=("A note on how to read it.",),
        end=End(False, True),
        missing=(),
        duration_s=15.0,
        requests=3700,
    )
    return dataclasses.replace(summary, **changes)


@pytest.fixture
def summary() -> MakeSummary:
    """Makes the summary of a run that has something in every section; fields may be given."""
    return make_summary


@pytest.fixture
def point() -> MakePoint:
    return make_point
