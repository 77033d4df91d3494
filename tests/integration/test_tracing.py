"""Spans, as a collector gets them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.integration.collector import Collector, attributes, collecting
from tests.integration.conftest import DIGITS, NOOP, Brake, NoopClient, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2
from xlaserve_proto import vision_pb2_grpc as vision_grpc

SPEED = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
STAGES = ["decode", "queue", "gather", "execute", "encode"]
INFER = "inference.GRPCInferenceService/ModelInfer"


class Parent:
    """The span of a client."""

    def __init__(self, *, is_sampled: bool = True) -> None:
        self.trace_id, self.span_id = token_hex(16), token_hex(8)
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-0{int(is_sampled)}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", self.traceparent), ("tracestate", "shop=7"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(start_module_server: StartServer, collector: Collector) -> Server:
    """A server that records what its clients do, and nothing else."""
    # With one bucket, a request is always one batch.
    models = [{**DIGITS, "modes": ["graph"], "buckets": [4]}, NOOP]
    settings = {"tracing": True, "trace_endpoint": f"http://{collector.address}", "trace_sample_ratio": 0}
    server = start_module_server({"models": models, **settings, "log_format": "json", "access_log": "all"}, env=SPEED)
    server.wait_until_ready()
    return server


@pytest.fixture(scope="module")
def traced_channel(traced: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(traced.grpc) as channel:
        yield channel


def trailing(call: Any) -> dict[str, str]:
    return dict(call.trailing_metadata())


def server_span(spans: Sequence[Span]) -> Span:
    (found,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    return found


def post(server: Server, path: str, body: bytes, parent: Parent) -> tuple[int, dict[str, str]]:
    host, port = server.http.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("POST", path, body, dict(parent.metadata))
        response = connection.getresponse()
        response.read()
        return response.status, dict(response.headers)
    finally:
        connection.close()


def test_a_calls_span_is_a_child_of_its_clients_and_parent_of_its_stages(
    traced: Server, traced_channel: grpc.Channel, collector: Collector, scans: dict[str, bytes]
) -> None:
    parent = Parent()
    request = vision_pb2.ClassifyRequest(model="digits", images=[scans["7"]])  # several may run in several batches
    metadata = (*parent.metadata, ("x-request-id", "tree"))
    _, call = vision_grpc.VisionStub(traced_channel).Classify.with_call(request, metadata=metadata)
    spans = collector.trace(parent.trace_id, 1 + len(STAGES))
    root = server_span(spans)
    assert root.name == "xlaserve.v1.Vision/Classify"
    assert root.parent_span_id.hex() == parent.span_id
    assert root.trace_state == "shop=7"
    assert attributes(root) == {
        "rpc.system.name": "grpc",
        "rpc.method": "xlaserve.v1.Vision/Classify",
        "rpc.response.status_code": "OK",
        "xlaserve.request_id": "tree",
        "xlaserve.model.name": "digits",
        "xlaserve.model.version": "1",
        "xlaserve.mode": "graph",
        "xlaserve.images": 1,
    }
    assert root.status.code == Status.STATUS_CODE_UNSET
    children = sorted((span for span in spans if span is not root), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in children] == STAGES
    assert {span.parent_span_id for span in children} == {root.span_id}
    # Each begins when the one before has ended, within what the clocks of threads and processes allow.
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in children]
    assert root.start_time_unix_nano <= times[0][0]
    assert times[-1][1] <= root.end_time_unix_nano
    for (start, end), (following, _) in pairwise(times):
        assert start <= end <= following + 1000
    assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60
    # The answer and the log name the server's span.
    assert trailing(call)["traceparent"] == f"00-{parent.trace_id}-{root.span_id.hex()}-01"
    traced.wait_for(lambda: parent.trace_id in traced.stderr, "the log did not name the trace")


def test_a_batch_is_linked_to_its_requests_and_they_to_it(
    start_server: StartServer, collector: Collector, brake: Brake
) -> None:
    settings = {"tracing": True, "trace_endpoint": f"http://{collector.address}", "trace_sample_ratio": 0}
    server = start_server({"models": [{**NOOP, "buckets": [2]}], "lanes": 1, **settings}, env={**SPEED, **brake.env})
    server.wait_until_ready()
    parents = [Parent(), Parent(), Parent(), Parent(), Parent(is_sampled=False)]
    with grpc.insecure_channel(server.grpc) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        brake.pull()
        calls = [stub.ModelInfer.future(NoopClient.request(1), metadata=parent.metadata) for parent in parents]
        server.wait_for(lambda: server.metric("xlaserve_in_flight_requests") == len(parents), "not all are in", 20)
        brake.release()
        for call in calls:
            call.result(30)
    traces = {parent.trace_id for parent in parents[:4]}

    def requests(spans: list[Span]) -> dict[bytes, bytes]:
        """Returns the batch of each request, by their spans."""
        found = [span for span in spans if span.trace_id.hex() in traces and span.name == "execute"]
        return {span.parent_span_id: span.links[0].span_id for span in found} if len(found) == len(traces) else {}

    batch_of = collector.wait_for(requests)
    batches = collector.wait_for(
        lambda spans: len(ours := [span for span in spans if span.span_id in {*batch_of.values()}]) >= 2 and ours
    )
    assert len({batch.trace_id for batch in batches}) == len(batches)
    assert {link.span_id: batch.span_id for batch in batches for link in batch.links} == batch_of
    assert {link.trace_id.hex() for batch in batches for link in batch.links} == traces
    assert any(len(batch.links) == 2 for batch in batches)
    for batch in batches:
        assert batch.name == "batch noop"
        assert not batch.parent_span_id
        assert attributes(batch)["xlaserve.bucket"].startswith("2x")  # type: ignore[union-attr]
    assert server.stop() == 0, server.stderr


def test_what_its_client_does_not_record_leaves_no_span_nor_does_a_probe(
    traced: Server, traced_channel: grpc.Channel, collector: Collector
) -> None:
    silent, after = Parent(is_sampled=False), Parent()
    stub = oip_grpc.GRPCInferenceServiceStub(traced_channel)
    _, call = stub.ModelInfer.with_call(NoopClient.request(1), metadata=silent.metadata)
    assert trailing(call)["traceparent"] == silent.traceparent
    stub.ModelInfer(NoopClient.request(1))
    probe = Parent()
    stub.ServerLive(pb.ServerLiveRequest(), metadata=probe.metadata)
    stub.ModelMetadata(pb.ModelMetadataRequest(name="noop"), metadata=after.metadata)
    (span,) = collector.trace(after.trace_id, 1)
    assert attributes(span)["rpc.method"] == "inference.GRPCInferenceService/ModelMetadata"
    traces = {span.trace_id.hex() for span in collector.spans}
    assert not traces & {silent.trace_id, probe.trace_id}


def test_a_failed_call_has_the_error_that_its_client_got(
    traced: Server, traced_channel: grpc.Channel, collector: Collector
) -> None:
    stub = oip_grpc.GRPCInferenceServiceStub(traced_channel)
    theirs, ours = Parent(), Parent()
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(pb.ModelInferRequest(model_name="cat"), metadata=theirs.metadata)
    (span,) = collector.trace(theirs.trace_id, 1)
    assert attributes(span)["rpc.response.status_code"] == "NOT_FOUND"
    assert span.status.code == Status.STATUS_CODE_UNSET
    (event,) = span.events
    assert event.name == "exception"
    assert attributes(event) == {"exception.type": "ModelNotFound", "exception.message": caught.value.details()}
    assert trailing(caught.value)["traceparent"].split("-")[2] == span.span_id.hex()

    multi_inference: Any = traced_channel.unary_unary("/tensorflow.serving.PredictionService/MultiInference")
    with pytest.raises(grpc.RpcError):
        multi_inference(b"", metadata=ours.metadata)
    (span,) = collector.trace(ours.trace_id, 1)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.status.message
    assert attributes(span)["error.type"] == attributes(span)["rpc.response.status_code"] == "UNIMPLEMENTED"


def test_each_message_of_a_stream_is_a_call_that_is_linked_to_the_stream(
    traced: Server, traced_channel: grpc.Channel, collector: Collector
) -> None:
    parent = Parent()
    good, bad = NoopClient.request(2), pb.ModelInferRequest(model_name="cat")
    good.id, bad.id = "good", "bad"
    stub = oip_grpc.GRPCInferenceServiceStub(traced_channel)
    assert len([*stub.ModelStreamInfer(iter([good, bad]), metadata=parent.metadata)]) == 2

    def complete(all_: list[Span]) -> list[Span]:
        found = of_trace(all_, parent)
        return found if {span.name for span in found} >= {STREAM, f"{STREAM} message", "encode"} else []

    spans = collector.wait_for(complete)
    (stream,) = [span for span in spans if span.name == STREAM]
    assert attributes(stream)["rpc.response.status_code"] == "OK"
    messages = {attributes(span)["xlaserve.message_id"]: span for span in spans if span.name == f"{STREAM} message"}
    assert {key: attributes(span)["rpc.response.status_code"] for key, span in messages.items()} == {
        "good": "OK",
        "bad": "NOT_FOUND",
    }
    assert {span.parent_span_id.hex() for span in [stream, *messages.values()]} == {parent.span_id}
    assert [[link.span_id for link in span.links] for span in messages.values()] == [[stream.span_id]] * 2
    children = {span.name for span in spans if span.parent_span_id == messages["good"].span_id}
    assert {"execute", "encode"} <= children


STREAM = "inference.GRPCInferenceService/ModelStreamInfer"


def of_trace(spans: list[Span], parent: Parent) -> list[Span]:
    return [span for span in spans if span.trace_id.hex() == parent.trace_id]


def test_http_requests_are_described_as_http(traced: Server, collector: Collector, scans: dict[str, bytes]) -> None:
    good, missing, unknown = Parent(), Parent(), Parent()
    status, headers = post(traced, "/v1/models/digits:classify", scans["3"], good)
    root = server_span(collector.wait_for(lambda all_: of_trace(all_, good)))
    assert headers["traceparent"].split("-")[2] == root.span_id.hex()
    assert root.name == "POST /v1/models/{model}:classify"
    assert root.parent_span_id.hex() == good.span_id
    found = attributes(root)
    assert found["http.request.method"] == "POST"
    assert found["http.route"] == "/v1/models/{model}:classify"
    assert found["url.path"] == "/v1/models/digits:classify"
    assert found["url.scheme"] == "http"
    assert found["http.response.status_code"] == status == 200

    status, _ = post(traced, "/v2/models/cat/infer", b"{}", missing)
    (span,) = collector.trace(missing.trace_id, 1)
    assert attributes(span)["http.response.status_code"] == status == 404
    assert (span.status.code, len(span.events)) == (Status.STATUS_CODE_UNSET, 1)
    post(traced, "/nowhere", b"", unknown)
    (span,) = collector.trace(unknown.trace_id, 1)
    assert (span.name, attributes(span)["http.response.status_code"]) == ("POST", 404)


def test_without_a_client_span_the_ratio_decides_and_variables_name_it(start_server: StartServer) -> None:
    with collecting() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
            "OTEL_SERVICE_NAME": "cameras",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test,service.version=7",
        }
        server = start_server({"models": [NOOP], "tracing": True}, env=env)
        server.wait_until_ready()
        with grpc.insecure_channel(server.grpc) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            _, call = stub.ModelInfer.with_call(NoopClient.request(1))
        trace_id = trailing(call)["traceparent"].split("-")[1]
        # The end sends what the thread, which looks every five seconds, has not.
        assert server.stop() == 0, server.stderr
        root = server_span([span for span in collector.spans if span.trace_id.hex() == trace_id])
        assert not root.parent_span_id
        assert collector.resource["service.name"] == "cameras"
        assert collector.resource["deployment.environment.name"] == "test"
        assert collector.resource["service.version"] == "7"


@pytest.mark.parametrize("collector_is", ["down", "hanging"])
def test_a_collector_that_does_not_answer_delays_no_request_and_no_end(
    start_server: StartServer, collector_is: str
) -> None:
    with collecting(hangs=True) as collector:
        address = collector.address if collector_is == "hanging" else "127.0.0.1:1"
        env = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16"}
        server = start_server({"models": [NOOP], "tracing": True, "trace_endpoint": f"http://{address}"}, env=env)
        server.wait_until_ready()
        slowest_s = 0.0
        with grpc.insecure_channel(server.grpc) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(300):
                began = time.monotonic()
                stub.ModelInfer(NoopClient.request(1))
                slowest_s = max(slowest_s, time.monotonic() - began)
        if collector_is == "hanging":
            assert collector.called.wait(20)
        assert slowest_s < 2, "the exporter waits for 10 s"
        began = time.monotonic()
        assert server.stop() == 0, server.stderr
        assert time.monotonic() - began < 15
        assert "Traceback" not in server.stderr
        assert "Queue full" in server.stderr
        assert len(server.stderr.splitlines()) < 60


def test_a_server_without_the_extra_says_what_it_needs(tmp_path: Path) -> None:
    # Python runs this before the server.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry'] = None")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    server = Server({"models": [NOOP], "tracing": True}, tmp_path, env)
    assert server.wait() != 0
    assert "tracing: it needs the extra otel: pip install 'xlaserve[otel]'" in server.stderr
    assert "Traceback" not in server.stderr
