"""Metrics for Prometheus, as the metrics' port shows them, for callers who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from xlaserve.admission.caller import CURRENT
from xlaserve.errors import DeadlineExceeded
from xlaserve.wire.http.message import HttpAnswer, HttpRequest
from xlaserve.wire.http.operation import Method

RELAY_TIMEOUT_S: Final = 5.0


def shown(registry: CollectorRegistry, refresh: Callable[[], None]) -> Method:
    """Returns what answers with the metrics of `registry`, after `refresh` has read gauges on the event loop."""

    async def metrics(request: HttpRequest) -> HttpAnswer:
        """Shows metrics for Prometheus."""
        CURRENT.get().check_all_models()
        refresh()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return HttpAnswer([await asyncio.to_thread(encode, registry)], media_type=media_type)

    return metrics


def relayed(address: str) -> Method:
    """Returns what answers with the metrics of all processes, which the one that supervises them shows at HOST:PORT."""
    host, _, port = address.rpartition(":")

    def ask(accept: str) -> tuple[bytes, str]:
        connection = HTTPConnection(host.strip("[]"), int(port), timeout=RELAY_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics", headers={"accept": accept})
            answer = connection.getresponse()
            return answer.read(), answer.getheader("content-type", "text/plain")
        finally:
            connection.close()

    async def metrics(request: HttpRequest) -> HttpAnswer:
        """Shows metrics for Prometheus."""
        CURRENT.get().check_all_models()
        try:
            shown, media_type = await asyncio.to_thread(ask, request.headers.get("accept", "*/*"))
        except (OSError, HTTPException):
            raise DeadlineExceeded("the metrics of all processes did not come in time") from None
        return HttpAnswer([shown], media_type=media_type)

    return metrics
