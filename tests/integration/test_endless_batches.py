"""A model whose batches never end keeps the others from service for no longer than it takes to be sure of that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode as Status
from tests.integration.conftest import NoopClient, Server, StartServer
from tests.integration.test_fronts import until
from tests.integration.test_set_aside import ask_other, index, last_address, states

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
ENDLESS = 66
"""Images of this level are never answered."""
ENDLESS_NOOP = """
import ctypes, os, time
from xlaserve.engine import batch_watch
from xlaserve.engine.batching import costs
from xlaserve.engine.program import Compilation
from xlaserve.models.sources.noop import NoopProgram

batch_watch.LOOK_S = 0.05  # 60 looks are 3 s
costs.BRIEF_S = float(os.environ["BRIEF_S"])
compile = NoopProgram.compile

def endless(self, mode, bucket):
    run = compile(self, mode, bucket).executable

    def executable(images):
        if (images[:, 0, 0, 0] == 66).any():
            time.sleep(1000)
        return run(images)

    return Compilation(executable, 0.0, 0.0)

NoopProgram.compile = endless
"""


def start(start_server: StartServer, folder: Path, *, brief_s: float, **settings: Any) -> Server:
    """Starts a server of one lane, in which programs of up to `brief_s` run on the event loop."""
    (folder / "sitecustomize.py").write_text(ENDLESS_NOOP)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    config = {"models": [NOOP, {**NOOP, "name": "other"}], "performance_hint": "latency", **settings}
    return start_server(config, env={"PYTHONPATH": path, "BRIEF_S": str(brief_s)})


def test_a_model_that_holds_all_lanes_of_an_engine_is_set_aside_after_three_times(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start(start_server, tmp_path, brief_s=0.0, fronts=2)
    client = NoopClient(server.grpc)
    for _ in range(3):
        until(lambda: client.ask(1) is Status.OK, "it does not serve")
        assert client.ask(ENDLESS) is Status.UNAVAILABLE, "the engine ended"
    until(lambda: ask_other(client, 1) is Status.OK, "the other does not serve")
    assert states(client) == {"noop": "FAILED", "other": "READY"}
    (failed,) = (one for one in index(client) if one.name == "noop")
    assert "mode graph, bucket 1x224x224" in failed.reason
    assert server.stderr.count("a batch in mode graph, bucket 1x224x224 has run for") == 3
    assert server.stop() == 0


@pytest.mark.parametrize("brief_s", [0.0, 1.0], ids=["lane", "event loop"])
def test_one_process_that_a_batch_holds_is_started_again(
    start_server: StartServer, tmp_path: Path, brief_s: float
) -> None:
    server = start(start_server, tmp_path, brief_s=brief_s, fronts=0)
    client = NoopClient(server.grpc)
    assert client.ask(1) is Status.OK
    assert client.ask(ENDLESS) is Status.UNAVAILABLE
    held = "the event loop is held" if brief_s else "all lanes (1) are held"
    assert held in server.stderr
    until(lambda: server.stderr.count("listening: ") == 2, "it was not started again")
    client = NoopClient(last_address(server))
    until(lambda: ask_other(client, 1) is Status.OK, "the other does not serve")
    assert client.ask(1) is Status.OK, "one time is not enough to set it aside"
    assert server.stop() == 0
