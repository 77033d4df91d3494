from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from xlaserve.errors import ConfigError
from xlaserve_fleet import cli, follow
from xlaserve_fleet.cli import following, status

ONE = {"id": "a", "address": "10.0.0.3:1", "http": "10.0.0.3:2", "state": "ready"}


TWO = {**ONE, "id": "b"}


@pytest.fixture
def names() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"servers": [ONE], "generation": 1}).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_without_ray_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("server: {models: [{name: noop, source: 'builtin:noop'}]}")
    own = cli.parser().parse_args(["status", "--config", str(file)])
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "xlaserve_fleet.cluster", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'xlaserve\[ray\]'"):
        status(own)


def test_files_are_written_and_the_command_run_without_ray(names: str, tmp_path: Path) -> None:
    addresses, proxy, ran = tmp_path / "addresses", tmp_path / "haproxy.cfg", tmp_path / "ran"
    options = ["--addresses-file", str(addresses), "--haproxy", str(proxy), "--grpc-port", "9001", "--once"]
    own = cli.parser().parse_args(["follow", names, *options, "--reload", f"touch {ran}"])
    assert following(own) == 0
    assert addresses.read_text() == "10.0.0.3:1\n"
    assert "bind :9001 proto h2" in proxy.read_text()
    assert ran.exists()


def test_what_fails_is_tried_again_though_the_servers_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ran = tmp_path / "folder", tmp_path / "ran"
    file, reload = folder / "addresses", f"sh -c 'test -e {ran} || {{ touch {ran}; exit 1; }}'"

    def lists(address: str) -> Iterator[list[dict[str, str]]]:
        yield [ONE]
        assert not ran.exists()
        folder.mkdir()
        yield [ONE]
        assert ran.exists()
        yield [ONE]
        file.unlink()
        yield [ONE]
        assert not file.exists(), "all had worked"
        yield [ONE, TWO]
        assert file.exists()

    monkeypatch.setattr(follow, "lists", lists)
    options = ["--addresses-file", str(file), "--reload", reload]
    following(cli.parser().parse_args(["follow", "127.0.0.1:1", *options]))
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("expected a file that can be written: No such file or directory")
    assert others == ["1 servers", "2 servers"]


def test_once_says_what_failed(names: str, tmp_path: Path) -> None:
    def once(file: Path, *options: str) -> int:
        options = ("--addresses-file", str(file), "--once", *options)
        return following(cli.parser().parse_args(["follow", names, *options]))

    with pytest.raises(ConfigError, match="expected a file that can be written"):
        once(tmp_path / "nowhere" / "addresses")
    assert once(tmp_path / "addresses", "--reload", "false") == 1
    assert once(tmp_path / "addresses", "--reload", "true") == 0


def test_a_follower_needs_something_to_write() -> None:
    with pytest.raises(ConfigError, match="--addresses-file, --haproxy or both"):
        following(cli.parser().parse_args(["follow", "127.0.0.1:1"]))


def test_the_example_is_a_fleet() -> None:
    from xlaserve_fleet import settings

    example = settings.load(Path(__file__).parents[2] / "deploy" / "ray" / "fleet.yaml")
    assert example.server_settings().models[0].name == "digits"
    assert (example.min_servers, example.most_servers) == (2, 8)
