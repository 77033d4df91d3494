"""The interface through which protocols use models: this process's repository, or a link to another process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from xlaserve.models.version import Version
from xlaserve.models.version_lookup import Directory
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.profiler import Recording
from xlaserve.programs.watch.xla_log import XlaCompilation
from xlaserve.telemetry.failures import Failure, Failures
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.telemetry.tally import Counted
from xlaserve.telemetry.version_metrics import Statistics


class Backend(Protocol):
    """All methods run on the event loop. Those that may wait raise EngineLost where it ends meanwhile."""

    @property
    def directory(self) -> Directory:
        """The models that there are."""

    @property
    def device(self) -> Device:
        """The device that runs the models."""

    @property
    def unexpected(self) -> Collection[XlaCompilation]:
        """Programs that XLA compiled although nothing asked for it."""

    @property
    def is_watched(self) -> bool | None:
        """Whether XLA's compilations are seen; None where nobody watches."""

    @property
    def lane_busy_s(self) -> float:
        """Time for which lanes were in use, all together."""

    @property
    def counted(self) -> Counted:
        """Counts of the models, summed over all processes at the last `count`."""

    @property
    def in_flight_elsewhere(self) -> int:
        """Requests that other processes had accepted and not answered at that time."""

    def statistics(self, version: Version) -> Statistics:
        """Returns what all processes have counted of a version since it was loaded, as of the last `count`."""

    def shadows(self, version: Version) -> Mapping[Pair, Findings]:
        """Returns what all processes have found of a version's shadows, as of the last `count`."""

    def failures(self, here: Failures) -> Iterable[Failure]:
        """Returns the last requests that failed at all processes, as of the last `count`, the newest first."""

    async def count(self) -> None:
        """Sums the counts of all processes into `counted`."""

    async def load(self, name: str) -> None:
        """Loads a model; see `Repository.load`."""

    async def update(self, name: str, labels: Mapping[str, str], versions: Collection[str]) -> None:
        """Updates a model's labels and versions; see `Repository.update`."""

    async def unload(self, name: str) -> None:
        """Unloads a model; see `Repository.unload`."""

    async def profile(self, seconds: float) -> Recording:
        """Records a profile; see `Profiler.record`."""
