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
from tests.integration.conftest import NOOP

from xlaserve.fleet.policy import BUSY, WAIT
from xlaserve.fleet.process import ServerFailed, ServerProcess, totals

CONFIG = {"models": [NOOP]}
FLAGS = {"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "metrics_port": 0, "lanes": 2}
PATIENCE_S = 60.0


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
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerFailed, match="does not answer"):
            await server.check()
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_a_server_that_can_not_start_says_why(tmp_path: Path) -> None:
    wrong = {"models": [{**NOOP, "weights": "other"}]}
    server = ServerProcess(wrong, FLAGS, tmp_path / "server", 0)
    with pytest.raises(ServerFailed, match=r"exited with 1(.|\n)*noop"):
        await server.start()


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from xlaserve.fleet.process import ServerProcess

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
    try:
        assert supervisor.stdout is not None
        pid = int((await asyncio.to_thread(supervisor.stdout.readline)).split()[0])
    finally:
        supervisor.kill()
        supervisor.communicate()
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert "stopped" in (folder / "server.log").read_text()


def test_the_totals_of_metrics_are_read_from_the_text() -> None:
    text = '# HELP a b\na{model="x y"} 1.5\na{model="z"} 2\nab 7\nb 3\n'
    assert totals(text, ("a", "b", "c")) == {"a": 3.5, "b": 3.0, "c": 0.0}
