from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from xlaserve.errors import ConfigError
from xlaserve_fleet import addresses
from xlaserve_fleet.addresses import Entry
from xlaserve_fleet.name_service import NameService

TIMEOUT_S = 30
ONE = Entry("a", "127.0.0.1:1", "127.0.0.1:2", "ready", {"pid": 7})
TOLD = {"id": "a", "address": "127.0.0.1:1", "http": "127.0.0.1:2", "state": "ready"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameService]:
    monkeypatch.setattr(addresses, "SETTLE_S", 0.0)
    found = NameService("127.0.0.1", free_port())
    yield found
    found.stop()


def asked(service: NameService, query: str = "") -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{service.address}/v1/servers{query}", timeout=TIMEOUT_S) as answer:
        assert answer.headers["content-type"] == "application/json"
        found: dict[str, Any] = json.load(answer)
    return found


def test_the_list_is_json_without_what_only_people_want_to_know(service: NameService) -> None:
    service.renew(ONE)
    found = asked(service)
    assert found == {"servers": [TOLD], "generation": found["generation"]}
    assert isinstance(found["generation"], int)
    assert service.entries() == [ONE]


def test_a_long_poll_is_answered_by_the_change(service: NameService) -> None:
    generation = asked(service)["generation"]
    with ThreadPoolExecutor() as pool:
        polling = pool.submit(asked, service, f"?after={generation}&wait_s=20")
        service.renew(ONE)
        assert polling.result(TIMEOUT_S) == {"servers": [TOLD], "generation": generation + 1}
        polling = pool.submit(asked, service, f"?after={generation + 1}&wait_s=20")
        service.remove("a")
        assert polling.result(TIMEOUT_S) == {"servers": [], "generation": generation + 2}
    assert asked(service, f"?after={generation + 2}&wait_s=0.01")["generation"] == generation + 2


@pytest.mark.parametrize("query", ["?after=x", "?wait_s=x", "?wait_s=-1", "?wait_s=nan", "?wait_s=inf"])
def test_a_wrong_query_is_refused(service: NameService, query: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        asked(service, query)
    assert error.value.code == 400
    assert b"expected after=" in error.value.read()
    error.value.close()


def test_a_port_that_is_taken_is_an_error_that_names_it(service: NameService) -> None:
    port = int(service.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"port: expected a free port of 127\.0\.0\.1, got {port}"):
        NameService("127.0.0.1", port)


def test_it_can_be_started_again_on_its_port() -> None:
    port = free_port()
    for _ in range(2):
        NameService("127.0.0.1", port).stop()
