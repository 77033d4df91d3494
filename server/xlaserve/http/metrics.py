"""Metrics for Prometheus, as the metrics' port shows them, for callers who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from xlaserve.access.caller import CURRENT
from xlaserve.http.message import HttpAnswer, HttpRequest
from xlaserve.http.operation import Method


def shown(registry: CollectorRegistry, refresh: Callable[[], None]) -> Method:
    """Returns what answers with the metrics of `registry`, after `refresh` has read gauges on the event loop."""

    async def metrics(request: HttpRequest) -> HttpAnswer:
        """Shows metrics for Prometheus."""
        CURRENT.get().check_all_models()
        refresh()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return HttpAnswer([await asyncio.to_thread(encode, registry)], media_type=media_type)

    return metrics
