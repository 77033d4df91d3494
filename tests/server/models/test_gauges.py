from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from xlaserve.config import Bucket, Mode, Precision
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.warmup.difference import Difference
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.engine.warmup.verify import Verified
from xlaserve.models.gauges import gauges
from xlaserve.models.version import State

BUCKET = Bucket(2, 4, 4)
LEVELS = (
    "queue_images",
    "queued_work_seconds",
    "in_flight_images",
    "in_flight_images_limit",
    "in_flight_bytes",
    "in_flight_bytes_limit",
)


def version(**fields: Any) -> Any:
    entries = [
        Entry("cats", "7", Mode.XLA, BUCKET, 1.0, 1.0, Cost(1.0, 1.0), datetime.now(UTC), verified=verified)
        for verified in (None, Verified(Difference(0.5, None, 8), not_finite=3))
    ]
    return SimpleNamespace(
        **{
            "name": "cats",
            "settings": SimpleNamespace(version="7", precision_in=lambda mode: Precision.BFLOAT16),
            "state": State.COMPILING,
            "served": None,
            "batcher": None,
            "auto": {BUCKET: Mode.GRAPH},
            "differences": {Mode.XLA: Difference(0.25, 0.75, 8), Mode.GRAPH: Difference(0.125, None, 8)},
            "decode_difference": Difference(0.0625, 0.875, 8),
            "examples": {Mode.XLA: Difference(0.03125, 1.0, 20), Mode.GRAPH: Difference(0.5, None, 20)},
            "ledger": entries,
            "warnings": ["slow", "narrow"],
            **fields,
        }
    )


def values(*versions: Any) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in gauges(versions)
    }


def test_a_gauge_is_there_without_models() -> None:
    assert set(values()) > {"xlaserve_queue_images", "xlaserve_model_state", "xlaserve_program_verified"}
    assert not any(values().values())


def test_a_version_is_shown_with_its_state_and_its_programs_findings() -> None:
    shown = {name: series for name, series in values(version()).items() if name != "xlaserve_model_state"}
    assert shown == {
        "xlaserve_queue_images": {},
        "xlaserve_queued_work_seconds": {},
        "xlaserve_in_flight_images": {},
        "xlaserve_in_flight_images_limit": {},
        "xlaserve_in_flight_bytes": {},
        "xlaserve_in_flight_bytes_limit": {},
        "xlaserve_model_info": {},
        "xlaserve_auto_mode": {("cats", "7", "2x4x4", "graph"): 1.0},
        "xlaserve_precision_difference": {
            ("cats", "7", "xla", "bfloat16"): 0.25,
            ("cats", "7", "graph", "bfloat16"): 0.125,
        },
        "xlaserve_precision_agreement": {("cats", "7", "xla", "bfloat16"): 0.75},
        "xlaserve_decode_difference": {("cats", "7"): 0.0625},
        "xlaserve_decode_agreement": {("cats", "7"): 0.875},
        "xlaserve_model_examples_difference": {("cats", "7", "xla"): 0.03125, ("cats", "7", "graph"): 0.5},
        "xlaserve_model_examples_agreement": {("cats", "7", "xla"): 1.0},
        "xlaserve_program_difference": {("cats", "7", "xla", "2x4x4"): 0.5},
        "xlaserve_program_verified": {("cats", "7", "xla", "2x4x4"): 1.0},
        "xlaserve_program_not_finite_images": {("cats", "7", "xla", "2x4x4"): 3.0},
        "xlaserve_model_warnings": {("cats", "7"): 2.0},
    }
    states = values(version())["xlaserve_model_state"]
    assert {labels for labels, value in states.items() if value} == {("cats", "7", "compiling")}
    assert len(states) == len(State)


def test_what_waits_is_shown_of_a_version_that_serves() -> None:
    admission = SimpleNamespace(images=5, max_images=50, size_bytes=70, max_bytes=700)
    batcher = SimpleNamespace(waiting_images=3, admission=admission, forecast=SimpleNamespace(work_s=lambda: 0.25))
    settings = SimpleNamespace(effective_default_mode=Mode.XLA, precision_in=lambda mode: Precision.BFLOAT16)
    model = SimpleNamespace(task=SimpleNamespace(name="detection"))
    shown = values(version(served=SimpleNamespace(settings=settings, model=model), batcher=batcher))
    assert {name: shown[f"xlaserve_{name}"] for name in LEVELS} == {
        "queue_images": {("cats", "7"): 3.0},
        "queued_work_seconds": {("cats", "7"): 0.25},
        "in_flight_images": {("cats", "7"): 5.0},
        "in_flight_images_limit": {("cats", "7"): 50.0},
        "in_flight_bytes": {("cats", "7"): 70.0},
        "in_flight_bytes_limit": {("cats", "7"): 700.0},
    }
    assert shown["xlaserve_model_info"] == {("cats", "7", "detection", "xla", "bfloat16"): 1.0}


def test_a_version_in_auto_is_shown_with_the_precisions_it_runs_in() -> None:
    precisions = {Mode.OPENVINO: Precision.INT8}
    settings = SimpleNamespace(
        effective_default_mode=Mode.AUTO, precision_in=lambda mode: precisions.get(mode, Precision.FLOAT32)
    )
    admission = SimpleNamespace(images=0, max_images=0, size_bytes=0, max_bytes=0)
    batcher = SimpleNamespace(waiting_images=0, admission=admission, forecast=SimpleNamespace(work_s=lambda: 0.0))
    model = SimpleNamespace(task=SimpleNamespace(name="detection"))
    served = SimpleNamespace(settings=settings, model=model)
    for auto, precision in (
        ({BUCKET: Mode.OPENVINO}, "int8"),
        ({BUCKET: Mode.OPENVINO, BUCKET._replace(batch=1): Mode.XLA}, "float32, int8"),
    ):
        shown = values(version(served=served, batcher=batcher, auto=auto))
        assert shown["xlaserve_model_info"] == {("cats", "7", "detection", "auto", precision): 1.0}


def test_of_a_version_that_was_unloaded_only_its_state_is_shown() -> None:
    shown = {name: series for name, series in values(version(state=State.UNLOADED)).items() if series}
    assert [*shown] == ["xlaserve_model_state"]
    assert shown["xlaserve_model_state"]["cats", "7", "unloaded"] == 1
