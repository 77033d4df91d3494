"""A fake of NVIDIA's library: no machine of ours has a GPU at all times."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pynvml  # type: ignore[import-untyped]
import pytest

from xlaserve_loadtest.record.blocks import GpuUse
from xlaserve_loadtest.run import environment, gpus, usage


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs; returns what was opened and closed."""
    calls: list[str] = []
    fakes = {
        "nvmlInit": lambda: calls.append("open"),
        "nvmlShutdown": lambda: calls.append("close"),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda gpu: f"NVIDIA H{gpu}00",
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=40 + gpu),
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 0,
        "nvmlDeviceGetMemoryInfo": lambda gpu, version: SimpleNamespace(used=5 * 2**20 + gpu),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    return calls


def test_the_driver_says_what_gpus_there_are_and_is_left_again(driver: list[str]) -> None:
    assert environment.describe().gpus == gpus.names() == ("NVIDIA H000", "NVIDIA H100")
    assert gpus.driver_version() == "580.1"
    assert gpus.look() == (gpus.Look(0.4, 5 * 2**20), gpus.Look(0.41, 5 * 2**20 + 1))
    assert driver == ["open", "close"] * 4


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_without_a_driver_that_answers_there_is_no_gpu(
    driver: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, broken, fail)
    assert gpus.names() == ()
    assert driver.count("open") == driver.count("close")


@pytest.mark.parametrize("pid", [1, None])
async def test_gpus_count_only_where_the_server_runs_here(driver: list[str], pid: int | None) -> None:
    use = usage.Usage(pid)
    with use.looking():
        while pid and use.result().gpu_utilisation is None:  # noqa: ASYNC110 - a look, not an event, is waited for
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
    found = use.result()
    assert (found.gpu_utilisation, found.gpu_memory_bytes) == ((0.41, 5 * 2**20 + 1) if pid else (None, None))
    assert found.gpus == ((GpuUse(0.4, 5 * 2**20), GpuUse(0.41, 5 * 2**20 + 1)) if pid else ())


def test_energy_is_that_of_all_gpus_between_two_looks(driver: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    meters_mj = {0: 5_000, 1: 100}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", meters_mj.__getitem__)
    use = usage.Usage(os.getpid())
    meters_mj.update({0: 6_500, 1: 350})
    assert use.result().gpu_energy_j == pytest.approx(1.75)


def test_gpus_that_do_not_count_energy_have_none(driver: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gpu: object) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", refuse)
    assert usage.Usage(os.getpid()).result().gpu_energy_j is None
