"""What is kept of a run: the lines of a run file, in types. `run_file` writes and reads them.

Runs and reports share nothing else. The format is documented in docs/loadtest-run-format.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

SCHEMA: Final = "xlaserve.loadtest.run/1"
SUFFIX: Final = ".run.jsonl.gz"


class Status(IntEnum):
    """How a request ended: gRPC's statuses, and what gRPC doesn't see."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16
    INVALID_REPLY = 100
    """Answered with OK, but not with what was asked for and the model's metadata promise."""
    DIFFERING_REPLY = 101
    """Answered as promised, but with other outputs than the same request got alone, which is known of a sample only."""


def in_words(status: str) -> str:
    """Returns the name of a status as reports show it."""
    return _WORDS.get(status, status)


_WORDS: Final = {Status.INVALID_REPLY.name: "invalid answer", Status.DIFFERING_REPLY.name: "differing answer"}


STAGES: Final = ("decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s")
"""Where a request's time went inside the server, as the server reports it."""

NO_STAGES: Final = (math.nan,) * len(STAGES)

REQUEST: Final = np.dtype(
    [
        ("block", np.uint32),
        ("measured", np.bool_),
        ("scheduled_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("status", np.uint8),
        ("images", np.uint32),
        ("model", np.uint8),
        ("target", np.uint8),
        ("generator", np.uint8),
        *((stage, np.float32) for stage in STAGES),
    ]
)
"""A request. Times are of one monotonic clock: when it was due, when it was sent, when its answer was there.
`model` is an index in `Arm.served`, `target` in `Arm.targets`, and `generator` in `GeneratorUse.machines`.
Stages that the server did not report are NaN."""

MAX_MODELS: Final = int(np.iinfo(REQUEST["model"]).max) + 1
"""Models that an arm may have; it has no more targets either, and a run no more generators."""

Rows = NDArray[np.void]
"""Requests: rows of `REQUEST`."""


def measured(rows: Rows) -> Rows:
    """Returns the requests that were due inside the window."""
    window: Rows = rows[rows["measured"]]
    return window


def answered(rows: Rows) -> Rows:
    """Returns the measured requests that were answered correctly."""
    correct: Rows = rows[rows["measured"] & (rows["status"] == Status.OK)]
    return correct


Role = Literal["measure", "search", "confirm", "curve"]
"""What a block is for."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a model."""

    name: str
    mode: str
    model: str
    target: str
    """"embedded", "in-process", "null", or HOST:PORT, several of them with commas between."""
    is_control_of: str | None = None
    """The arm that this one repeats; an A/A control must come out equal to it."""
    models: tuple[str, ...] = ()
    """Models of a mix, of which `model` then says the shares; empty for one model."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses that its requests go to in turn."""
        return tuple(self.target.split(","))

    @property
    def served(self) -> tuple[str, ...]:
        """Names of the models that its requests are for."""
        return self.models or (self.model,)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the generator ran."""

    cpu: str
    cores: int
    gpus: tuple[str, ...]
    system: str
    python: str
    packages: Mapping[str, str]
    """Versions by name."""
    flags: Mapping[str, str]
    """XLA_FLAGS and other variables that change what runs, where they are set."""
    git_revision: str | None = None
    machine_ids: tuple[str, ...] = ()
    """Hashes by which a machine is known again, of its boot and of its name; empty in older files."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: what was asked for."""

    kind: ClassVar[str] = "header"
    started_at: str
    """ISO 8601, UTC."""
    command: tuple[str, ...]
    configuration: Mapping[str, Any]
    """Every option in force."""
    seed: int
    scenario: str | None
    baseline: str | None
    """The arm that the others are compared with."""
    arms: tuple[Arm, ...]
    environment: Environment
    schema: str = SCHEMA


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A program that the server compiled."""

    mode: str
    bucket: tuple[int, int, int]
    """Batch, height, width."""
    trace_s: float
    compile_s: float
    run_s: float
    run_loaded_s: float | None = None
    """A run with every lane busy."""
    at: str | None = None
    """When it was compiled, ISO 8601."""
    model: str | None = None
    """None where the server has one model."""
    from_cache: bool = False
    """Whether it was loaded from the compile cache: `trace_s` and `compile_s` are then what loading took."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that was started or found."""

    kind: ClassVar[str] = "server"
    id: int
    arms: tuple[str, ...]
    address: str
    name: str
    pid: int | None = None
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The server's description of each model: source, weights, modes, buckets ..."""
    ledger: tuple[LedgerEntry, ...] = ()
    ready_s: float | None = None
    """From its start to ready; None for a server that was running before."""


@dataclass(frozen=True, slots=True)
class GeneratorLine:
    """A generator on another machine, or in another process of `loadtest generate`."""

    kind: ClassVar[str] = "generator"
    address: str
    """HOST:PORT."""
    machine: str
    """Its name for itself."""
    workers: int
    """Processes that send."""
    environment: Environment


@dataclass(frozen=True, slots=True)
class LoadLine:
    """What was asked of the target in a block."""

    type: Literal["closed", "open", "offline"]
    concurrency: int | None = None
    rate_per_s: float | None = None
    """Requests due each second, the mean where it changes."""
    arrivals: Literal["poisson", "constant", "replay", "ramp"] | None = None
    """`ramp` is only in older files, which do not say of what."""
    ramp_per_s: tuple[float, float] | None = None
    """Where the rate is a ramp: requests due each second at its start and at its end."""
    stages: tuple[tuple[float, float, float], ...] | None = None
    """Where the rate goes through stages: of each the rates at its start and end, and its seconds."""
    burst: int = 1
    """Requests due at the same moment."""
    images_per_request: str = "1"


@dataclass(frozen=True, slots=True)
class MachineUse:
    """What the generator on one machine did in a block. Fields that are not explained are as in GeneratorUse."""

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
    """How far times of its requests may be off at most, where its clock drifted evenly."""
    clock_drift_ms: float
    """How far its clock drifted from the coordinator's."""


@dataclass(frozen=True, slots=True)
class GeneratorUse:
    """What the load generator did in a block, and whether it kept up."""

    workers: int
    cpu_s: float
    sends: int
    late_sends: int = 0
    """Sent more than a millisecond, or 10% of the interval between two, after they were due."""
    dropped: int = 0
    """Requests that were due, but never sent."""
    dropped_by_model: tuple[int, ...] = ()
    """The same for each of the arm's models; empty where all are of the first."""
    compared: int = 0
    """Answers that were compared with what the same request got alone, those of warm-up included."""
    differing: int = 0
    """Answers of these that differ beyond the tolerance."""
    busy: float | None = None
    """Share of the generator's measured ceiling."""
    wait_ms: float | None = None
    """Mean time that an answer waited until a worker's event loop came to it; None in older files."""
    longest_wait_ms: float | None = None
    preemptions: int | None = None
    """How often the scheduler took the processor from a worker (involuntary context switches)."""
    steal: float | None = None
    """Share of the machine's processor time that its hypervisor gave to others."""
    own_ms: float | None = None
    """Median latency of one request at a time to a server on its machine that does nothing; None: not measured."""
    others: float | None = None
    """Share of the machine's processor time that processes other than the load test and its server used; None where
    that can't be told."""
    ceiling_others: float | None = None
    """The same while the ceiling was measured."""
    machines: tuple[MachineUse, ...] = ()
    """Each generator's part, where they run elsewhere (`--generator`); `wait_ms` and `steal` are then the worst's."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one GPU did in a block, for anyone."""

    utilisation: float
    """Mean share from 0 to 1."""
    memory_bytes: int
    """The largest value seen."""


@dataclass(frozen=True, slots=True)
class ServerUse:
    """What the server used in a block; None where it could not be seen."""

    cpu_s: float | None = None
    """CPU time of its process and of all that descend from it."""
    peak_rss_bytes: int | None = None
    """Of the same processes together."""
    gpu_utilisation: float | None = None
    """Of the busiest GPU, from 0 to 1."""
    gpu_memory_bytes: int | None = None
    """Of the GPU with the most."""
    gpus: tuple[GpuUse, ...] = ()
    """The machine's GPUs in the driver's order."""
    gpu_energy_j: float | None = None
    """Energy of all GPUs, whatever they did."""
    cpu_energy_j: float | None = None
    """Energy of the machine's processor packages, whatever they did."""


@dataclass(frozen=True, slots=True)
class Counters:
    """How the server's own counters moved in a block; None where it does not report them."""

    batches_by_bucket: Mapping[str, int] = field(default_factory=dict)
    """Batches by batch size, height and width: "8x224x224"."""
    padded_rows: int | None = None
    images: int | None = None
    compilations: int | None = None
    """Programs of the model that the server compiled beside traffic: no request waited for them."""
    serving_compilations: int | None = None
    """Programs of any model that XLA compiled while requests waited; None where the server does not say."""


@dataclass(frozen=True, slots=True)
class BlockLine:
    """A stretch of the run under one arm and one load; written when it is over."""

    kind: ClassVar[str] = "block"
    index: int
    arm: str
    load: LoadLine
    start_ns: int
    end_ns: int
    generator: GeneratorUse
    role: Role = "measure"
    server: int | None = None
    """Id of the block's server."""
    window_ns: tuple[int, int] | None = None
    """Requests due in this half-open interval are the measured ones; None when it ended in warm-up."""
    steady: bool | None = None
    """Whether it reached a steady state; None where that was not asked."""
    round: int | None = None
    """Blocks of one mirrored round (A B B A) share it."""
    server_use: ServerUse = ServerUse()
    counters: Counters | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """Some requests of one block, in the order in which they ended."""

    kind: ClassVar[str] = "requests"
    block: int
    rows: Rows
    """Their `block` column is ignored."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    kind: ClassVar[str] = "event"
    at_ns: int
    what: str
    """compile, error or note; files of other versions may hold others."""
    text: str


@dataclass(frozen=True, slots=True)
class Equality:
    """How far an arm's outputs are from the baseline's, on the same images."""

    kind: ClassVar[str] = "equality"
    arm: str
    baseline: str
    images: int
    largest_absolute: float
    largest_relative: float
    top1_agreement: float | None
    """Share of images with the same best class; None where outputs are not scores."""
    tolerance_absolute: float
    tolerance_relative: float
    is_equal: bool
    model: str | None = None
    """Model of a mix that gave these outputs."""
    differing: int | None = None
    """Images of requests whose outputs differ beyond the tolerance; None in older files."""

    @property
    def differing_images(self) -> int:
        """Images whose outputs differ: 0 where they are equal on the whole, all where an older file does not say."""
        if self.is_equal:
            return 0
        return self.images if self.differing is None else self.differing


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests of one arm that failed the same way."""

    kind: ClassVar[str] = "failure"
    arm: str
    status: str
    count: int
    message: str
    """The message of one of the requests."""


@dataclass(frozen=True, slots=True)
class End:
    """The last line."""

    kind: ClassVar[str] = "end"
    interrupted: bool
    complete: bool
    """Whether everything that was planned was measured."""
    reason: str = ""


Line = Header | Server | GeneratorLine | BlockLine | Requests | Event | Equality | Failure | End


@dataclass(frozen=True)
class Run:
    """A run file, read."""

    path: Path
    header: Header
    servers: tuple[Server, ...]
    blocks: tuple[BlockLine, ...]
    requests: Rows
    """Requests in the order of the file."""
    events: tuple[Event, ...]
    equalities: tuple[Equality, ...]
    failures: tuple[Failure, ...]
    end: End | None
    """None when the file was cut off."""
    generators: tuple[GeneratorLine, ...] = ()
