"""Settings of a run: every option of the command, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xlaserve_loadtest.schedule.arms import ServerArm
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, Process, Replay
from xlaserve_loadtest.schedule.mix import Mix, Size
from xlaserve_loadtest.schedule.payload import Form
from xlaserve_loadtest.schedule.search import Slo
from xlaserve_loadtest.targets.channel import Transport

NULL = "null"
IN_PROCESS = "in-process"
EMBEDDED = "embedded"

_RECORDED_AS = {"loads": "loops", "max_in_flight": "most_in_flight"}
"""Options that run files know by an older name, so that `loadtest compare` finds them in old and new ones."""


@dataclass(frozen=True)
class Settings:
    """A load test. The help of the command explains what is not explained here."""

    models: tuple[str, ...]
    model_shares: tuple[float, ...]
    """Shares of requests to each of `models`, which then are measured together; empty: each has arms of its own."""
    modes: tuple[str, ...]
    """Modes to measure; `all` alone stands for every mode that the target offers, none for the usual ones."""
    loads: tuple[Load, ...]
    duration_s: float
    """Measured seconds at most, for each arm under each load; in a search the least of a run that confirms a rate."""
    warmup_s: float
    block_s: float | None
    """Seconds of a block where arms are compared, at least; None: about one."""
    mix: Mix[int]
    """Images per request."""
    payload: Form
    images: Path | None
    """Folder of images; None: synthetic images."""
    sizes: tuple[Size, ...]
    """Sizes of the images; empty: the model's own."""
    size_shares: tuple[float, ...]
    """Share of requests of each of `sizes`."""
    is_distinct: bool
    """Whether no request is like another."""
    inputs: tuple[tuple[str, str], ...]
    """The content of each input of a model that takes no images: its name, and noise, zeros or a path."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Shapes of inputs whose sides the model leaves open."""
    targets: tuple[str, ...]
    """HOST:PORT of running servers, or `null` or `in-process` alone; empty starts servers, unless `arms` names some."""
    arms: tuple[ServerArm, ...]
    """Running servers that are compared with each other; empty: arms are modes."""
    target_http: str | None
    transport: Transport
    config: Path | None
    processes: int
    """Server processes that each arm has in a comparison, one after the other."""
    is_shared: bool
    """Whether one process runs all arms."""
    baseline: str | None
    """Mode, or arm, that the others are compared with; None: the first of `arms`, or the mode graph."""
    has_control: bool
    workers: int | None
    """Processes that send, on each generator; None: by the number of cores."""
    generators: tuple[str, ...]
    """HOST:PORT of each `loadtest generate` that sends; empty: this machine does."""
    generator_key: bytes = field(repr=False)
    """The key that they share."""
    max_in_flight: int
    ends_when_steady: bool
    scenario: str | None
    slo: Slo | None
    search_arrivals: Process
    """Arrivals of a search's runs."""
    find_max: bool
    equality_images: int
    """Images whose outputs are compared; 0: none."""
    save_arrivals: Path | None
    record: Path | None
    """The run file; None: a new name."""
    seed: int
    """Of images and of the order of arms."""
    schedule_seed: int
    """Of arrivals."""
    sample_seed: int
    """Of which request is sent next, where they are drawn at random."""
    draws_samples: bool
    """Whether requests are drawn at random, with replacement; in turn otherwise."""
    """Whether the outputs of every image are written before the run."""
    deadline_s: float
    start_timeout_s: float

    @property
    def target(self) -> str:
        """The target's name in the record."""
        return ",".join(self.targets) or EMBEDDED

    @property
    def is_in_process(self) -> bool:
        """Whether the compiled functions are called without a server."""
        return self.targets == (IN_PROCESS,)

    @property
    def is_remote(self) -> bool:
        """Whether somebody else runs the servers."""
        return bool(self.arms) or (bool(self.targets) and not self.is_in_process and self.targets != (NULL,))

    @property
    def is_embedded(self) -> bool:
        """Whether the servers are started here."""
        return not self.targets and not self.arms

    @property
    def has_generators(self) -> bool:
        """Whether others send, and not processes that are started here."""
        return bool(self.generators)

    @property
    def most_slots(self) -> int:
        """The most requests that one load keeps under way; an open loop has no such number."""
        return max((load.slots if isinstance(load, ClosedLoop) else 64) for load in self.loads)

    @property
    def replay(self) -> Replay | None:
        """The replay where that is the load."""
        return next((load for load in self.loads if isinstance(load, Replay)), None)

    def document(self) -> Mapping[str, Any]:
        """Returns every option in JSON's types, without secrets."""
        document: dict[str, Any] = {_RECORDED_AS.get(name, name): _plain(value) for name, value in vars(self).items()}
        del document["generator_key"]
        document["transport"] = self.transport.document()
        document["trace"] = self.replay.sha256 if self.replay else None
        document["loops"] = [{"type": type(load).__name__, **load.document()} for load in self.loads]
        return document


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
