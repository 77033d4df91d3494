"""Blocks of a run: the load of each, and the work of generators and server in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Role = Literal["measure", "search", "confirm", "curve"]
"""The purpose of a block: measuring, a trial of a search, its confirmation, or a point of a load curve."""


@dataclass(frozen=True, slots=True)
class LoadLine:
    """The load of a block."""

    type: Literal["closed", "open", "offline"]
    concurrency: int | None = None
    rate_per_s: float | None = None
    """Requests due each second, the mean where it changes."""
    arrivals: Literal["poisson", "constant", "replay", "ramp"] | None = None
    """`ramp` is only in older files, which do not say which process made the arrivals."""
    ramp_per_s: tuple[float, float] | None = None
    """Requests due each second at the start and at the end of a ramp; None where the rate is no ramp."""
    stages: tuple[tuple[float, float, float], ...] | None = None
    """Rates per second at the start and at the end of each stage of a profile, and its seconds; None without a
    profile."""
    burst: int = 1
    """Requests due at the same moment."""
    images_per_request: str = "1"


@dataclass(frozen=True, slots=True)
class MachineUse:
    """The work of one machine's generator in a block. Fields without a text are as in GeneratorUse."""

    generator: str
    """HOST:PORT."""
    workers: int
    cpu_s: float
    sends: int
    late_sends: int
    wait_ms: float
    longest_wait_ms: float
    preemptions: int
    steal: float
    clock_error_ms: float
    """Largest possible error of its requests' times, in milliseconds, if its clock drifted evenly."""
    clock_drift_ms: float
    """Drift of its clock from the coordinator's in the block, in milliseconds."""


@dataclass(frozen=True, slots=True)
class GeneratorUse:
    """The work of all generators in a block, and whether they kept up with the load."""

    workers: int
    cpu_s: float
    sends: int
    late_sends: int = 0
    """Requests sent more than a millisecond, or 10% of the interval between two, after they were due."""
    dropped: int = 0
    """Requests that were due but never sent."""
    dropped_by_model: tuple[int, ...] = ()
    """`dropped` for each of the arm's models; empty where all dropped requests are for the first."""
    compared: int = 0
    """Answers that were compared with the answer to the same request sent alone, warm-up included."""
    differing: int = 0
    """Compared answers that differ beyond the tolerance."""
    busy: float | None = None
    """Rate of the block as a share of the generator's measured highest rate; None where that was not measured."""
    wait_ms: float | None = None
    """Mean milliseconds that an answer waited for a worker's event loop; None in older files."""
    longest_wait_ms: float | None = None
    preemptions: int | None = None
    """Involuntary context switches of the workers: how often the scheduler took the processor from one."""
    steal: float | None = None
    """Share of the machine's processor time that its hypervisor gave to others."""
    own_ms: float | None = None
    """Median milliseconds of one request at a time to an empty server on the generator's machine; None: not
    measured."""
    others: float | None = None
    """Share of the machine's processor time that processes other than the load test and its server used; None where
    it can't be measured."""
    ceiling_others: float | None = None
    """`others` while the generator's highest rate was measured."""
    machines: tuple[MachineUse, ...] = ()
    """The work of each generator where they run on other machines (`--generator`); `wait_ms` and `steal` above are then
    the largest of any machine."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of one GPU in a block, by all processes of the machine."""

    utilisation: float
    """Mean utilisation, from 0 to 1."""
    memory_bytes: int
    """Largest memory in use."""


@dataclass(frozen=True, slots=True)
class ServerUse:
    """Resources that the server used in a block; a field is None where it could not be measured."""

    cpu_s: float | None = None
    """CPU time of the server's process and its descendants."""
    peak_rss_bytes: int | None = None
    """Largest resident memory of these processes together."""
    gpu_utilisation: float | None = None
    """Mean utilisation of the busiest GPU, from 0 to 1."""
    gpu_memory_bytes: int | None = None
    """Largest memory in use of any GPU."""
    gpus: tuple[GpuUse, ...] = ()
    """The machine's GPUs in the driver's order."""
    gpu_energy_j: float | None = None
    """Energy of all GPUs of the machine, idle ones and other work included."""
    cpu_energy_j: float | None = None
    """Energy of the machine's processor packages, other work included."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Increments of the server's counters in a block; None where the server has no such counter."""

    batches_by_bucket: Mapping[str, int] = field(default_factory=dict)
    """Number of batches by bucket, batch size, height and width: "8x224x224"."""
    padded_rows: int | None = None
    images: int | None = None
    compilations: int | None = None
    """Programs of the model that the server compiled in the background, while no request waited for them."""
    serving_compilations: int | None = None
    """Programs of any model that XLA compiled while requests waited; None where the server does not report it."""


@dataclass(frozen=True, slots=True)
class BlockLine:
    """A part of the run with one arm and one load; written when the block has ended."""

    kind: ClassVar[str] = "block"
    index: int
    arm: str
    load: LoadLine
    start_ns: int
    end_ns: int
    generator: GeneratorUse
    role: Role = "measure"
    server: int | None = None
    """The `id` of the block's `Server` line."""
    window_ns: tuple[int, int] | None = None
    """Half-open interval in which requests must be due to be measured; None where the block ended in warm-up."""
    steady: bool | None = None
    """Whether the block reached a steady state; None where the run did not ask for one."""
    round: int | None = None
    """The number of the mirrored round (A B B A) that the block belongs to."""
    server_use: ServerUse = ServerUse()
    counters: Counters | None = None
