"""Memory that a front shares with its engine goes back to the system once it was not needed for a while."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.fakes import outputs_of
from tests.server.processes.link.engines import EngineProcess, EnginesElsewhere, until, until_nothing_is_held
from tests.server.processes.link.front_process import ask
from tests.server.processes.link.models import LARGE, MAP_SIDE, pictures

from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest
from xlaserve.processes.link.front_end import arena_memory

MIB = 2**20


def shared_bytes(pid: int | str) -> int:
    """Returns how much shared memory is in a process's resident size."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * 1024


async def test_a_burst_leaves_no_memory_behind_at_either_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "TRIM_S", 0.3)
    monkeypatch.setattr(arena_memory, "TRIM_STEP_S", 0.001)
    monkeypatch.setattr(arena_memory, "KEPT_BYTES", MIB)
    with EngineProcess(tmp_path / "socket") as process:
        engines = await EnginesElsewhere.connect(process)
        before, before_there = shared_bytes("self"), shared_bytes(process.pid)
        images = pictures(*range(40), size=LARGE)
        with engines.engine("maps").admit(len(images), images.nbytes) as admitted:
            result = await admitted.run(EngineRequest((images,), Mode.XLA, float("inf")))
        arena, map_bytes = engines.link.arena, 40 * MAP_SIDE**2
        size_bytes = images.nbytes + map_bytes
        await asyncio.sleep(0.5)
        assert arena.resident_bytes >= size_bytes, "it is still in use: the outputs lie there"
        assert arena.spare_bytes < 2 * MIB
        assert shared_bytes("self") - before >= images.nbytes
        assert shared_bytes(process.pid) - before_there >= map_bytes
        assert [*outputs_of(result)[0][:, 9, 9]] == [*range(40)]
        del result
        await until_nothing_is_held(engines, collects=False)
        assert arena.spare_bytes >= size_bytes - 2 * MIB
        await until(lambda: arena.resident_bytes <= MIB)
        assert shared_bytes("self") - before <= 2 * MIB
        assert shared_bytes(process.pid) - before_there <= 2 * MIB
        assert outputs_of(await ask(engines.link, "numbers", 7))[0] == [7]
        await engines.stop()


async def test_memory_that_is_needed_again_and_again_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "TRIM_S", 1.0)
    monkeypatch.setattr(arena_memory, "KEPT_BYTES", MIB)
    with EngineProcess(tmp_path / "socket") as process:
        engines = await EnginesElsewhere.connect(process)
        images = pictures(*[7] * 8, size=LARGE)
        found: list[int] = []
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:
            found.append(engines.link.arena.resident_bytes)
            with engines.engine("numbers").admit(len(images), images.nbytes) as admitted:
                assert outputs_of(await admitted.run(EngineRequest((images,), Mode.XLA, float("inf"))))[0][0] == 7
            await asyncio.sleep(0.02)
        assert min(found[1:]) >= images.nbytes
        await engines.stop()
