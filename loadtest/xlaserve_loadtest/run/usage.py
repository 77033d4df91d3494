"""What a server used in a block, seen from outside: its process, its GPU, its own counters."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from xlaserve_loadtest.record.lines import Counters, ServerUse
from xlaserve_loadtest.run import gpus

_POLL_S: Final = 0.25
_GPU_POLL_S: Final = 1.0
_TIMEOUT_S: Final = 2.0

Counts = Mapping[tuple[str, str], float]
"""A server's counters for one model at one moment, by name and bucket."""

_SERVING: Final = ("xlaserve_xla_compilations_total", "serving")
"""The counter, and its phase, of what XLA compiled while requests waited: of the whole server, not of a model."""


def change(before: Counts | None, after: Counts | None) -> Counters | None:
    """Returns how counters moved between two looks; None where one of them saw none."""
    if before is None or after is None:
        return None
    moved = {key: round(number - before.get(key, 0)) for key, number in after.items()}

    def total(counter: str) -> int:
        return sum(number for (name, _), number in moved.items() if name == f"xlaserve_{counter}_total")

    return Counters(
        batches_by_bucket={
            bucket: number
            for (name, bucket), number in moved.items()
            if name == "xlaserve_bucket_batches_total" and number
        },
        padded_rows=total("padded_rows"),
        images=total("images"),
        compilations=total("compilations"),
        serving_compilations=moved.get((_SERVING[0], "")),
    )


async def counts(http_address: str | None, model: str) -> Counts | None:
    """Asks a server for its counters, summed over modes, since one arm at a time gets load; None without them."""
    if http_address is None:
        return None

    def fetch() -> str:
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=_TIMEOUT_S) as answer:
            return str(answer.read(), "utf-8")

    numbers: defaultdict[tuple[str, str], float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(await asyncio.to_thread(fetch)):
            for sample in family.samples:
                if sample.labels.get("model") == model or (sample.name, sample.labels.get("phase")) == _SERVING:
                    numbers[sample.name, sample.labels.get("bucket", "")] += sample.value
    except (OSError, ValueError):
        return None
    return numbers


class Usage:
    """Samples a process and the first GPU while a block runs."""

    def __init__(self, pid: int | None) -> None:
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):
            self._process = psutil.Process(pid) if pid is not None else None
        self._cpu_before_s = self._cpu_s()
        self._peak_bytes = 0
        self._gpu_looks: list[tuple[float, int]] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Samples at intervals until the context ends."""
        looks = [asyncio.create_task(self._look_at_process())]
        if self._process:
            looks.append(asyncio.create_task(self._look_at_gpu()))
        try:
            yield
        finally:
            for look in looks:
                look.cancel()

    def result(self) -> ServerUse:
        """Returns what was used since this was made."""
        cpu_s = self._cpu_s()
        utilisation = [look[0] for look in self._gpu_looks]
        return ServerUse(
            cpu_s=None if cpu_s is None or self._cpu_before_s is None else cpu_s - self._cpu_before_s,
            peak_rss_bytes=self._peak_bytes or None,
            gpu_utilisation=math.fsum(utilisation) / len(utilisation) if utilisation else None,
            gpu_memory_bytes=max(look[1] for look in self._gpu_looks) if self._gpu_looks else None,
        )

    def _cpu_s(self) -> float | None:
        if self._process is None:
            return None
        try:
            times = self._process.cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)

    async def _look_at_process(self) -> None:
        while self._process:
            with suppress(psutil.Error):
                self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
            await asyncio.sleep(_POLL_S)

    async def _look_at_gpu(self) -> None:
        while look := await asyncio.to_thread(gpus.first_use):
            self._gpu_looks.append(look)
            await asyncio.sleep(_GPU_POLL_S)
