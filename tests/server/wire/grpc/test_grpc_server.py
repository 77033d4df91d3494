"""What becomes of the server where grpcio's own comes to an end."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from xlaserve.admission.authenticator import Authenticator
from xlaserve.config import Settings
from xlaserve.wire.grpc import port_closing
from xlaserve.wire.grpc.grpc_server import GrpcServer


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


def make(on_crash: Mock) -> GrpcServer:
    return GrpcServer(
        Settings(),
        Mock(),
        Mock(),
        None,
        message_memory=Mock(),
        admissions=Mock(),
        authenticator=Authenticator(None),
        certificates=None,
        metrics=Mock(),
        on_crash=on_crash,
    )


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), RuntimeError("in core")])
async def test_whatever_ends_grpcio_another_one_listens(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Grpcio(error), Grpcio(error), Grpcio(None)]
    left: list[Any] = [*made]
    monkeypatch.setattr(GrpcServer, "_build", lambda self: left.pop(0))
    crashed = Mock()
    server = make(on_crash=crashed)
    await server.start()
    async with asyncio.timeout(20):
        await made[-1].is_started.wait()
    server._listening.cancel()
    crashed.assert_not_called()


async def test_connections_that_stay_are_tried_ever_more_rarely_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GrpcServer, "_build", lambda self: Grpcio(None))
    monkeypatch.setattr(port_closing, "_fds", Mock(side_effect=psutil.AccessDenied()))
    server = make(on_crash=Mock())
    pauses_s: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)
        server._is_stopping = len(pauses_s) == 7

    monkeypatch.setattr("asyncio.sleep", sleep)
    await server._hang_up(server._server, 1)
    assert pauses_s == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1])
    assert len(caplog.records) == 1
