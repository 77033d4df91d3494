from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from xlaserve.config import Mode
from xlaserve.engine.timings import Timings
from xlaserve.models.triton_metrics import triton_metrics
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.version_metrics import ModelTelemetry

KEYS = ("model", "version", "reason")


def served(metrics: Metrics) -> Any:
    """A version that answered three images in one request, failed two requests, and has four that wait."""
    telemetry = ModelTelemetry(metrics, "cats", "7")
    timings = Timings(decode_s=0.5, queue_s=0.25, gather_s=0.125, execute_s=2.0, encode_s=0.0625, total_s=3.0)
    telemetry.request_answered("ModelInfer", Mode.XLA, 3, timings)
    telemetry.request_failed("ModelInfer", "xla", "RESOURCE_EXHAUSTED", 0.1)
    telemetry.request_failed("Classify", "xla", "UNAVAILABLE", 0.1)
    telemetry.request_failed("Classify", "", "INVALID_ARGUMENT", 0.1)
    metrics.count_refused("Classify", "NOT_FOUND")
    return SimpleNamespace(
        name="cats",
        settings=SimpleNamespace(version="7"),
        telemetry=telemetry,
        served=SimpleNamespace(),
        batcher=SimpleNamespace(waiting_requests=4),
    )


def shown() -> dict[tuple[str, ...], float]:
    metrics = Metrics()
    versions = [served(metrics)]
    metrics.add_gauges(lambda: triton_metrics(versions, metrics))
    metrics.read_gauges()
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("nv_")]
    return {
        (sample.name, *(sample.labels[key] for key in KEYS if key in sample.labels)): sample.value for sample in samples
    }


def test_requests_durations_and_what_waits_have_tritons_names_and_units() -> None:
    assert shown() == {
        ("nv_inference_request_success", "cats", "7"): 1,
        ("nv_inference_count", "cats", "7"): 3,
        ("nv_inference_exec_count", "cats", "7"): 0,
        ("nv_inference_request_duration_us", "cats", "7"): 3_000_000,
        ("nv_inference_queue_duration_us", "cats", "7"): 250_000,
        ("nv_inference_compute_input_duration_us", "cats", "7"): 625_000,
        ("nv_inference_compute_infer_duration_us", "cats", "7"): 2_000_000,
        ("nv_inference_compute_output_duration_us", "cats", "7"): 62_500,
        ("nv_inference_request_failure", "cats", "7", "REJECTED"): 2,
        ("nv_inference_request_failure", "cats", "7", "OTHER"): 1,
        ("nv_inference_pending_request_count", "cats", "7"): 4,
    }
