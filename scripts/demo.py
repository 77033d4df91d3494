"""Serves the built-in models, asks them about sample images, compares XLA with graph mode, and stops."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from xlaserve_client import VisionClient

ROOT: Final = Path(__file__).resolve().parent.parent
CONFIG: Final = ROOT / "deploy" / "demo.yaml"
SAMPLES: Final = ROOT / "scripts" / "samples"
START_TIMEOUT_S: Final = 300
MIN_SCORE: Final = 0.5
MIN_SHARE: Final = 0.005
"""Share of an image's pixels; less counts as noise."""
LOAD: Final = ("--mode", "xla,graph", "--model", "digits", "--duration", "3", "--concurrency", "16")


def main() -> None:
    """Runs the demo; exits 1 when the server can't be started, an answer is wrong, or the load test fails."""
    with served() as target:
        with VisionClient(target) as client:
            correct = all([classify(client), detect(client), segment(client)])
        print(f"\nload test: loadtest {' '.join(LOAD)} --target {target}\n")
        print("Both modes run in this server's process, which is quick, and blind to what differs between two starts:")
        print("loadtest --model digits takes two minutes and gives each mode six processes of its own.\n", flush=True)
        # The console scripts are next to the interpreter.
        loadtest = Path(sys.executable).with_name("loadtest")
        load_test = subprocess.run([loadtest, *LOAD, "--target", target], check=False)
    sys.exit(0 if correct and load_test.returncode == 0 else 1)


@contextmanager
def served() -> Iterator[str]:
    """Starts `xlaserve serve` on free ports, waits until it is ready, gives its gRPC address, and stops it."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder, "ready.json")
        command = [sys.executable, "-m", "xlaserve", "serve", "--config", str(CONFIG)]
        flags = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", "--ready-file", str(ready_file)]
        print(f"starting: xlaserve serve --config {CONFIG.relative_to(ROOT)}", flush=True)
        server = subprocess.Popen([*command, *flags])
        try:
            yield wait_until_ready(server, ready_file)
        finally:
            server.terminate()
            status = server.wait(timeout=60)
        print(f"the server stopped with status {status}", flush=True)
        if status:
            sys.exit(status)


def wait_until_ready(server: subprocess.Popen[bytes], ready_file: Path) -> str:
    """Returns the server's gRPC address; exits when it ends or takes too long."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode} before it was ready")
        if ready_file.exists():
            return str(json.loads(ready_file.read_text())["grpc"])
        time.sleep(0.05)
    sys.exit(f"the server was not ready within {START_TIMEOUT_S} s")


def classify(client: VisionClient) -> bool:
    """Classifies the samples, held-out scans named for their digit, and says whether every answer is right."""
    images = sorted((SAMPLES / "digits").glob("*.png"))
    print(f"\nclassifying {len(images)} scans that training never saw\n")
    answers = client.classify(images, model="digits", top_k=1)
    right = 0
    for image, answer in zip(images, answers.classifications, strict=True):
        best = answer.categories[0]
        is_right = best.label == image.stem.partition("_")[0]
        right += is_right
        print(f"  {image.name:<12} {best.label}  {best.score:6.1%}  {'right' if is_right else 'WRONG'}")
    took = f"; the server took {answers.timings.total_s * 1000:.1f} ms for all of them" if answers.timings else ""
    print(f"\n{right} of {len(images)} right{took}")
    return right == len(images)


def detect(client: VisionClient) -> bool:
    """Detects the shapes in the samples, which are named for them, and says whether every answer is right."""
    images = sorted((SAMPLES / "shapes").glob("*.jpg"))
    print(f"\ndetecting shapes in {len(images)} images that training never saw\n")
    answers = client.detect(images, model="shapes-detector", min_score=MIN_SCORE)
    right = 0
    for image, answer in zip(images, answers.results, strict=True):
        found = sorted(item.label for item in answer.detections)
        is_right = "_".join(found) == image.stem
        right += is_right
        print(f"  {image.name}, {answer.width} x {answer.height}: {'right' if is_right else 'WRONG'}")
        for item in answer.detections:
            x, y = round((item.box.x_min + item.box.x_max) / 2), round((item.box.y_min + item.box.y_max) / 2)
            print(f"    {item.label:<9} {item.score:6.1%}  around ({x}, {y})")
    return right == len(images)


def segment(client: VisionClient) -> bool:
    """Segments the same samples, and says whether every map holds the shapes that its image is named for."""
    images = sorted((SAMPLES / "shapes").glob("*.jpg"))
    print("\nsegmenting them\n")
    right = 0
    for image, answer in zip(images, client.segment(images, model="shapes-segmenter").maps, strict=True):
        shares = {
            answer.label(index): pixels / answer.classes.size
            for index, pixels in answer.counts().items()
            if pixels >= answer.classes.size * MIN_SHARE
        }
        is_right = shares.keys() - {"background"} == set(image.stem.split("_"))
        right += is_right
        listed = ", ".join(f"{label} {share:.1%}" for label, share in shares.items())
        print(f"  {image.name}: {listed}  {'right' if is_right else 'WRONG'}")
    return right == len(images)


if __name__ == "__main__":
    main()
