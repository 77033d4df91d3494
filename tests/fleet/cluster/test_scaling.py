"""Servers of a fleet share nothing: N of them answer N times as much, as far as the machine's cores go."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from bench.timed_model import BATCH_S, IMAGE_S
from tests.fleet.cluster.conftest import Fleet

from xlaserve.models.sources.noop import SIDE
from xlaserve_client import AsyncVisionClient
from xlaserve_client.errors import ServerError

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("ray")

TIMED = """
import sys

if {"xlaserve", "serve"} <= {*sys.orig_argv}:
    from bench.timed_model import install

    install()
"""
"""Has every server take a known time for a batch, and hardly any processor time."""
LANES, BATCH = 2, 8
SERVER = {
    "lanes": LANES,
    "models": [{"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [BATCH]}],
}
MOST_PER_S = LANES * BATCH / (BATCH_S + IMAGE_S * BATCH)
"""What a server can answer with full batches."""
CALLERS = 2 * LANES * BATCH
"""For each server: as many images run as wait."""
WARM_S, MEASURED_S = 3.0, 10.0
LEAST = 0.85
"""Of what the servers can answer. Not every batch is full."""


@pytest.fixture(autouse=True)
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started from now on are `TIMED`. Ray's nodes pass their environment on."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TIMED)
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "site"), str(root))))


async def rate(fleet: str, callers: int) -> tuple[float, Counter[str]]:
    """Returns the answers a second that so many callers get, and what became of the other calls."""
    outcomes: Counter[str] = Counter()
    pixels = np.zeros((1, SIDE, SIDE, 3), np.uint8)
    begin = time.monotonic() + WARM_S

    async def call(client: AsyncVisionClient) -> None:
        while (now := time.monotonic()) < begin + MEASURED_S:
            try:
                await client.infer(pixels, model="noop")
            except ServerError as error:
                outcomes[type(error).__name__] += 1
            else:
                outcomes["answered"] += begin <= now

    async with AsyncVisionClient(fleet, deadline_s=30) as client, asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(call(client))
    return outcomes.pop("answered", 0) / MEASURED_S, outcomes


def busy_s() -> float:
    """Returns the processor time that the whole machine has been busy."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


def test_throughput_adds_up_as_far_as_the_cores_go(fleet: Callable[..., Fleet]) -> None:
    one = fleet(8, min_servers=1, server=SERVER)
    rates = {}
    for servers in (1, 2, 4, 8):
        one.write(min_servers=servers, max_servers=servers)
        one.do("update")
        one.wait_for(servers)
        before, began_at = busy_s(), time.monotonic()
        rates[servers], failed = asyncio.run(rate(one.url, servers * CALLERS))
        cores = (busy_s() - before) / (time.monotonic() - began_at)
        print(
            f"{servers} servers: {rates[servers]:.0f} answers/s, {rates[servers] / servers / MOST_PER_S:.0%} of what"
            f" they can; the machine's cores in use: {cores:.2f} of {os.cpu_count()}; failed {dict(failed)}"
        )
        assert not failed
        assert rates[servers] < 1.02 * servers * MOST_PER_S
    for servers in (1, 2, 4):
        assert rates[servers] > LEAST * servers * MOST_PER_S
