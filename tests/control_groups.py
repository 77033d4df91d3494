"""Control groups as Linux shows them, below a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

POINT: Final = "/sys/fs/cgroup"
UNIFIED: Final = f"30 23 0:26 / {POINT} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
"""The line of mountinfo that mounts version 2."""


def mounted(controllers: str, group: str = "/", point: str | None = None) -> str:
    """Returns the line of mountinfo that mounts controllers of version 1."""
    return f"35 31 0:32 {group} {point or f'{POINT}/{controllers}'} rw shared:9 - cgroup cgroup rw,{controllers}"


def lay_out(root: Path, paths: str, mounts: Sequence[str], files: Mapping[str, str]) -> None:
    """Writes /proc/self and `files` of control groups, by their path below POINT."""
    process = root / "proc/self"
    process.mkdir(parents=True, exist_ok=True)
    (process / "cgroup").write_text(f"{paths}\n")
    other = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"
    (process / "mountinfo").write_text("".join(f"{line}\n" for line in (other, *mounts)))
    for name, content in files.items():
        file = root / POINT.lstrip("/") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
