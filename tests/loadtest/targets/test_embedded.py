from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.loadtest.conftest import PuppetCommand

from xlaserve import config
from xlaserve.config import sources
from xlaserve.config.sources import Source
from xlaserve_loadtest.targets import embedded
from xlaserve_loadtest.targets.embedded import EmbeddedServer, configuration, narrowed, served_name
from xlaserve_loadtest.targets.open_inference import describe
from xlaserve_loadtest.targets.target import TargetError

MakeServer = Callable[..., EmbeddedServer]

PATIENCE_S = 20
HOLD_A_SERVER = """
import asyncio, psutil, uvloop
from xlaserve_loadtest.targets.embedded import EmbeddedServer, configuration

async def main():
    async with EmbeddedServer(configuration(["builtin:noop"], ["xla"]), start_timeout_s=60):
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        await asyncio.Event().wait()

uvloop.run(main())
"""


@pytest.fixture
def server(puppet_command: PuppetCommand) -> MakeServer:
    def make(*flags: str, config: str | Path = "models: []", **more: Any) -> EmbeddedServer:
        return EmbeddedServer(config, command=puppet_command(*flags), **{"start_timeout_s": 20, **more})

    return make


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_the_server_runs_inside_the_block_and_not_after(server: MakeServer) -> None:
    async with server() as running:
        pid = running._process.pid
        assert (await describe(running.address, "digits")).server == "puppet 1"
        assert running.exit_report() is None
        assert is_running(pid)
        assert running.ready_s > 0
    assert not is_running(pid)


async def test_the_server_is_stopped_when_the_block_raises_or_is_cancelled(
    server: MakeServer,
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with server() as running:
            raise ZeroDivisionError
    assert not is_running(running._process.pid)
    cancelled, entered = server(), asyncio.Event()

    async def hold() -> None:
        async with cancelled:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(cancelled._process.pid)


async def test_a_server_that_does_not_heed_sigterm_is_killed(
    server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.1)
    async with server("--ignore-sigterm") as running:
        pid = running._process.pid
    assert not is_running(pid)


async def test_a_server_that_fails_to_start_is_quoted(server: MakeServer) -> None:
    with pytest.raises(TargetError, match=r"exited with status 1\nno model could be loaded from models: \[7\]"):
        async with server("--fail-at-start", config="models: [7]"):
            pass


async def test_a_server_that_never_gets_ready_is_given_up_and_stopped(server: MakeServer) -> None:
    starting = server("--never-ready", start_timeout_s=0.2)
    with pytest.raises(TargetError, match=r"not ready after 0\.2 s"):
        async with starting:
            pass
    assert not is_running(starting._process.pid)


async def test_what_the_server_logs_is_shown_while_it_starts(server: MakeServer) -> None:
    class Shown(Exception):
        pass

    def show(line: str) -> None:
        if line:
            raise Shown(line)

    starting = server("--never-ready", on_output=show)
    with pytest.raises(Shown, match="puppet: starting"):
        async with starting:
            pass
    assert not is_running(starting._process.pid)


async def test_the_end_of_a_server_is_told(server: MakeServer) -> None:
    async with server() as running:
        os.kill(running._process.pid, 9)
        await running._process.wait()
        assert running.exit_report() == "the server was ended by signal 9\npuppet: starting"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_server_ends_soon_after_a_load_tester_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD_A_SERVER], stdout=subprocess.PIPE, text=True) as load_tester:
        assert load_tester.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in load_tester.stdout.readline().split()]
        load_tester.kill()
    try:
        assert len(processes) > 1  # the one that serves, and its parent
        assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


