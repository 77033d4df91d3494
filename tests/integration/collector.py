"""A collector's receiver: OTLP over gRPC, in a few lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 30


class Collector(service.TraceServiceServicer):
    """Keeps the spans that it is sent; `hangs` answers nothing until `release`."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.called = threading.Event()
        """Set once somebody sends spans."""
        self._news = threading.Condition()
        self._released = threading.Event()
        if not hangs:
            self._released.set()
        self.address = ""

    def release(self) -> None:
        self._released.set()

    def Export(  # noqa: N802 - as the contract names it
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        self.called.set()
        self._released.wait(WAIT_S)
        with self._news:
            for of_resource in request.resource_spans:
                self.resource = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
                self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
            self._news.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(self, condition: Callable[[list[Span]], Any]) -> Any:
        """Returns what `condition` gives of all spans so far, once that is true."""
        found: list[Any] = []

        def holds() -> bool:
            found[:] = [condition(self.spans)]
            return bool(found[0])

        with self._news:
            assert self._news.wait_for(holds, WAIT_S), f"not within {WAIT_S} s: {[span.name for span in self.spans]}"
        return found[0]

    def trace(self, trace_id: str, spans: int) -> list[Span]:
        """Returns the spans of a trace, once there are so many."""
        found = self.wait_for(
            lambda all_: len(mine := [span for span in all_ if span.trace_id.hex() == trace_id]) >= spans and mine
        )
        assert len(found) == spans, [span.name for span in found]
        return list(found)


@contextmanager
def collecting(*, hangs: bool = False) -> Iterator[Collector]:
    """Starts a collector on a free port, and stops it again."""
    collector = Collector(hangs=hangs)
    server = grpc.server(ThreadPoolExecutor(4))
    service.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.release()
        server.stop(0).wait()


def attributes(span: Any) -> dict[str, str | int]:
    """Returns a span's, or an event's, attributes."""
    return {
        pair.key: pair.value.int_value if pair.value.HasField("int_value") else pair.value.string_value
        for pair in span.attributes
    }
