from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlaserve.planning.virtual_time import VirtualTimeLoop
from xlaserve.processes.supervision.service_manager import ServiceManager

PATIENCE_S = 30.0
PERIOD_S = 0.02


class Manager:
    """A service manager that keeps what it is told."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(PATIENCE_S)
        self.environment = {"NOTIFY_SOCKET": address}

    def heard(self) -> dict[str, str]:
        """Returns the next message."""
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def all_heard(self) -> list[str]:
        """Returns the messages that have come so far."""
        found = []
        self._socket.setblocking(False)
        try:
            while True:
                found.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return found
        finally:
            self._socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    folder = os.path.relpath(tmp_path)  # addresses are short
    manager = Manager(f"{folder}/notify" if request.param == "path" else f"@xlaserve-test-{os.getpid()}")
    yield manager
    manager.close()


def test_each_state_is_told(manager: Manager) -> None:
    server = ServiceManager(manager.environment)
    server.tell_status("compiling")
    assert manager.heard() == {"STATUS": "compiling"}
    server.tell_ready("ready: digits")
    assert manager.heard() == {"READY": "1", "STATUS": "ready: digits"}
    server.tell_reloading()
    reloading = manager.heard()
    assert reloading.pop("MONOTONIC_USEC").isdecimal()
    assert reloading == {"RELOADING": "1", "STATUS": "reloading"}
    server.tell_stopping()
    assert manager.heard() == {"STOPPING": "1", "STATUS": "stopping"}
    server.close()
    server.tell_status("nobody hears this")
    assert manager.all_heard() == []


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
async def test_without_a_service_manager_nothing_happens(environment: dict[str, str]) -> None:
    server = ServiceManager({**environment, "WATCHDOG_USEC": "1000000"})
    server.tell_ready("ready")
    await server.watch()
    server.close()


@pytest.mark.parametrize("address", ["/nonexistent/notify", "vsock:2:1234", "@nobody-listens-here", "/" + "long" * 100])
def test_one_that_can_not_be_reached_is_a_warning(address: str, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": address}).tell_ready("ready")
    (record,) = caplog.records
    assert record.message.startswith(f"NOTIFY_SOCKET: expected the address of a socket that listens, got {address}: ")


def test_one_that_is_gone_is_a_warning(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    server = ServiceManager(manager.environment)
    manager.close()
    server.tell_ready("ready")
    (record,) = caplog.records
    assert record.message.startswith("the service manager was not told READY=1: ")
    server.close()


async def test_the_watchdog_hears_twice_in_its_period(virtual_time: VirtualTimeLoop, manager: Manager) -> None:
    server = ServiceManager({**manager.environment, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())})
    watching = asyncio.ensure_future(server.watch())
    await asyncio.sleep(16.5)
    assert manager.all_heard() == ["WATCHDOG=1"] * 5
    watching.cancel()
    server.close()


@pytest.mark.parametrize("settings", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_PID": "1"}])
async def test_no_watchdog_is_told_where_none_was_asked_for(manager: Manager, settings: dict[str, str]) -> None:
    wanted = {"WATCHDOG_USEC": "8000000"} if "WATCHDOG_PID" in settings else {}
    server = ServiceManager({**manager.environment, **wanted, **settings})
    await server.watch()
    assert manager.all_heard() == []
    server.close()


def test_the_watchdog_hears_nothing_while_the_event_loop_hangs(manager: Manager) -> None:
    server = ServiceManager({**manager.environment, "WATCHDOG_USEC": str(int(PERIOD_S * 1_000_000))})
    hangs, go_on = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    def hang() -> None:
        hangs.set()
        go_on.wait(PATIENCE_S)

    async def serve() -> None:
        watching = asyncio.ensure_future(server.watch())
        loop.call_soon(loop.call_soon, hang)  # after the first ping
        await ended.wait()
        watching.cancel()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert hangs.wait(PATIENCE_S)
    assert manager.heard() == {"WATCHDOG": "1"}
    time.sleep(10 * PERIOD_S)  # time enough for twenty
    assert manager.all_heard() == []
    go_on.set()
    assert manager.heard() == {"WATCHDOG": "1"}
    loop.call_soon_threadsafe(ended.set)
    thread.join(PATIENCE_S)
    loop.close()
    server.close()


def test_another_process_is_told_of_and_says_the_rest(manager: Manager) -> None:
    before, after = ServiceManager(manager.environment), ServiceManager(manager.environment, is_silent=True)
    after.tell_ready("ready: other")
    before.tell_main(4711)
    before.tell_stopping()
    after.is_silent = False
    after.tell_ready("ready: mine")
    assert manager.heard() == {"MAINPID": "4711"}
    assert manager.heard() == {"READY": "1", "STATUS": "ready: mine"}
    assert not manager.all_heard()
    before.close()
    after.close()
