"""A server's use of the machine in a block, seen from outside: its process, its GPU, its own counters."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from xlaserve_loadtest.record.blocks import Counters, GpuUse, ServerUse
from xlaserve_loadtest.run import gpus
from xlaserve_loadtest.run.energy import CpuMeters

_POLL_S: Final = 1.0
"""To find the children of a process is to look at every process of the machine: often, it would be load of its own."""
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


async def counts(http_address: str | None, models: Sequence[str]) -> Counts | None:
    """Asks a server for its counters, summed over `models` and modes; None without them.

    One arm at a time gets load.
    """
    if http_address is None:
        return None

    def fetch() -> str:
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=_TIMEOUT_S) as answer:
            return str(answer.read(), "utf-8")

    numbers: defaultdict[tuple[str, str], float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(await asyncio.to_thread(fetch)):
            for sample in family.samples:
                if sample.labels.get("model") in models or (sample.name, sample.labels.get("phase")) == _SERVING:
                    numbers[sample.name, sample.labels.get("bucket", "")] += sample.value
    except (OSError, ValueError, HTTPException):  # it may speak another protocol
        return None
    return numbers


class Usage:
    """Samples a server's processes and the machine's GPUs while a block runs. `pid` is None for another machine's."""

    def __init__(self, pid: int | None) -> None:
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):
            self._process = psutil.Process(pid) if pid is not None else None
        self._meters = CpuMeters() if self._process else None
        self._gpu_before_j = gpus.energy_j() if self._process else ()
        self._cpu_before_s = self._cpu_s()
        self._peak_bytes = 0
        self._looks: list[tuple[gpus.Look, ...]] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Samples at intervals until the context ends."""
        looks = asyncio.create_task(self._look())
        try:
            yield
        finally:
            looks.cancel()

    def result(self) -> ServerUse:
        """Returns what was used since this was made."""
        cpu_s = self._cpu_s()
        self._look_at_memory()
        by_gpu = [
            GpuUse(math.fsum(look.utilisation for look in looks) / len(looks), max(look.used_bytes for look in looks))
            for looks in zip(*self._looks, strict=False)
        ]
        energy_j = gpus.energy_j() if self._gpu_before_j else ()
        return ServerUse(
            cpu_s=None if cpu_s is None or self._cpu_before_s is None else cpu_s - self._cpu_before_s,
            peak_rss_bytes=self._peak_bytes or None,
            gpu_utilisation=max((gpu.utilisation for gpu in by_gpu), default=None),
            gpu_memory_bytes=max((gpu.memory_bytes for gpu in by_gpu), default=None),
            gpus=tuple(by_gpu),
            gpu_energy_j=sum(energy_j) - sum(self._gpu_before_j) if energy_j else None,
            cpu_energy_j=self._meters.joules() if self._meters else None,
        )

    def _cpu_s(self) -> float | None:
        """Returns the CPU time of the processes so far, that of ended children included."""
        if self._process is None:
            return None
        try:
            times = [self._process.cpu_times()]
        except psutil.Error:
            return None
        for child in self._children():
            with suppress(psutil.Error):
                times.append(child.cpu_times())
        return math.fsum(own.user + own.system + own.children_user + own.children_system for own in times)

    def _children(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return self._process.children(recursive=True) if self._process else []
        return []

    async def _look(self) -> None:
        has_gpus = True
        while self._process:
            self._look_at_memory()
            if has_gpus and (look := await asyncio.to_thread(gpus.look)):
                self._looks.append(look)
            else:
                has_gpus = False
            await asyncio.sleep(_POLL_S)

    def _look_at_memory(self) -> None:
        held = 0
        for process in (self._process, *self._children()) if self._process else ():
            with suppress(psutil.Error):
                held += process.memory_info().rss
        self._peak_bytes = max(self._peak_bytes, held)
