"""An environment for each client: its packages would clash with ours, and with those of other clients."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from scripts.environments import make, run

FOLDER: Final = Path(__file__).parent
REPOSITORY: Final = FOLDER.parents[1]


def environment(client: str) -> Path:
    """Returns the environment with what CLIENT.txt pins."""
    return make(FOLDER / f"{client}.txt", REPOSITORY / f".venv-{client}")


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
