"""Tracing of a process: a tracer, and the exporter of its spans."""

from __future__ import annotations

from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.telemetry.tracing import Tracer


class Tracing:
    """Records spans of calls and batches, and sends them to a collector. Raises ConfigError without the extra otel."""

    def __init__(self, settings: Settings) -> None:
        try:
            from xlaserve.telemetry.otlp import Exporter  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError("tracing: it needs the extra otel: pip install 'xlaserve[otel]'") from None
        exporter = Exporter(settings.trace_endpoint)
        self.close = exporter.close
        self.tracer = Tracer(settings.trace_sample_ratio, exporter.send)

    @classmethod
    def of(cls, settings: Settings) -> Tracing | None:
        """Returns the tracing that `settings` ask for; None if they turn it off."""
        return cls(settings) if settings.tracing else None
