"""What a server of several processes tells the world, and what it refuses, without any process."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from prometheus_client import CollectorRegistry

from xlaserve.admission.shared_counts import SharedCounts, Upgrade
from xlaserve.config import ModelSettings, Settings
from xlaserve.engine.under_way import KEY_BYTES, UnderWay
from xlaserve.errors import ConfigError
from xlaserve.processes import several_processes
from xlaserve.processes.capacity import TYPICAL, US_PER_S
from xlaserve.processes.engine_process import UNDER_WAY
from xlaserve.processes.engine_replacement import InitialModels
from xlaserve.processes.engines import ENGINE, FOLDERS, Engines, folder_of_engines
from xlaserve.processes.front_process import FrontOrders
from xlaserve.processes.handover import ClientOverrides, Predecessor
from xlaserve.processes.several_processes import FRONT, SPARE_LOOK_S, SPARES, Server
from xlaserve.processes.supervision import child_handle, linux
from xlaserve.processes.supervision.child_handle import Launcher
from xlaserve.processes.supervision.merged_metrics import AllMetrics
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.supervisor import Supervisor

PATIENCE_S = 30.0
PROCESS = cast(Process, None)
READY, NOT_READY = {"serving": "ready: m", "is_ready": True}, {"serving": "ready: no model", "is_ready": False}


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


class World:
    """A server of one front, or more, whose processes say what the test wants."""

    def __init__(self, *, fronts: int = 1, grows: bool = False, **settings: Any) -> None:
        models = (ModelSettings(name="m", source="fake"),)
        values = {"grpc_port": 0, "http_port": 0, "metrics_port": None, **settings}
        self.settings = Settings(models=models, fronts=fronts, **values)
        self.server = Server(self.settings, lambda: self.settings, grows=grows)
        self.about: dict[str, Mapping[str, Any]] = {}
        self.failures: list[str] = []
        self.server._supervisor = cast(Supervisor, SimpleNamespace(about=self.about, fail=self.failures.append))
        self.server._front = Role(name=FRONT.format(1), target="")

    def say(self, name: str, about: Mapping[str, Any]) -> None:
        self.about[name] = about
        self.server.became_ready(Role(name=name, target=""), PROCESS)

    def start(self, engine: Mapping[str, Any]) -> None:
        self.say(ENGINE, engine)
        self.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})


def test_it_is_ready_once_all_processes_are_and_for_as_long_as_a_model_serves(tmp_path: Path) -> None:
    world = World(ready_file=tmp_path / "ready")
    world.say(ENGINE, READY)
    assert not world.server.is_ready()
    assert not (tmp_path / "ready").exists()
    world.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})
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


class GrowingWorld(World):
    """A server of one front, which may have five, on a machine of 16 cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: int = 1) -> None:
        super().__init__(fronts=5, grows=True)
        monkeypatch.setattr(several_processes, "usable_cores", lambda: 16)
        self.added: list[Role] = []
        self.server._supervisor = cast(Supervisor, SimpleNamespace(about=self.about, add=self.added.extend))
        self.server._usage = SharedCounts(fronts=5)
        self.server._ports, self.server._shared = {}, {}
        self.server._successor_address = Path("successor")
        roles = [Role(name=f"{ENGINE} {number}", target="") for number in range(engines)]
        self.server._engines = cast(Any, SimpleNamespace(roles=roles, addresses=(), changes=ClientOverrides()))

    def orders_of(self, front: int) -> Settings:
        (role,) = (role for role in self.added if role.name == FRONT.format(front))
        assert callable(role.payload)
        orders: FrontOrders = pickle.loads(role.payload())
        assert orders.number == front
        return orders.settings


FAST = {**READY, "images_per_s": 3.5 * US_PER_S / TYPICAL.front_us}


def test_as_many_fronts_are_added_as_bring_what_an_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})
    assert not world.added
    world.say(ENGINE, FAST)
    assert [role.name for role in world.added] == ["front 2", "front 3", "front 4"]
    assert world.server._usage.serving == 4
    assert not world.server._was_ready, "clients that wait for it find all fronts"
    for role in (*world.added,):
        world.say(role.name, {"grpc": "127.0.0.1:1"})
    assert world.server._was_ready
    world.say(ENGINE, {**READY, "images_per_s": 1.0})
    assert (len(world.added), world.server._usage.serving) == (3, 4), "none is taken away"
    world.say(ENGINE, {**READY, "images_per_s": 1e9})
    assert (len(world.added), world.server._usage.serving) == (4, 5), "a model that was loaded later is faster"
    world.server._service_manager.close()


def test_fronts_know_the_whole_of_what_is_divided_among_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.say(ENGINE, FAST)
    settings = world.orders_of(4)
    assert settings == world.settings.model_copy(update={"metrics_port": None})
    world.server._service_manager.close()


