"""Draws docs/page.png: the page at `/` in a browser, of a server with the models of the demonstration and two fronts.

python -m tests.page_picture
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, Final

from scripts.monitoring.live import SAMPLES, asking, started, wait_until
from tests.browser import CHROMIUM, chromium

from xlaserve_client import VisionClient
from xlaserve_client.errors import ClientError

ROOT: Final = Path(__file__).parents[1]
USUAL_WIDTH: Final = 1280
SHAPES: Final = SAMPLES / "shapes" / "circle_square_triangle.jpg"
EVERY_S: Final = 1 / 120


@contextmanager
def _server(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields where a server listens, by protocol."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "xlaserve", "serve", "--config", str(ROOT / "deploy" / "demo.yaml"), "--fronts=2"]
    ports = [f"--{name}-port=0" for name in ("grpc", "http", "metrics")]
    with started([*command, *ports, f"--ready-file={ready}"], folder / "server.log") as process:
        wait_until(ready.exists, [process], folder)
        yield json.loads(ready.read_text())


def _asked(address: str) -> AbstractContextManager[None]:
    """Has the server asked in the meantime: for digits, now and then for shapes, and twice for what fails."""
    digits = sorted((SAMPLES / "digits").glob("*.png"))

    def ask(ending: Event) -> None:
        with VisionClient(address, deadline_s=5) as client:
            for model, image in (("cat", digits[0].read_bytes()), ("digits", (ROOT / "README.md").read_bytes())):
                with suppress(ClientError):
                    client.classify(image, model=model)
            count = 0
            while not ending.wait(EVERY_S):
                count += 1
                client.classify(digits[count % len(digits)], model="digits")
                if count % 10 == 0:
                    client.detect(SHAPES, model="shapes-detector")

    return asking(ask)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.page_picture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=65, help="how long the server is watched")
    parser.add_argument("--widths", default=f"{USUAL_WIDTH}", help="of the pictures, in pixels: 390,800,1280")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no chromium: scripts/install_chromium.sh installs it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _server(folder) as found, _asked(found["grpc"]), chromium(folder / "profile") as page:
            page.look(USUAL_WIDTH)
            page.open(f"http://{found['http']}/")
            page.wait_for("document.querySelectorAll('#models-rows a').length === 3")
            page.click("#models-rows tr:nth-child(2) a")
            page.wait_for("document.querySelector('#model-title').textContent.startsWith('shapes-detector')")
            page.wait_for("document.querySelectorAll('#buckets-rows tr').length === 2")
            page.click("#ledger summary")
            page.wait_for("document.querySelectorAll('#ledger-rows tr').length === 2")
            page.drop(SHAPES, "#drop")
            page.wait_for("document.querySelector('#picture').naturalWidth > 0")
            time.sleep(options.seconds)
            page.evaluate("scrollTo(0, 0)")
            for width in map(int, options.widths.split(",")):
                page.look(width)
                suffix = "" if width == USUAL_WIDTH else f"-{width}"
                picture = options.out / f"page{suffix}.png"
                picture.write_bytes(page.picture())
                print(picture)


if __name__ == "__main__":
    main()
