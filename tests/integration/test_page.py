"""The page at `/` of a real server, in a browser: what it shows is what the server does, behind the same keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import CHROMIUM, Page, chromium
from tests.integration.conftest import DIGITS, NOOP, Server, StartServer
from tests.integration.test_http import ask

SAMPLES = Path(__file__).parents[2] / "scripts" / "samples"

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; scripts/install_chromium.sh installs it")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as page:
        page.look(1280)
        yield page


def is_shown(page: Page, text: str) -> None:
    page.wait_for(f"document.body?.innerText.includes({json.dumps(text)})")


def test_the_page_is_for_anybody_and_lets_nothing_of_others_in(server: Server) -> None:
    for path, media_type in (
        ("/", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/page.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/page/shapes.jpg", "image/jpeg"),
    ):
        got = ask(server, "GET", path)
        assert (got.status, got.headers["content-type"]) == (200, media_type)
        assert "default-src 'none'" in got.headers["content-security-policy"]
        assert "unsafe" not in got.headers["content-security-policy"]
        assert got.headers["x-content-type-options"] == "nosniff"
        assert ask(server, "HEAD", path).status == 200
    for path in ("/page/", "/page/none", "/page/..%2fpage.py", "/page/page.py"):
        assert ask(server, "GET", path).status == 404


def test_the_status_is_what_the_server_has_done(server: Server, scans: dict[str, bytes]) -> None:
    def counts() -> tuple[int, int]:
        (model,) = (one for one in ask(server, "GET", "/v1/status").json()["models"] if one["name"] == "digits")
        return model["images"], model["failed"]

    images, failed = counts()
    assert ask(server, "POST", "/v1/models/digits:classify", scans["3"]).status == 200
    refused = ask(server, "POST", "/v1/models/digits:classify", b"no image", x_request_id="of-this-test")
    assert refused.status == 400
    server.wait_for(lambda: counts() == (images + 1, failed + 1), "no such counts", timeout_s=5)
    look: dict[str, Any] = {}

    def is_shown() -> bool:
        nonlocal look
        look = ask(server, "GET", "/v1/status").json()
        return any(one["request_id"] == "of-this-test" for one in look["failures"])

    server.wait_for(is_shown, "no such failure", timeout_s=5)
    by_name = {model["name"]: model for model in look["models"]}
    assert (by_name["digits"]["state"], by_name["broken"]["state"]) == ("READY", "FAILED")
    assert "secret" not in by_name["broken"]["reason"]
    (failure,) = (one for one in look["failures"] if one["request_id"] == "of-this-test")
    assert (failure["status"], failure["model"], failure["method"]) == ("INVALID_ARGUMENT", "digits", "classify")
    assert look["addresses"] == {"grpc": server.grpc, "http": server.http, "metrics": server.metrics}

    def version() -> Any:
        return ask(server, "GET", "/v1/status/models/digits/versions/1").json()

    # A front is told of buckets once a second.
    server.wait_for(lambda: sum(one["batches"] for one in version()["buckets"]), "no batches", timeout_s=5)
    digits = version()
    assert len(digits["ledger"]) == digits["programs_total"] == len(digits["buckets"])
    assert all(bucket["run"]["alone_s"] > 0 for bucket in digits["buckets"])
    assert ask(server, "GET", "/v1/status/models/none/versions/1").status == 404


@needs_browser
def test_an_image_that_is_dropped_is_classified_and_counted(server: Server, page: Page) -> None:
    page.open(f"http://{server.http}/")
    is_shown(page, "digits, version 1")
    page.drop(SAMPLES / "digits" / "7_1748.png", "#drop")
    page.wait_for("document.querySelector('#found').textContent.startsWith('7, score')")
    assert "execute" in page.text("#took-stages")
    page.wait_for("document.querySelector('#stages-when').textContent === 'in the last minute'")
    page.click("#ledger summary")
    is_shown(page, "Compared with the reference")
    page.click("a[href='#broken/1']")
    is_shown(page, "broken, version 1")
    page.wait_for("!document.querySelector('#model-reason').hidden")
    assert page.said == []
    assert {one.split("/")[2] for one in page.asked if one.startswith("http")} == {server.http}


@needs_browser
def test_where_callers_have_keys_the_page_asks_for_one(start_server: StartServer, tmp_path: Path, page: Page) -> None:
    roles = {"ops": ["observe"], "both": ["observe", "infer"], "shop": ["infer"]}
    callers = [
        {"name": name, "key_sha256": hashlib.sha256(f"xla_{name}".encode()).hexdigest(), "roles": of_it}
        for name, of_it in roles.items()
    ]
    (tmp_path / "access.yaml").write_text(json.dumps({"callers": callers}))
    server = start_server(
        {"models": [{**DIGITS, "modes": ["graph"], "buckets": [1]}, NOOP], "access": str(tmp_path / "access.yaml")}
    )
    assert ask(server, "GET", "/v1/status").status == 401
    assert ask(server, "GET", "/v1/status", authorization="Bearer xla_shop").status == 403
    page.open(f"http://{server.http}/")
    page.wait_for("document.activeElement.id === 'key'")
    page.type("xla_shop")
    page.press("Enter")
    is_shown(page, "this caller may not do that")
    page.type("xla_ops")
    page.press("Enter")
    is_shown(page, "digits, version 1")
    page.click("[data-sample='page/digit.png']")
    is_shown(page, "this caller may not do that")
    page.open(f"http://{server.http}/")
    page.wait_for("document.activeElement.id === 'key'")
    page.type("xla_both")
    page.press("Enter")
    is_shown(page, "digits, version 1")
    page.click("[data-sample='page/digit.png']")
    page.wait_for("document.querySelector('#found').textContent.startsWith('3, score')")