async def test_none_is_added_while_another_server_starts_but_once_that_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fronts that listen after those of the other server would be given its connections."""
    world = GrowingWorld(monkeypatch)
    world.start({**READY, "images_per_s": 300.0})
    fails = asyncio.Event()

    async def is_ready() -> bool:
        await fails.wait()
        return False

    other = SimpleNamespace(pid=7, is_ready=is_ready, end=AsyncMock(return_value="ended with status 1"))
    monkeypatch.setattr(several_processes, "Successor", lambda *_: other)
    world.server._metrics_endpoint, world.server._regions = None, 0
    world.server._usage.upgrade = Upgrade.STARTING
    handing_over = asyncio.create_task(world.server._hand_over())
    await asyncio.sleep(0)
    world.say(ENGINE, FAST)
    assert not world.added
    fails.set()
    await asyncio.wait_for(handing_over, PATIENCE_S)
    assert [role.name for role in world.added] == ["front 2", "front 3", "front 4"]
    assert world.server._usage.upgrade is Upgrade.NONE
    world.server._service_manager.close()


@pytest.mark.parametrize("fails", ["start", "is_ready"])
async def test_an_error_during_an_upgrade_leaves_a_server_that_can_be_upgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    world = GrowingWorld(monkeypatch)
    world.server._metrics_endpoint, world.server._regions = None, 0
    end = AsyncMock(return_value="ended with status 0")
    other = SimpleNamespace(pid=7, is_ready=AsyncMock(side_effect=KeyError("unforeseen")), end=end)
    start = Mock(return_value=other) if fails == "is_ready" else Mock(side_effect=KeyError("unforeseen"))
    monkeypatch.setattr(several_processes, "Successor", start)
    named = psutil.Process().name()
    world.server._was_ready = True
    for tried in (1, 2):
        world.server._upgrade()
        await asyncio.wait_for(asyncio.gather(*world.server._starting), PATIENCE_S)
        assert world.server._usage.upgrade is Upgrade.NONE
        assert (start.call_count, end.call_count) == (tried, tried if fails == "is_ready" else 0)
        assert psutil.Process().name() == named
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["'unforeseen'"] * 2
    world.server._service_manager.close()


async def test_an_error_on_leaving_keeps_no_server_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    monkeypatch.setattr(linux, "set_title", Mock(side_effect=OSError("no /proc")))
    leave, successor = Mock(), Mock()
    world.server._successor = successor
    world.server._metrics_endpoint, world.server._supervisor = None, cast(Any, SimpleNamespace(leave=leave))
    with pytest.raises(OSError, match="no /proc"):
        world.server._leave()
    leave.assert_called_once_with()
    successor.go.assert_called_once_with()
    world.server._service_manager.close()


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


def test_a_server_that_stops_has_no_change_of_models_wait_for_an_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.server._usage.upgrade = Upgrade.STARTING
    world.server.stopping()
    assert world.server._usage.upgrade is Upgrade.NONE
    world.server._service_manager.close()


async def test_servers_before_find_the_one_that_takes_their_place(tmp_path: Path) -> None:
    server = World().server
    server._changes_socket = tmp_path / "changes"
    (tmp_path / "before").mkdir()
    address, gone = tmp_path / "before" / "successor", tmp_path / "gone" / "successor"
    address.symlink_to(tmp_path / "a server whose place this one takes")
    before = SimpleNamespace(leaves=AsyncMock(), successor_addresses=[gone, address])
    await server._take_over(cast(Predecessor, before), {})
    assert address.readlink() == tmp_path / "changes"
    assert [*(tmp_path / "before").iterdir()] == [address]
    server._service_manager.close()


@pytest.mark.parametrize(("engines", "expected"), [(1, 2), (2, 4), (4, 5)])
def test_each_engine_is_brought_as_much(monkeypatch: pytest.MonkeyPatch, engines: int, expected: int) -> None:
    world = GrowingWorld(monkeypatch, engines)
    world.say(f"{ENGINE} 0", {**READY, "images_per_s": 1.9 * US_PER_S / TYPICAL.front_us})
    assert world.server._usage.serving == expected
    world.server._service_manager.close()


def test_a_slow_model_needs_no_further_front_and_a_server_that_stops_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.start({**READY, "images_per_s": 300.0})
    assert not world.added
    assert world.server.is_ready()
    world.server.stopping()
    world.say(ENGINE, FAST)
    assert not world.added
    world.server._service_manager.close()


def test_with_several_engines_it_is_ready_for_as_long_as_one_of_them_serves(manager: Manager) -> None:
    world = World(engines=2)
    for number in (1, 2):
        world.server._serving_engines[f"{ENGINE} {number}"] = PROCESS
    world.server._engines = cast(Any, SimpleNamespace(ended=lambda *_: False))
    world.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})
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


@pytest.mark.usefixtures("virtual_time")
async def test_a_process_waits_for_the_end_of_a_front_as_soon_as_one_is_ready_and_is_tried_for_again() -> None:
    world, loop = World(), asyncio.get_running_loop()
    tried_at: list[float] = []
    world.server._launcher = cast(Launcher, SimpleNamespace(prepare=lambda role: tried_at.append(loop.time())))
    keeping = asyncio.create_task(world.server._keep_spare())
    await asyncio.sleep(10)
    assert not tried_at
    world.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})  # and no engine
    await asyncio.sleep(1000)
    waits_s = [after - before - SPARE_LOOK_S for before, after in pairwise(tried_at)]
    assert tried_at[0] <= 10 + SPARE_LOOK_S
    assert waits_s[:3] == [0.25, 0.5, 1.0]
    assert waits_s[-1] == max(waits_s) == SPARES.longest_wait_s

    def prepare(role: Role) -> bool:
        tried_at.append(loop.time())
        return True

    world.server._launcher = cast(Launcher, SimpleNamespace(prepare=prepare))
    await asyncio.sleep(100)
    assert tried_at[-1] - tried_at[-2] == SPARE_LOOK_S
    keeping.cancel()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("lives_s", [0.0, 0.6])
async def test_a_process_that_waits_and_ends_by_itself_is_started_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lives_s: float
) -> None:
    loop = asyncio.get_running_loop()

    class Waiting:
        """A process that the kernel kills, as where memory is short."""

        def __init__(self, *_: object) -> None:
            started_at.append(loop.time())

        @property
        def status(self) -> int | None:
            return None if loop.time() < started_at[-1] + lives_s else -signal.SIGKILL

        def end(self) -> None:
            pass

    world, started_at = World(), list[float]()
    monkeypatch.setattr(child_handle, "Spare", Waiting)
    world.server._launcher = Launcher()
    world.server._front = replace(world.server._front, has_spare=True)
    world.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})
    keeping = asyncio.create_task(world.server._keep_spare())
    await asyncio.sleep(3600)
    assert len(started_at) < 80
    assert started_at[-1] - started_at[-2] >= SPARES.longest_wait_s
    assert "front 1: the spare process ended with status -9" in caplog.text
    keeping.cancel()


def test_an_engine_begins_with_what_the_one_that_has_changed_last_has(tmp_path: Path) -> None:
    engines = Engines(Settings(), Settings, tmp_path, lambda: True)
    new, old, newer = (pickle.dumps(InitialModels({}, {}, changed_ns=at_ns)) for at_ns in (2, 1, 3))
    kept = []
    for content in (new, old, new, newer):
        engines.keep(content)
        kept.append(engines.initial_models)
    assert kept == [new, new, new, newer]


async def test_all_engines_have_to_be_ready_to_take_the_place_of_another_server() -> None:
    world = World(engines=2)
    roles = [Role(name=f"{ENGINE} {number}", target="") for number in (1, 2)]
    world.server._engines = cast(Any, SimpleNamespace(roles=roles))
    left = asyncio.Event()

    async def leaves() -> None:
        left.set()

    world.server._before = cast(Any, SimpleNamespace(leaves=leaves))
    world.say(FRONT.format(1), {"grpc": "127.0.0.1:1"})
    world.say(roles[0].name, READY)
    await asyncio.sleep(0)
    begun = [left.is_set()]
    world.say(roles[1].name, READY)
    await left.wait()
    assert begun == [False]
    world.server._service_manager.close()


def test_the_service_manager_hears_of_a_start_without_any_model_and_of_reloads(manager: Manager) -> None:
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


def test_the_folder_of_a_supervisor_that_was_killed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as other, ExitStack() as stack:  # of a short name
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        left = Path(temporary) / f"{FOLDERS}left"
        left.mkdir()
        (left / "engine-0").touch()
        held = folder_of_engines(other)
        assert {held, folder_of_engines(stack)} == {*Path(temporary).iterdir()}


@pytest.mark.parametrize("has_said_so", [False, True])
def test_an_engine_has_crashed_unless_it_has_said_that_it_ends(has_said_so: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        engines = Engines(Settings(), Settings, Path(temporary), lambda: True)
        opened = engines.roles[0].connect()
        child_handle = cast(Process, SimpleNamespace(pid=1))
        engines.began(child_handle)
        engines.filled(engines.roles[0], child_handle)
        with UnderWay(opened[UNDER_WAY]).loading(b"k" * KEY_BYTES):
            if has_said_so:
                engines.announced_end(child_handle)
            assert engines.ended(child_handle, 0) is not has_said_so
        for file in opened.values():
            os.close(file)


def test_engines_that_fail_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # of a short name
        folder = Path(temporary)
        engines = Engines(Settings(), Settings, folder, lambda: True)

        def start(pid: int) -> Process:
            for file in engines.roles[0].connect().values():
                os.close(file)
            child_handle = cast(Process, SimpleNamespace(pid=pid))
            engines.began(child_handle)
            return child_handle

        def left() -> tuple[int, list[str]]:
            return len([*Path("/proc/self/fd").iterdir()]), sorted(path.name for path in folder.iterdir())

        serving = start(1)
        engines.filled(engines.roles[0], serving)
        before = left()
        engines.ended(start(2), 1)
        assert left() == before
        for file in engines.roles[0].connect().values():  # and the process can't be started
            os.close(file)
        engines.ended(start(3), 0)
        assert left() == before
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no more files"):
            patch.setattr(os, "memfd_create", Mock(side_effect=OSError("no more files")))
            engines.roles[0].connect()
        engines.ended(start(4), 0)
        assert left()[0] == before[0]
        engines.ended(serving, -9)
        assert (folder / "engine").is_symlink()
