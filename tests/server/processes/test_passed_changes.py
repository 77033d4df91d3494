"""How a front has another server make a change of models, over a Unix socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from xlaserve.errors import EngineLost, ModelFailed, ModelNotFound, QueueFull, ShuttingDown, XlaserveError
from xlaserve.processes import passed_changes
from xlaserve.processes.link.engine_end.front_link import MAX_QUESTIONS
from xlaserve.processes.link.engine_end.host import bound
from xlaserve.processes.passed_changes import OtherServer, taking

NAMED: Mapping[str, object] = {"name": "m"}
pytestmark = pytest.mark.timeout(20)


class Backend:
    """The models of the other server: notes the changes."""

    def __init__(self) -> None:
        self.changes: list[tuple[object, ...]] = []
        self.error: XlaserveError | None = None
        self.began, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def load(self, name: str) -> None:
        await self._change("load", name)

    async def update(self, name: str, labels: Mapping[str, str], versions: Collection[str]) -> None:
        await self._change("update", name, labels, versions)

    async def unload(self, name: str) -> None:
        await self._change("unload", name)

    async def _change(self, *change: object) -> None:
        self.changes.append(change)
        self.began.set()
        try:
            await self.may_end.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.ended.set()


class Other:
    """The server that has taken this one's place, and listens at `address`."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self.backend = Backend()
        self.host = taking(cast(Any, self.backend))
        self.host.listen(bound(address))


@pytest_asyncio.fixture
async def other(tmp_path: Path) -> AsyncIterator[Other]:
    other = Other(tmp_path / "changes")
    yield other
    await other.host.close()


async def test_changes_are_made_by_the_other_server(other: Other) -> None:
    await OtherServer(other.address).make("load", NAMED)
    await OtherServer(other.address).make("update", {"name": "m", "labels": {"stable": "2"}, "versions": ["2", "3"]})
    await OtherServer(other.address).make("unload", NAMED)
    assert other.backend.changes == [("load", "m"), ("update", "m", {"stable": "2"}, ["2", "3"]), ("unload", "m")]


async def test_a_change_fails_as_in_the_other_server(other: Other) -> None:
    other.backend.error = ModelFailed("model m: no memory")
    with pytest.raises(ModelFailed, match=r"^model m: no memory$"):
        await OtherServer(other.address).make("load", NAMED)


async def test_no_caller_is_told_of_models_of_the_other_server(other: Other) -> None:
    other.backend.error = ModelNotFound("no model 'm'; there are: secret")
    with pytest.raises(ModelNotFound, match=r"^no model 'm' is configured$"):
        await OtherServer(other.address).make("unload", NAMED)


async def test_a_change_whose_caller_gives_up_is_cancelled_there(other: Other) -> None:
    other.backend.may_end.clear()
    passing = asyncio.create_task(OtherServer(other.address).make("load", NAMED))
    await other.backend.began.wait()
    passing.cancel()
    await asyncio.wait([passing])
    await other.backend.ended.wait()


async def test_changes_under_way_are_bounded(other: Other) -> None:
    server = OtherServer(other.address)
    other.backend.may_end.clear()
    passing = [asyncio.create_task(server.make("load", NAMED)) for _ in range(MAX_QUESTIONS)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await server.make("load", NAMED)
    other.backend.may_end.set()
    await asyncio.gather(*passing)
    await server.make("load", NAMED)
    assert len(other.backend.changes) == MAX_QUESTIONS + 1


async def test_a_change_is_lost_with_the_other_server(other: Other) -> None:
    other.backend.may_end.clear()
    passing = asyncio.create_task(OtherServer(other.address).make("load", NAMED))
    await other.backend.began.wait()
    await other.host.close()
    with pytest.raises(EngineLost):
        await passing


async def test_an_address_may_lead_to_the_other_server_a_moment_later(other: Other, tmp_path: Path) -> None:
    address = tmp_path / "successor"
    passing = asyncio.create_task(OtherServer(address).make("load", NAMED))
    await asyncio.sleep(0)
    address.symlink_to(other.address)
    await passing
    assert other.backend.changes == [("load", "m")]


@pytest.mark.parametrize("listens", [False, True])
async def test_where_no_other_server_answers_nothing_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr(passed_changes, "REACH_S", 0.05)
    address = tmp_path / "successor"
    with bound(address if listens else tmp_path / "elsewhere"), pytest.raises(ShuttingDown, match="was not begun"):
        await OtherServer(address).make("load", NAMED)


async def test_a_server_that_speaks_in_another_way_has_begun_nothing(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    async def speak(listener: socket.socket) -> None:
        connection, _ = await loop.sock_accept(listener)
        with connection:
            await loop.sock_sendall(connection, b"another version")
            await loop.sock_recv(connection, 1)

    with bound(tmp_path / "successor") as listener:
        listener.setblocking(False)
        speaking = asyncio.create_task(speak(listener))
        with pytest.raises(ShuttingDown, match="this change was not begun"):
            await OtherServer(tmp_path / "successor").make("load", NAMED)
        await speaking


async def test_a_change_goes_on_from_server_to_server(other: Other, tmp_path: Path) -> None:
    class Leaving(Backend):
        async def load(self, name: str) -> None:
            await OtherServer(other.address).make("load", {"name": name})

    host = taking(cast(Any, Leaving()))
    host.listen(bound(tmp_path / "leaving"))
    await OtherServer(tmp_path / "leaving").make("load", NAMED)
    assert other.backend.changes == [("load", "m")]
    await host.close()
