"""Utilisation, memory and power of the machine's GPUs, from NVIDIA's driver; work of other processes counts too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from itertools import takewhile
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS: Final = ("gpu", "name")
PREFIX: Final = "xlaserve_gpu_"
VISIBLE: Final = re.compile(r"[0-9]+|(GPU|MIG)-.+")
"""A GPU, or a part of one, as CUDA_VISIBLE_DEVICES names them."""

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

_FAMILIES: Final[tuple[tuple[_Family, str, str, Callable[[Any, Any], float]], ...]] = (
    (
        GaugeMetricFamily,
        "xlaserve_gpu_utilization_ratio",
        "Share of the last moments in which a GPU computed, from 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        GaugeMetricFamily,
        "xlaserve_gpu_memory_used_bytes",
        "Memory of a GPU that is in use.",
        # Version 2 leaves out what the driver reserves for itself.
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2).used,
    ),
    (
        GaugeMetricFamily,
        "xlaserve_gpu_memory_size_bytes",
        "Memory of a GPU.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2).total,
    ),
    (
        GaugeMetricFamily,
        "xlaserve_gpu_power_watts",
        "What a GPU draws.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    (
        CounterMetricFamily,
        "xlaserve_gpu_energy_joules",
        "What a GPU took since its driver was loaded; not counted before Volta.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    ),
)


class Gpus(Collector):
    """Reads the GPUs when /metrics is read. `nvml` is the module `pynvml`; None for a machine without GPUs."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus: list[tuple[str, str, Any]] = []
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus.append((str(index), str(nvml.nvmlDeviceGetName(gpu)), gpu))
        except nvml.NVMLError:  # no driver
            return

    def __len__(self) -> int:
        return len(self._gpus)

    def levels(self) -> list[dict[str, float | str]]:
        """Returns the current values of each GPU, by the names of the metrics without `xlaserve_gpu_`. Blocks."""
        levels: dict[str, dict[str, float | str]] = {index: {"name": name} for index, name, _ in self._gpus}
        for family in self.collect():
            for sample in family.samples:
                levels[sample.labels["gpu"]][family.name.removeprefix(PREFIX)] = sample.value
        return [*levels.values()]

    def collect(self) -> Iterable[Metric]:
        """Yields every family; a GPU that does not report a value has no sample in its family."""
        for make, name, help_text, read in _FAMILIES:
            family = make(name, help_text, labels=LABELS)
            for index, gpu_name, gpu in self._gpus:
                try:
                    family.add_metric((index, gpu_name), float(read(self._nvml, gpu)))
                except self._nvml.NVMLError:
                    continue
            yield family


def count_visible(environment: Mapping[str, str] = os.environ) -> int:
    """Returns how many GPUs TensorFlow may see: those that CUDA_VISIBLE_DEVICES names, else all that the driver knows.

    As CUDA reads that variable, GPUs after a negative number or an invalid name are hidden.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return len(of_machine())
    return len([*takewhile(VISIBLE.fullmatch, map(str.strip, named.split(",")))])


def of_machine() -> Gpus:
    """Returns the GPUs of this machine: none where NVIDIA's library for Python is not installed."""
    if find_spec("pynvml") is None:
        return Gpus(None)
    import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415 - comes with the extra `gpu`

    return Gpus(pynvml)
