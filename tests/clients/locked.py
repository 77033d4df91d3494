"""Two servers that let only those in whom they know: by keys and tokens over TLS, and by certificates."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.integration.conftest import NOOP, Server

KEYS: Final = {"user": "key-of-a-user-0123456789", "watcher": "key-of-a-watcher-0123456789"}
ISSUER, AUDIENCE = "https://issuer.example", "xlaserve"


@contextmanager
def running(folder: Path) -> Iterator[Path]:
    """Yields a file of JSON that says where they listen, and what clients need; `access_calls.py` reads it."""
    folder.mkdir()
    authority, clients, others = trustme.CA(), trustme.CA(), trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    clients.cert_pem.write_to_path(folder / "clients.pem")
    signing = rsa.generate_private_key(65_537, 2048)
    _write_access(folder, signing)
    tls = {"tls_certificate": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
    config = {"models": [NOOP], "access": str(folder / "access.yaml"), **tls}
    now = int(time.time())
    with (
        _server(config, folder / "tls") as by_key,
        _server({**config, "tls_client_ca": str(folder / "clients.pem")}, folder / "mutual") as by_certificate,
    ):
        needed = {
            "tls": _addresses(by_key),
            "mutual": _addresses(by_certificate),
            "ca": str(folder / "ca.pem"),
            "own": _own(folder / "own", clients),
            "others": _own(folder / "others", others),
            **KEYS,
            "token": _token(signing, exp=now + 3600),
            "old_token": _token(signing, exp=now - 3600),
        }
        file = folder / "locked.json"
        file.write_text(json.dumps(needed))
        yield file


def _write_access(folder: Path, signing: rsa.RSAPrivateKey) -> None:
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(signing.public_key()))
    (folder / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "k", "alg": "RS256", "use": "sig"}]}))
    roles = {"user": "infer", "watcher": "observe"}
    callers: list[dict[str, Any]] = [
        {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), "roles": [roles[name]]}
        for name, key in KEYS.items()
    ]
    callers.append({"name": "certified", "certificate": "client.example", "roles": ["infer"]})
    tokens = {"jwks": "jwks.json", "issuer": ISSUER, "audience": AUDIENCE}
    (folder / "access.yaml").write_text(json.dumps({"callers": callers, "tokens": tokens}))


def _own(folder: Path, authority: trustme.CA) -> list[str]:
    folder.mkdir()
    issued = authority.issue_cert("client.example")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return [str(folder / "cert.pem"), str(folder / "key.pem")]


def _token(signing: rsa.RSAPrivateKey, exp: int) -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "somebody", "roles": ["infer"], "exp": exp}
    return jwt.encode(claims, signing, "RS256", {"kid": "k"})


def _addresses(server: Server) -> dict[str, str]:
    return {
        name: f"localhost:{address.rpartition(':')[2]}"
        for name, address in (("grpc", server.grpc), ("http", server.http))
    }


@contextmanager
def _server(config: dict[str, Any], folder: Path) -> Iterator[Server]:
    folder.mkdir()
    server = Server(config, folder)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
