"""Control groups: as Linux shows them, below a folder, and real ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

POINT: Final = "/sys/fs/cgroup"
UNIFIED: Final = f"30 23 0:26 / {POINT} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
"""The line of mountinfo that mounts version 2."""
END_S: Final = 20.0
"""How long processes of a group may take to end that were told to."""


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


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path]:
    """Gives a new group whose memory has a limit, of either version. Raises OSError where none can be made here."""
    version_1 = Path(POINT, "memory")
    group = (version_1 if version_1.is_dir() else Path(POINT)) / f"xlaserve-test-limit-{os.getpid()}"
    group.mkdir()
    try:
        limits = [group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()]
        if not limits:
            raise OSError("control groups of this machine have no limits of memory")
        limits[0].write_text(str(limit_bytes))
        yield group
    finally:
        give_up_at = time.monotonic() + END_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        group.rmdir()


def killed(group: Path) -> int:
    """Returns how many processes the kernel has killed there for lack of memory."""
    version_2 = group / "memory.events"
    events = version_2 if version_2.exists() else group / "memory.oom_control"
    return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])
