"""`xlaserve-health`, as Docker's health check runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import trustme
from tests.integration.conftest import NOOP, StartServer

from xlaserve.processes.event_loop import SECOND_SIGNAL_S

PATIENCE_S = 60.0


def health(*arguments: str, **environment: str) -> tuple[int, str]:
    """Returns the exit status, and what it said."""
    code = "import sys; from xlaserve.commands.health import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_server_that_drains_is_live_and_not_ready(start_server: StartServer) -> None:
    server = start_server({"models": [NOOP], "shutdown_delay_s": PATIENCE_S})
    port = server.grpc.rpartition(":")[2]
    assert health(XLASERVE_GRPC_PORT=port) == (0, "SERVING")
    assert health("--target", server.grpc, "--service", "noop") == (0, "SERVING")
    status, said = health("--target", server.grpc, "--service", "nothing")
    assert (status, said) == (1, f"xlaserve-health: {server.grpc}: NOT_FOUND: no such service")
    server.process.terminate()
    server.wait_for(lambda: "still serving" in server.stderr, "it did not drain")
    assert health("--target", server.grpc) == (1, "NOT_SERVING")
    assert health("--target", server.grpc, "--service", "liveness") == (0, "SERVING")
    time.sleep(SECOND_SIGNAL_S)  # a signal that comes sooner is the same one
    server.process.terminate()
    assert server.wait() == 0
    status, said = health("--target", server.grpc)
    assert status == 1
    assert said.startswith(f"xlaserve-health: {server.grpc}: UNAVAILABLE: ")


def test_a_server_with_tls_is_asked_with_a_certificate(start_server: StartServer, tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, certificate, key = (tmp_path / name for name in ("ca.pem", "tls.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued = authority.issue_cert("vision.example")
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(certificate, append=True)
    tls = {"tls_certificate": str(certificate), "tls_key": str(key), "tls_client_ca": str(ca)}
    server = start_server({"models": [NOOP], **tls})
    options = ("--target", server.grpc, "--tls-ca", str(ca), "--tls-name", "vision.example")
    assert health(*options, "--tls-cert", str(certificate), "--tls-key", str(key)) == (0, "SERVING")
    assert health("--target", server.grpc, "--timeout", "1")[0] == 1
    missing = str(tmp_path / "missing.pem")
    assert health("--tls-ca", missing) == (1, f"xlaserve-health: {missing}: No such file or directory")


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, xlaserve.commands.health; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pydantic", "tensorflow", "xlaserve.cli"} & set(found)
