"""Stands in for NVIDIA's library where no GPU is: one GPU whose figures are made up. For tests of dashboards."""

from __future__ import annotations

import time
from types import SimpleNamespace

nvmlMemory_v2 = 2  # noqa: N816 - NVIDIA's name


class NVMLError(Exception):
    """What NVIDIA's library raises."""


def nvmlInit() -> None:  # noqa: N802, D103
    pass


def nvmlDeviceGetCount() -> int:  # noqa: N802, D103
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802, D103
    return index


def nvmlDeviceGetName(gpu: int) -> str:  # noqa: N802, D103
    return f"made up {gpu}"


def nvmlDeviceGetUtilizationRates(gpu: int) -> SimpleNamespace:  # noqa: N802, D103
    return SimpleNamespace(gpu=50)


def nvmlDeviceGetMemoryInfo(gpu: int, version: int) -> SimpleNamespace:  # noqa: N802, D103
    return SimpleNamespace(used=2**30, total=2**32)


def nvmlDeviceGetPowerUsage(gpu: int) -> int:  # noqa: N802, D103
    return 100_000


def nvmlDeviceGetTotalEnergyConsumption(gpu: int) -> int:  # noqa: N802, D103
    return int(100_000 * time.time())
