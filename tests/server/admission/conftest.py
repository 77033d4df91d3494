"""Keys and access files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

KEY = "xla_one"
Write = Callable[..., Path]


def entry(name: str, key: str = KEY, **more: Any) -> dict[str, Any]:
    """Returns a caller's entry."""
    return {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), **more}


@cache
def certificate(common_name: str, *names: str) -> bytes:
    """Returns a client's certificate in PEM, with these alternative names."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + timedelta(days=1))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, names)]), critical=False)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an access file with these callers; returns its path."""

    def write(*callers: dict[str, Any], **more: Any) -> Path:
        path = tmp_path / "access.yaml"
        path.write_text(json.dumps({"callers": callers, **more}))
        return path

    return write
