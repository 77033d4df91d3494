"""The limits that Linux control groups set for this process, of version 1, version 2 and both together.

A process is in one group of each hierarchy, which /proc/self/cgroup names, and the least limit of that group and its
parents holds. /proc/self/mountinfo says where the hierarchies are mounted. In a container the mount may begin at the
container's group, and a path may name a group outside the namespace: what is mounted there counts then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

ROOT: Final = Path("/")
_UNIFIED: Final = ""
"""Stands for the controllers of version 2, which have one hierarchy together."""
_FILE_SYSTEMS: Final = {"cgroup": 1, "cgroup2": 2}
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class MemoryLimit(NamedTuple):
    """The limit of a group, and the part of it that all of its processes take."""

    limit_bytes: int
    taken_bytes: int
    """Without files that the kernel drops where memory is needed."""


class _Mount(NamedTuple):
    version: int
    controllers: frozenset[str]
    group: str
    """The path of the group that is mounted."""
    point: str


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Returns the limits of memory that hold for this process, in no order; none where there are none."""
    return [found for folder in _folders("memory", root) if (found := _memory_limit(folder)) is not None]


def processors(root: Path = ROOT) -> float:
    """Returns the number of processors whose time this process may take; infinity where nothing bounds it."""
    return min(map(_quota, _folders("cpu", root)), default=math.inf)


def _memory_limit(folder: Path) -> MemoryLimit | None:
    """Returns the limit of one group; None where it has none."""
    for limit, taken, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_bytes = int((folder / limit).read_text())
        except (OSError, ValueError):  # of the other version, the root's group, or "max"
            continue
        with suppress(OSError, ValueError):
            taken_bytes = int((folder / taken).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return MemoryLimit(limit_bytes, max(0, taken_bytes - int(statistics.get(dropped, 0))))
        return MemoryLimit(limit_bytes, 0)
    return None


def _quota(folder: Path) -> float:
    """Returns the processors of one group."""
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = map(int, both.read_text().split())
        else:
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # the root's group, or "max"
        return math.inf


def _folders(controller: str, root: Path) -> list[Path]:
    """Returns the folders of this process's groups and their parents, as far as they are mounted."""
    paths = _paths(root)
    found: dict[Path, None] = {}
    for mount in _mounts(root):
        is_unified = mount.version == 2
        if not is_unified and controller not in mount.controllers:
            continue
        if (path := paths.get(_UNIFIED if is_unified else controller)) is not None:
            point = root / mount.point.lstrip("/")
            below = _below(path, mount.group)
            found.update(dict.fromkeys(point / each for each in (below, *below.parents)))
    return [*found]


def _below(path: str, mounted: str) -> PurePosixPath:
    """Returns the path of group `path` below the group that is mounted; the empty path where it is not below that."""
    group, top = PurePosixPath(path).parts, PurePosixPath(mounted).parts
    rest = group[len(top) :]
    return PurePosixPath(*rest) if group[: len(top)] == top and ".." not in rest else PurePosixPath()


def _paths(root: Path) -> dict[str, str]:
    """Returns the path of this process's group, by controller."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys([_UNIFIED] if number == "0" else controllers.split(","), path))
    return paths


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        where, how = before.split(" "), after.split(" ")
        if len(where) > 4 and len(how) > 2 and (version := _FILE_SYSTEMS.get(how[0])):
            yield _Mount(version, frozenset(how[2].split(",")), _unescaped(where[3]), _unescaped(where[4]))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
