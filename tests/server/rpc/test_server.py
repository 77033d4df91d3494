"""What becomes of the server where grpcio's own comes to an end."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import Mock

import pytest

from xlaserve.config import Settings
from xlaserve.rpc.server import GrpcServer


class Grpcio:
    """A server of grpcio's that ends with `error`, or never."""

    def __init__(self, error: Exception | None) -> None:
        self.is_started = asyncio.Event()
        self._error = error

    def add_insecure_port(self, address: str) -> int:
        return 1

    async def start(self) -> None:
        self.is_started.set()

    async def wait_for_termination(self) -> None:
        if self._error:
            raise self._error
        await asyncio.sleep(math.inf)


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), RuntimeError("in core")])
async def test_whatever_ends_grpcio_another_one_listens(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Grpcio(error), Grpcio(error), Grpcio(None)]
    left: list[Any] = [*made]
    monkeypatch.setattr(GrpcServer, "_build", lambda self: left.pop(0))
    crashed = Mock()
    server = GrpcServer(Settings(), Mock(), Mock(), Mock(), None, intake=Mock(), metrics=Mock(), on_crash=crashed)
    await server.start()
    async with asyncio.timeout(20):
        await made[-1].is_started.wait()
    server._listening.cancel()
    crashed.assert_not_called()
