"""A model that crashes its process is set aside, and the others serve."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode as Status
from tests.attack import saved_models
from tests.integration.conftest import NoopClient, Server, StartServer
from tests.integration.test_fronts import PATIENCE_S, clients, until

from xlaserve_proto import open_inference_pb2 as pb

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
CONFIG: dict[str, Any] = {"models": [NOOP, {**NOOP, "name": "other"}], "fronts": 2}
DEADLY = 66
"""Images of this level end the process that runs them."""
DEADLY_NOOP = """
import ctypes, os, time
from xlaserve.processes import engine
from xlaserve.engine.program import Compilation
from xlaserve.models.sources.noop import NoopProgram

compile = NoopProgram.compile

def deadly(self, mode, bucket):
    run = compile(self, mode, bucket).executable

    def executable(images):
        time.sleep(0.002)  # on a thread, and so that others run at the same time
        if (images[:, 0, 0, 0] == 66).any():
            ctypes.string_at(0)
        return run(images)

    return Compilation(executable, 0.0, 0.0)

NoopProgram.compile = deadly
load = engine.Engine._load_model

def load_model(self, settings, prepared=None):
    if settings.name == os.environ.get("DEADLY_LOAD"):
        os._exit(int(end)) if (end := os.environ.get("DEADLY_END")) else ctypes.string_at(0)
    return load(self, settings, prepared)

