"""Which limits hold for a process, in the control groups that there are."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from tests.control_groups import POINT, UNIFIED, lay_out, mounted

from xlaserve.engine import control_groups
from xlaserve.engine.control_groups import MemoryLimit
from xlaserve.engine.memory import available_memory_bytes, machine_memory_bytes, usable_memory_bytes

GIB, MIB = 2**30, 2**20
NO_LIMIT = "9223372036854771712\n"
"""Of version 1."""


class Case(NamedTuple):
    """Control groups, and what they allow."""

    paths: str
    mounts: list[str]
    files: dict[str, str]
    memory_bytes: int
    processors: float


CASES = {
    "none": Case("", [], {}, machine_memory_bytes(), math.inf),
    "a container of version 2, in a namespace of its own": Case(
        "0::/", [UNIFIED], {"memory.max": f"{GIB}\n", "cpu.max": "150000 100000\n"}, GIB, 1.5
    ),
    "a service of systemd": Case(
        "0::/system.slice/xlaserve.service",
        [UNIFIED],
        {
            "system.slice/memory.max": "max\n",
            "system.slice/cpu.max": "max 100000\n",
            "system.slice/xlaserve.service/memory.max": f"{GIB}\n",
            "system.slice/xlaserve.service/cpu.max": "50000 100000\n",
        },
        GIB,
        0.5,
    ),
    "parents with less than their child": Case(
        "0::/a/b/c",
        [UNIFIED],
        {
            "a/memory.max": f"{GIB}\n",
            "a/b/memory.max": f"{2 * GIB}\n",
            "a/b/c/memory.max": "max\n",
            "a/cpu.max": "max 100000\n",
            "a/b/cpu.max": "300000 100000\n",
            "a/b/c/cpu.max": "800000 200000\n",
        },
        GIB,
        3.0,
    ),
    "a container of version 2 in the namespace of the host": Case(
        "0::/system.slice/docker-1a.scope",
        [UNIFIED],
        {
            "system.slice/docker-1a.scope/memory.max": f"{GIB}\n",
            "system.slice/docker-1a.scope/cpu.max": "200000 100000\n",
        },
        GIB,
        2.0,
    ),
    "a container of which only its own group is mounted": Case(
        "0::/system.slice/docker-1a.scope",
        [UNIFIED.replace(" / /", " /system.slice/docker-1a.scope /")],
        {"memory.max": f"{GIB}\n", "cpu.max": "200000 100000\n"},
        GIB,
        2.0,
    ),
    "a group below the one that is mounted": Case(
        "0::/docker/1a/inner",
        [UNIFIED.replace(" / /", " /docker/1a /")],
        {"memory.max": f"{2 * GIB}\n", "inner/memory.max": f"{GIB}\n", "inner/cpu.max": "100000 100000\n"},
        GIB,
        1.0,
    ),
    "a group outside the namespace": Case(
        "0::/../..", [UNIFIED], {"memory.max": f"{GIB}\n", "cpu.max": "100000 100000\n"}, GIB, 1.0
    ),
    "a group beside the namespace, mounted from above it": Case(
        "0::/../other",
        [UNIFIED.replace(" / /", " /.. /")],
        {"memory.max": f"{2 * GIB}\n", "other/memory.max": f"{GIB}\n"},
        GIB,
        math.inf,
    ),
    "a path that does not exist where it is mounted": Case(
        "0::/kubepods/pod1/1a", [UNIFIED], {"memory.max": f"{GIB}\n", "cpu.max": "100000 100000\n"}, GIB, 1.0
    ),
    "version 1": Case(
        "4:memory:/docker/1a\n3:cpu,cpuacct:/docker/1a\n1:name=systemd:/docker/1a",
        [mounted("memory"), mounted("cpu,cpuacct")],
        {
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/docker/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/docker/1a/memory.limit_in_bytes": f"{GIB}\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/docker/1a/cpu.cfs_quota_us": "250000\n",
            "cpu,cpuacct/docker/1a/cpu.cfs_period_us": "100000\n",
        },
        GIB,
        2.5,
    ),
    "version 1 in a container, of which only its own group is mounted": Case(
        "4:memory:/docker/1a\n3:cpu,cpuacct:/docker/1a",
        [mounted("memory", "/docker/1a"), mounted("cpu,cpuacct", "/docker/1a")],
        {
            "memory/memory.limit_in_bytes": f"{GIB}\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        GIB,
        0.5,
    ),
    "both versions": Case(
        "4:memory:/service\n0::/other",
        [mounted("memory"), UNIFIED.replace(POINT, f"{POINT}/unified")],
        {
            "memory/service/memory.limit_in_bytes": f"{GIB}\n",
            "unified/other/cpu.max": "100000 100000\n",
        },
        GIB,
        1.0,
    ),
    "a mount point with a space": Case(
        "0::/",
        [UNIFIED.replace(POINT, f"{POINT}/a\\040b")],
        {"a b/memory.max": f"{GIB}\n"},
        GIB,
        math.inf,
    ),
    "files that nobody understands": Case(
        "x\n0::/",
        ["", "1 2 3", UNIFIED],
        {"memory.max": "?\n", "cpu.max": "100000\n"},
        machine_memory_bytes(),
        math.inf,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_least_limit_of_the_own_group_and_its_parents_holds(case: Case, tmp_path: Path) -> None:
    lay_out(tmp_path, case.paths, case.mounts, case.files)
    assert usable_memory_bytes(tmp_path) == min(case.memory_bytes, machine_memory_bytes())
    assert control_groups.processors(tmp_path) == case.processors


VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("paths", "mount", "names"), [("0::/a/b", UNIFIED, VERSION_2), ("4:memory:/a/b", mounted("memory"), VERSION_1)]
)
def test_what_is_available_is_the_least_of_what_each_group_has_left(
    paths: str, mount: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, taken, dropped = names
    at = "" if mount == UNIFIED else "memory/"
    files = {
        f"{at}a/{limit}": f"{1000 * MIB}\n",
        f"{at}a/{taken}": f"{900 * MIB}\n",
        f"{at}a/memory.stat": f"anon 7\n{dropped} {50 * MIB}\n",
        f"{at}a/b/{limit}": f"{500 * MIB}\n",
        f"{at}a/b/{taken}": f"{100 * MIB}\n",
        f"{at}a/b/memory.stat": f"{dropped} 0\n",
    }
    lay_out(tmp_path, paths, [mount], files)
    machine = SimpleNamespace(available=32 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    limits = control_groups.memory_limits(tmp_path)
    assert sorted(limits) == [MemoryLimit(500 * MIB, 100 * MIB), MemoryLimit(1000 * MIB, 850 * MIB)]
    assert available_memory_bytes(tmp_path) == 150 * MIB
    machine.available = MIB
    assert available_memory_bytes(tmp_path) == MIB


MEASURE = """
import os, sys
for folder in sys.argv[1:]:
    with open(f"{folder}/cgroup.procs", "w") as group:
        group.write(str(os.getpid()))
from xlaserve.engine import control_groups
from xlaserve.engine.memory import usable_memory_bytes
print(usable_memory_bytes(), control_groups.processors())
"""


@pytest.fixture
def real_groups() -> Iterator[tuple[Path, Path]]:
    """Groups of memory and of processors, each within one that has the limits."""
    with ExitStack() as stack:

        def make(controller: str, limit: str, value: str) -> Path:
            top = Path(POINT, controller)
            outer = (top if top.is_dir() else Path(POINT)) / f"xlaserve-test-{controller}-{os.getpid()}"
            inner = outer / "inner"
            for folder in (outer, inner):
                folder.mkdir()
                stack.callback(folder.rmdir)
            (outer / limit).write_text(value)
            return inner

        try:
            yield (
                make("memory", "memory.limit_in_bytes", f"{512 * MIB}"),
                make("cpu", "cpu.cfs_quota_us", "150000"),
            )
        except OSError as error:
            pytest.skip(f"groups of version 1 can't be made here: {error}")


def test_limits_that_the_kernel_holds_are_seen(real_groups: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", MEASURE, *map(str, real_groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(512 * MIB), "1.5"]
