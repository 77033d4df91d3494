"""The page at `/`: files that hold nothing of this server, and may be had by anyone. What they show they ask for."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from xlaserve.admission.caller import ANYONE
from xlaserve.errors import NotFound
from xlaserve.wire.http.message import HttpAnswer, HttpRequest
from xlaserve.wire.http.operation import Operation

MEDIA_TYPES: Final = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "digit.png": "image/png",
    "shapes.jpg": "image/jpeg",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Names of models, labels and reasons are others' texts: nothing of them can become markup or a script."""
HEADERS: Final = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


def operations() -> list[Operation]:
    """Returns what serves the page. It is no part of the API that OpenAPI describes."""
    folder = files("xlaserve.wire.http") / "files"
    answers = {
        name: HttpAnswer([(folder / name).read_bytes()], media_type=media_type, headers=HEADERS)
        for name, media_type in MEDIA_TYPES.items()
    }

    async def page(request: HttpRequest) -> HttpAnswer:
        """Shows what this server is and does, for people."""
        return answers["page.html"]

    async def page_file(request: HttpRequest) -> HttpAnswer:
        """Has what the page consists of."""
        if (answer := answers.get(request.path["file"])) is None:
            raise NotFound("path: expected a file of the page, got another")
        return answer

    return [
        Operation("GET", ["/"], "page", page, ANYONE),
        Operation("GET", ["/page/{file}"], "page_file", page_file, ANYONE),
    ]
