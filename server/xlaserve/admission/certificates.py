"""The server's certificate, and the authorities of clients' certificates; read again when the files change."""

from __future__ import annotations

import _ssl
import os
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from xlaserve.admission.watch import Watch
from xlaserve.errors import ConfigError

_UNUSABLE: Final = {
    "KEY_VALUES_MISMATCH": "another certificate's",
    "NO_CERTIFICATE_ASSIGNED": "another certificate's",  # it is of another algorithm
    "NO_START_LINE": "a file without any",
    "NO_CERTIFICATE_OR_CRL_FOUND": "a file without any",
    "BAD_END_LINE": "one that is cut off",
    "EE_KEY_TOO_SMALL": "one whose key is too small",
    "CA_KEY_TOO_SMALL": "one of an authority whose key is too small",
    "CA_MD_TOO_WEAK": "one with too weak a signature",
}
"""OpenSSL's reasons in plain words."""
REMEMBERED: Final = 1024
"""Certificates of clients whose names are remembered."""


class Pem(NamedTuple):
    """The contents of the files."""

    key: bytes
    certificate: bytes
    """The server's, then those that lead to its authority."""
    client_ca: bytes | None
    """Authorities whose certificates clients must show; None asks for none."""
    expiry_s: float
    """When the server's certificate ends, in seconds since the epoch."""


class Certificates:
    """TLS of gRPC and HTTP. The files are as before where they can't be used after a change."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Raises ConfigError."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._context: ssl.SSLContext
        self.pem: Pem
        files = [file for file in (key, certificate, client_ca) if file is not None]

        def read() -> Sequence[Path]:
            self._context, self.pem = self._read()
            return files

        self.watch = Watch("tls", files, read)

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._client_ca is not None

    def follow(self, on_new_authorities: Callable[[], object]) -> None:
        """Reads the files again from now on when they change.

        `on_new_authorities` is called, on another thread, once others are believed than before: open connections may
        be those of clients that are believed no more.
        """
        believed = self.pem.client_ca

        def compare() -> None:
            nonlocal believed
            if self.pem.client_ca != believed:
                believed = self.pem.client_ca
                on_new_authorities()

        self.watch.follow(compare)

    def server_context(self) -> ssl.SSLContext:
        """Returns the context for a connection, which gets the certificate that is valid when it is made.

        Where clients show theirs, each connection needs a context of its own: a session that is resumed is not verified
        again, and Python can't turn off the cache of a context's sessions.
        """
        if not self.asks_clients:
            return self._context
        context = self._bare_context()
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _on_hello(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._context

    def _bare_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = self._on_hello
        if self.asks_clients:
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def _read(self) -> tuple[ssl.SSLContext, Pem]:
        key, certificate, client_ca = self._key, self._certificate, self._client_ca
        context = self._bare_context()
        with _usable("tls_certificate", "a certificate in PEM", certificate):
            certificate_pem, expiry_s = certificate.read_bytes(), _expiry_s(certificate)
            _check_chain(certificate)
        with _usable("tls_key", "the private key of tls_certificate in PEM, without a password", key):
            pem = Pem(key.read_bytes(), certificate_pem, None, expiry_s)
            context.load_cert_chain(certificate, key, password=_no_password)
        if client_ca is not None:
            with _usable("tls_client_ca", "certificates of authorities in PEM", client_ca):
                pem = pem._replace(client_ca=client_ca.read_bytes())
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(client_ca)
        return context, pem


@contextmanager
def _usable(field: str, expected: str, file: Path) -> Iterator[None]:
    """A block in which a file is read. Raises ConfigError where it can't be used."""
    try:
        yield
    except ssl.SSLError as error:
        reason = getattr(error, "reason", None) or "nothing that can be read"  # Python gives some errors none
        got = _UNUSABLE.get(reason, reason)
        raise ConfigError(f"{field}: expected {expected}, got {got}: {file}") from None
    except OSError as error:
        raise ConfigError(f"{field}: {file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{field}: expected {expected}, got {error}: {file}") from None


def _expiry_s(certificate: Path) -> float:
    """Returns when the first certificate of a file ends. Raises ssl.SSLError where there is none, OSError."""
    # Python shows a certificate's dates only of the other side of a connection.
    decoded: dict[str, str] = _ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
    return ssl.cert_time_to_seconds(decoded["notAfter"])


def _check_chain(certificate: Path) -> None:
    """Raises ssl.SSLError where OpenSSL can't use the certificates of a file, whatever the key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # OpenSSL takes both from one file as well, the certificates first
        context.load_cert_chain(certificate, password=_no_password)
    except ssl.SSLError as error:
        if "PEM lib" not in str(error) and error.reason != "KEY_VALUES_MISMATCH":  # the file has no key, or another one
            raise
    except ValueError:  # a key with a password
        pass


def _no_password() -> bytes:
    raise ValueError("an encrypted one")


def names_of(certificate: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names in a verified certificate, as `ssl.SSLObject.getpeercert` gives it."""
    for part in certificate.get("subject", ()):
        yield from (value for key, value in part if key == "commonName")
    yield from (value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "email"))


def names_in(pem: bytes) -> tuple[str, ...]:
    """Returns the names in a verified certificate in PEM, as `names_of` does; none where it can't be read.

    gRPC's core gives names as C strings, which end at a zero byte that may be in the middle of a name.
    """
    try:
        return _names_in(pem)
    except (OSError, ValueError):  # not remembered: perhaps no file could be opened
        return ()


@lru_cache(REMEMBERED)
def _names_in(pem: bytes) -> tuple[str, ...]:
    """Raises OSError and ValueError."""
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)  # Python reads certificates from files alone
    try:
        os.write(file, pem)
        return (*names_of(_ssl._test_decode_cert(f"/proc/self/fd/{file}")),)  # type: ignore[attr-defined]
    finally:
        os.close(file)
