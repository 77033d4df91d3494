"""The machine's GPUs, as NVIDIA's driver reports them; without a driver there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pynvml  # type: ignore[import-untyped]

_T = TypeVar("_T")


def names() -> tuple[str, ...]:
    """Returns the name of each GPU."""
    count = pynvml.nvmlDeviceGetCount
    return _ask(lambda: tuple(str(pynvml.nvmlDeviceGetName(_gpu(index))) for index in range(count()))) or ()


def driver_version() -> str | None:
    """Returns the driver's version; None without a driver."""
    return _ask(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def first_use() -> tuple[float, int] | None:
    """Returns how busy the first GPU is, from 0 to 1, and its bytes in use, by anyone; None where it can't be seen."""
    return _ask(
        lambda: (
            pynvml.nvmlDeviceGetUtilizationRates(_gpu(0)).gpu / 100,
            # Version 2 leaves out what the driver reserves for itself.
            int(pynvml.nvmlDeviceGetMemoryInfo(_gpu(0), version=pynvml.nvmlMemory_v2).used),
        )
    )


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