engine.Engine._load_model = load_model
"""


def start(
    start_server: StartServer,
    folder: Path,
    *models: Any,
    wait: bool = True,
    DEADLY_LOAD: str = "",  # noqa: N803 - an environment variable
    DEADLY_END: str = "",  # noqa: N803
    **settings: Any,
) -> Server:
    (folder / "sitecustomize.py").write_text(DEADLY_NOOP)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    config = {**CONFIG, "models": [*CONFIG["models"], *models], **settings}
    return start_server(
        config, env={"PYTHONPATH": path, "DEADLY_LOAD": DEADLY_LOAD, "DEADLY_END": DEADLY_END}, wait=wait
    )


def last_address(server: Server) -> str:
    """Returns where the process listens that was started last: each chooses a port."""
    *_, address = re.findall(r"listening: gRPC (\S+),", server.stderr)
    return str(address)


def ask_other(client: NoopClient, level: int) -> Status:
    request = client.request(level)
    request.model_name = "other"
    return client.outcome(client.stub.ModelInfer.future(request, timeout=PATIENCE_S), level)


def crashes(server: Server) -> int:
    return len(re.findall(r"engine: process \d+ ended with signal 11", server.stderr))


def index(client: NoopClient) -> Sequence[Any]:
    return client.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE_S).models


def states(client: NoopClient) -> dict[str, str]:
    return {model.name: model.state for model in index(client)}


def test_a_model_that_crashes_three_times_is_set_aside_and_others_are_not(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start(start_server, tmp_path)
    outcomes: Counter[Status] = Counter()
    stopping = threading.Event()

    def ask(client: NoopClient) -> None:
        while not stopping.is_set():
            outcomes[ask_other(client, 1)] += 1

    client, *others = clients(server, 5)
    asking = [threading.Thread(target=ask, args=(other,)) for other in others]
    for thread in asking:
        thread.start()
    deadly: Counter[Status] = Counter()
    try:
        for crash in range(3):
            until(lambda: client.ask(1) is Status.OK, "it does not serve")
            deadly[client.ask(DEADLY)] += 1
            until(lambda crash=crash: crashes(server) == crash + 1, "it did not crash")  # type: ignore[misc]
        until(lambda: ask_other(client, 1) is Status.OK, "the other does not serve")
    finally:
        stopping.set()
        for thread in asking:
            thread.join(PATIENCE_S)
    assert deadly == {Status.UNAVAILABLE: 3}
    assert {*outcomes} == {Status.OK, Status.UNAVAILABLE}, "what was under way beside it, and what came too early"
    assert states(client) == {"noop": "FAILED", "other": "READY"}
    call = client.send(DEADLY)
    assert client.outcome(call) is Status.FAILED_PRECONDITION
    assert "it was set aside" in call.details()
    assert ask_other(client, 2) is Status.OK
    os.kill(server.pid, signal.SIGHUP)
    until(lambda: "read the configuration again: no model changed" in server.stderr, "it was not read")
    assert states(client)["noop"] == "FAILED"
    models = [{**NOOP, "buckets": [1, 2]}, *CONFIG["models"][1:]]
    server.config_file.write_text(json.dumps({**CONFIG, "models": models}))
    os.kill(server.pid, signal.SIGHUP)
    until(lambda: client.ask(1) is Status.OK, "other settings did not give it another chance")
    assert crashes(server) == 3


@pytest.mark.slow
def test_a_model_that_is_set_aside_may_be_loaded_once_more(start_server: StartServer, tmp_path: Path) -> None:
    server = start(start_server, tmp_path)
    client = NoopClient(server.grpc)
    for crash in range(3):
        until(lambda: client.ask(1) is Status.OK, "it does not serve")
        client.ask(DEADLY)
        until(lambda crash=crash: crashes(server) == crash + 1, "it did not crash")  # type: ignore[misc]
    until(lambda: ask_other(client, 1) is Status.OK, "the other does not serve")
    client.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="noop"), timeout=PATIENCE_S)
    assert client.ask(1) is Status.OK
    client.ask(DEADLY)
    until(lambda: crashes(server) == 4, "it did not crash")
    until(lambda: ask_other(client, 1) is Status.OK, "the other does not serve")
    assert states(client) == {"noop": "FAILED", "other": "READY"}, "once more was enough"


@pytest.mark.slow
def test_a_model_whose_load_crashes_the_process_is_set_aside_at_the_start(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start(
        start_server, tmp_path, {**NOOP, "name": "deadly"}, exit_on_model_failure=False, DEADLY_LOAD="deadly"
    )
    client = NoopClient(server.grpc)
    assert states(client) == {"noop": "READY", "other": "READY", "deadly": "FAILED"}
    assert crashes(server) == 1
    assert client.ask(1) is Status.OK


@pytest.mark.parametrize("status", [0, 128 + signal.SIGTERM])
@pytest.mark.parametrize("fronts", [0, 1])
def test_a_model_whose_load_ends_the_process_is_set_aside(
    start_server: StartServer, tmp_path: Path, fronts: int, status: int
) -> None:
    deadly = {**NOOP, "name": "deadly"}
    server = start(
        start_server,
        tmp_path,
        deadly,
        DEADLY_LOAD="deadly",
        DEADLY_END=str(status),
        fronts=fronts,
        exit_on_model_failure=False,
    )
    client = NoopClient(server.grpc)
    assert states(client) == {"noop": "READY", "other": "READY", "deadly": "FAILED"}
    (failed,) = (one for one in index(client) if one.name == "deadly")
    assert f"status {status} while" in failed.reason
    assert server.stop() == 0


def test_one_process_that_a_model_crashes_serves_the_others(start_server: StartServer, tmp_path: Path) -> None:
    deadly = {**NOOP, "name": "deadly"}
    server = start(start_server, tmp_path, deadly, fronts=0, exit_on_model_failure=False, DEADLY_LOAD="deadly")
    client = NoopClient(server.grpc)
    assert states(client) == {"noop": "READY", "other": "READY", "deadly": "FAILED"}
    (failed,) = (one for one in index(client) if one.name == "deadly")
    assert "building the model" in failed.reason
    assert client.ask(1) is Status.OK
    load = client.stub.RepositoryModelLoad.future(
        pb.RepositoryModelLoadRequest(model_name="deadly"), timeout=PATIENCE_S
    )
    assert load.code() is Status.UNAVAILABLE, "it is tried again where somebody asks for it"
    until(lambda: server.stderr.count("ready: noop, other") == 2, "it does not serve again")
    client = NoopClient(last_address(server))
    assert states(client) == {"noop": "READY", "other": "READY", "deadly": "FAILED"}
    assert server.stop() == 0


def test_a_single_process_crashed_by_a_model_at_start_ends_with_the_reason(
    start_server: StartServer, tmp_path: Path
) -> None:
    models = {**NOOP, "name": "deadly"}
    server = start(
        start_server, tmp_path, models, fronts=0, exit_on_model_failure=True, wait=False, DEADLY_LOAD="deadly"
    )
    assert server.wait() == 1
    *_, last = server.stderr.splitlines()
    assert last.startswith("xlaserve: model deadly failed: ")
    assert "building the model" in last


@pytest.mark.parametrize("number", [signal.SIGKILL])
@pytest.mark.slow
def test_a_process_that_others_kill_sets_nothing_aside(
    start_server: StartServer, tmp_path: Path, number: signal.Signals
) -> None:
    server = start(start_server, tmp_path)
    client = NoopClient(server.grpc)
    for _ in range(4):
        until(lambda: client.ask(1) is Status.OK, "it does not serve")
        pids = re.findall(r"engine: process (\d+)$", server.stderr, re.MULTILINE)
        os.kill(int(pids[-1]), number)
        until(lambda pid=pids[-1]: f"process {pid} ended with signal" in server.stderr, "it did not end")  # type: ignore[misc]
    until(lambda: states(client) == {"noop": "READY", "other": "READY"}, "not all models serve")


@pytest.mark.slow
def test_a_model_that_xla_crashes_on_fails_alone_in_one_process(start_server: StartServer, tmp_path: Path) -> None:
    saved_models.without_boxes(str(tmp_path / "saved"), 8)
    bad = {"name": "bad", "source": str(tmp_path / "saved"), "modes": ["xla"], "buckets": [1]}
    server = start_server({"models": [bad, NOOP], "fronts": 0, "exit_on_model_failure": False})
    client = NoopClient(server.grpc)
    assert client.ask(1) is Status.OK
    (failed,) = (one for one in index(client) if one.name == "bad")
    assert failed.state == "FAILED"
    assert "mode xla, bucket 1x8x8" in failed.reason
    assert "model bad: failed: " in server.stderr
