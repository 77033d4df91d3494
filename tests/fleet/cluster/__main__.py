"""Runs the tests of fleets in an environment that has Ray besides what this one has.

python -m tests.fleet.cluster [PYTEST'S ARGUMENTS ...]
"""

from __future__ import annotations

import fcntl
import site
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / ".venv-fleet"


def environment() -> Path:
    """Returns the interpreter of an environment with the extra `ray`: made once, and again when that changes.

    It sees the packages of this one, so that TensorFlow is not there twice.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["ray"]
    constraints = ROOT / "constraints.txt"
    installed, python = FOLDER / "installed.txt", FOLDER / "bin" / "python"
    with constraints.open() as pinned:
        fcntl.flock(pinned, fcntl.LOCK_EX)
        made_of = "\n".join(wanted) + pinned.read()
        if not installed.exists() or installed.read_text() != made_of:
            subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
            (packages,) = FOLDER.glob("lib/python*/site-packages")
            folders = [path for path in site.getsitepackages() if path.startswith(sys.prefix)]
            lines = [f"import site; site.addsitedir({path!r})" for path in folders]
            (packages / "ours.pth").write_text("\n".join(lines) + "\n")
            pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
            subprocess.run([*pip, "--constraint", constraints, *wanted], check=True)
            installed.write_text(made_of)
    return python


def main(arguments: Sequence[str]) -> int:
    command = [str(environment()), "-m", "pytest", "-m", "fleet", *(arguments or [str(Path(__file__).parent)])]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
