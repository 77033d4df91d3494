"""What people type with curl: prints how each call ended, as JSON.

python curl_calls.py HTTP_HOST:PORT IMAGE.png
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HTTP, IMAGE = sys.argv[1:3]
CLASSIFY = "/v1/models/digits:classify"
TIMEOUT_S = 30


def curl(path: str, *options: str, body: bytes = b"") -> tuple[int, bytes]:
    command = ("curl", "-s", "-m", str(TIMEOUT_S), "-w", "\n%{http_code}", *options, HTTP + path)
    answer, _, status = subprocess.run(command, capture_output=True, check=True, input=body).stdout.rpartition(b"\n")
    return int(status), answer


def labels(path: str, *options: str, body: bytes = b"") -> list[str]:
    status, answer = curl(path, *options, body=body)
    assert status == 200, answer
    return [one["categories"][0]["label"] for one in json.loads(answer)["classifications"]]


def forms() -> None:
    """`-F image=@three.png`, several images, options"""
    assert labels(CLASSIFY, "-F", f"image=@{IMAGE}") == ["3"]
    assert labels(CLASSIFY, "-F", f"image=@{IMAGE}", "-F", f"image=@{IMAGE}", "-F", "top_k=3") == ["3", "3"]


def bodies() -> None:
    """`--data-binary @three.png`, and `-d` with JSON"""
    assert labels(f"{CLASSIFY}?top_k=1", "--data-binary", f"@{IMAGE}") == ["3"]
    encoded = base64.b64encode(Path(IMAGE).read_bytes()).decode()
    for header in ([], ["-H", "content-type: application/json"]):
        assert labels(CLASSIFY, *header, "-d", "@-", body=json.dumps({"image": encoded}).encode()) == ["3"]


def picture() -> None:
    """`-H 'Accept: image/png'`: the image with the answer drawn in"""
    status, answer = curl(CLASSIFY, "-H", "Accept: image/png", "-F", f"image=@{IMAGE}")
    assert (status, answer[:4]) == (200, b"\x89PNG")


def mistakes() -> None:
    """No image, no file, text, and an unknown model, version, label and method: 400 or 404 with what was expected"""
    for path, options, status, text in (
        (
            CLASSIFY,
            ["-X", "POST"],
            400,
            "image: expected one as the body, or named image in a form or",
        ),
        (CLASSIFY, ["-F", "image=three.png"], 400, "expected JPEG, PNG or WebP"),
        (CLASSIFY, ["-F", f"image=@{__file__}"], 400, "expected JPEG, PNG or WebP"),
        (CLASSIFY, ["-F", f"file=@{IMAGE}"], 400, "expected files in fields named image"),
        ("/v1/models/other:classify", ["-F", f"image=@{IMAGE}"], 404, "; there are: "),
        ("/v1/models/digits/versions/7:classify", ["-F", f"image=@{IMAGE}"], 404, "it has 1"),
        ("/v1/models/digits/labels/canary:classify", ["-F", f"image=@{IMAGE}"], 404, "it has 1"),
        ("/v1/models/digits:clasify", ["-F", f"image=@{IMAGE}"], 404, "expected one of predict, classify"),
        ("/v1/models/digits:detect", ["-F", f"image=@{IMAGE}"], 400, "use Classify"),
        (CLASSIFY, [], 405, "expected POST"),
    ):
        found, answer = curl(path, *options)
        assert (found, text in json.loads(answer)["error"]) == (status, True), answer


def outcome(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    json.dump({call.__name__: outcome(call) for call in (forms, bodies, picture, mistakes)}, sys.stdout)
