"""Export of spans to an OpenTelemetry collector, by OTLP over gRPC. The only module that imports the OpenTelemetry
extra.

Spans wait in a bounded queue, from which a thread sends them. Where the collector is slow or unreachable, the oldest
spans are dropped and no request is delayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from xlaserve.engine.trace_context import TraceContext
from xlaserve.errors import ConfigError
from xlaserve.telemetry.tracing import Attribute, FinishedSpan

FLUSH_S: Final = 2.0
"""Seconds in which waiting spans are sent when the exporter is closed."""
ABORT_S: Final = 0.5
"""Seconds that an export under way may take to end after that."""
PACKAGE: Final = "xlaserve"

_FLAGS: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE_FLAGS: Final = _FLAGS | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK

_NO_ERROR: Final = Status()

log = logging.getLogger(__name__)


class Exporter:
    """Sends spans to the collector at `endpoint`, or without one to the collector that OpenTelemetry's variables name.

    Raises ConfigError where those variables can't be used.
    """

    def __init__(self, endpoint: str | None) -> None:
        try:
            named = Resource.create({SERVICE_NAME: PACKAGE, SERVICE_VERSION: version(PACKAGE)})
            self._exporter = OtlpExporter(endpoint, named.merge(OTELResourceDetector().detect()))
            self._processor = BatchSpanProcessor(self._exporter)
        except Exception as error:
            raise ConfigError(f"tracing: one of OpenTelemetry's variables can't be used: {error}") from None

    def send(self, span: FinishedSpan) -> None:
        """Puts a span into the queue; returns at once."""
        self._processor.on_end(QueuedSpan(span))

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Sends the waiting spans, for `timeout_s` at most; blocks."""
        flushing = Thread(target=self._processor.shutdown, name="trace flush", daemon=True)
        flushing.start()
        flushing.join(timeout_s)
        if flushing.is_alive():
            log.warning("tracing: the collector did not take the last spans in %g s", timeout_s)
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
            self._exporter.shutdown()
            flushing.join(ABORT_S)


class QueuedSpan(ReadableSpan):
    """A span in the SDK's queue, which reads only whether it is sampled."""

    context: SpanContext = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, span: FinishedSpan) -> None:  # leaves out the fields of the SDK's own spans
        self.span = span


class OtlpExporter(OTLPSpanExporter):
    """Encodes FinishedSpan directly, several times as fast as the SDK encodes its own spans."""

    def __init__(self, endpoint: str | None, resource: Resource) -> None:
        super().__init__(endpoint=endpoint)
        # One span of the SDK's own, encoded by the SDK, has the resource and the scope that all spans share.
        scope = InstrumentationScope(PACKAGE, version(PACKAGE))
        named = ReadableSpan("", context=QueuedSpan.context, resource=resource, instrumentation_scope=scope)
        self._shared = encode_spans([named])
        del self._shared.resource_spans[0].scope_spans[0].spans[:]

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        request = ExportTraceServiceRequest()
        request.CopyFrom(self._shared)
        spans = request.resource_spans[0].scope_spans[0].spans
        for queued in data:
            if isinstance(queued, QueuedSpan):
                _encode(queued.span, spans.add)
        return request


def _encode(span: FinishedSpan, add: Callable[..., Span]) -> None:
    context, parent = span.context, span.parent
    made = add(
        trace_id=bytes.fromhex(context.trace_id),
        span_id=bytes.fromhex(context.span_id),
        trace_state=context.state,
        parent_span_id=b"" if parent is None else bytes.fromhex(parent.span_id),
        flags=_REMOTE_FLAGS if span.is_server and parent is not None else _FLAGS,
        name=span.name,
        kind=Span.SPAN_KIND_SERVER if span.is_server else Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        status=_status(span),
        attributes=_attributes(span.attributes),
        links=[_link(link) for link in span.links],
    )
    failure = span.failure
    if failure is not None:
        attributes = {"exception.type": failure.error, "exception.message": failure.reason}
        made.events.add(name="exception", time_unix_nano=span.end_ns, attributes=_attributes(attributes))


def _status(span: FinishedSpan) -> Status:
    if not span.is_error:
        return _NO_ERROR
    return Status(code=Status.STATUS_CODE_ERROR, message="" if span.failure is None else span.failure.reason)


def _link(to: TraceContext) -> Span.Link:
    return Span.Link(trace_id=bytes.fromhex(to.trace_id), span_id=bytes.fromhex(to.span_id), flags=_FLAGS)


def _attributes(attributes: Mapping[str, Attribute]) -> list[KeyValue]:
    return [_attribute(name, value) for name, value in attributes.items()]


# Most values, such as a model's name, are the same in many spans. `typed`, since 1 and True are equal.
@lru_cache(maxsize=1024, typed=True)
def _attribute(name: str, value: Attribute) -> KeyValue:
    match value:
        case bool():
            return KeyValue(key=name, value=AnyValue(bool_value=value))
        case int():
            return KeyValue(key=name, value=AnyValue(int_value=value))
        case float():
            return KeyValue(key=name, value=AnyValue(double_value=value))
        case str():
            return KeyValue(key=name, value=AnyValue(string_value=value))
