"""What Prometheus and the probes see."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection

import grpc
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.conftest import Brake, MakeRequest, NoopClient, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import vision_pb2
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from xlaserve_proto.vision_pb2_grpc import VisionStub

VISION = {"Classify", "Detect", "Embed", "Locate", "Segment", "Transcribe"}
RPCS = {
    method.name
    for file in (pb, vision_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Any of them may be counted: of calls whose message does not arrive."""
METHODS = {
    *RPCS,
    "Predict",
    "Regress",
    "infer",
    "predict",
    "regress",
    *VISION,
    *map(str.lower, VISION),
}
STATES = {"loading", "compiling", "ready", "draining", "unloaded", "failed"}
LABELS = {
    "reason",
    "model",
    "method",
    "mode",
    "status",
    "bucket",
    "state",
    "version",
    "phase",
    "precision",
    "le",
    "task",
    "role",
}
BUILD = {"version", "python", "tensorflow", "device", "device_name"}


FORMATS = ("text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0")
"""As scrapers ask for them; Prometheus itself, for the second."""


def get(address: str, path: str, media_type: str = FORMATS[0]) -> tuple[int, str]:
    host, port = address.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", path, headers={"accept": media_type})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def families(server: Server) -> dict[str, Metric]:
    status, text = get(server.metrics, "/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(grpc.RpcError):
        call()


class Growth:
    """How much the sum over the series of a metric has grown."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = families(server)

    def __call__(self, name: str, **labels: str) -> float:
        return self._sum(families(self._server), name, labels) - self._sum(self._before, name, labels)

    @staticmethod
    def _sum(metrics: dict[str, Metric], name: str, labels: dict[str, str]) -> float:
        samples = (sample for family in metrics.values() for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_names_units_and_labels_follow_the_conventions(
    server: Server, oip: GRPCInferenceServiceStub, valid: MakeRequest
) -> None:
    oip.ModelInfer(valid("image"))
    metrics = families(server)
    ours = {name: family for name, family in metrics.items() if not name.startswith("process_")}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= set(metrics)
    for name, family in ours.items():
        assert re.fullmatch(r"xlaserve_[a-z]+(_[a-z]+)*", name), name
        assert not name.endswith("_created"), name
        assert not re.search(r"_(ms|us|millis|milliseconds|mib|kb)(_|$)", name), name
        assert family.documentation, name
        assert family.type in {"counter", "gauge", "histogram"}, name
        for sample in family.samples:
            assert set(sample.labels) <= (BUILD if name == "xlaserve_build_info" else LABELS), sample
            if family.type == "counter":
                assert sample.name == f"{name}_total"
    assert {name for name, family in ours.items() if family.type == "histogram"} == {
        *(
            f"xlaserve_{stage}_seconds"
            for stage in ("request", "refusal", "decode", "queue", "gather", "execute", "encode")
        ),
        *(f"xlaserve_shadow_{measure}" for measure in ("agreement", "iou", "difference", "execute_seconds")),
        "xlaserve_compile_seconds",
        "xlaserve_batch_size",
    }
    counters = ("requests", "images", "bucket_batches", "padded_rows", "compilations", "lane_busy_seconds")
    assert {f"xlaserve_{name}" for name in counters} <= set(ours)
    gauges = ("queue_images", "in_flight_images", "in_flight_requests", "in_flight_bytes", "model_state", "ready")
    assert {ours[f"xlaserve_{name}"].type for name in gauges} == {"gauge"}


@pytest.mark.parametrize("fronts", [0, 1])
def test_no_series_says_when_it_began(start_server: StartServer, fronts: int) -> None:
    """It would be one more for each, and Prometheus stores it as any other."""
    noop = {"name": "noop", "source": "builtin:noop", "buckets": [1]}
    server = start_server({"models": [noop], "fronts": fronts, "triton_metrics": True})
    assert NoopClient(server.grpc).ask(1) == grpc.StatusCode.OK
    for media_type in FORMATS:
        text = get(server.metrics, "/metrics", media_type)[1]
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        for name in ("xlaserve_requests_total", "xlaserve_request_seconds_bucket", "nv_inference_count"):
            assert any(line.startswith(name) for line in lines), name
        assert text.endswith("# EOF\n") == ("openmetrics" in media_type)
        assert [line for line in lines if "_created" in line] == []


def test_every_request_is_counted_once_by_its_status(
    server: Server, oip: GRPCInferenceServiceStub, vision: VisionStub, valid: MakeRequest, scans: dict[str, bytes]
) -> None:
    grown = Growth(server)
    for _ in range(3):
        oip.ModelInfer(valid(n=2))
    graph = valid("image", n=4)
    graph.parameters["mode"].string_param = "graph"
    oip.ModelInfer(graph)
    vision.Classify(vision_pb2.ClassifyRequest(model="digits", images=list(scans.values())))
    late, wrong, turbo, unknown, broken = (valid() for _ in range(5))
    late.parameters["timeout"].int64_param = 1
    wrong.inputs[0].shape[0] = -1
    turbo.parameters["mode"].string_param = "turbo"
    unknown.model_name = "nope"
    broken.model_name = "broken"
    list(oip.ModelStreamInfer(iter([valid(), wrong, valid()])))
    for request in (late, wrong, turbo, unknown, broken):
        refused(partial(oip.ModelInfer, request))
    refused(lambda: vision.Classify(vision_pb2.ClassifyRequest(model="digits", images=[b"no image"])))

    assert grown("xlaserve_requests_total", method="ModelInfer", mode="xla", status="OK") == 3
    assert grown("xlaserve_requests_total", method="ModelInfer", mode="graph", status="OK") == 1
    assert grown("xlaserve_requests_total", method="Classify", mode="xla", status="OK") == 1
    assert grown("xlaserve_requests_total", method="ModelStreamInfer", mode="xla", status="OK") == 2
    assert grown("xlaserve_requests_total", method="ModelStreamInfer", status="INVALID_ARGUMENT") == 1
    assert grown("xlaserve_requests_total", method="ModelInfer", mode="xla", status="DEADLINE_EXCEEDED") == 1
    assert grown("xlaserve_requests_total", method="ModelInfer", status="INVALID_ARGUMENT") == 2
    assert grown("xlaserve_requests_total", method="Classify", mode="xla", status="INVALID_ARGUMENT") == 1
    assert grown("xlaserve_requests_total", model="broken", mode="", status="FAILED_PRECONDITION") == 1
    assert grown("xlaserve_requests_total", model="", version="", method="ModelInfer", status="NOT_FOUND") == 1
    assert grown("xlaserve_requests_total") == 14

    assert grown("xlaserve_images_total", model="digits", mode="xla") == 6 + 10 + 2
    assert grown("xlaserve_images_total", mode="graph") == 4
    assert grown("xlaserve_request_seconds_count", model="digits") == 12
    assert grown("xlaserve_request_seconds_count", model="digits", status="OK") == 7
    assert grown("xlaserve_decode_seconds_count", model="digits") == 2
    assert grown("xlaserve_queue_seconds_count", model="digits") == 7
    assert grown("xlaserve_encode_seconds_count", model="digits") == 7
    assert grown("xlaserve_request_seconds_sum", model="digits") > grown("xlaserve_queue_seconds_sum", model="digits")


def test_batches_buckets_and_padding_add_up(server: Server, oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    grown = Growth(server)
    for n in (1, 3, 5, 7, 8, 9, 20):
        oip.ModelInfer(valid(n=n))
    assert grown("xlaserve_batch_size_sum", mode="xla") == 53
    batches = grown("xlaserve_batch_size_count", mode="xla")
    for stage in ("gather", "execute"):
        assert grown(f"xlaserve_{stage}_seconds_count", model="digits") == batches
        assert grown(f"xlaserve_{stage}_seconds_sum", model="digits") > 0
    by_bucket = {size: grown("xlaserve_bucket_batches_total", bucket=f"{size}x32x32") for size in (1, 2, 4, 8)}
    assert sum(by_bucket.values()) == batches
    rows = sum(size * count for size, count in by_bucket.items())
    assert rows == 53 + grown("xlaserve_padded_rows_total", mode="xla")
    assert grown("xlaserve_compilations_total") == 0
    assert server.metric("xlaserve_compilations_total", model="digits") == 8
    assert server.metric("xlaserve_compile_seconds_count", model="digits", mode="xla") == 4


def test_nothing_that_a_client_makes_up_becomes_a_label(
    server: Server, oip: GRPCInferenceServiceStub, vision: VisionStub, valid: MakeRequest
) -> None:
    before = get(server.metrics, "/metrics")[1].count("\n")
    for number in range(20):
        unknown, turbo, versioned = valid(), valid(), valid()
        unknown.model_name = f"made-up-{number}"
        turbo.parameters["mode"].string_param = f"made-up-{number}"
        versioned.model_version = f"{1000 + number}"
        for request in (unknown, turbo, versioned):
            refused(partial(oip.ModelInfer, request))
            list(oip.ModelStreamInfer(iter([request])))
        for model, mode in ((unknown.model_name, ""), ("digits", f"made-up-{number}")):
            refused(partial(vision.Classify, vision_pb2.ClassifyRequest(model=model, mode=mode, images=[b"x"])))
        refused(partial(oip.ModelMetadata, pb.ModelMetadataRequest(name=f"made-up-{number}")))
    text = get(server.metrics, "/metrics")[1]
    assert "made-up" not in text
    assert "1000" not in re.findall(r'version="(\d+)"', text)
    assert text.count("\n") - before < 80  # each made-up name would add one at least
    for family in families(server).values():
        for sample in family.samples:
            assert sample.labels.get("model", "digits") in {"digits", "noop", "broken", ""}
            assert sample.labels.get("mode", "") in {"", "xla", "graph", "eager"}
            assert sample.labels.get("method", "ModelInfer") in METHODS
            assert sample.labels.get("status", "OK") in grpc.StatusCode.__members__


def test_each_model_is_in_one_state(server: Server) -> None:
    samples = families(server)["xlaserve_model_state"].samples
    assert {sample.labels["state"] for sample in samples} == STATES
    now = [(s.labels["model"], s.labels["version"], s.labels["state"]) for s in samples if s.value]
    assert sorted(now) == [("broken", "1", "failed"), ("digits", "1", "ready"), ("noop", "1", "ready")]


def test_idle_means_that_nothing_is_under_way(server: Server) -> None:
    for name in ("queue_images", "in_flight_images", "in_flight_bytes", "in_flight_requests"):
        assert server.metric(f"xlaserve_{name}") == 0
    assert server.metric("xlaserve_ready") == 1
    assert server.metric("xlaserve_lanes") >= 1
    assert [get(server.metrics, path) for path in ("/healthz", "/readyz")] == [(200, "ok\n"), (200, "ready\n")]


def test_what_is_under_way_shows_and_readiness_follows_the_models(start_server: StartServer, brake: Brake) -> None:
    config = {"models": [{"name": "noop", "source": "builtin:noop", "buckets": [1]}], "lanes": 1}
    brake.pull()
    server = start_server(config, env=brake.env, wait=False)
    probes = ("/healthz", "/readyz")
    assert [get(server.metrics, path)[0] for path in probes] == [200, 503]
    assert server.metric("xlaserve_ready") == 0
    server.wait_for(lambda: server.metric("xlaserve_model_state", state="compiling") == 1, "it did not compile")
    assert [get(server.metrics, path)[0] for path in probes] == [200, 503]
    brake.release()
    server.wait_until_ready()
    assert [get(server.metrics, path)[0] for path in probes] == [200, 200]

    brake.pull()
    request = pb.ModelInferRequest(model_name="noop")
    request.inputs.add(name="pixels", datatype="UINT8", shape=[1, 224, 224, 3])
    request.raw_input_contents.append(bytes(224 * 224 * 3))
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        calls = [call.future(request) for _ in range(5)]
        server.wait_for(lambda: server.metric("xlaserve_in_flight_images", model="noop") == 5, "they did not arrive")
        assert server.metric("xlaserve_in_flight_requests") == 5
        assert server.metric("xlaserve_in_flight_bytes") == 5 * 224 * 224 * 3
        assert 3 <= server.metric("xlaserve_queue_images") < 5
        server.process.terminate()
        server.wait_for(lambda: get(server.metrics, "/readyz")[0] == 503, "it stayed ready")
        assert get(server.metrics, "/healthz")[0] == 200
        brake.release()
        assert all(call.result().outputs for call in calls)
    assert server.wait() == 0
