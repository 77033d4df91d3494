"""Under which names requests may come."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.wire.http.wire import Host, request, settle

from xlaserve.admission.hosts import Hosts
from xlaserve.config import Settings
from xlaserve.errors import PermissionDenied
from xlaserve.wire.http import routes
from xlaserve.wire.http.operation import Operation

LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1", "127.1.2.3:8000", "[::1]:8000"]
ADDRESSES = ["10.1.2.3", "10.1.2.3:8000", "[2001:db8::1]", "192.0.2.7:1"]
NAMES = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evillocalhost",
    "[x]",
]


def hosts(*, is_locked: bool = False, **settings: Any) -> Hosts:
    return Hosts.of(Settings(**settings), is_locked=is_locked)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_server_answers_to_addresses_and_localhost_alone(host: str) -> None:
    names = hosts(host=host)
    assert [one for one in (*LOOPBACK, *ADDRESSES, None, "") if not names.passes(one)] == []
    assert [one for one in NAMES if names.passes(one)] == []


def test_any_host_passes_on_a_public_server_or_one_with_authentication() -> None:
    every = [*LOOPBACK, *ADDRESSES, *NAMES]
    for names in (hosts(host="0.0.0.0"), hosts(is_locked=True), hosts(allowed_hosts=("*",))):
        assert all(map(names.passes, every))


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0"}, {"is_locked": True}])
def test_allowed_names_pass_and_no_others(settings: dict[str, Any]) -> None:
    names = hosts(allowed_hosts=("xlaserve.default.svc", "Proxy."), **settings)
    assert all(
        map(names.passes, ["xlaserve.default.svc:8000", "XLASERVE.default.svc.", "proxy", *LOOPBACK, *ADDRESSES])
    )
    assert not any(map(names.passes, [*NAMES, "default.svc", "a.proxy"]))


def test_the_configured_host_passes() -> None:
    assert hosts(host="serving.lan", allowed_hosts=("proxy",)).passes("serving.lan:8000")


def test_a_refusal_names_the_setting() -> None:
    error = hosts().refusal("evil.example")
    assert isinstance(error, PermissionDenied)
    assert "allowed_hosts" in str(error) and "'evil.example'" in str(error)


@pytest.mark.parametrize("name", ["", "a:1", "http://a", "a/b", "a b", "[::1]", "*.a"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        Settings(allowed_hosts=(name,))


@pytest.mark.usefixtures("virtual_time")
async def test_every_path_is_refused_under_a_name_that_does_not_pass() -> None:
    plain = Host()
    anything: Any = plain.method
    operations = [Operation("GET", ["/v1/status", *routes.TASKS], "status", anything, ())]
    client = Host(app=routes.application(plain.calls, operations, hosts())).connect()
    asked = [("/v1/status", "127.0.0.1"), *((path, "evil.example") for path in ("/v1/status", "/", "/a%2fb", "/none"))]
    client.send(*(request("GET", path, host=name) for path, name in asked))
    await settle()
    await settle()
    assert [reply.status for reply in client.replies()] == [200, 403, 403, 403, 403]
    assert len(plain.method.requests) == 1
