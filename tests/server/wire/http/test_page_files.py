"""The page at `/` in a browser, on a server whose state a test makes up: hostile names, hundreds of models, none."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.browser import CHROMIUM, Page, chromium

from xlaserve.telemetry.metrics import SECONDS
from xlaserve.wire.http import page_files as page_module
from xlaserve.wire.http.message import HttpAnswer, HttpRequest

WIDTHS = (390, 800, 1280)
EVIL = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
SAMPLES = Path(__file__).parents[4] / "scripts" / "samples"
ROLES = ("engine", "front 1", "front 2")
SEEN = Path(__file__).with_name("seen.js").read_text()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; scripts/install_chromium.sh installs it")


def histogram(count: int) -> dict[str, Any]:
    return {"counts": [0, 0, 0, count, count // 2, count // 10], "total_s": count * 0.002}


class State:
    """What the server says."""

    def __init__(self) -> None:
        self.models = [self.model("cats", task="detection", images=100)]
        self.failures: list[dict[str, Any]] = []
        self.key = ""
        self.buckets = 2
        self.label = "cat"
        self.inputs: list[dict[str, Any]] = []
        self.posts: list[tuple[str, str, bytes]] = []
        self.began = time.monotonic()
        self.clock: Callable[[], float] = time.monotonic
        self.processes: Callable[[float], list[dict[str, Any]]] = lambda cpu_s: [self.process("", cpu_s)]

    @staticmethod
    def process(role: str, cpu_s: float, pid: int = 1) -> dict[str, Any]:
        return {"role": role, "pid": pid, "cpu_s": cpu_s, "resident_bytes": 3 * 2**30}

    @staticmethod
    def model(name: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "version": "1",
            "state": "READY",
            "reason": "",
            "task": "classification",
            "mode": "xla",
            "programs": 2,
            "programs_total": 2,
            "warnings": 0,
            "images": 0,
            "requests": 0,
            "failed": 0,
            "total": histogram(0),
            "waiting_images": 0,
            "queued_work_s": 0.0,
            "in_flight_images": 0,
            "in_flight_images_limit": 64,
            **more,
        }

    def look(self) -> dict[str, Any]:
        now = self.clock()
        grown = int((now - self.began) * 100)
        for model in self.models:
            if model["images"]:
                model |= {"images": 100 + grown, "requests": 100 + grown, "total": histogram(100 + grown)}
        return {
            "name": "xlaserve",
            "version": "0.1.0",
            "tensorflow": "2.21.0",
            "addresses": {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000", "metrics": None},
            "is_ready": any(model["state"] == "READY" for model in self.models),
            "clock_s": now,
            "up_s": now - self.began,
            "device": {"kind": "gpu", "name": "A device of some name", "count": 2},
            "lanes": {"count": 4, "threads": 1, "busy_s": (now - self.began) * 2},
            "cores": 16,
            "processes": self.processes(now - self.began),
            "gpus": [{"name": "H200", "utilization_ratio": 0.5, "memory_used_bytes": 2**34, "memory_size_bytes": 2**37}]
            * 2,
            "in_flight_requests": 2,
            "compiled_while_serving": 0,
            "is_watched": True,
            "bounds_s": SECONDS,
            "models": self.models,
            "failures": self.failures,
        }

    def details(self, name: str) -> dict[str, Any]:
        model = next((one for one in self.models if one["name"] == name), self.model(name))
        cost = {"alone_s": 0.00271828, "loaded_s": 0.0314159}
        batches = [2**number for number in range(self.buckets)]
        buckets = [
            {
                "mode": "auto",
                "runs_in": "xla",
                "bucket": f"{batch % 997}x224x224",
                "batch": batch,
                "run": cost,
                "turn": cost,
                "batches": batch % 1009,
            }
            for batch in batches
        ]
        ledger = [
            {
                "mode": "xla",
                "bucket": f"{batch % 997}x224x224",
                "at_s": time.time(),
                "trace_s": 1.5,
                "compile_s": 12.25,
                "run": cost,
                "from_cache": bool(batch % 3),
                "in_background": not batch % 3,
                "difference": 1.2e-6,
                "fault": "",
            }
            for batch in batches
        ]
        if name == "choosy":
            buckets.append({**buckets[0], "mode": "graph", "runs_in": "graph", "batches": 0})
            ledger.append({**ledger[0], "mode": "graph"})
        return {
            **model,
            "warnings": [f"warning: {EVIL}"] if name == "evil" else [],
            "source": "birds.keras" if name == "birds" else "keras.applications:ResNet50",
            "weights": "birds.keras" if name == "birds" else "imagenet",
            "fit": "letterbox",
            "resize": "pillow bilinear, antialiased",
            "precision": "bfloat16 (xla: largest difference 0.012, agreement 1.000 of 16 images)",
            "decode": "exact",
            "inputs": self.inputs,
            "examples": "xla: largest difference 2e-07, agreement 1.000 of 20 images" if name == "birds" else "",
            "modes": ["auto"] if name == "choosy" else ["auto", "xla", "graph"],
            "stages": dict.fromkeys(("decode", "queue", "gather", "execute", "encode"), model["total"]),
            "buckets": buckets,
            "padded_rows": 12,
            "ledger": ledger,
        }

    def answer(self, method: str) -> dict[str, Any]:
        timings = {"decode_s": 0.002, "queue_s": 0.001, "gather_s": 0.0001, "execute_s": 0.02, "encode_s": 0.001}
        head = {"model": "cats", "version": "1", "mode": "xla", "timings": {**timings, "total_s": 0.025}}
        found: dict[str, Any] = {
            "classify": {"classifications": [{"categories": [{"index": 0, "label": self.label, "score": 0.75}]}]},
            "detect": {"results": [{"detections": [{"index": 0, "label": self.label, "score": 0.5, "box": {}}]}]},
            "segment": {
                "maps": [{"counts": [{"index": 0, "label": self.label, "pixels": 50}], "height": 10, "width": 10}]
            },
            "embed": {"embeddings": [{"values": [0.6, 0.8]}]},
            "transcribe": {
                "transcriptions": [
                    {"text": self.label, "score": 0.5, "categories": [{"index": 0, "label": self.label, "score": 0.75}]}
                ]
            },
            "locate": {"results": [{"keypoints": [{"index": 0, "label": self.label, "score": 0.5, "x": 1.5, "y": 2}]}]},
            "transform": {"images": [{"height": 320, "width": 480, "png": ""}]},
        }
        return {**head, **found[method]}


class Handler(BaseHTTPRequestHandler):
    state: State
    files: dict[str, HttpAnswer]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.files:
            answer = self.files[self.path]
            self._send(200, b"".join(map(bytes, answer.parts)), answer.media_type, *answer.headers)
        elif self.state.key and self.headers.get("authorization") != f"Bearer {self.state.key}":
            self._json({"error": "this server asks who calls"}, 401)
        elif self.path == "/v1/status":
            self._json(self.state.look())
        elif found := re.fullmatch("/v1/status/models/([^/]+)/versions/1", self.path):
            self._json(self.state.details(found[1]))
        else:
            self._json({"error": "path"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.state.posts.append((self.path, self.headers["accept"], body))
        method = self.path.partition("?")[0].rpartition(":")[2]
        if self.path.startswith("/v2/"):
            output = {"name": "scores", "datatype": "FP32", "shape": [1, 3], "data": [0.25, 0.5, 0.125]}
            self._json({"outputs": [output], "parameters": {**self.state.answer("embed")["timings"]}})
        elif not body.startswith((b"\x89PNG", b"\xff\xd8")):
            self._json({"error": f"image: expected JPEG, PNG or WebP, got {EVIL}"}, 400)
        elif self.headers["accept"] == "image/png":
            file = io.BytesIO()
            Image.new("RGB", (480, 320), "teal").save(file, "PNG")
            self._send(200, file.getvalue(), "image/png")
        else:
            self._json(self.state.answer(method))

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, media_type: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, text in (("content-type", media_type), ("content-length", str(len(body))), *headers):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(state: State, port: int = 0) -> Iterator[str]:
    root, file = page_module.operations()

    async def files() -> dict[str, HttpAnswer]:
        nothing = memoryview(b"")
        found = {"/": await root.method(HttpRequest({}, {}, {}, nothing))}
        for name in page_module.MEDIA_TYPES:
            found[f"/page/{name}"] = await file.method(HttpRequest({"file": name}, {}, {}, nothing))
        return found

    handler = type("Of", (Handler,), {"state": state, "files": asyncio.run(files())})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as page:
        page.look(1280)
        yield page


@pytest.fixture
def page(state: State, browser: Page) -> Iterator[Page]:
    """The page of a server in this state; it may say nothing to the console, and ask nothing of others."""
    with serving(state) as address:
        browser.open(address)
        yield browser
        assert browser.said == []
        assert {one.split("/")[2] for one in browser.asked if one.startswith("http")} == {address.split("/")[2]}


def is_shown(page: Page, text: str) -> None:
    page.wait_for(f"document.body?.innerText.includes({json.dumps(text)})")


def check_views(page: Page, name: str, pictures: Path) -> None:
    """Nothing sticks out, is cut off or is pale at any width, in light and in dark."""
    for scheme, width in product(("light", "dark"), WIDTHS):
        page.look(width, scheme)
        found = page.evaluate(SEEN)
        assert found["texts"] > 30
        assert not found["defects"], (scheme, width, found["defects"])
        assert (found["paper"] > 0.8) == (scheme == "light")
        (pictures / f"{name}-{width}-{scheme}.png").write_bytes(page.picture())
    page.look(1280)


@pytest.mark.slow
def test_it_shows_models_buckets_stages_and_rates(state: State, page: Page, tmp_path: Path) -> None:
    state.models += [
        state.model("dogs", state="COMPILING", programs=1, programs_total=8),
        state.model("birds", state="FAILED", reason="it broke\n" * 40),
    ]
    state.failures.append(
        {
            "at_s": time.time(),
            "method": "classify",
            "status": "RESOURCE_EXHAUSTED",
            "reason": "queue_full: 512 images wait",
            "model": "cats",
            "caller": "anybody",
            "request_id": "0123456789abcdef0123456789abcdef",
            "total_s": None,
        }
    )
    is_shown(page, "compiling 1/8")
    is_shown(page, "queue_full: 512 images wait")
    is_shown(page, "cats, version 1")
    is_shown(page, "32 GiB of 256 GiB")
    page.wait_for("Number(document.querySelector('#tiles .tile dd').textContent) > 80")
    assert page.evaluate("Number(document.querySelector('#tiles .tile dd').textContent)") == pytest.approx(100, abs=20)
    assert page.text("#buckets-rows").startswith("1x224x224\tauto: xla\t2.72\t31.4\t31.4\t1\t")
    assert page.text("#stages-when") == "in the last minute"
    page.click("#ledger summary")
    is_shown(page, "differs by 1.2e-6 at most")
    page.click("#models-rows tr:nth-child(3) a")
    is_shown(page, "birds, version 1")
    is_shown(page, "it broke")
    assert page.text("#model-what").count("birds.keras") == 1
    # A reload keeps what was counted before it.
    assert page.text("#stages-when") == "since the server was started"
    check_views(page, "state", tmp_path)


def test_processor_and_memory_are_those_of_all_processes(state: State, browser: Page) -> None:
    """Another engine takes the place of one, and what that had used is gone."""

    def at(now: float, **cpu_s: float) -> None:
        state.processes = lambda _: [state.process(*one) for one in zip(ROLES, cpu_s.values(), pids, strict=True)]
        state.clock = lambda: now

    state.began, pids = 0.0, [1, 2, 3]
    at(100, engine=5000, front_1=70, front_2=7)
    tile = "document.querySelector('#tiles .tile:nth-child(6)').innerText.replaceAll('\u00a0', ' ').split('\\n')"
    with serving(state) as address:
        browser.open(address)
        is_shown(browser, "of 16; memory 9\u00a0GiB")
        at(104, engine=5004, front_1=72, front_2=8)
        browser.wait_for(f"{tile}[1] === '1.75 cores'")
        assert browser.evaluate(tile)[2] == "of 16; memory 9 GiB; most: engine, 1"
        pids[0] = 4
        at(106, engine=1.5, front_1=73, front_2=8.5)
        browser.wait_for(f"{tile}[1] === '1 cores'")
        assert browser.evaluate(tile)[2] == "of 16; memory 9 GiB; most: front 1, 0.5"


def test_a_dropped_image_shows_what_was_found_and_where_the_time_went(state: State, page: Page, tmp_path: Path) -> None:
    is_shown(page, "cats, version 1")
    file = SAMPLES / "shapes" / "circle_square_triangle.jpg"
    page.drop(file, "#drop")
    is_shown(page, "1 object with a score of 0.3 or more")
    assert "cat\n0.5" in page.text("#findings")
    assert "execute\n20 ms" in page.text("#took-stages")
    assert "in the server\n25 ms" in page.text("#took-stages")
    page.wait_for("document.querySelector('#picture').naturalWidth === 480")
    assert {(path, accept, body) for path, accept, body in state.posts} == {
        ("/v1/models/cats/versions/1:detect?min_score=0.3&mode=xla", accept, file.read_bytes())
        for accept in ("application/json", "image/png")
    }
    check_views(page, "tried", tmp_path)


def test_an_image_made_by_the_model_replaces_the_one_sent(state: State, page: Page) -> None:
    state.models[:] = [state.model("denoiser", task="image")]
    is_shown(page, "denoiser, version 1")
    page.drop(SAMPLES / "shapes" / "circle_square_triangle.jpg", "#drop")
    is_shown(page, "An image of 480 \u00d7 320 pixels")
    page.wait_for("document.querySelector('#picture').naturalWidth === 480")
    assert page.evaluate("document.querySelector('#picture').alt").startswith("What denoiser makes of the image")
    assert {accept for _, accept, _ in state.posts} == {"application/json", "image/png"}


def test_a_model_of_several_inputs_has_a_field_for_each(state: State, page: Page, tmp_path: Path) -> None:
    state.inputs = [
        {"name": "photo", "datatype": "UINT8", "shape": [-1, 12, 10, 3], "is_image": True},
        {"name": "numbers", "datatype": "FP32", "shape": [-1, 2], "is_image": False},
        {"name": "place", "datatype": "INT32", "shape": [-1], "is_image": False},
    ]
    page.wait_for("!document.querySelector('#inputs').hidden")
    assert page.evaluate("document.querySelector('#drop').hidden")
    photo = SAMPLES / "digits" / "7_1748.png"
    page.drop(photo, "#inputs")
    page.wait_for("document.querySelector('#inputs input').files.length === 1")
    for field, text in ((2, "[0.5, 2"), (3, "4")):
        page.click(f"#inputs-fields label:nth-child({field}) input")
        page.type(text)
    page.click("#inputs-end button")
    page.wait_for("document.querySelector('#found').textContent.startsWith('numbers: expected numbers in JSON')")
    assert state.posts == []
    page.click("#inputs-fields label:nth-child(2) input")
    page.type("]")
    page.click("#inputs-end button")
    page.wait_for("document.querySelector('#found').textContent === '1 output'")
    assert "0.25, 0.5, 0.125" in page.text("#findings")
    assert "execute" in page.text("#took-stages")
    ((path, _, body),) = state.posts
    assert path == "/v2/models/cats/versions/1/infer"
    sent = json.loads(body)["inputs"]
    assert base64.b64decode(sent[0].pop("data")[0]) == photo.read_bytes()
    assert sent == [
        {"name": "photo", "datatype": "BYTES", "shape": [1]},
        {"name": "numbers", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 2]},
        {"name": "place", "datatype": "INT32", "shape": [1], "data": [4]},
    ]
    check_views(page, "inputs", tmp_path)


@pytest.mark.parametrize(
    ("task", "title", "finding"),
    [("sequence", "cat, score 0.5", "cat\n0.75"), ("keypoints", "1 keypoint", "cat\n0.5 at 1.5, 2")],
)
def test_texts_and_keypoints_are_shown(state: State, page: Page, task: str, title: str, finding: str) -> None:
    state.models[:] = [state.model("reader", task=task)]
    is_shown(page, "reader, version 1")
    page.drop(SAMPLES / "shapes" / "circle_square_triangle.jpg", "#drop")
    is_shown(page, title)
    assert finding in page.text("#findings")
    assert any(accept == "image/png" for _, accept, _ in state.posts) == (task == "keypoints")


def test_everything_can_be_done_with_the_keyboard(state: State, page: Page) -> None:
    state.models.append(state.model("dogs"))
    page.wait_for("document.querySelectorAll('#models-rows a').length === 2")
    page.tab_to("a[href='#dogs/1']")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    is_shown(page, "dogs, version 1")
    assert page.evaluate("document.querySelector('[aria-current]').textContent") == "dogs"
    page.tab_to("[data-sample='page/digit.png']")
    page.press(" ")
    is_shown(page, "cat, score 0.75")
    page.tab_to("summary")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#ledger-rows tr').length === 2")


def test_a_screen_reader_finds_landmarks_names_and_changes_but_no_chatter(state: State, page: Page) -> None:
    dogs = state.model("dogs", state="COMPILING", programs=1)
    state.models.append(dogs)
    is_shown(page, "dogs")
    parts = {(part["role"], part["name"]) for part in page.accessibility()}
    assert {role for role, _ in parts} >= {"banner", "main", "navigation", "progressbar", "columnheader", "rowheader"}
    assert {("region", "Models"), ("region", "Last errors"), ("region", "Try an image with cats")} <= parts
    assert "of 16; memory 3\u00a0GiB" in page.text("#tiles")  # not "of 16, 3 GiB", which is one number to the ear
    assert not [part for part in parts if part[0] in ("button", "link", "textbox", "combobox") and not part[1]]
    assert page.text("#announced") in ("", "dogs is compiling.")
    dogs["state"] = "READY"
    page.wait_for("document.querySelector('#announced').textContent === 'dogs is ready.'")
    live = page.evaluate("[...document.querySelectorAll('[role=status], [aria-live]')].map((one) => one.id).join()")
    assert live == "connection,announced,found"


def test_what_others_named_is_text(state: State, page: Page, tmp_path: Path) -> None:
    state.models = [state.model("evil", state="READY", reason=EVIL), state.model(EVIL)]
    state.label = EVIL
    state.failures.append(
        dict.fromkeys(("method", "status", "reason", "model", "caller", "request_id"), EVIL)
        | {"at_s": 1.0, "total_s": None}
    )
    is_shown(page, "evil, version 1")
    evil = tmp_path / f"{EVIL.replace('/', '')}.png"
    evil.write_bytes((SAMPLES / "digits" / "3_1765.png").read_bytes())
    page.drop(evil, "#drop")
    is_shown(page, f"{EVIL}, score 0.75")
    is_shown(page, evil.name)
    (tmp_path / "no.png").write_bytes(b"text")
    page.drop(tmp_path / "no.png", "#drop")
    is_shown(page, f"got {EVIL}")
    page.wait_for("document.querySelector('#picture').hidden")
    is_shown(page, f"warning: {EVIL}")
    assert page.evaluate("document.title") == "xlaserve: ready"
    assert (
        page.evaluate("document.querySelectorAll('main script, main img:not([src^=page]):not(#picture)').length") == 0
    )
    page.said = [said for said in page.said if "400 (Bad Request)" not in said]  # the browser's own line


def test_the_policy_stops_markup_and_scripts_from_elsewhere(browser: Page, state: State) -> None:
    with serving(state) as address:
        browser.open(address)
        is_shown(browser, "cats, version 1")
        with pytest.raises(AssertionError, match="TrustedHTML"):
            browser.evaluate("document.body.innerHTML = '<p>'")
        with pytest.raises(AssertionError, match="TrustedScript"):
            browser.evaluate("document.body.setAttribute('onclick', 'document.title = 1')")
        browser.evaluate(
            "document.body.append(Object.assign(document.createElement('img'), {src: 'http://localhost:1/'}))"
        )
        browser.wait_for("true")
        assert browser.evaluate("fetch('http://localhost:1/').then(() => 'sent', (error) => error.message)") != "sent"
        assert sum("Content Security Policy" in said for said in browser.said) >= 2


@pytest.mark.slow
def test_modes_measured_but_not_used_by_auto_are_marked_and_no_buckets(state: State, page: Page) -> None:
    state.models.append(state.model("choosy"))
    is_shown(page, "choosy")
    page.click("#models-rows tr:nth-child(2) a")
    is_shown(page, "choosy, version 1")
    page.click("#ledger summary")
    is_shown(page, "in parentheses")
    cells = "[...document.querySelectorAll('#{} td:nth-child({})')].map((cell) => cell.textContent)"
    assert page.evaluate(cells.format("buckets-rows", 2)) == ["auto: xla"] * state.buckets
    assert page.evaluate(cells.format("ledger-rows", 3)) == ["xla"] * state.buckets + ["(graph)"]


@pytest.mark.slow
def test_hundreds_of_models_and_buckets_can_be_found(state: State, page: Page, tmp_path: Path) -> None:
    state.models = [state.model(f"model-{number:03}-of-a-rather-long-name") for number in range(200)]
    state.buckets = 64
    is_shown(page, "model-000-of-a-rather-long-name, version 1")
    page.click("#filter")
    page.type("177")
    page.wait_for("document.querySelectorAll('#models-rows tr').length === 1")
    assert page.text("#models-count") == "1 of 200"
    page.press("Tab")
    page.press("Tab")
    page.press("Enter")
    is_shown(page, "model-177-of-a-rather-long-name, version 1")
    page.click("#ledger summary")
    page.wait_for("document.querySelectorAll('#ledger-rows tr').length === 64")
    check_views(page, "many", tmp_path)
    took_ms = page.evaluate(
        "(() => { const filter = document.querySelector('#filter'); const began = performance.now(); filter.value = '';"
        "filter.dispatchEvent(new Event('input')); return performance.now() - began; })()"
    )
    assert page.evaluate("document.querySelectorAll('#models-rows tr').length") == 200
    assert took_ms < 1000


def test_a_server_without_models_says_so(state: State, page: Page) -> None:
    state.models = []
    is_shown(page, "This server has no models, or none that you may use.")
    is_shown(page, "not ready")
    assert page.evaluate("document.querySelector('#model').hidden")


def test_a_server_that_has_gone_is_said_to_be_and_comes_back(state: State, browser: Page) -> None:
    with serving(state) as address:
        browser.open(address)
        is_shown(browser, "cats, version 1")
    is_shown(browser, "No answer from the server since")
    assert browser.evaluate("document.body.className") == "stale"
    state.models = [state.model("dogs")]
    with serving(state, int(address.rsplit(":", 1)[1].strip("/"))):
        is_shown(browser, "dogs, version 1")
        assert browser.text("#connection") == ""
        assert browser.text("#announced").startswith("The server answers again.")
        assert browser.evaluate("document.body.className") == ""


def test_a_key_is_asked_for_and_kept_in_memory_only(state: State, browser: Page) -> None:
    state.key = "xla_secret"
    with serving(state) as address:
        browser.open(address)
        browser.wait_for("document.activeElement.id === 'key'")
        assert browser.evaluate("document.querySelector('main').hidden")
        asked = len(browser.asked)
        for key, seen in (("wrong", "this server asks who calls."), ("xla_secret", "cats, version 1")):
            browser.type(key)
            browser.press("Enter")
            is_shown(browser, seen)
        assert len(browser.asked) > asked
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "xla_secret" not in browser.evaluate(kept)
        assert browser.evaluate("document.querySelector('#key').value") == ""
        browser.open(address)
        browser.wait_for("document.activeElement.id === 'key'")


@pytest.mark.slow
def test_nobody_is_asked_while_the_page_is_hidden(state: State, page: Page) -> None:
    is_shown(page, "cats, version 1")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {get: () => window.isHidden, configurable: true});"
        "window.isHidden = true; document.dispatchEvent(new Event('visibilitychange'))"
    )
    time.sleep(0.5)  # what was under way
    page.evaluate("1")
    asked = len(page.asked)
    time.sleep(2.5)
    page.evaluate("1")
    assert len(page.asked) == asked
    page.evaluate("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for("performance.getEntriesByType('resource').length > 0")
    before = page.text("#what")
    page.wait_for(f"document.querySelector('#what').innerText !== {json.dumps(before)}")
    assert len(page.asked) > asked


def test_its_samples_are_those_of_the_repository() -> None:
    root = Path(page_module.__file__).parent / "files"
    assert (root / "digit.png").read_bytes() == (SAMPLES / "digits" / "3_1765.png").read_bytes()
    assert (root / "shapes.jpg").read_bytes() == (SAMPLES / "shapes" / "circle_square_triangle.jpg").read_bytes()
