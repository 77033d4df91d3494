"""An engine of a front that can't be reached, or not yet."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from xlaserve.processes import remote_engine
from xlaserve.processes.link.front_end import engine_link as link
from xlaserve.processes.remote_engine import RemoteEngine


def engine_at(address: Path) -> RemoteEngine:
    return RemoteEngine(address, on_models=lambda before: None, on_lost=lambda: None, tally=dict)


@pytest.mark.timeout(20)
async def test_it_is_said_why_an_engine_can_t_be_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = asyncio.Event()
    sleep = asyncio.sleep

    async def wait(seconds: float) -> None:
        if seconds == remote_engine.FAILED_RETRY_S:
            waited.set()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", wait)
    engine = engine_at(tmp_path / "gone" / "engine")
    with caplog.at_level(logging.WARNING):
        following = asyncio.create_task(engine.follow())
        await waited.wait()
        following.cancel()
        await asyncio.wait([following])
    assert "the engine can't be reached, next attempt in 1 s: [Errno 2] No such file or directory" in caplog.text


@pytest.mark.timeout(20)
async def test_an_engine_that_takes_long_to_start_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: asyncio.Queue[None] = asyncio.Queue()

    async def connect(*_: object, **__: object) -> Any:
        tried.put_nowait(None)
        raise TimeoutError

    monkeypatch.setattr(link, "connect", connect)
    monkeypatch.setattr(remote_engine, "RETRY_S", 0)
    with caplog.at_level(logging.INFO):
        following = asyncio.create_task(engine_at(Path("engine")).follow())
        for _ in range(2):
            await tried.get()
        following.cancel()
        await asyncio.wait([following])
    assert {(record.levelno, record.getMessage()) for record in caplog.records} == {
        (logging.INFO, "the engine does not answer yet")
    }
