from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from xlaserve.telemetry import gpus
from xlaserve.telemetry.gpus import Gpus, count_visible


class NvmlError(Exception):
    pass


def no_driver() -> None:
    raise NvmlError


def no_energy(gpu: str) -> int:
    if gpu == "gpu 1":
        raise NvmlError
    return 7_500


def nvml(**fields: Any) -> Any:
    """What `pynvml` is on a machine with two GPUs, of which the second does not count energy."""
    memory = SimpleNamespace(used=3 * 2**30, total=8 * 2**30)
    return SimpleNamespace(
        **{
            "NVMLError": NvmlError,
            "nvmlInit": lambda: None,
            "nvmlMemory_v2": 2,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: f"gpu {index}",
            "nvmlDeviceGetName": lambda gpu: "H200",
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=25),
            "nvmlDeviceGetMemoryInfo": lambda gpu, version: memory,
            "nvmlDeviceGetPowerUsage": lambda gpu: 120_000,
            "nvmlDeviceGetTotalEnergyConsumption": no_energy,
            **fields,
        }
    )


def shown(module: Any) -> dict[tuple[str, str], float]:
    """The value of each metric and GPU."""
    families = list(Gpus(module).collect())
    return {(sample.name, sample.labels["gpu"]): sample.value for family in families for sample in family.samples}


def test_each_gpu_is_shown_in_units_without_prefix() -> None:
    found = shown(nvml())
    assert {name.removeprefix("xlaserve_gpu_"): value for (name, gpu), value in found.items() if gpu == "0"} == {
        "utilization_ratio": 0.25,
        "memory_used_bytes": 3 * 2**30,
        "memory_size_bytes": 8 * 2**30,
        "power_watts": 120.0,
        "energy_joules_total": 7.5,
    }
    assert ("xlaserve_gpu_power_watts", "1") in found


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    assert ("xlaserve_gpu_energy_joules_total", "1") not in shown(nvml())


def test_a_machine_without_a_driver_or_the_library_has_no_gpus() -> None:
    for module in (None, nvml(nvmlInit=no_driver)):
        registry = CollectorRegistry()
        registry.register(Gpus(module))
        assert "xlaserve_gpu_memory_used_bytes{" not in generate_latest(registry).decode()


def test_levels_are_listed_by_gpu_for_those_who_show_them() -> None:
    first, second = Gpus(nvml()).levels()
    assert first == {
        "name": "H200",
        "utilization_ratio": 0.25,
        "memory_used_bytes": 3 * 2**30,
        "memory_size_bytes": 8 * 2**30,
        "power_watts": 120.0,
        "energy_joules": 7.5,
    }
    assert second == {name: level for name, level in first.items() if name != "energy_joules"}
    assert (len(Gpus(nvml())), len(Gpus(None)), Gpus(None).levels()) == (2, 0, [])


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("0", 1),
        ("0,1", 2),
        (" 1, GPU-8f2a", 2),
        ("MIG-GPU-8f2a/1/0", 1),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
    ],
)
def test_the_environment_says_which_gpus_may_be_seen(named: str, expected: int) -> None:
    assert count_visible({"CUDA_VISIBLE_DEVICES": named}) == expected


def test_where_the_environment_says_nothing_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "of_machine", lambda: Gpus(nvml()))
    assert count_visible({}) == 2
