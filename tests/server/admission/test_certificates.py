from __future__ import annotations

import logging
import os
import resource
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from tests.server.admission.conftest import certificate

from xlaserve.admission.certificates import Certificates, names_in, names_of
from xlaserve.errors import ConfigError

NAME = "serving.example.com"


class Files:
    """A server's certificate by one authority, and another authority for its clients."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key, self.client_ca = (folder / name for name in ("cert.pem", "key.pem", "ca.pem"))
        self.authority, self.clients = trustme.CA(), trustme.CA()
        self.issue()
        self.clients.cert_pem.write_to_path(self.client_ca)

    def issue(self, ends: datetime | None = None) -> None:
        issued = self.authority.issue_cert(NAME, not_after=ends)
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    def read(self, *, asks_clients: bool = False) -> Certificates:
        return Certificates(self.certificate, self.key, self.client_ca if asks_clients else None)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def connect(
    certificates_context: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Shakes hands without a network; returns both ends. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = certificates_context.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=NAME, session=session)
    for _ in range(4):
        for end in (theirs, ours):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    ours.write(b"x")  # what a client learns late of TLS 1.3
    theirs.read(1)
    return ours, theirs


def client_of(authority: trustme.CA, own: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    if own is not None:
        own.configure_cert(context)
    return context


def serial(end: ssl.SSLObject) -> object:
    found = end.getpeercert()
    assert found is not None
    return found["serialNumber"]


def test_a_new_certificate_is_for_new_connections(files: Files) -> None:
    certificates = files.read()
    context, client = certificates.server_context(), client_of(files.authority)
    before = serial(connect(context, client)[1])
    files.issue()
    assert serial(connect(context, client)[1]) == before
    certificates.watch.look()
    assert serial(connect(context, client)[1]) != before
    assert certificates.pem.certificate == files.certificate.read_bytes()


def test_clients_need_a_certificate_of_the_authority(files: Files) -> None:
    context = files.read(asks_clients=True).server_context()
    ours, _ = connect(context, client_of(files.authority, files.clients.issue_cert("ops.example.com")))
    assert [*names_of(ours.getpeercert() or {})] == ["ops.example.com"]
    for own in (None, files.authority.issue_cert("ops.example.com")):
        with pytest.raises(ssl.SSLError):
            connect(context, client_of(files.authority, own))


VERSIONS = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])


@VERSIONS
def test_a_replaced_authority_is_not_trusted_even_for_old_sessions(files: Files, version: ssl.TLSVersion) -> None:
    certificates = files.read(asks_clients=True)
    context = certificates.server_context()
    old = client_of(files.authority, files.clients.issue_cert("ops.example.com"))
    old.maximum_version = version
    session = connect(context, old)[1].session
    another = trustme.CA()
    another.cert_pem.write_to_path(files.client_ca)
    certificates.watch.look()
    with pytest.raises(ssl.SSLError):
        connect(certificates.server_context(), old, session)
    connect(certificates.server_context(), client_of(files.authority, another.issue_cert("ops.example.com")))


@VERSIONS
def test_no_session_is_resumed_where_clients_show_certificates(files: Files, version: ssl.TLSVersion) -> None:
    for asks_clients in (True, False):
        certificates = files.read(asks_clients=asks_clients)
        client = client_of(files.authority, files.clients.issue_cert("ops.example.com"))
        client.maximum_version = version
        session = connect(certificates.server_context(), client)[1].session
        assert connect(certificates.server_context(), client, session)[1].session_reused is not asks_clients


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_a_client_of_tls_1_1_is_refused(files: Files) -> None:
    client = client_of(files.authority)
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = ssl.TLSVersion.TLSv1
    client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        connect(files.read().server_context(), client)


def test_files_that_do_not_fit_leave_all_as_before(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    certificates = files.read()
    context, client = certificates.server_context(), client_of(files.authority)
    before, pem = serial(connect(context, client)[1]), certificates.pem
    certificate = files.certificate.read_bytes()
    files.issue()
    new = files.certificate.read_bytes()
    for wrong in (certificate, new[: len(new) // 2], b""):
        files.certificate.write_bytes(wrong)
        certificates.watch.look()
        assert serial(connect(context, client)[1]) == before
    files.certificate.unlink()
    certificates.watch.look()
    assert certificates.pem is pem
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    files.certificate.write_bytes(new)
    certificates.watch.look()
    assert serial(connect(context, client)[1]) != before


def test_an_encrypted_key_is_refused(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    secret = BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, secret))
    with pytest.raises(ConfigError, match=r"^tls_key: expected .*, got an encrypted one: "):
        files.read()


@pytest.mark.parametrize("field", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize("how", ["missing", "empty", "no PEM", "a folder"])
def test_files_that_can_not_be_used_are_refused_in_one_line(files: Files, field: str, how: str) -> None:
    path: Path = getattr(files, field)
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "missing":
        path.write_text("" if how == "empty" else "-----BEGIN NOTHING-----\n")
    with pytest.raises(ConfigError, match=rf"^tls_{field}: [^\n]*{path.name}[^\n]*$"):
        files.read(asks_clients=True)


def test_a_key_of_another_certificate_is_refused(files: Files) -> None:
    key = files.key.read_bytes()
    files.issue()
    files.key.write_bytes(key)
    with pytest.raises(
        ConfigError, match=r"^tls_key: expected the private key of tls_certificate .*, got another certificate's: "
    ):
        files.read()


def test_a_key_of_another_algorithm_is_refused(files: Files) -> None:
    key = rsa.generate_private_key(65537, 2048)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    with pytest.raises(ConfigError, match=r"^tls_key: .*, got another certificate's: "):
        files.read()


def test_a_certificate_that_leads_on_and_is_broken_is_no_fault_of_the_key(files: Files) -> None:
    whole = files.certificate.read_bytes()
    files.certificate.write_bytes(whole + whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"^tls_certificate: expected .*, got one that is cut off: "):
        files.read()


def test_a_certificate_with_too_small_a_key_is_no_fault_of_the_key_file(files: Files) -> None:
    key = rsa.generate_private_key(65537, 1024)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    files.certificate.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    with pytest.raises(ConfigError, match=r"^tls_certificate: .*, got one whose key is too small: "):
        files.read()


def test_it_is_known_when_the_certificate_ends_and_a_new_one_ends_later(files: Files) -> None:
    ends = datetime(2030, 2, 3, 4, 5, 6, tzinfo=UTC)
    files.issue(ends)
    certificates = files.read()
    assert certificates.pem.expiry_s == ends.timestamp()
    files.issue(ends + timedelta(days=1))
    certificates.watch.look()
    assert certificates.pem.expiry_s == ends.timestamp() + 24 * 3600


def test_names_are_the_common_name_and_the_alternative_ones() -> None:
    certificate = {
        "subject": ((("organizationName", "shop"),), (("commonName", "one"),)),
        "subjectAltName": (("DNS", "two"), ("URI", "spiffe://three"), ("email", "four@x"), ("IP Address", "::1")),
    }
    assert [*names_of(certificate)] == ["one", "two", "spiffe://three", "four@x"]
    assert [*names_of({})] == []


def test_names_in_pem_are_whole_and_none_where_it_is_unreadable() -> None:
    assert names_in(certificate("ops\0.evil", "one", "two\0.evil")) == ("ops\0.evil", "one", "two\0.evil")
    assert names_in(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n") == ()
    assert names_in(b"") == ()


def test_a_certificate_that_no_file_was_left_for_is_read_again_later() -> None:
    pem = certificate("later")
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    for left in (0, 1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + left, hard))
        try:
            assert names_in(pem) == ()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    assert names_in(pem) == ("later",)
