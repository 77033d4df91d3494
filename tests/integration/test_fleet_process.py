"""A server of a fleet as a real process, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import trustme
from tests.integration.conftest import NOOP

from xlaserve_fleet import folders
from xlaserve_fleet.policy import BUSY, WAIT
from xlaserve_fleet.process import Recovering, ServerFailed, ServerProcess, reachable, rotate, totals
from xlaserve_fleet.settings import FleetSettings, flags

CONFIG = {"models": [NOOP]}
FLAGS = {"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "metrics_port": 0, "lanes": 2}
PATIENCE_S = 60.0


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - processes set no events
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    found = ServerProcess(CONFIG, FLAGS, tmp_path / "server", 0)
    yield found
    await found.stop()


async def test_a_server_is_started_asked_and_stopped(server: ServerProcess, tmp_path: Path) -> None:
    await server.start()
    assert server.found.grpc.startswith("127.0.0.1:")
    assert (tmp_path / "server").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "server" / "config.yaml").stat().st_mode & 0o777 == 0o600
    await server.check()
    load = await server.load()
    assert load.keys() == {WAIT, BUSY}
    assert load[WAIT] == 0
    assert 0 <= load[BUSY] < 0.5
    pid = server.pid
    assert pid is not None
    assert os.getuid() != 0 or os.getpriority(os.PRIO_PROCESS, pid) == 0
    await server.stop()
    assert not psutil.pid_exists(pid)
    assert not (tmp_path / "server").exists()


async def test_a_server_that_was_killed_is_seen_to_have_ended(server: ServerProcess) -> None:
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: server.has_ended)
    with pytest.raises(ServerFailed, match="ended, with -9"):
        await server.check()


async def test_a_server_that_hangs_does_not_pass_the_check(server: ServerProcess) -> None:
    await server.start()
    (serving,) = psutil.Process(server.pid).children()
    serving.suspend()
    try:
        with pytest.raises(ServerFailed, match="does not answer"):
            await server.check()
    finally:
        serving.resume()


async def test_no_other_server_takes_its_place_unseen(tmp_path: Path) -> None:
    """That would go on without anybody who watches it, while the fleet has another one started."""
    fleet = FleetSettings(server={**CONFIG, "fronts": 1})
    server = ServerProcess(fleet.server, flags(fleet, "127.0.0.1"), tmp_path / "server", 0)
    try:
        await server.start()
        assert server.pid is not None
        before = {child.pid for child in psutil.Process(server.pid).children()}
        os.kill(server.pid, signal.SIGUSR2)
        await until(lambda: "upgrade: " in (tmp_path / "server" / "server.log").read_text())
        assert "would take it for ended" in (tmp_path / "server" / "server.log").read_text()
        assert not server.has_ended
        await server.check()
        assert before <= {child.pid for child in psutil.Process(server.pid).children()}
    finally:
        await server.stop()


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_server_whose_engine_has_ended_has_some_time_to_recover(tmp_path: Path, with_tls: bool) -> None:
    config: dict[str, Any] = {**CONFIG, "fronts": 1}
    if with_tls:
        issued = trustme.CA().issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(tmp_path / "key.pem")
        (tmp_path / "certificate.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        config |= {"tls_certificate": str(tmp_path / "certificate.pem"), "tls_key": str(tmp_path / "key.pem")}
    server = ServerProcess(config, FLAGS, tmp_path / "server", 0, recover_s=PATIENCE_S)
    try:
        await server.start()
        await server.check()
        children = psutil.Process(server.pid).children()
        next(child for child in children if child.name() == "engine").kill()

        async def outcome() -> type[Exception] | None:
            try:
                await server.check()
            except ServerFailed as error:
                return type(error)
            return None

        seen: list[type[Exception] | None] = []
        async with asyncio.timeout(PATIENCE_S):
            while Recovering not in seen or seen[-1] is not None:
                seen.append(await outcome())
        assert {*seen} == {Recovering, None}
        server._recover_s = 0.0
        next(child for child in psutil.Process(server.pid).children() if child.name() == "engine").kill()
        async with asyncio.timeout(PATIENCE_S):
            while (last := await outcome()) is None:
                pass
        assert last is ServerFailed
    finally:
        await server.stop()


async def test_a_server_that_can_not_start_says_why(tmp_path: Path) -> None:
    wrong = {"models": [{**NOOP, "weights": "other"}]}
    server = ServerProcess(wrong, FLAGS, tmp_path / "server", 0)
    with pytest.raises(ServerFailed, match=r"exited with 1(.|\n)*noop"):
        await server.start()
    assert not (tmp_path / "server").exists()


async def test_a_server_on_all_addresses_is_found_at_that_of_its_node(tmp_path: Path) -> None:
    server = ServerProcess(CONFIG, {**FLAGS, "host": "0.0.0.0"}, tmp_path / "server", 0, "127.0.0.2")
    try:
        await server.start()
        await server.check()
        for address in (server.found.grpc, server.found.http, server.found.metrics):
            assert address.startswith("127.0.0.2:")
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("listens", "node", "found"),
    [
        ("0.0.0.0:1", "10.0.0.3", "10.0.0.3:1"),
        ("[::]:1", "10.0.0.3", "10.0.0.3:1"),
        ("[::]:1", "fd00::3", "[fd00::3]:1"),
        ("10.0.0.4:1", "10.0.0.3", "10.0.0.4:1"),
        ("[fd00::4]:1", "10.0.0.3", "[fd00::4]:1"),
    ],
)
def test_a_server_is_found_where_others_reach_it(listens: str, node: str, found: str) -> None:
    assert reachable(listens, node) == found


def test_a_log_that_has_grown_too_long_is_moved_while_it_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as output:
        output.write(b"first")
        rotate(log, 5)
        assert log.read_bytes() == b"first"
        output.write(b" second")
        rotate(log, 5)
        output.write(b"third")
    assert log.read_bytes() == b"third"
    assert (tmp_path / "server.log.1").read_bytes() == b"first second"


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from xlaserve_fleet.process import ServerProcess

async def main(config, flags, folder):
    server = ServerProcess(config, flags, Path(folder), 0)
    await server.start()
    print(server.pid, server.found.grpc, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*eval(sys.argv[1])))
"""


async def test_a_server_drains_and_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    arguments: Any = (CONFIG, FLAGS, str(folder))
    supervisor = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", SUPERVISOR, repr(arguments)], stdout=subprocess.PIPE, text=True
    )

    def is_swept() -> bool:
        os.close(folders.hold(tmp_path / "next"))
        return not folder.exists()

    try:
        assert supervisor.stdout is not None
        pid = int((await asyncio.to_thread(supervisor.stdout.readline)).split()[0])
        os.kill(pid, signal.SIGSTOP)
    finally:
        supervisor.kill()
        supervisor.communicate()
    assert not is_swept()  # the server is still there
    os.kill(pid, signal.SIGCONT)
    await until(lambda: has_ended(pid))
    assert "stopped" in (folder / "server.log").read_text()
    await until(is_swept)  # the threads of one that has ended may have its files for a moment


def test_the_totals_of_metrics_are_read_from_the_text() -> None:
    text = '# HELP a b\na{model="x y"} 1.5\na{model="z"} 2\nab 7\nb 3\n'
    assert totals(text, ("a", "b", "c")) == {"a": 3.5, "b": 3.0, "c": 0.0}
