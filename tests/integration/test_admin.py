"""What operators ask a running server: a profile, and its ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tests.integration.conftest import Server, StartServer
from tests.required import required

from xlaserve_proto import admin_pb2 as pb
from xlaserve_proto import admin_pb2_grpc as pb_grpc

TIMEOUT_S = 60
NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}


def profile(address: str, seconds: float) -> pb.ProfileResponse:
    with grpc.insecure_channel(address) as channel:
        return pb_grpc.AdminStub(channel).Profile(pb.ProfileRequest(seconds=seconds), timeout=TIMEOUT_S)


def xlaserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("XLASERVE_")}
    command = [sys.executable, "-m", "xlaserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)


def test_nobody_profiles_a_server_that_was_not_configured_for_it(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        profile(server.grpc, 0.1)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    done = xlaserve("profile", "--target", server.grpc, "--seconds", "0.1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"xlaserve: server {server.grpc}: it records no profiles; start it with admin: true")


def test_a_server_without_tensorflow_has_nothing_to_profile(start_server: StartServer) -> None:
    server = start_server({"models": [NOOP], "admin": True})
    with pytest.raises(grpc.RpcError) as refused:
        profile(server.grpc, 0.1)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "nothing to profile" in required(refused.value.details())


def test_a_profile_is_recorded_where_the_configuration_says(start_server: StartServer, tmp_path: Path) -> None:
    model = {"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1]}
    server = start_server({"models": [model], "admin": True, "profile_dir": str(tmp_path / "profiles")})
    done = xlaserve("profile", "--target", server.grpc, "--seconds", "0.2")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "profiles").iterdir()
    assert folder.name in done.stdout
    assert list(folder.rglob("*.xplane.pb"))
    assert str(tmp_path) not in done.stdout, "paths of the server are its own business"

    with pytest.raises(grpc.RpcError) as refused:
        profile(server.grpc, 61)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_ledger_of_a_running_server_says_what_when_and_how_long(server: Server) -> None:
    table = xlaserve("ledger", "--target", server.grpc)
    assert table.returncode == 0, table.stderr
    header, *lines = table.stdout.splitlines()
    assert header.split()[:3] == ["model", "mode", "bucket"]
    assert "ready at" in header
    assert any(line.split()[:3] == ["digits", "xla", "8x32x32"] for line in lines)

    ledger = json.loads(xlaserve("ledger", "--target", server.grpc, "--json").stdout)
    assert ledger["unexpected"] == []
    assert len(ledger["programs"]) == len(lines)
    assert all(program["at"].startswith("20") and program["run_s"] > 0 for program in ledger["programs"])


def test_a_server_that_does_not_answer_is_said_in_a_line() -> None:
    done = xlaserve("ledger", "--target", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("xlaserve: server 127.0.0.1:1: UNAVAILABLE")
    assert "Traceback" not in done.stderr
