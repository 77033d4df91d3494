"""An environment for each client: its packages would clash with ours, and with those of other clients."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
REPOSITORY: Final = FOLDER.parents[1]
INSTALL_TIMEOUT_S: Final = 900


def run(*command: str | Path, timeout_s: float = INSTALL_TIMEOUT_S, cwd: Path | None = None) -> str:
    """Returns what a command says on stdout. Raises AssertionError with all that it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(client: str) -> Path:
    """Returns the environment with what CLIENT.txt pins: made once, and again when that changes."""
    requirements, folder = FOLDER / f"{client}.txt", REPOSITORY / f".venv-{client}"
    installed = folder / requirements.name
    with requirements.open("rb") as pinned:
        fcntl.flock(pinned, fcntl.LOCK_EX)  # tests of several processes may want it
        pins = pinned.read()
        if not installed.exists() or installed.read_bytes() != pins:
            run(sys.executable, "-m", "venv", "--without-pip", "--clear", folder)
            pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
            run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--requirement", requirements)
            installed.write_bytes(pins)
    return folder


def version(client: str, package: str) -> str:
    """Returns the version of a package that CLIENT.txt pins."""
    pins = dict(line.split("==") for line in (FOLDER / f"{client}.txt").read_text().split())
    return pins[package]


def debian_library(client: str, package: str, file: str) -> Path | None:
    """Returns the folder of a shared library, unpacked from Debian's package into the environment.

    None where the package can't be had.
    """
    folder = environment(client) / "debian"
    if not (found := [*folder.rglob(file)]) and shutil.which("apt-get") and shutil.which("dpkg"):
        folder.mkdir(exist_ok=True)
        try:
            run("apt-get", "download", package, cwd=folder)
            for archive in folder.glob("*.deb"):
                run("dpkg", "-x", archive, folder)
        except AssertionError as error:
            print(error, file=sys.stderr)
        found = [*folder.rglob(file)]
    return found[0].parent if found else None
