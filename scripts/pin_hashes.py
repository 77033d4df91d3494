"""Writes what this Python would install, at the versions of constraints.txt, as requirements with hashes.

pip takes hashes in a file of constraints only where everything is hashed, which an editable install never is. So the
file is for deployments: `pip install --no-deps --require-hashes --requirement FILE`, then `pip install --no-deps .`. It
holds for the version of Python, the platform and the build that it was made with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def report(extras: str) -> Mapping[str, Any]:
    """Returns what pip says that it would install. Raises CalledProcessError."""
    options = ("--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check", "--report", "-")
    command = [sys.executable, "-m", "pip", "install", *options, "--constraint", str(ROOT / "constraints.txt")]
    done = subprocess.run([*command, f"{ROOT}[{extras}]"], check=True, stdout=subprocess.PIPE)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a requirement for each package but our own. Raises KeyError for one without a hash."""
    for package in sorted(found["install"], key=lambda package: str(package["metadata"]["name"]).lower()):
        metadata, source = package["metadata"], package["download_info"]
        if "dir_info" not in source:
            sha256 = source["archive_info"]["hashes"]["sha256"]
            yield f"{metadata['name']}=={metadata['version']} --hash=sha256:{sha256}"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", help="such as cpu,jwt")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "requirements-hashed.txt")
    options = parser.parse_args()
    pinned = [*lines(report(options.extras))]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(f"{line}\n" for line in pinned))
    print(f"{options.out}: {len(pinned)} packages")


if __name__ == "__main__":
    main()
