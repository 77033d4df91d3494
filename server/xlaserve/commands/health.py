"""`xlaserve-health`: asks a server over gRPC how it is, for supervisors that can only run a command.

A script of its own rather than a command of `xlaserve`: it is run every few seconds, and so imports next to nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PORT_VARIABLE: Final = "XLASERVE_GRPC_PORT"
TIMEOUT_S: Final = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where the service serves, 1 otherwise, 2 for a wrong command line."""
    options = parser().parse_args(arguments)
    try:
        with _connect(options) as channel:
            request = health_pb2.HealthCheckRequest(service=options.service)
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
            status = stub.Check(request, timeout=options.timeout).status
    except grpc.RpcError as error:
        said = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        sys.stderr.write(f"xlaserve-health: {options.target}: {said}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"xlaserve-health: {error.filename}: {error.strerror}\n")
        return 1
    sys.stdout.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    found = argparse.ArgumentParser(
        prog="xlaserve-health", description="Asks a server for its health. Exits with 0 where it serves, else with 1."
    )
    target = f"127.0.0.1:{os.environ.get(PORT_VARIABLE, '8001')}"
    found.add_argument(
        "--target",
        default=target,
        metavar="HOST:PORT",
        help=f"port 8001, or {PORT_VARIABLE}, of this machine by default",
    )
    found.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="a model, as NAME or model:NAME, or `liveness`: whether the server answers, ready or not; by default"
        " whether it is ready",
    )
    found.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="seconds in all (%(default)g)")
    found.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificates that are trusted, PEM; speaks TLS")
    found.add_argument("--tls-cert", type=Path, metavar="FILE", help="the certificate to show, PEM")
    found.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    found.add_argument("--tls-name", metavar="HOST", help="the name in the server's certificate, where it is another")
    return found


def _connect(options: argparse.Namespace) -> grpc.Channel:
    settings: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if options.tls_ca is None:
        return grpc.insecure_channel(options.target, settings)
    if options.tls_name:
        settings.append(("grpc.ssl_target_name_override", options.tls_name))
    files = (options.tls_ca, options.tls_key, options.tls_cert)
    return grpc.secure_channel(
        options.target, grpc.ssl_channel_credentials(*(path and path.read_bytes() for path in files)), settings
    )
