"""Another server takes the place of one, and nobody who calls notices."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc import Call, RpcError
from grpc import StatusCode as Status
from tests.integration.conftest import NoopClient, Server, StartServer
from tests.integration.test_fronts import NOOP, PATIENCE_S, processes, until
from tests.integration.test_swap import HELD_START, asked

from xlaserve_proto import open_inference_pb2 as pb

VERSIONS = [
    {**NOOP, "name": "versions", "version": "1", "version_labels": {"stable": "1"}},
    {**NOOP, "name": "versions", "version": "2"},
]
CONFIG = {"models": [NOOP, {**NOOP, "name": "other"}, *VERSIONS], "fronts": 2, "max_connection_age_s": 1.0}


class Upgraded:
    """A server, and those that take its place."""

    def __init__(self, start: StartServer, folder: Path, **settings: Any) -> None:
        (folder / "sitecustomize.py").write_text(HELD_START)
        self._held = folder / "held"
        path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.server = start({**CONFIG, **settings}, env={"PYTHONPATH": path, "HELD": str(self._held)})

    @property
    def pid(self) -> int:
        """The process of the server that serves, as the ready file says."""
        return int(json.loads((self.server.config_file.parent / "ready.json").read_text())["pid"])

    @property
    def all(self) -> list[psutil.Process]:
        """Those that were started by the ones before them, and live."""
        found = []
        for pid in re.findall(r"upgrade: process (\d+) starts", self.server.stderr):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def begin(self) -> psutil.Process:
        """Has another server start, whose engine is held, and returns it."""
        self._held.touch()
        started = self.server.stderr.count("engine: process")
        os.kill(self.server.pid, signal.SIGUSR2)
        until(lambda: self.server.stderr.count("engine: process") > started, "no other server has begun")
        (successor,) = self.all
        return successor

    def release(self) -> None:
        self._held.unlink()

    def end(self) -> None:
        self._held.unlink(missing_ok=True)
        for process in self.all:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, living = psutil.wait_procs(self.all, timeout=PATIENCE_S)
        for process in living:
            process.kill()
        assert not living


@pytest.fixture
def upgraded(start_server: StartServer, tmp_path: Path) -> Iterator[Upgraded]:
    upgraded = Upgraded(start_server, tmp_path)
    yield upgraded
    upgraded.end()


def upgrade(pid: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xlaserve", "upgrade", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def over_http(server: Server, *, stays: bool) -> Iterator[list[object]]:
    """Asks over HTTP until its block ends; yields what comes of it that is not an answer."""
    host, port = server.http.rsplit(":", 1)
    failed: list[object] = []

    def ask(client: object, number: int) -> object:
        connection = kept if stays else HTTPConnection(host, int(port), timeout=PATIENCE_S)
        try:
            connection.request("GET", "/v2/models/noop/ready")
            status = connection.getresponse()
            status.read()
        except OSError as error:
            return repr(error)
        finally:
            if not stays:
                connection.close()
        return HTTPStatus(status.status)

    kept = HTTPConnection(host, int(port), timeout=PATIENCE_S)
    with asked(server, ask, 1) as outcomes:
        yield failed
    kept.close()
    failed += [outcome for outcome in outcomes if outcome != HTTPStatus.OK]


def ask_anew(server: Server) -> Any:
    def ask(client: NoopClient, number: int) -> Status:
        new = NoopClient(server.grpc)
        with new.channel:
            return new.ask(number)

    return ask


def states(server: Server) -> dict[tuple[str, str], str]:
    client = NoopClient(server.grpc)
    with client.channel:
        return states_seen_by(client)


def states_seen_by(client: NoopClient) -> dict[tuple[str, str], str]:
    index = client.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE_S)
    return {(model.name, model.version): model.state for model in index.models}


def test_servers_take_each_others_place_and_no_call_fails(upgraded: Upgraded) -> None:
    server = upgraded.server
    client = NoopClient(server.grpc)
    client.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="other"), timeout=PATIENCE_S)
    before = states(server)
    assert before["other", "1"] == "UNLOADED"
    pids = [upgraded.pid]
    with ExitStack() as stack:
        # A connection that ends for its age gives a call back to the client that the client had not sent yet.
        kept = stack.enter_context(asked(server, lambda client, number: client.ask(number), 2, retries=True))
        new = stack.enter_context(asked(server, ask_anew(server), 1))
        failed = [stack.enter_context(over_http(server, stays=stays)) for stays in (True, False)]
        for _ in range(2):
            done = upgrade(pids[-1])
            assert done.returncode == 0, done
            until(lambda: upgraded.pid != pids[-1], "the ready file does not name the other server")
            until(lambda: "xlaserve_ready 1.0" in server.scrape(), "metrics are not shown")
            pids.append(upgraded.pid)
    assert {*kept} == {*new} == {Status.OK}, (kept, new)
    assert failed == [[], []]
    assert states(server) == before
    assert server.wait() == 0
    until(lambda: [process.pid for process in upgraded.all] == [pids[-1]], "those before it have not ended")
    assert " ERROR " not in server.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_ends_its_successor_and_a_killed_one_does_not(
    upgraded: Upgraded, number: signal.Signals
) -> None:
    successor = upgraded.begin()
    os.kill(upgraded.server.pid, signal.SIGUSR2)  # another is not started
    until(lambda: "is starting already" in upgraded.server.stderr, "nothing was said of the second")
    os.kill(upgraded.server.pid, number)
    assert upgraded.server.wait() == (0 if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert not upgraded.all
        return
    upgraded.release()
    until(lambda: upgraded.pid == successor.pid, "the other server has not taken its place")
    assert NoopClient(upgraded.server.grpc).ask(7) == Status.OK


def test_a_second_upgrade_is_refused_while_one_is_under_way(upgraded: Upgraded) -> None:
    successor = upgraded.begin()
    second = upgrade(upgraded.server.pid)
    assert second.returncode == 1
    assert f"to process {successor.pid}" in second.stderr
    assert second.stdout == ""
    upgraded.release()
    until(lambda: upgraded.pid == successor.pid, "the first upgrade did not go on")


def test_a_server_goes_on_where_another_one_cannot_serve(upgraded: Upgraded) -> None:
    server, said = upgraded.server, json.loads(upgraded.server.config_file.read_text())
    broken = {**NOOP, "source": "builtin:unknown"}
    for change, expected in (
        ({"fronts": 0}, "fronts: expected at least 1"),
        ({"models": [broken], "exit_on_model_failure": False}, "builtin:unknown"),
    ):
        server.config_file.write_text(json.dumps({**said, **change}))
        done = upgrade(server.pid)
        assert done.returncode == 1
        assert "goes on" in done.stderr, done
        assert expected in server.stderr
    assert upgraded.pid == server.pid
    assert NoopClient(server.grpc).ask(7) == Status.OK
    successor = upgraded.begin()
    successor.kill()
    until(lambda: "ended with status -9, this one goes on" in server.stderr, "its end was not seen")
    assert NoopClient(server.grpc).ask(7) == Status.OK
    assert len(processes(server)) == 3


def test_a_ready_file_that_can_not_be_written_ends_no_service(upgraded: Upgraded) -> None:
    server = upgraded.server
    place = server.config_file.parent / "ready.json"
    place.unlink()
    place.mkdir()
    done = upgrade(server.pid)
    assert (done.returncode, "goes on" in done.stderr) == (1, True), done
    assert "ready_file: expected a file, got the folder" in server.stderr
    assert NoopClient(server.grpc).ask(7) == Status.OK
    place.rmdir()
    successor = upgraded.begin()
    place.mkdir()  # too late to be noticed before the old server leaves
    upgraded.release()
    until(lambda: "this server goes on without a ready file" in server.stderr, "the file was written")
    assert server.wait() == 0
    assert successor.is_running()
    assert NoopClient(server.grpc).ask(7) == Status.OK


def load(client: NoopClient, name: str = "other") -> Status:
    try:
        client.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE_S)
    except RpcError as error:
        assert isinstance(error, Call)
        return error.code()
    return Status.OK


def unload(client: NoopClient) -> None:
    client.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="other"), timeout=PATIENCE_S)


def test_loads_during_an_upgrade_are_made(start_server: StartServer, tmp_path: Path) -> None:
    upgraded = Upgraded(start_server, tmp_path, max_connection_age_s=300.0)
    server = upgraded.server
    with ExitStack() as stack:
        stack.callback(upgraded.end)
        pool = stack.enter_context(ThreadPoolExecutor())
        clients = [NoopClient(server.grpc) for _ in range(3)]
        for client in clients:
            stack.enter_context(client.channel)
        successor = upgraded.begin()
        engines = server.stderr.count("engine: process")
        waiting = [pool.submit(load, client) for client in clients]
        time.sleep(0.3)  # nothing tells that they wait
        assert not any(one.done() for one in waiting)
        successor.kill()  # and the old server makes them
        upgraded.release()
        assert [one.result(PATIENCE_S) for one in waiting] == [Status.OK] * 3
        assert server.stderr.count("engine: process") > engines
        unload(clients[0])
        upgraded.begin()
        waiting = [pool.submit(load, client) for client in clients]
        time.sleep(0.3)
        assert not any(one.done() for one in waiting)
        upgraded.release()
        assert [one.result(PATIENCE_S) for one in waiting] == [Status.OK] * 3
        assert states(server)["other", "1"] == "READY"
        assert states_seen_by(clients[1])["other", "1"] == "UNLOADED", "its connection is not the old server's"
        unload(clients[1])
        assert states(server)["other", "1"] == "UNLOADED"
        assert load(clients[1], "unknown") == Status.NOT_FOUND
        second = psutil.Process(upgraded.pid)
        assert upgrade(second.pid).returncode == 0
        until(lambda: second not in upgraded.all, "the second server has not ended")
        assert load(clients[1]) == Status.OK
        assert states(server)["other", "1"] == "READY", "the third server has not made it"


def test_one_process_can_not_be_upgraded(start_server: StartServer) -> None:
    server = start_server({"models": [NOOP]})
    done = upgrade(server.pid)
    assert done.returncode == 1
    assert "see the setting `fronts`" in done.stderr
    os.kill(server.pid, signal.SIGUSR2)
    time.sleep(0.2)
    assert NoopClient(server.grpc).ask(7) == Status.OK
