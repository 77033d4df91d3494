"""Calls to a running server, for commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from xlaserve.config import Settings
from xlaserve.config.authority import authority
from xlaserve.errors import ModelNotFound, XlaserveError
from xlaserve_client.connection import call_metadata
from xlaserve_client.errors import reason_of
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc

TOKEN_VARIABLE = "XLASERVE_TOKEN"
AUTHORITIES_VARIABLE = "XLASERVE_CA"
"""Names the file of the certificates that are trusted, PEM; set and empty for those of the system. Without it commands
speak no TLS."""
LIST_TIMEOUT_S = 10.0
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0))


def add_target(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds `--target`, which was `--server` in 0.1."""
    parser.add_argument("--target", "--server", metavar="HOST:PORT", help=text)


def address(settings: Settings) -> str:
    """Returns where a server with these settings listens, as seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return authority(host, settings.grpc_port)


def list_models(server: str) -> pb.ListModelsResponse:
    """Returns what `server`, HOST:PORT, says of its models. Raises XlaserveError."""
    with channel(server) as connected:
        stub = vision_pb2_grpc.VisionStub(connected)
        return stub.ListModels(pb.ListModelsRequest(), timeout=LIST_TIMEOUT_S, metadata=metadata())


def ready_model(models: Collection[pb.Model], name: str, server: str) -> pb.Model:
    """Returns the highest ready version of model `name`, or of the only one where it is empty. Raises ModelNotFound."""
    ready = [model for model in models if model.state == pb.Model.STATE_READY]
    names = sorted({model.name for model in ready})
    wanted = name or (names[0] if len(names) == 1 else "")
    if found := [model for model in ready if model.name == wanted]:
        return max(found, key=lambda model: int(model.version))
    raise ModelNotFound(f"no model {name!r} is ready on {server}; there are: {', '.join(names) or 'none'}")


def metadata() -> tuple[tuple[str, str], ...]:
    """Returns what says who calls: the API key or token in XLASERVE_TOKEN. Raises XlaserveError."""
    try:
        return call_metadata(os.environ.get(TOKEN_VARIABLE) or None, ())
    except ValueError as error:
        raise XlaserveError(f"{TOKEN_VARIABLE}: {str(error).removeprefix('token: ')}") from None


@contextmanager
def channel(server: str, needs: str = "it is no xlaserve, or of another version") -> Iterator[grpc.Channel]:
    """Connects to `server`, HOST:PORT; any status other than OK is raised as XlaserveError.

    `needs` says what is missing where it has no such method.
    """
    try:
        with _connect(server) as connected:
            yield connected
    except grpc.RpcError as error:
        status = f"{error.code().name}: {reason_of(error.details())}" if isinstance(error, grpc.Call) else str(error)
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            status = f"{needs} ({error.details()})"
        raise XlaserveError(f"server {server}: {status}") from None


def _connect(server: str) -> grpc.Channel:
    authorities = os.environ.get(AUTHORITIES_VARIABLE)
    if authorities is None:
        return grpc.insecure_channel(server, UNLIMITED)
    try:
        credentials = grpc.ssl_channel_credentials(Path(authorities).read_bytes() if authorities else None)
    except OSError as error:
        raise XlaserveError(f"{AUTHORITIES_VARIABLE}: {authorities}: {error.strerror}") from None
    return grpc.secure_channel(server, credentials, UNLIMITED)
