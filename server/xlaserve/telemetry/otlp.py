"""Spans to an OpenTelemetry collector, by OTLP over gRPC. The only module that imports OpenTelemetry, an extra.

Spans wait in a bounded queue, from which a thread sends them: a collector that is slow or gone costs spans, the oldest
first, and no request its time.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from xlaserve.errors import ConfigError
from xlaserve.telemetry.tracing import FinishedSpan
from xlaserve.trace_context import TraceContext

FLUSH_S: Final = 2.0
"""How long the spans that still wait may take to leave at the end."""
ABORT_S: Final = 0.5
"""How long a message under way may take to end after that."""
PACKAGE: Final = "xlaserve"

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

log = logging.getLogger(__name__)


class Exporter:
    """Sends spans to the collector at `endpoint`, else to the one that OpenTelemetry's variables name.

    Raises ConfigError where those variables can't be used.
    """

    def __init__(self, endpoint: str | None) -> None:
        try:
            self._exporter = OTLPSpanExporter(endpoint=endpoint)
            self._processor = BatchSpanProcessor(self._exporter)
            named = Resource.create({SERVICE_NAME: PACKAGE, SERVICE_VERSION: version(PACKAGE)})
            self._resource = named.merge(OTELResourceDetector().detect())
        except Exception as error:
            raise ConfigError(f"tracing: one of OpenTelemetry's variables can't be used: {error}") from None
        self._scope = InstrumentationScope(PACKAGE, version(PACKAGE))

    def send(self, span: FinishedSpan) -> None:
        """Puts a span into the queue; returns at once."""
        # The SDK's own tracer takes seven times as long to make a span, and would do so while its call is answered.
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_context(span.context),
                parent=None if span.parent is None else _context(span.parent, is_remote=span.is_server),
                resource=self._resource,
                attributes=span.attributes,
                events=_events(span),
                links=[Link(_context(link)) for link in span.links],
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=_status(span),
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Sends what still waits, for `timeout_s` at most; blocks."""
        flushing = Thread(target=self._processor.shutdown, name="trace flush", daemon=True)
        flushing.start()
        flushing.join(timeout_s)
        if flushing.is_alive():
            log.warning("tracing: the collector did not take the last spans in %g s", timeout_s)
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
            self._exporter.shutdown()
            flushing.join(ABORT_S)


def _context(trace: TraceContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([trace.state]) if trace.state else None
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote, _SAMPLED, state)


def _status(span: FinishedSpan) -> Status:
    if not span.is_error:
        return Status(StatusCode.UNSET)
    return Status(StatusCode.ERROR, None if span.failure is None else span.failure.reason)


def _events(span: FinishedSpan) -> list[Event]:
    if span.failure is None:
        return []
    attributes = {"exception.type": span.failure.error, "exception.message": span.failure.reason}
    return [Event("exception", attributes, span.end_ns)]
