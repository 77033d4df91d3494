"""The machine's GPUs, as NVIDIA's driver reports them; without a driver there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pynvml  # type: ignore[import-untyped]

_T = TypeVar("_T")


def names() -> tuple[str, ...]:
    """Returns the name of each GPU."""
    return _each(lambda gpu: str(pynvml.nvmlDeviceGetName(gpu)))


def driver_version() -> str | None:
    """Returns the driver's version; None without a driver."""
    return _ask(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


@dataclass(frozen=True, slots=True)
class Look:
    """A GPU at one moment, with all that anyone does on it."""

    utilisation: float
    """From 0 to 1."""
    used_bytes: int


def look() -> tuple[Look, ...]:
    """Returns each GPU as it is now; nothing where there is none to be seen."""
    return _each(
        lambda gpu: Look(
            pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            # Version 2 leaves out what the driver reserves for itself.
            int(pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).used),
        )
    )


def energy_j() -> tuple[float, ...]:
    """Returns what each GPU took since the driver was loaded; nothing where one does not count it (before Volta)."""
    return _each(lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000)


def _each(question: Callable[[object], _T]) -> tuple[_T, ...]:
    return _ask(lambda: tuple(question(_gpu(index)) for index in range(pynvml.nvmlDeviceGetCount()))) or ()


def _gpu(index: int) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _ask(question: Callable[[], _T]) -> _T | None:
    try:
        pynvml.nvmlInit()
        try:
            return question()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
