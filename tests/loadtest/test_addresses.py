from __future__ import annotations

import pytest

from xlaserve_loadtest.addresses import Address


@pytest.mark.parametrize(
    ("text", "protocol", "authority"),
    [
        ("host:8001", "", "host:8001"),
        ("[::1]:8001", "", "[::1]:8001"),
        ("http://host:8000", "http", "host:8000"),
        ("http://host", "http", "host:80"),
        ("https://host/", "https", "host:443"),
        ("http://[::1]:8000", "http", "[::1]:8000"),
        ("tfs://host:8500", "tfs", "host:8500"),
        ("tfs+http://host:8501", "tfs+http", "host:8501"),
        ("tfs+https://host", "tfs+https", "host:443"),
        ("fleet://head:7000", "fleet", "head:7000"),
    ],
)
def test_an_address_names_its_protocol(text: str, protocol: str, authority: str) -> None:
    address = Address.parse(text)
    assert (address.protocol, address.authority) == (protocol, authority)


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:0",
        "host:65536",
        "ftp://host:1",
        "tfs://host",
        "fleet://head",
        "http://host/v2",
        "http://me@host",
        "http://",
        "",
    ],
)
def test_anything_else_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT, http://HOST\[:PORT\], .* got"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [("127.0.0.1:1", True), ("http://localhost", True), ("tfs://[::1]:1", True), ("https://10.0.0.1", False)],
)
def test_loopback_is_known_in_every_protocol(text: str, is_loopback: bool) -> None:
    assert Address.parse(text).is_loopback == is_loopback
