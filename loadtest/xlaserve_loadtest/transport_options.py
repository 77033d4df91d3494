"""How a target is reached, on the command line: TLS, headers and compression."""

from __future__ import annotations

import argparse
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from xlaserve_loadtest.parser import checked, count_to, file
from xlaserve_loadtest.targets.channel import COMPRESSIONS, Transport

_HEADER: Final = re.compile(r"([0-9a-z_.-]+)=([ -~]*)")
"""Headers that HTTP/2 and gRPC allow, except names in -bin, whose values are bytes."""

MAX_CONNECTIONS: Final = 1024


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options to `parser`."""
    group = parser.add_argument_group("how the target is reached")
    group.add_argument("--tls", action="store_true", help="over TLS; implied by the options that begin so")
    group.add_argument("--tls-ca", type=file, metavar="FILE", help="certificates that are trusted, PEM")
    group.add_argument("--tls-cert", type=file, metavar="FILE", help="the client's own certificate, PEM")
    group.add_argument("--tls-key", type=file, metavar="FILE", help="its key, PEM")
    group.add_argument("--tls-server-name", metavar="NAME", help="in the server's certificate; the address's without")
    group.add_argument(
        "--header",
        type=checked(_header),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="metadata of every call, repeatable; its value is not recorded",
    )
    group.add_argument("--compression", choices=tuple(COMPRESSIONS), help="of requests")
    group.add_argument(
        "--connections",
        type=count_to(MAX_CONNECTIONS),
        metavar="N",
        help="to each address, over gRPC, from each generator; they take requests in turn (1)",
    )


def transport(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Transport:
    """Returns what the options say. Ends with status 2 where a file can't be read, or is not what it should be."""
    if bool(options.tls_cert) != bool(options.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    authorities, certificate, key = (
        _read(option, path, parser)
        for option, path in (
            ("--tls-ca", options.tls_ca),
            ("--tls-cert", options.tls_cert),
            ("--tls-key", options.tls_key),
        )
    )
    # gRPC would only say that the server is unavailable.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if options.tls_ca:
            context.load_verify_locations(options.tls_ca)
    except ssl.SSLError:
        parser.error(f"--tls-ca: expected certificates in PEM, got {options.tls_ca}")
    try:
        if options.tls_cert:
            context.load_cert_chain(options.tls_cert, options.tls_key, password=b"")
    except ssl.SSLError:
        expected = "a certificate and its key in PEM, without a password"
        parser.error(f"--tls-cert, --tls-key: expected {expected}, got {options.tls_cert} and {options.tls_key}")
    return Transport(
        is_secure=options.tls or any((options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name)),
        authorities=authorities,
        certificate=certificate,
        key=key,
        server_name=options.tls_server_name,
        headers=tuple(options.header),
        compression=options.compression,
        connections=options.connections or 1,
    )


def _read(option: str, path: Path | None, parser: argparse.ArgumentParser) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        parser.error(f"{option}: expected a file, got {path}: {error.strerror}")


def without_secrets(words: Sequence[str], transport: Transport) -> list[str]:
    """Returns a command line without the values of headers, which may be tokens."""
    shown = list(words)
    for _, value in transport.headers:
        shown = [word.replace(value, "...") if value else word for word in shown]
    return shown


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    match = _HEADER.fullmatch(f"{name.lower()}{equals}{value}")
    if match is None or match[1].endswith("-bin"):
        raise ValueError("expected NAME=VALUE such as authorization='Bearer TOKEN'")  # what came may be a token
    return match[1], match[2]
