from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from xlaserve.errors import ConfigError
from xlaserve.fleet import follow, haproxy

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


def test_the_list_is_given_whenever_its_ready_servers_change(names: Any) -> None:
    address, asked = names(
        [
            {"servers": [A], "generation": 5},
            {"servers": [A], "generation": 5},
            {"servers": [A, {**B, "state": "draining"}], "generation": 6},
            {"servers": [A, B], "generation": 7},
            {"servers": [], "generation": 8},
        ]
    )
    assert [*itertools.islice(follow.lists(address), 3)] == [[A], [A, B], []]
    assert asked == ["/v1/servers"] + [f"/v1/servers?after={n}&wait_s=20" for n in (5, 5, 6, 7)]


def test_a_name_service_that_is_away_changes_nothing(names: Any, caplog: pytest.LogCaptureFixture) -> None:
    address, _ = names([{"servers": [A], "generation": 5}, None, None, {"servers": [A, B], "generation": 6}])
    slept: list[float] = []
    with caplog.at_level(logging.WARNING):
        assert [*itertools.islice(follow.lists(address, slept.append), 2)] == [[A], [A, B]]
    assert slept == [follow.RETRY_S] * 2
    assert len(caplog.records) == 1


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    follow.write(file, follow.addresses([A, B]))
    follow.write(file, follow.addresses([B]))
    assert file.read_text() == "10.0.0.4:1\n"
    assert [*tmp_path.iterdir()] == [file]
    with pytest.raises(ConfigError, match="expected a file that can be written"):
        follow.write(tmp_path / "nowhere" / "addresses", "")


def test_a_command_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    follow.reload("sh -c 'echo why >&2; exit 3'")
    follow.reload("/nonexistent/command")
    assert "exited with 3: why" in caplog.records[0].getMessage()
    assert "/nonexistent/command" in caplog.records[1].getMessage()


def test_haproxy_speaks_http2_to_servers_and_asks_their_http_port_how_they_are() -> None:
    text = haproxy.configuration([A, B], 9001, 9000)
    assert "    bind :9001 proto h2\n" in text
    assert "    bind :9000\n" in text
    assert "    server a 10.0.0.3:1 proto h2 check port 2 check-proto h1\n" in text
    assert "    server b 10.0.0.4:2\n" in text
    assert "balance leastconn" in text
    assert "httpchk GET /v2/health/ready" in text
