"""Announcements and refusals of a server of several processes, without any process."""

from __future__ import annotations

import asyncio
import pickle
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry
from tests.server.processes.server_world import FRONT_ADDRESSES, NOT_READY, PATIENCE_S, PROCESS, READY, World

from xlaserve.errors import ConfigError
from xlaserve.processes.engines import ENGINE
from xlaserve.processes.fronts import FRONT
from xlaserve.processes.handover import ClientOverrides, Predecessor
from xlaserve.processes.supervision.merged_metrics import AllMetrics
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.supervisor import Supervisor


class Manager:
    """A service manager."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """Returns the first line of each message since the last time."""
        lines = []
        while True:
            try:
                lines.append(self._socket.recv(4096).decode().split("\n")[0])
            except BlockingIOError:
                return lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def test_it_is_ready_once_all_processes_are_and_while_a_model_serves(tmp_path: Path) -> None:
    world = World(ready_file=tmp_path / "ready")
    world.say(ENGINE, READY)
    assert not world.server.is_ready()
    assert not (tmp_path / "ready").exists()
    world.say(FRONT.format(1), FRONT_ADDRESSES)
    assert world.server.is_ready()
    assert (tmp_path / "ready").exists()
    world.say(ENGINE, NOT_READY)
    assert not world.server.is_ready()
    world.say(ENGINE, READY)
    assert world.server.is_ready()
    world.server._serving_engines[ENGINE] = PROCESS
    world.server._engines = cast(Any, SimpleNamespace(ended=lambda *_: False))
    world.server.ended(Role(name=ENGINE, target=""), PROCESS, -9, was_ready=True)
    assert not world.server.is_ready()


@pytest.mark.parametrize(
    ("host", "metrics_port", "is_kept"),
    [("127.0.0.1", 0, True), ("localhost", 0, True), ("127.0.0.2", 0, False), ("127.0.0.1", None, False)],
)
async def test_a_port_of_metrics_that_is_not_wanted_any_more_is_closed(
    host: str, metrics_port: int | None, is_kept: bool
) -> None:
    """Others would go on to reach the metrics there, or be accepted and never answered."""
    world = World(host=host, metrics_port=metrics_port)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        world.server._before = Predecessor({}, listening, 0, ClientOverrides(), socket.socket())
        world.server._endpoint(AllMetrics(CollectorRegistry()))
        assert (listening.fileno() >= 0) is is_kept
        world.server._before.channel.close()
    world.server._service_manager.close()


def test_with_several_engines_it_is_ready_while_one_of_them_serves(manager: Manager) -> None:
    world = World(engines=2)
    for number in (1, 2):
        world.server._serving_engines[f"{ENGINE} {number}"] = PROCESS
    world.server._engines = cast(Any, SimpleNamespace(ended=lambda *_: False))
    world.say(FRONT.format(1), FRONT_ADDRESSES)
    world.say(f"{ENGINE} 2", READY)
    assert world.server.is_ready()
    world.say(f"{ENGINE} 1", NOT_READY)
    assert world.server.is_ready()
    world.server.ended(Role(name=f"{ENGINE} 2", target=""), PROCESS, -9, was_ready=True)
    assert not world.server.is_ready()
    world.say(f"{ENGINE} 2", READY)
    manager.heard()
    world.server.reloading()
    world.say(f"{ENGINE} 2", READY)
    assert manager.heard() == ["RELOADING=1"], "the other one has not read the configuration yet"
    world.say(f"{ENGINE} 1", READY)
    assert manager.heard() == ["READY=1"]
    world.server._service_manager.close()


class Asking:
    """An engine that wants another one in its place."""

    def __init__(self) -> None:
        self.told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def itself(self) -> Process:
        return cast(Process, self)

    def tell_outcome(self, outcome: object) -> None:
        self.told.set_result(outcome)


async def test_an_engine_is_told_where_another_could_not_even_be_started(caplog: pytest.LogCaptureFixture) -> None:
    world, engine, role = World(), Asking(), Role(name=ENGINE, target="")
    world.server._engines = cast(Any, SimpleNamespace(beside=lambda role, start: role))
    world.server._serving_engines[ENGINE] = engine.itself
    succeed = AsyncMock(side_effect=pickle.PicklingError("a defect"))
    world.server._supervisor = cast(Supervisor, SimpleNamespace(succeed=succeed))
    world.server.asked_for_successor(role, engine.itself, b"")
    outcome = await asyncio.wait_for(engine.told, PATIENCE_S)
    assert outcome == {"reason": "another process could not be started; the server's log says why"}
    assert "a defect" in caplog.text


async def test_an_engine_whose_place_another_has_taken_is_told_so() -> None:
    world, engine = World(), Asking()
    world.server._serving_engines[ENGINE] = Asking().itself
    world.server.asked_for_successor(Role(name=ENGINE, target=""), engine.itself, b"")
    assert await asyncio.wait_for(engine.told, PATIENCE_S) == {"reason": "another process has taken its place"}


async def test_all_engines_have_to_be_ready_to_take_the_place_of_another_server() -> None:
    world = World(engines=2)
    roles = [Role(name=f"{ENGINE} {number}", target="") for number in (1, 2)]
    world.server._engines = cast(Any, SimpleNamespace(roles=roles))
    left = asyncio.Event()

    async def leaves() -> None:
        left.set()

    world.server._before = cast(Any, SimpleNamespace(leaves=leaves))
    world.say(FRONT.format(1), FRONT_ADDRESSES)
    world.say(roles[0].name, READY)
    await asyncio.sleep(0)
    begun = [left.is_set()]
    world.say(roles[1].name, READY)
    await left.wait()
    assert begun == [False]
    world.server._service_manager.close()


def test_the_service_manager_hears_of_reloads_and_starts_without_models(manager: Manager) -> None:
    world = World()
    world.server.reloading()
    world.start(NOT_READY)
    assert manager.heard() == ["READY=1"], "else it would start the server again and again"
    world.server.reloading()
    assert manager.heard() == ["RELOADING=1"]
    world.say(ENGINE, READY)
    assert manager.heard() == ["READY=1"]
    world.server._service_manager.close()


def test_a_ready_file_that_can_t_be_written_ends_the_server(tmp_path: Path) -> None:
    world = World(ready_file=tmp_path / "gone" / "ready")
    world.start(READY)
    (reason,) = world.failures
    assert reason.startswith(f"ready_file: expected a file that can be made, got {tmp_path}")


async def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host: expected an address or a name of this machine, got 'a\.\.b'"):
        await World(host="a..b").server.run()


async def test_a_folder_for_temporary_files_that_can_t_have_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(ConfigError, match=r"TMPDIR: expected a folder .* AF_UNIX path too long"):
        await World().server.run()
    assert not [*long.iterdir()]
