from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from xlaserve_loadtest.run.setups import COPIES_ON_THE_WAY, set_up
from xlaserve_loadtest.run.worker import Setup, Worker
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule.payload import PayloadError, Request

REQUEST = Request(bytes(1000), 1, "xla")
SETUP = Setup({}, {"xla": [REQUEST, REQUEST], "xla (again)": [REQUEST]}, deadline_s=1)


class FakeWorker(WorkerProcess):
    """Takes a setup, and some time for it."""

    under_way = 0

    def __init__(self, offsets: list[int]) -> None:
        self.offsets = offsets
        self.calls = cast(Worker, self)

    async def setup(self, setup: Setup) -> None:
        FakeWorker.under_way += 1
        assert FakeWorker.under_way == 1
        await asyncio.sleep(0)
        FakeWorker.under_way -= 1
        self.offsets.append(setup.offset)


def free_bytes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(
        "xlaserve_loadtest.schedule.payload.psutil.virtual_memory", lambda: SimpleNamespace(available=number)
    )


async def test_workers_are_set_up_in_turn_and_begin_at_different_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes(monkeypatch, 1000 * (3 + COPIES_ON_THE_WAY))
    offsets: list[int] = []
    await set_up([FakeWorker(offsets) for _ in range(3)], SETUP)
    assert offsets == [0, 1, 2]


async def test_memory_must_suffice_for_the_copy_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes(monkeypatch, 1000 * (3 + COPIES_ON_THE_WAY) - 1)
    with pytest.raises(PayloadError, match="1 different requests with 6 copies of each"):
        await set_up([FakeWorker([]) for _ in range(3)], SETUP)
