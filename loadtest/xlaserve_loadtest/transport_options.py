"""How a target is reached, on the command line: TLS, headers and compression."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from xlaserve_loadtest.parser import checked
from xlaserve_loadtest.targets.channel import COMPRESSIONS, Transport

_HEADER: Final = re.compile(r"([0-9a-z_.-]+)=([ -~]*)")
"""What HTTP/2 and gRPC allow, but for names in -bin, whose values are bytes."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options to `parser`."""
    group = parser.add_argument_group("how the target is reached")
    group.add_argument("--tls", action="store_true", help="over TLS; implied by the options that begin so")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificates that are trusted, PEM")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="the client's own certificate, PEM")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
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


def transport(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Transport:
    """Returns what the options say. Ends with status 2 where a file can't be read."""

    def read(path: Path | None) -> bytes | None:
        try:
            return path.read_bytes() if path else None
        except OSError as error:
            parser.error(f"{path}: {error.strerror}")

    return Transport(
        is_secure=options.tls or any((options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name)),
        authorities=read(options.tls_ca),
        certificate=read(options.tls_cert),
        key=read(options.tls_key),
        server_name=options.tls_server_name,
        headers=tuple(options.header),
        compression=options.compression,
    )


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
        raise ValueError(f"expected NAME=VALUE such as authorization='Bearer TOKEN', got {text!r}")
    return match[1], match[2]
