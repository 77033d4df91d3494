"""A script in the place of the load test that a sweep starts."""

from __future__ import annotations

import sys
from pathlib import Path


def fake_loadtest(tmp_path: Path, script: str) -> tuple[str, ...]:
    """A load test that does what the script says; `arguments` holds its command line."""
    file = tmp_path / "fake.py"
    file.write_text(f"import pathlib, sys, time\narguments = sys.argv[1:]\n{script}\n")
    return (sys.executable, str(file))
