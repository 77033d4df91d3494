from __future__ import annotations

import html as html_text
import json
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from xlaserve_loadtest import html

CHROMIUM = shutil.which("chromium")
# Without these, it looks for updates, and for sandboxes that a container has not.
FLAGS = shlex.split(
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr --log-level=0"
)
TIMEOUT_S = 60

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; scripts/install_chromium.sh installs it")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """A folder, the address at which it is served, and the paths that were asked for."""
    folder = tmp_path / "site"
    folder.mkdir()
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.fixture
def browse(tmp_path: Path):
    """Opens an address in chromium and returns the document as it stands in the end, and the console's lines."""

    def open_(address: str, *flags: str) -> tuple[str, list[str]]:
        done = subprocess.run(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, address],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return open_


def test_a_browser_draws_every_chart_without_an_error_or_a_request(summary, site, browse):
    folder, address, asked = site
    (folder / "report.html").write_text(html.render([summary()]))
    shutil.copy(Path(__file__).parent / "probe.html", folder)
    document, console = browse(f"{address}/probe.html", "--virtual-time-budget=20000", "--dump-dom")
    assert console == []
    found = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
    assert found, document[:2000]
    narrow, wide = json.loads(html_text.unescape(found[1]))
    assert (narrow["width"], wide["width"]) == (390, 1100)
    for seen in (narrow, wide):
        assert [plot["name"] for plot in seen["plots"]] == [
            "throughput", "percentiles", "over-time", "load-curve", "stages", "break-even", "ledger", "buckets",
        ]  # fmt: skip
        for plot in seen["plots"]:
            assert plot["points"] > 2, plot
            assert plot["marks"] > 0, plot
            assert plot["height"] > 100, plot
            assert not plot["sticks_out"], plot
            assert plot["printed_width"] <= 680, plot
            assert plot["restored_width"] == plot["width"], plot
        assert seen["scroll_width"] <= seen["width"]
        assert seen["resources"] == []
        assert "xla is faster than graph" in seen["text"]
    assert set(asked) == {"/probe.html", "/report.html"}


def test_an_error_of_a_page_would_be_noticed(site, browse):
    folder, address, asked = site
    (folder / "bad.html").write_text(
        '<link rel="icon" href="data:,"><img src="missing.png"><script>console.error("told"); undefined.x</script>'
    )
    _, console = browse(f"{address}/bad.html", "--virtual-time-budget=2000", "--dump-dom")
    assert any("told" in line for line in console)
    assert any("TypeError" in line for line in console)
    assert "/missing.png" in asked


def test_it_prints_on_a_handful_of_pages(summary, site, browse, tmp_path):
    folder, address, _ = site
    (folder / "report.html").write_text(html.render([summary()]))
    paper = tmp_path / "report.pdf"
    _, console = browse(f"{address}/report.html", "--virtual-time-budget=20000", f"--print-to-pdf={paper}")
    assert console == []
    pages = len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))
    assert 4 <= pages <= 14
