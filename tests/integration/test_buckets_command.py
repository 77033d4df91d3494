"""`xlaserve buckets`: what a server's traffic says about its buckets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.conftest import Server, StartServer

PATIENCE_S = 60
MODEL = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4], "version": 7}


def xlaserve_buckets(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xlaserve", "buckets", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def server(start_module_server: StartServer) -> Any:
    return start_module_server({"models": [MODEL], "lanes": 1})


def test_without_traffic_nothing_is_proposed(start_server: StartServer) -> None:
    server = start_server({"models": [MODEL]})
    done = xlaserve_buckets("noop", "--target", server.grpc)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == f"xlaserve: model noop: {server.grpc} has run no batch of it yet, so that no demand is known\n"
    )


def test_what_waited_is_reported_with_a_set_for_it(
    server: Server, connect: Callable[[Any], Any], tmp_path: Path
) -> None:
    client = connect(server)
    for _ in range(40):
        assert client.ask(1, 2, 3) is grpc.StatusCode.OK
    file = tmp_path / "demand.json"
    done = xlaserve_buckets("noop", "--target", server.grpc, "--json", "--save", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    (report,) = json.loads(done.stdout)
    assert (report["model"], report["resolution"], report["demand"]) == ("noop", [224, 224], {"3": 120})
    assert json.loads(file.read_text()) == {"224x224": {"3": 120}}
    present, powers, proposed = report["sets"]
    assert [one["name"] for one in report["sets"]] == ["present", "powers of two", "proposed"]
    assert present["buckets"] == powers["buckets"] == [1, 2, 4]
    assert proposed["image_s"] <= powers["image_s"] * 1.01
    assert report["gain_over_powers_of_two"] == pytest.approx(1 - proposed["image_s"] / powers["image_s"])

    table = xlaserve_buckets("noop", "--target", server.grpc, "--max-buckets", "1").stdout
    assert "noop at 224x224: 120 images; waiting with them: at most 3 for 100%" in table
    assert "powers of two" in table
    (line,) = [line for line in table.splitlines() if line.startswith("buckets: ")]
    assert len(json.loads(line.removeprefix("buckets: "))) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("nop",), "xlaserve: no model 'nop' is ready on {server}; there are: noop\n"),
        (("noop", "--mode", "xla"), "xlaserve: --mode: expected one of graph, got 'xla'\n"),
        (("noop", "--save", "/nonexistent/x"), "xlaserve: --save: /nonexistent/x can't be written: No such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    server: Server, connect: Callable[[Any], Any], options: tuple[str, ...], reason: str
) -> None:
    assert connect(server).ask(1) is grpc.StatusCode.OK
    done = xlaserve_buckets(*options, "--target", server.grpc)
    assert done.returncode == 1
    assert done.stderr.startswith(reason.format(server=server.grpc))
    assert done.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_named() -> None:
    done = xlaserve_buckets("noop", "--target", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("xlaserve: server 127.0.0.1:1: UNAVAILABLE: ")
