"""Where a run took place, for its record."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from xlaserve_loadtest.record.lines import Environment
from xlaserve_loadtest.run import gpus

_PACKAGES: Final = (
    "xlaserve",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "grpcio",
    "protobuf",
    "numpy",
    "pillow",
    "uvloop",
)
_FLAGS: Final = ("TF_", "XLA_", "OMP_", "CUDA_", "KERAS_", "NVIDIA_TF32", "MALLOC_", "XLASERVE_")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SECRETS: Final = ("TOKEN", "SECRET", "PASSWORD", "KEY")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that generates load."""

    id: str
    """The same for processes that share a loopback: those of one kernel and one network namespace."""
    name: str
    environment: Environment

    @classmethod
    def of_this(cls) -> Machine:
        """Describes the machine that this runs on."""
        return cls(_loopback(), platform.node(), describe())


def describe() -> Environment:
    """Returns the machine that this runs on, and those of its settings that change figures."""
    return Environment(
        cpu=_cpu(),
        cores=cores(),
        gpus=gpus.names(),
        system=platform.platform(),
        python=platform.python_version(),
        packages={package: installed for package in _PACKAGES if (installed := _version(package))},
        flags={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_FLAGS) and not any(word in name for word in _SECRETS)
        },
        git_revision=_git_revision(Path(__file__).parent),
        machine_ids=_machine_ids(),
    )


def _loopback() -> str:
    try:
        return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return platform.node()


def _machine_ids() -> tuple[str, ...]:
    """Returns hashes of the boot, which containers of a machine share, and of the name, which outlasts a boot."""
    found = []
    for kind, path in (("boot", _BOOT_ID), (f"name {platform.node()}", Path("/etc/machine-id"))):
        with suppress(OSError):
            found.append(f"{kind} {path.read_text().strip()}")
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in found)


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_revision(folder: Path) -> str | None:
    """Returns the commit that this code comes from, with "+" where files were changed since."""
    revision = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not revision:
        return None
    return revision.strip() + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ("git", "-C", str(folder), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
