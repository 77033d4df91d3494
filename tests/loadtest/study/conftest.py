from __future__ import annotations

from collections.abc import Callable

import pytest

from xlaserve_loadtest.study.record import Cell, Entry, ModeResult, Sweep

ENVIRONMENT = {"cpu": "A CPU", "cores": 2, "gpus": ("NVIDIA A100-SXM4-40GB",), "packages": {"keras": "3.15.1"}}

MakeEntry = Callable[..., Entry]
MakeSweep = Callable[..., Sweep]


def make_entry(
    name: str,
    ratio: float | None,
    *,
    family: str = "F",
    rate: float = 100.0,
    resolution: int | None = 224,
    batch: int = 4,
) -> Entry:
    """A cell in which graph mode makes `rate` images/s, and xla `ratio` times as many, or fails."""
    if ratio is None:
        xla = ModeResult(reason=f"{name} can't be compiled")
    else:
        verdict = "faster" if ratio > 1.05 else "slower" if ratio < 0.95 else "inconclusive"
        xla = ModeResult(None, rate * ratio, None, ratio, (ratio * 0.97, ratio * 1.03), verdict)
    graph = ModeResult(images_per_s=rate, ratio=None if ratio is None else 1.0)
    source = f"keras.applications:{name}"
    return Entry(
        Cell(source, resolution, batch), name, family, {"xla": xla, "graph": graph}, "2026-11-20T18:00:00", 1.0
    )


@pytest.fixture
def entry() -> MakeEntry:
    return make_entry


def make_sweep(*entries: Entry) -> Sweep:
    """A sweep of the given entries."""
    made = Sweep(ENVIRONMENT, {"batch": [4]}, "graph", "2026-11-20T18:00:00+00:00")
    made.entries.update((entry.cell, entry) for entry in entries)
    return made


@pytest.fixture
def sweep() -> MakeSweep:
    return make_sweep