async def test_a_configuration_file_is_passed_on(server: MakeServer, tmp_path: Path) -> None:
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
        ("kagglehub:a/b", "a-b", "kagglehub:a/b", None),
        ("kagglehub:a/b.keras", "a-b.keras", "kagglehub:a/b.keras", None),
        ("/models/my net.keras", "my-net", "/models/my net.keras", None),
        ("net.keras", "net", str(Path("net.keras").absolute()), None),
        ("net.new-format", "net", str(Path("net.new-format").absolute()), None),
        ("/models/a:b", "a-b", "/models/a:b", None),
        ("./a:b", "a-b", str(Path("a:b").absolute()), None),
    ],
)
def test_a_configuration_is_made_for_a_model(model: str, name: str, source: str, weights: str | None) -> None:
    text = configuration([model], ["xla", "graph"], buckets=[4])
    (entry,) = yaml.safe_load(text)["models"]
    assert served_name(model) == entry["name"] == name
    assert entry["buckets"] == [4]
    assert (entry["source"], entry.get("weights")) == (source, weights)
    assert entry["modes"] == ["xla", "graph"]
    assert json.loads(text)


@pytest.mark.parametrize("kind", [kind for kind in Source if kind.value.prefix])
def test_a_name_is_a_path_to_the_load_tester_where_it_is_one_to_the_server(kind: Source) -> None:
    prefix = kind.value.prefix
    for model in (f"{prefix}a/b", f"./{prefix}a/b", f"/{prefix}a", f"{prefix}a.keras"):
        (entry,) = yaml.safe_load(configuration([model], ["xla"]))["models"]
        is_path = sources.looks_like_path(model)
        assert entry["source"] == (str(Path(model).absolute()) if is_path else model)


@pytest.mark.parametrize("kind", [kind for kind in Source if kind.value.prefix])
def test_what_the_server_would_download_gets_random_weights(kind: Source) -> None:
    (entry,) = yaml.safe_load(configuration([f"{kind.value.prefix}Some"], ["xla"]))["models"]
    assert entry.get("weights") == ("random" if kind.value.is_downloaded else None)


@pytest.mark.parametrize(("labels", "measured"), [({"stable": 1, "new": 3}, "1"), ({"new": 2}, "3")])
def test_of_several_versions_the_default_one_is_measured(tmp_path: Path, labels: dict[str, int], measured: str) -> None:
    path = tmp_path / "models.yaml"
    versions: list[dict[str, Any]] = [{"name": "mine", "source": "builtin:noop", "version": n} for n in (1, 2, 3)]
    versions[2] |= {"version_labels": labels, "routing": {"new": 5}, "shadow": {"version": "new"}}
    path.write_text(json.dumps({"models": versions}))
    (entry,) = json.loads(narrowed(path, ["mine"], ["graph"]))["models"]
    assert entry["version"] == measured
    assert (entry["version_labels"], entry["routing"], entry["shadow"]) == ({}, {}, None)


def test_a_configuration_file_is_narrowed_to_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLASERVE_COMPILE_CACHE")
    path = tmp_path / "models.yaml"
    path.write_text(
        "lanes: 2\ncompile_cache: cache\nmodels:\n"
        "  - {name: mine, source: mine.keras, modes: [xla], default_mode: xla, labels: labels.txt, buckets: auto,\n"
        "     auto_buckets: {demand: demand.json}}\n"
        "  - {name: other, source: 'builtin:noop'}\n"
    )
    document = json.loads(narrowed(path, ["mine"], ["graph", "eager"]))
    (entry,) = document["models"]
    assert (document["lanes"], document["compile_cache"]) == (2, str(tmp_path / "cache"))
    assert (entry["name"], entry["modes"], entry["default_mode"]) == ("mine", ["graph", "eager"], None)
    assert entry["source"] == str(tmp_path / "mine.keras")
    assert entry["labels"] == str(tmp_path / "labels.txt")
    assert entry["auto_buckets"]["demand"] == str(tmp_path / "demand.json")


def test_a_configuration_means_the_same_with_and_without_a_load_tester(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("{profile_dir: p, models: [{name: mine, source: m/it.keras, modes: [xla], weights: w}]}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(narrowed(Path("models.yaml"), ["mine"], ["xla"]))
    assert config.load(tmp_path / "run" / "config.yaml") == config.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [{name: other, source: 'builtin:noop'}]", r"expected its models \(other\), got mine"),
        ("lanes: 2", r"expected its models \(digits\), got mine"),
        ("{", "not YAML"),
        ("models: 3", "models: .*got 3"),
    ],
)
def test_a_configuration_file_without_the_model_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(TargetError, match=f"--config .*{message}"):
        narrowed(path, ["mine"], ["xla"])
