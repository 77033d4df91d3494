from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

import xlaserve
from xlaserve.engine.trace_context import TraceContext, new
from xlaserve.telemetry.otlp import PACKAGE, OtlpExporter, QueuedSpan
from xlaserve.telemetry.tracing import Attribute, FinishedSpan, SpanFailure

CLIENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "shop=7,other=x")
CALL = CLIENT._replace(span_id="0000000000000001")
RESOURCE = Resource({"service.name": "test", "numbers": [1, 2]})


def context(trace: TraceContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([trace.state]) if trace.state else None
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote, sampled, state)


def spans_of(request: ExportTraceServiceRequest) -> Sequence[Span]:
    return request.resource_spans[0].scope_spans[0].spans


def sdk_span(span: FinishedSpan) -> ReadableSpan:
    status, events = Status(StatusCode.UNSET), []
    if (failure := span.failure) is not None:
        events = [
            Event("exception", {"exception.type": failure.error, "exception.message": failure.reason}, span.end_ns)
        ]
    if span.is_error:
        status = Status(StatusCode.ERROR, None if failure is None else failure.reason)
    return ReadableSpan(
        span.name,
        context=context(span.context),
        parent=None if span.parent is None else context(span.parent, is_remote=span.is_server),
        resource=RESOURCE,
        attributes=span.attributes,
        events=events,
        links=[Link(context(link)) for link in span.links],
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        status=status,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(PACKAGE, xlaserve.__version__),
    )


def test_spans_are_encoded_as_opentelemetrys_own_encoder_does() -> None:
    exporter = OtlpExporter("http://127.0.0.1:1", RESOURCE)
    values: dict[str, Attribute] = {
        "text": "é",
        "yes": True,
        "one": 1,
        "no": False,
        "half": 0.5,
        "negative": -1,
        "empty": "",
    }
    failure = SpanFailure("BatchFailed", "INTERNAL", "the batch failed")
    spans = [
        FinishedSpan("service/Method", CALL, CLIENT, 1, 2, values, is_server=True),
        FinishedSpan("service/Method", new(), None, 1_795_798_830_000_000_001, 2**62, {}, is_server=True),
        FinishedSpan("queue", CALL._replace(span_id="0" * 15 + "2"), CALL, 1, 1, {"one": 1.0, "yes": 1}),
        FinishedSpan("execute", CALL._replace(span_id="0" * 15 + "3"), CALL, 5, 9, {}, [new(), CLIENT]),
        FinishedSpan("batch noop", new(), None, 5, 9, {}, [CALL], failure=failure, is_error=True),
        FinishedSpan("refused", new(), CLIENT, 5, 9, {}, is_server=True, failure=failure),
        FinishedSpan("GET /", new(), CLIENT, 5, 9, {}, is_server=True, is_error=True),
    ]
    try:
        sent = exporter._translate_data([*map(QueuedSpan, spans)])
    finally:
        exporter.shutdown()
    expected = encode_spans([*map(sdk_span, spans)])
    assert [*spans_of(sent)] == [*spans_of(expected)]
    assert sent == expected
    assert len(spans_of(sent)) == len(spans)
