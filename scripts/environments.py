"""Environments for programs whose packages would clash with ours."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Final

INSTALL_TIMEOUT_S: Final = 900


def run(*command: str | Path, timeout_s: float = INSTALL_TIMEOUT_S, cwd: Path | None = None) -> str:
    """Returns what a command says on stdout. Raises AssertionError with all that it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make(requirements: Path, folder: Path, python: Path | str = sys.executable) -> Path:
    """Returns `folder`, an environment of `python` with what `requirements` pins.

    It is made once, and again when that changes. Raises AssertionError where it can't be made.
    """
    installed = folder / requirements.name
    with requirements.open("rb") as pinned:
        fcntl.flock(pinned, fcntl.LOCK_EX)  # several processes may want it
        pins = pinned.read()
        if not installed.exists() or installed.read_bytes() != pins:
            run(python, "-m", "venv", "--without-pip", "--clear", folder)
            pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
            run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--requirement", requirements)
            installed.write_bytes(pins)
    return folder
