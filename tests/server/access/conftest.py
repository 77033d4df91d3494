"""Keys and access files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KEY = "xla_one"
Write = Callable[..., Path]


def entry(name: str, key: str = KEY, **more: Any) -> dict[str, Any]:
    """Returns a caller's entry."""
    return {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), **more}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an access file with these callers; returns its path."""

    def write(*callers: dict[str, Any], **more: Any) -> Path:
        path = tmp_path / "access.yaml"
        path.write_text(json.dumps({"callers": callers, **more}))
        return path

    return write
