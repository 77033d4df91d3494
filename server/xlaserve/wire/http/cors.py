"""Which web pages of others may call (CORS): browsers ask before, and keep answers from pages that may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY: Final = "*"
EXPOSED: Final = ("inference-header-content-length", "retry-after", "x-request-id", "xlaserve-warning")
"""Headers of answers that pages may read."""


def with_cors(application: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns the application for the pages of these origins as well. Credentials are what pages put into headers."""
    if not origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        allow_private_network=True,  # the server may be on a private network, and the page on a public one
        expose_headers=EXPOSED,
    )
