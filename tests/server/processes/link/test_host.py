"""The engine's end of links, in this process."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.server.processes.link.models import PATIENCE_S

from xlaserve.errors import QueueFull
from xlaserve.processes.link.arena import Arena
from xlaserve.processes.link.engine_end import host as host_module
from xlaserve.processes.link.engine_end.front_link import MAX_COUNTS
from xlaserve.processes.link.engine_end.host import Host, bound
from xlaserve.processes.link.front_end import arena_memory
from xlaserve.processes.link.front_end.arena_memory import MIN_ARENA_BYTES
from xlaserve.processes.link.front_end.engine_link import connect
from xlaserve.processes.link.link_records import Count, Counted
from xlaserve.processes.link.record_codec import RecordReader, pack, pack_hello


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
    linked = await connect(tmp_path / "engine")
    assert host.fronts == 1
    assert "Too many open files" in caplog.text
    linked.close()
    await host.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def arenas() -> int:
    """Returns how many arenas, or views of one, this process has."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found += "xlaserve-arena" in str(file.readlink())
    return found


async def test_memory_is_freed_with_a_link_and_not_by_the_garbage_collector(tmp_path: Path, no_collector: None) -> None:
    before = arenas()
    host = Host()
    host.listen(bound(tmp_path / "engine"))
    linked = await connect(tmp_path / "engine")
    pixels = linked.arena.take(4096).memory
    assert arenas() == before + 3, "the file, and it mapped at both ends"
    linked.close()
    await linked.lost()
    await host.close()
    assert arenas() == before + 1, "a request still has pixels there"
    del pixels
    assert arenas() == before


def test_an_arena_that_has_ended_gives_nothing(no_collector: None) -> None:
    before = arenas()
    arena = Arena(2**20)
    arena.end()
    with pytest.raises(QueueFull):
        arena.take(1)
    assert arenas() == before


@pytest.mark.parametrize(("limit", "share"), [(resource.RLIMIT_FSIZE, 1), (resource.RLIMIT_AS, 16)])
async def test_a_limit_of_files_or_addresses_leaves_an_arena_fewer(tmp_path: Path, limit: int, share: int) -> None:
    host = Host()
    host.listen(bound(tmp_path / "engine"))
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (2**35 + 1, before[1]))
    try:
        linked = await connect(tmp_path / "engine")
    finally:
        resource.setrlimit(limit, before)
    assert linked.arena.size_bytes == 2**35 // share
    assert (await connect(tmp_path / "engine")).arena.size_bytes >= MIN_ARENA_BYTES
    await host.close()


async def test_the_arenas_of_all_fronts_fit_among_an_engine_s_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_memory, "machine_memory_bytes", lambda: 2**42)
    host = Host()
    host.listen(bound(tmp_path / "engine"))
    linked = [await connect(tmp_path / "engine") for _ in range(32)]  # and as many views, in this process
    assert {one.arena.size_bytes for one in linked} == {2**40}
    await host.close()


async def test_fronts_move_to_the_engine_that_takes_the_place_of_theirs(tmp_path: Path) -> None:
    host = Host()
    host.listen(bound(tmp_path / "engine"))
    fronts = [await connect(tmp_path / "engine") for _ in range(3)]
    succeeding = asyncio.create_task(host.succeed())
    for linked in fronts:
        assert await linked.superseded()
        assert linked.is_superseded
    with pytest.raises(OSError, match=r".*"):
        await connect(tmp_path / "engine")
    fronts[0].move()
    fronts[1].move()
    assert not succeeding.done()
    fronts[2].close()
    await succeeding
    assert not await fronts[2].superseded()
    assert host.fronts == 2, "they may have something under way"
    leaving = asyncio.create_task(host.drained())
    for linked in fronts:
        linked.close()
    await leaving
    await host.close()


async def test_a_front_that_tells_nothing_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "COUNT_S", 0.001)
    host, arena = Host(), Arena(4096)
    here, there = socket.socketpair()
    with here:
        here.setblocking(False)
        socket.send_fds(here, [pack_hello(arena.size_bytes, 1)], [arena.file])
        await host.accept(there)
        for _ in range(3 * MAX_COUNTS):
            assert await host.count() == []
        loop, reading = asyncio.get_running_loop(), RecordReader.from_engine()
        asked: list[int] = []

        async def read() -> None:
            data = await loop.sock_recv(here, 2**16)
            asked.extend(one.number for one in reading.feed(data) if isinstance(one, Count))

        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < MAX_COUNTS:
                await read()
            assert asked == [*range(1, MAX_COUNTS + 1)]
            await loop.sock_sendall(here, b"".join(pack(Counted(number, b"%d" % number)) for number in asked))
            while not await host.count():  # until it has read that, it asks nothing more
                pass
            while len(asked) == MAX_COUNTS:
                await host.count()
                await read()
            assert asked[-1] > 3 * MAX_COUNTS, "a later question"
    await host.close()
