from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import yaml

from xlaserve_loadtest import embedded
from xlaserve_loadtest.embedded import EmbeddedServer, configuration
from xlaserve_loadtest.target import GrpcTarget, TargetError


@pytest.fixture
def server(puppet_command):
    def make(*flags, config="models: []", **more):
        return EmbeddedServer(config, command=puppet_command(*flags), **{"start_timeout_s": 20, **more})

    return make


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_the_server_runs_inside_the_block_and_not_after(server):
    async with server() as running:
        pid = running._process.pid
        assert (await GrpcTarget(running.address, deadline_s=5).describe("digits")).server == "puppet 1"
        assert running.obituary() is None
        assert is_running(pid)
    assert not is_running(pid)


async def test_the_server_is_stopped_when_the_block_raises_or_is_cancelled(server):
    with pytest.raises(ZeroDivisionError):
        async with server() as running:
            raise ZeroDivisionError
    assert not is_running(running._process.pid)
    cancelled, entered = server(), asyncio.Event()

    async def hold():
        async with cancelled:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(cancelled._process.pid)


async def test_a_server_that_does_not_heed_sigterm_is_killed(server, monkeypatch):
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.1)
    async with server("--ignore-sigterm") as running:
        pid = running._process.pid
    assert not is_running(pid)


async def test_a_server_that_fails_to_start_is_quoted(server):
    with pytest.raises(TargetError, match=r"exited with status 1\nno model could be loaded from models: \[7\]"):
        async with server("--fail-at-start", config="models: [7]"):
            pass


async def test_a_server_that_never_gets_ready_is_given_up_and_stopped(server):
    starting = server("--never-ready", start_timeout_s=0.2)
    with pytest.raises(TargetError, match=r"not ready after 0\.2 s"):
        async with starting:
            pass
    assert not is_running(starting._process.pid)


async def test_what_the_server_logs_is_shown_while_it_starts(server):
    class Shown(Exception):
        pass

    def show(line):
        if line:
            raise Shown(line)

    starting = server("--never-ready", on_output=show)
    with pytest.raises(Shown, match="puppet: starting"):
        async with starting:
            pass
    assert not is_running(starting._process.pid)


async def test_the_end_of_a_server_is_told(server):
    async with server() as running:
        os.kill(running._process.pid, 9)
        await running._process.wait()
        assert running.obituary() == "the server was ended by signal 9\npuppet: starting"


async def test_a_configuration_file_is_passed_on(server, tmp_path):
    config = tmp_path / "models.yaml"
    config.write_text("from a file")
    with pytest.raises(TargetError, match="from a file"):
        async with server("--fail-at-start", config=config):
            pass


@pytest.mark.parametrize(
    ("model", "name", "source", "weights"),
    [
        ("digits", "digits", "builtin:digits", None),
        ("builtin:noop", "noop", "builtin:noop", None),
        ("keras.applications:ResNet50", "ResNet50", "keras.applications:ResNet50", "random"),
        ("/models/my net.keras", "my-net", "/models/my net.keras", None),
    ],
)
def test_a_configuration_is_made_for_a_model(model, name, source, weights):
    text, served = configuration(model, ["xla", "graph"])
    (entry,) = yaml.safe_load(text)["models"]
    assert served == entry["name"] == name
    assert (entry["source"], entry.get("weights")) == (source, weights)
    assert entry["modes"] == ["xla", "graph"]
    assert json.loads(text)
