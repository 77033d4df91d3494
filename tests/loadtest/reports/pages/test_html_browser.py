from __future__ import annotations

import html as html_text
import json
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.loadtest.reports.pages import samples
from tests.loadtest.reports.pages.conftest import MakeSummary

from xlaserve_loadtest.reports import html
from xlaserve_loadtest.study import catalog
from xlaserve_loadtest.study import html as zoo_html
from xlaserve_loadtest.study.record import Cell, Entry, ModeResult, Sweep

CHROMIUM = shutil.which("chromium")
# Without these, it looks for updates, and for sandboxes that a container has not.
FLAGS = shlex.split(
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr --log-level=0"
)
TIMEOUT_S = 60

Site = tuple[Path, str, list[str]]
Browse = Callable[..., tuple[str, list[str]]]
Look = Callable[[str], list[dict[str, Any]]]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; scripts/install_chromium.sh installs it")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
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
def browse(tmp_path: Path) -> Browse:
    """Opens an address in chromium and returns the document as it stands in the end, and the console's lines."""

    def open_(address: str, *flags: str) -> tuple[str, list[str]]:
        done = subprocess.run(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, address],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return open_


@pytest.fixture
def look(site: Site, browse: Browse) -> Look:
    """Shows a report to a browser and returns what is seen in windows of several widths, in light and in dark.

    Nothing may be cut off, stick out of the window, lie on other text, or have too little contrast. Every chart must
    hold data and be drawn inside its window, on paper too; nothing may be asked for from outside, and the console must
    stay empty.
    """
    folder, address, asked = site

    def look_(report: str) -> list[dict[str, Any]]:
        (folder / "report.html").write_text(report)
        shutil.copy(Path(__file__).parent / "probe.html", folder)
        document, console = browse(f"{address}/probe.html", "--virtual-time-budget=20000", "--dump-dom")
        assert console == []
        found = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
        assert found, document[:2000]
        views: list[dict[str, Any]] = json.loads(html_text.unescape(found[1]))
        widths = [390, 480, 800, 1280]
        assert [(view["scheme"], view["width"]) for view in views] == list(product(("light", "dark"), widths))
        for view in views:
            assert (view["paper"] > 0.9) == (view["scheme"] == "light")
            assert (view["paper"] < 0.1) == (view["scheme"] == "dark")
            assert view["texts"] > 10
            assert view["scroll_width"] <= view["width"]
            assert view["resources"] == []
            where = f"at {view['width']} pixels, {view['scheme']}:"
            assert not view["defects"], "\n".join([where, *view["defects"]])
            for plot in view["plots"]:
                assert plot["points"] > 0, plot
                assert plot["marks"] > 0, plot
                assert plot["height"] > 100, plot
                assert not plot["sticks_out"], plot
                assert plot["printed_width"] <= 680, plot
                assert plot["restored_width"] == plot["width"], plot
        assert set(asked) == {"/probe.html", "/report.html"}
        return views

    return look_


def test_a_browser_draws_every_chart_of_a_run_without_error_or_request(summary: MakeSummary, look: Look) -> None:
    for view in look(html.render([summary()])):
        assert [plot["name"] for plot in view["plots"]] == [
            "throughput", "percentiles", "over-time", "closed-loads", "stages", "break-even", "ledger", "buckets",
        ]  # fmt: skip
        assert "xla is faster than graph" in view["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", samples.SAMPLES)
def test_nothing_is_cut_off_or_covered_in_any_report(name: str, look: Look) -> None:
    look(html.render([samples.summary(name)]))


@pytest.mark.parametrize(("least", "step"), [(0.2, 1.1), pytest.param(0.45, 1.04, marks=pytest.mark.slow)])
def test_a_browser_draws_every_chart_of_a_sweep_without_error_or_request(least: float, step: float, look: Look) -> None:
    sweep = Sweep({"cpu": "A CPU", "cores": 2}, {}, "graph", "2026-11-20T18:00:00+00:00")
    for index, model in enumerate(catalog.applications()):
        ratio = least * step**index
        results = {
            "xla": ModeResult(
                images_per_s=90 * ratio,
                ratio=ratio,
                ratio_interval=(ratio * 0.9, ratio * 1.1),
                verdict=("faster", "slower", "inconclusive", None)[index % 4],
            ),
            "graph": ModeResult(images_per_s=90.0, ratio=1.0),
        }
        cell = Cell(model.source, model.size, 8)
        sweep.entries[cell] = Entry(cell, model.name, model.family, results, "2026-11-20T18:00:00", 1.0)
    for view in look(zoo_html.render(sweep)):
        bars = {plot["name"]: plot["marks"] for plot in view["plots"]}
        assert list(bars) == ["speed-ups-xla", "by-family", "by-resolution"]
        assert bars["speed-ups-xla"] >= len(catalog.applications())


def test_an_error_of_a_page_would_be_noticed(site: Site, browse: Browse) -> None:
    folder, address, asked = site
    (folder / "bad.html").write_text(
        '<link rel="icon" href="data:,"><img src="missing.png"><script>console.error("told"); undefined.x</script>'
    )
    _, console = browse(f"{address}/bad.html", "--virtual-time-budget=2000", "--dump-dom")
    assert any("told" in line for line in console)
    assert any("TypeError" in line for line in console)
    assert "/missing.png" in asked


def test_it_prints_on_a_handful_of_pages(summary: MakeSummary, site: Site, browse: Browse, tmp_path: Path) -> None:
    folder, address, _ = site
    (folder / "report.html").write_text(html.render([summary()]))
    paper = tmp_path / "report.pdf"
    _, console = browse(f"{address}/report.html", "--virtual-time-budget=20000", f"--print-to-pdf={paper}")
    assert console == []
    pages = len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))
    assert 4 <= pages <= 14
