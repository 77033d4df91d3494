"""The server that clients are run against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.clients import locked
from tests.clients.registry import Target
from tests.integration.conftest import DIGITS, Server

CONFIG: Final = {
    "models": [
        {**DIGITS, "modes": ["graph"]},
        {**DIGITS, "name": "digits-images", "modes": ["graph"], "metadata_input": "image"},
        {**DIGITS, "name": "digits-named", "modes": ["graph"], "input_name": "input_1", "output_name": "probs"},
    ],
    "shared_memory": True,
}


@contextmanager
def running(folder: Path) -> Iterator[Target]:
    """Yields a server that is ready."""
    server = Server(CONFIG, folder)
    try:
        with locked.running(folder / "locked") as needed:
            server.wait_until_ready()
            yield Target(server.grpc, server.http, needed)
    finally:
        server.stop()
