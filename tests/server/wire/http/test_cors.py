"""Web pages of other origins."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.wire.http.wire import Host, request, settle

from xlaserve.config import Settings
from xlaserve.errors import ConfigError, InvalidArgument
from xlaserve.wire.http.cors import with_cors
from xlaserve.wire.http.message import HttpRequest
from xlaserve.wire.http.open_inference_methods import OpenInference

PAGE, OTHER = "https://page.example", "https://other.example"
ALLOWED = "access-control-allow-origin"


def host(*origins: str) -> Host:
    plain = Host()
    return Host(app=with_cors(plain.calls.application("method", plain.method, ()), origins))


async def ask(origins: tuple[str, ...], *arguments: Any, **headers: Any) -> Any:
    client = host(*origins).connect()
    client.send(request(*arguments, **headers))
    await settle()
    (reply,) = client.replies(*arguments[:1])
    return reply


@pytest.mark.usefixtures("virtual_time")
async def test_pages_of_named_origins_may_read_answers_and_others_may_not() -> None:
    assert (await ask((PAGE,), "POST", "/", b"", origin=PAGE)).headers[ALLOWED] == PAGE
    assert (await ask(("*",), "POST", "/", b"", origin=OTHER)).headers[ALLOWED] == "*"
    for origins in ((PAGE,), ()):
        reply = await ask(origins, "POST", "/", b"", origin=OTHER)
        assert reply.status == 200
        assert ALLOWED not in reply.headers
    assert ALLOWED not in (await ask((PAGE,), "POST", "/", b"")).headers


@pytest.mark.usefixtures("virtual_time")
async def test_browsers_ask_before_pages_send_tensors_and_keys() -> None:
    asking = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    reply = await ask((PAGE,), "OPTIONS", "/", origin=PAGE, **asking)
    assert (reply.status, reply.headers[ALLOWED]) == (200, PAGE)
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert (await ask((PAGE,), "OPTIONS", "/", origin=OTHER, **asking)).status == 400


@pytest.mark.usefixtures("virtual_time")
async def test_pages_of_named_origins_may_call_a_private_network() -> None:
    asking = {"access_control_request_method": "POST", "access_control_request_private_network": "true"}
    allowed = "access-control-allow-private-network"
    reply = await ask((PAGE,), "OPTIONS", "/", origin=PAGE, **asking)
    assert (reply.status, reply.headers[ALLOWED], reply.headers[allowed]) == (200, PAGE, "true")
    reply = await ask((PAGE,), "OPTIONS", "/", origin=OTHER, **asking)
    assert (reply.status, ALLOWED in reply.headers) == (400, False)


def test_only_pages_of_named_origins_change_models() -> None:
    def check(origins: tuple[str, ...], headers: dict[str, str]) -> None:
        nothing: Any = None
        OpenInference(nothing, nothing, origins)._check_origin(HttpRequest({}, {}, headers, memoryview(b"")))

    check((), {})
    check((PAGE,), {"origin": PAGE})
    for origins in ((), (PAGE,), ("*",)):
        with pytest.raises(InvalidArgument):
            check(origins, {"origin": OTHER})


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://*.example", "null", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises((ConfigError, ValueError)):
        Settings(cors_origins=(origin,))
