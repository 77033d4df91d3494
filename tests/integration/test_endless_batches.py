"""A model whose batches never end keeps the others from service for no longer than it takes to be sure of that."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode as Status
from tests.integration.conftest import NoopClient, Server, StartServer
from tests.integration.test_fronts import until
from tests.integration.test_set_aside import ask_other, index, last_address, states

from xlaserve.processes.supervision.parent import SAME_SIGNAL_S

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
ENDLESS = 66
"""Images of this level are never answered."""
ENDLESS_NOOP = """
import ctypes, os, time
from xlaserve.engine import batch_watch
from xlaserve.engine.batching import costs
from xlaserve.engine.program import Compilation
from xlaserve.models.sources.noop import NoopProgram
from xlaserve.processes import beginning

batch_watch.LOOK_S = beginning.LOOK_S = float(os.environ["LOOK_S"])
beginning.LATER_S = 0.0
costs.BRIEF_S = float(os.environ["BRIEF_S"])
sleep = ctypes.PyDLL(None).sleep if os.environ["KEEPS_LOCK"] else time.sleep
compile = NoopProgram.compile

def endless(self, mode, bucket):
    run = compile(self, mode, bucket).executable

    def executable(images):
        if (images[:, 0, 0, 0] == 66).any():
            sleep(1000)
        return run(images)

    return Compilation(executable, 0.0, 0.0)

NoopProgram.compile = endless
"""


def start(
    start_server: StartServer,
    folder: Path,
    *,
    brief_s: float,
    look_s: float = 0.05,  # 60 looks are 3 s
    keeps_lock: bool = False,
    **settings: Any,
) -> Server:
    """Starts a server of one lane, in which programs of up to `brief_s` run on the event loop. Endless batches are
    looked at once in `look_s`, and may keep Python's lock."""
    (folder / "sitecustomize.py").write_text(ENDLESS_NOOP)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    config = {"models": [NOOP, {**NOOP, "name": "other"}], "performance_hint": "latency", **settings}
    patched = {"BRIEF_S": str(brief_s), "LOOK_S": str(look_s), "KEEPS_LOCK": "1" if keeps_lock else ""}
    return start_server(config, env={"PYTHONPATH": path, **patched})


def answers_health(server: Server) -> bool:
    """Returns whether the event loop of a server of one process runs."""
    try:
        with urllib.request.urlopen(f"http://{server.http}/v2/health/live", timeout=0.5):
            return True
    except OSError:
        return False


def test_a_model_that_holds_all_lanes_three_times_is_set_aside(start_server: StartServer, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("brief_s", "keeps_lock", "said"),
    [
        (0.0, False, "all lanes (1) are held"),
        (1.0, False, "the event loop is held"),
        (1.0, True, "its event loop has stood still for"),
    ],
    ids=["lane", "event loop", "lock"],
)
def test_one_process_that_a_batch_holds_is_started_again(
    start_server: StartServer, tmp_path: Path, brief_s: float, keeps_lock: bool, said: str
) -> None:
    server = start(start_server, tmp_path, brief_s=brief_s, keeps_lock=keeps_lock, fronts=0)
    client = NoopClient(server.grpc)
    assert client.ask(1) is Status.OK
    assert client.ask(ENDLESS) is Status.UNAVAILABLE
    assert said in server.stderr
    until(lambda: server.stderr.count("listening: ") == 2, "it was not started again")
    assert "while model noop ran (mode graph, bucket 1x224x224); another is started" in server.stderr
    client = NoopClient(last_address(server))
    until(lambda: ask_other(client, 1) is Status.OK, "the other does not serve")
    assert client.ask(1) is Status.OK, "one time is not enough to set it aside"
    assert server.stop() == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_one_process_whose_event_loop_a_batch_holds_ends_at_a_signal(
    start_server: StartServer, tmp_path: Path, signals: int
) -> None:
    drain_timeout_s = 1 if signals == 1 else 1000
    server = start(start_server, tmp_path, brief_s=1.0, look_s=1.0, fronts=0, drain_timeout_s=drain_timeout_s)
    client = NoopClient(server.grpc)
    call = client.send(ENDLESS)
    until(lambda: not answers_health(server), "the event loop goes on")
    for _ in range(signals):
        server.process.terminate()
        time.sleep(2 * SAME_SIGNAL_S)
    assert server.wait() == 128 + signal.SIGKILL
    assert client.outcome(call) is Status.UNAVAILABLE
    assert "has not ended in time" in server.stderr
