"""The environment that programs and their costs depend on, other than the model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from xlaserve.programs.tf import flags
from xlaserve.programs.tf.device import Device, cores, cpu_name

_VARIABLES: Final = ("NVIDIA_TF32_OVERRIDE", "TF_ENABLE_ONEDNN_OPTS", flags.TF_XLA, flags.XLA)
"""Environment variables that change computations or their results."""
_OUR_OWN: Final = re.compile(r"--(tf_xla_persistent_cache_|xla_dump_|xla_gpu_per_fusion_autotune_cache_dir=)\S+")
"""Flags that say where files go, and change no program."""
_PACKAGES: Final = ("keras", "keras-cv", "keras-hub", "numpy", "openvino")
_CODE: Final = ("engine", "models", "programs")
"""Packages of ours that make programs."""


def tensorflow_version() -> str:
    """Returns the version of TensorFlow without importing it."""
    return _version("tensorflow") or _version("tensorflow-cpu") or "unknown"


@cache
def installed() -> Mapping[str, str]:
    """Returns versions and a digest of the code that makes programs, as at the first call: it may be replaced later."""
    return _on_disk()


def is_replaced() -> bool:
    """Returns whether other code has been installed since this process began: its programs would not be ours."""
    try:
        return _on_disk() != installed()
    except FileNotFoundError:  # it is being replaced at this moment
        return True


def _on_disk() -> Mapping[str, str]:
    package = Path(__file__).parents[2]
    return {
        "tensorflow": tensorflow_version(),
        **{name: _version(name) for name in _PACKAGES},
        "xlaserve": digest(
            package, (file for part in _CODE for kind in ("*.py", "data/*") for file in (package / part).rglob(kind))
        ),
    }


def environment(device: Device) -> dict[str, str]:
    """Returns the facts that a kept program depends on, for `device`: it is used only where all are the same."""
    facts = {
        **installed(),
        "device": f"{device.kind} {device.name}{' TF32' if device.tf32 else ''}",
        "machine": platform.machine(),
        # XLA compiles for the features of this very processor, and divides work by the number of its cores.
        "processor": f"{cpu_name()} {_short(_cpu_flags())}",
        "cores": str(cores()),
        **{name: _OUR_OWN.sub("", os.environ.get(name, "")).strip() for name in _VARIABLES},
    }
    if device.kind == "gpu":
        with suppress(OSError):
            facts["driver"] = Path("/proc/driver/nvidia/version").read_text()
    return facts


def key(facts: object) -> str:
    """Returns a digest of `facts`, of JSON's types."""
    return _short(json.dumps(facts, sort_keys=True))


def digest(folder: Path, files: Iterable[Path]) -> str:
    """Returns a digest of the contents of `files` and of their paths within `folder`, in any order. Raises OSError."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return _short("\n".join(sorted(digests)))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    # x86 calls them flags, ARM Features.
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
