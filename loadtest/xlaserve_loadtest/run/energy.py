"""The machine's energy meters. Each counts for the whole device, whoever uses it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_PACKAGES: Final = "intel-rapl:[0-9]*"
"""Also on AMD's processors: https://docs.kernel.org/power/powercap/powercap.html."""


class CpuMeters:
    """The RAPL meters of the processor packages. Kernels since 5.10 let only root read them."""

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        # "intel-rapl:0:1" is a part of the package "intel-rapl:0".
        self._zones = [zone for zone in sorted(root.glob(_PACKAGES)) if zone.name.count(":") == 1]
        self._before_uj = self._read_uj()

    def joules(self) -> float | None:
        """Returns what all packages took since this was made; None where that can't be read."""
        now_uj = self._read_uj()
        if not now_uj or len(now_uj) != len(self._before_uj):
            return None
        moved_uj = 0
        for zone, before, after in zip(self._zones, self._before_uj, now_uj, strict=True):
            # A meter begins again at 0 after its greatest value; a block is too short for a second time.
            moved_uj += after - before if after >= before else after - before + _number(zone / "max_energy_range_uj")
        return moved_uj / 1e6

    def _read_uj(self) -> list[int]:
        with suppress(OSError, ValueError):
            return [_number(zone / "energy_uj") for zone in self._zones]
        return []


def _number(path: Path) -> int:
    return int(path.read_text())
