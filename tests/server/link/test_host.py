"""The engine's end of links, in this process."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.server.link.engines import ARENA_BYTES

from xlaserve.link.front import connect
from xlaserve.link.host import Host, bound


async def test_a_front_is_taken_in_although_an_earlier_one_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")]

    async def accept_later(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", accept_later)
    host = Host()
    host.listen(bound(tmp_path / "engine"))
    linked = await connect(tmp_path / "engine", ARENA_BYTES)
    assert host.fronts == 1
    assert "Too many open files" in caplog.text
    linked.close()
    await host.close()
