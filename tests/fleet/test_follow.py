from __future__ import annotations

import itertools
import json
import logging
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from xlaserve.errors import ConfigError
from xlaserve_fleet import follow, haproxy

A = {"id": "a", "address": "10.0.0.3:1", "http": "10.0.0.3:2", "state": "ready"}
B = {"id": "b", "address": "10.0.0.4:1", "http": "10.0.0.4:2", "state": "ready"}

Answers = list[dict[str, Any] | None]


@pytest.fixture
def names() -> Iterator[Callable[[Answers], tuple[str, list[str]]]]:
    """Starts a name service that gives each of the answers once, None for one that fails; returns what it was asked."""
    servers: list[HTTPServer] = []

    def start(answers: Answers) -> tuple[str, list[str]]:
        left, asked = iter(answers), []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                answer = next(left)
                self.send_response(503 if answer is None else 200)
                self.end_headers()
                if answer is not None:
                    self.wfile.write(json.dumps(answer).encode())

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ids(found: Iterator[list[follow.Server]], count: int) -> list[str]:
    return ["".join(one["id"] for one in servers) for servers in itertools.islice(found, count)]


def test_the_ready_servers_are_given_after_each_answer(names: Any) -> None:
    address, asked = names(
        [
            {"servers": [A], "generation": 5},
            {"servers": [A], "generation": 5},
            {"servers": [A, {**B, "state": "draining"}], "generation": 6},
            {"servers": [A, B], "generation": 7},
        ]
    )
    assert ids(follow.lists(address), 4) == ["a", "a", "a", "ab"]
    assert asked == ["/v1/servers"] + [f"/v1/servers?after={n}&wait_s=20" for n in (5, 5, 6)]


def test_a_name_service_that_is_away_changes_nothing(names: Any, caplog: pytest.LogCaptureFixture) -> None:
    address, _ = names([{"servers": [A], "generation": 5}, None, None, {"servers": [A, B], "generation": 6}])
    slept: list[float] = []
    with caplog.at_level(logging.WARNING):
        assert ids(follow.lists(address, slept.append), 4) == ["a", "a", "a", "ab"]
    assert slept == [follow.RETRY_S] * 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize("servers", [[], [{**A, "state": "draining"}]])
def test_a_list_without_a_ready_server_changes_nothing(
    servers: Any, names: Any, caplog: pytest.LogCaptureFixture
) -> None:
    without = {"servers": servers, "generation": 6}
    address, _ = names(
        [without, {"servers": [A], "generation": 5}, without, without, {"servers": [B], "generation": 7}]
    )
    with caplog.at_level(logging.WARNING):
        assert ids(follow.lists(address, lambda _: None), 4) == ["a", "a", "a", "b"]
    assert [record.getMessage().partition("as they are: ")[2] for record in caplog.records] == [
        "no server is ready"
    ] * 2


WRONG: list[Any] = [
    [],
    7,
    {"servers": [B], "generation": float("inf")},
    {"servers": [B], "generation": "6"},
    {"servers": 7, "generation": 6},
    {"servers": [7], "generation": 6},
    {"servers": ["x"], "generation": 6},
    *({"servers": [{k: v for k, v in B.items() if k != key}], "generation": 6} for key in B),
    *(
        {"servers": [{**B, "id": key}], "generation": 6}
        for key in ("b\nprogram x\n    command sh", "b\n", "b c", "b#", "", 7, None)
    ),
    *(
        {"servers": [{**B, key: value}], "generation": 6}
        for key in ("address", "http")
        for value in ("10.0.0.4", "10.0.0.4:1\n", "10.0.0.4:1 ssl", ":1", "10.0.0.4:", "[x]:1", "a:123456", "$H:1", 7)
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_an_answer_that_is_no_list_of_servers_changes_nothing(
    wrong: Any, names: Any, caplog: pytest.LogCaptureFixture
) -> None:
    address, _ = names([{"servers": [A], "generation": 5}, wrong, {"servers": [A, B], "generation": 6}])
    with caplog.at_level(logging.WARNING):
        assert ids(follow.lists(address, lambda _: None), 3) == ["a", "a", "ab"]
    (record,) = caplog.records
    assert "stay as they are: expected " in record.getMessage()
    assert "\n" not in record.getMessage()


def test_hosts_may_be_names_and_ipv6_addresses(names: Any) -> None:
    one = {"id": "a-b_c.9", "address": "node-1.example:1", "http": "[2001:db8::1]:65535"}
    address, _ = names([{"servers": [{**one, "state": "ready", "zone": "x\ny"}], "generation": 5}])
    assert next(follow.lists(address)) == [one]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    follow.write(file, follow.addresses([A, B]))
    follow.write(file, follow.addresses([B]))
    assert file.read_text() == "10.0.0.4:1\n"
    assert [*tmp_path.iterdir()] == [file]
    for folder in ("nowhere", "addresses"):
        with pytest.raises(ConfigError, match="expected a file that can be written"):
            follow.write(tmp_path / folder / "addresses", "")


def test_a_command_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert not follow.reload("sh -c 'echo why >&2; exit 3'")
    assert not follow.reload("/nonexistent/command")
    assert not follow.reload("sh -c 'unfinished")
    assert "exited with 3: why" in caplog.records[0].getMessage()
    assert "/nonexistent/command" in caplog.records[1].getMessage()
    assert "No closing quotation" in caplog.records[2].getMessage()
    assert follow.reload("true")


def test_haproxy_speaks_http2_to_servers_and_checks_their_http_port() -> None:
    text = haproxy.configuration([A, B], 9001, 9000)
    assert "    bind :9001 proto h2\n" in text
    assert "    bind :9000\n" in text
    assert "    server a 10.0.0.3:1 proto h2 check port 2 check-proto h1\n" in text
    assert "    server b 10.0.0.4:2\n" in text
    assert "balance leastconn" in text
    assert "httpchk GET /v2/health/ready" in text


def test_haproxy_takes_it_beside_a_file_of_its_own(tmp_path: Path) -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("needs haproxy")
    own, fleet = tmp_path / "haproxy.cfg", tmp_path / "fleet.cfg"
    own.write_text(
        "global\n    maxconn 100\ndefaults\n    mode tcp\n    timeout connect 5s\n    timeout client 5s\n"
        "    timeout server 5s\nfrontend http\n    bind :9080\n    default_backend http\n"
        "backend http\n    server a 127.0.0.1:9081\n"
    )
    ipv6 = {"id": "c", "address": "[2001:db8::1]:1", "http": "[2001:db8::1]:2"}
    fleet.write_text(haproxy.configuration([A, B, ipv6], 9001, 9000))
    done = subprocess.run(
        ["haproxy", "-c", "-f", own, "-f", fleet], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
