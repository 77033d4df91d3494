"""The lines of a run file, in types. `run_file` writes and reads them.

Runs and reports share nothing else. The format is documented in docs/loadtest-run-format.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from xlaserve_loadtest.record.blocks import BlockLine
from xlaserve_loadtest.record.requests import Rows

SCHEMA: Final = "xlaserve.loadtest.run/1"
SUFFIX: Final = ".run.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a model, which is measured or compared with others."""

    name: str
    mode: str
    model: str
    target: str
    """"embedded", "in-process", "null", or HOST:PORT, several of them with commas between."""
    is_control_of: str | None = None
    """The arm that this A/A control repeats, and whose figures it must equal; None for other arms."""
    models: tuple[str, ...] = ()
    """Names of the models of a mix, whose shares `model` then states as text; empty for one model."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses to which the arm's requests are sent in turn."""
        return tuple(self.target.split(","))

    @property
    def served(self) -> tuple[str, ...]:
        """Names of the models of the arm's requests."""
        return self.models or (self.model,)


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the software of a generator."""

    cpu: str
    cores: int
    gpus: tuple[str, ...]
    system: str
    python: str
    packages: Mapping[str, str]
    """Versions by name."""
    flags: Mapping[str, str]
    """XLA_FLAGS and other environment variables that change a program, where they are set."""
    git_revision: str | None = None
    machine_ids: tuple[str, ...] = ()
    """Hashes of the machine's boot id and name, which identify it; empty in older files."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: the configuration of the run."""

    kind: ClassVar[str] = "header"
    started_at: str
    """ISO 8601, UTC."""
    command: tuple[str, ...]
    configuration: Mapping[str, Any]
    """Every option in force."""
    seed: int
    scenario: str | None
    baseline: str | None
    """The arm with which the others are compared; None where nothing is compared."""
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
    """Median seconds of a run with every lane busy."""
    at: str | None = None
    """Time of compilation, ISO 8601."""
    model: str | None = None
    """None where the server has one model."""
    from_cache: bool = False
    """Whether it was loaded from the compile cache: `trace_s` and `compile_s` are then the seconds of loading."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that the run started, or that was running before."""

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
    """Seconds from start to ready; None for a server that was running before."""


@dataclass(frozen=True, slots=True)
class GeneratorLine:
    """A generator on another machine, or in another process of `loadtest generate`."""

    kind: ClassVar[str] = "generator"
    address: str
    """HOST:PORT."""
    machine: str
    """The machine's name, as the generator reports it."""
    workers: int
    """Number of processes that send requests."""
    environment: Environment


@dataclass(frozen=True, slots=True)
class Requests:
    """Some requests of one block, in the order in which they ended."""

    kind: ClassVar[str] = "requests"
    block: int
    rows: Rows
    """Requests of the block; their `block` column is ignored."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run."""

    kind: ClassVar[str] = "event"
    at_ns: int
    what: str
    """compile, error or note; files of other versions may hold others."""
    text: str


@dataclass(frozen=True, slots=True)
class Equality:
    """Differences of an arm's outputs from the baseline's, or from its own earlier ones, on the same images."""

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
    """The model of a mix that was compared; None where an arm has one model."""
    differing: int | None = None
    """Number of images in requests whose outputs differ beyond the tolerance; None in older files."""
    incomparable: str = ""
    """Why the outputs can't be compared, which counts as if all of them differed: `images` is then 0."""

    @property
    def pair(self) -> str:
        """The comparison in words: "xla against graph" or "xla against itself"."""
        return f"{self.arm} against {'itself' if self.arm == self.baseline else self.baseline}"

    @property
    def differing_images(self) -> int:
        """Number of images whose outputs differ: 0 where `is_equal`; all images where an older file has no number."""
        if self.is_equal:
            return 0
        return self.images if self.differing is None else self.differing


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests of one arm that failed with the same status."""

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
    """The contents of a run file."""

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
    """None where the file was cut off."""
    generators: tuple[GeneratorLine, ...] = ()
