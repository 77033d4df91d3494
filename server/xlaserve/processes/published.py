"""The catalogue of models that an engine publishes to its fronts: plain data, which can be pickled."""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.warmup.difference import Difference
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.models.catalog import Model
from xlaserve.models.task import DATATYPES, Datatype, Task, TensorSpec
from xlaserve.models.version import Served, State, Version
from xlaserve.models.version_lookup import Directory
from xlaserve.processes.link.engine_state import ModelSnapshot
from xlaserve.programs.tf.device import Device
from xlaserve.programs.watch.xla_log import XlaCompilation

ITEM_BYTES: Final[dict[Datatype, int]] = {datatype: dtype.itemsize for dtype, datatype in DATATYPES.items()}


@dataclass(slots=True)
class Elsewhere:
    """A stand-in for a program that is in another process."""

    platform: str

    def compile(self, mode: Mode, bucket: Bucket) -> NoReturn:
        """Raises NotImplementedError."""
        raise NotImplementedError(f"{mode} {bucket}: models are compiled in the engine's process")


class Facts(NamedTuple):
    """The properties of a version, from its settings to its ledger."""

    settings: ModelSettings
    model: Model | None
    """The model, with an `Elsewhere` for its program; None until it is loaded."""
    auto: Mapping[Bucket, Mode]
    differences: Mapping[Mode, Difference]
    decode_difference: Difference | None
    examples: Mapping[Mode, Difference]
    warnings: tuple[str, ...]
    entries: tuple[Entry, ...]
    """The entries of the version's ledger."""


class Loading(NamedTuple):
    """One loading of a version, with its present state."""

    number: int
    """Identifies the loading among those of all engines that run at the same time."""
    state: State
    reason: str
    takes_requests: bool
    facts: bytes
    """Pickled `Facts`: fronts unpickle them only when they have changed."""


class Catalogue(NamedTuple):
    """All loadings, in their order, and the labels and shares by which requests choose between them."""

    is_ready: bool
    loadings: tuple[Loading, ...]
    labels: Mapping[str, Mapping[str, str]]
    """By model and label, the number of the version that the label names."""
    shares: Mapping[str, Mapping[str, float]]
    """Percentages of the requests without a version, by model, and by the label or version that they go to."""


class EngineReport(NamedTuple):
    """The state of an engine, published to its fronts with each change."""

    catalogue: Catalogue
    device: Device
    unexpected: tuple[XlaCompilation, ...]
    is_watched: bool | None


class Publisher:
    """Describes the models of `directory` for fronts, and numbers their loadings from `first` on. On the event loop."""

    def __init__(self, directory: Directory, first: int = 1) -> None:
        self._directory = directory
        self._next = count(first)
        self._numbers: WeakKeyDictionary[Version, int] = WeakKeyDictionary()
        self._facts: WeakKeyDictionary[Version, tuple[object, bytes]] = WeakKeyDictionary()

    def number(self, version: Version) -> int:
        """Returns the number of this loading of a version."""
        if version not in self._numbers:
            self._numbers[version] = next(self._next)
        return self._numbers[version]

    def numbered(self) -> dict[int, Version]:
        """Returns all loadings by their numbers."""
        return {self.number(version): version for version in self._directory.index()}

    def fingerprint(self) -> object:
        """Returns an object that differs from an earlier one if the catalogue does. Cheap."""
        versions = self._directory.index()
        shapes = [batcher.shapes() for _, batcher in self._serving()]
        return self._directory.is_ready, [(*_fingerprint(version), version.state) for version in versions], shapes

    def catalogue(self) -> Catalogue:
        """Returns the present catalogue."""
        versions = self._directory.index()
        names = {version.name for version in versions}
        return Catalogue(
            self._directory.is_ready,
            tuple(map(self._loading, versions)),
            {name: dict(self._directory.labels(name)) for name in names},
            {name: dict(self._directory.shares(name)) for name in names},
        )

    def serving(self) -> Collection[tuple[ModelSnapshot, Served]]:
        """Returns the versions that take requests, each with what a link needs to know of it."""
        return [(snapshot(served, batcher, self.number(served.version)), served) for served, batcher in self._serving()]

    def _serving(self) -> Iterator[tuple[Served, Batcher]]:
        for version in self._directory.index():
            if version.served is not None and version.batcher is not None:
                yield version.served, version.batcher

    def _loading(self, version: Version) -> Loading:
        fingerprint = _fingerprint(version)
        before, facts = self._facts.get(version, (None, b""))
        if before != fingerprint:
            facts = pickle.dumps(_facts(version))
            self._facts[version] = fingerprint, facts
        return Loading(self.number(version), version.state, version.reason, version.served is not None, facts)


def _fingerprint(version: Version) -> tuple[object, ...]:
    model = version.model
    return (
        id(version),
        tuple(version.ledger),
        len(version.warnings),
        len(version.auto),
        len(version.differences),
        version.decode_difference,
        len(version.examples),
        model is not None and model.buckets,
    )


def _facts(version: Version) -> Facts:
    model = version.model
    if model is not None:
        model = replace(model, program=Elsewhere(model.program.platform), reference=None)
    return Facts(
        version.settings,
        model,
        dict(version.auto),
        dict(version.differences),
        version.decode_difference,
        dict(version.examples),
        tuple(version.warnings),
        tuple(version.ledger),
    )


def snapshot(served: Served, batcher: Batcher, number: int) -> ModelSnapshot:
    """Returns the snapshot for links of a version that `batcher` runs; `number` is that of its loading."""
    model = served.model
    admission, largest = batcher.admission, batcher.shapes()
    resolutions = sorted({(height, width) for _, height, width in largest})
    measured = {entry.bucket[1:]: entry.verified.row_bytes for entry in served.version.ledger if entry.verified}
    return ModelSnapshot(
        id=number,
        title=served.settings.title,
        is_open=not admission.is_closed,
        max_images=admission.max_images,
        max_bytes=admission.max_bytes,
        inputs=model.inputs,
        output_bytes={size: measured.get(size) or described(model.task, *size) for size in resolutions},
        largest=largest,
        unmatched=batcher.unmatched,
    )


def described(task: Task, height: int, width: int) -> tuple[int, ...]:
    """Returns the bytes of one row of each output, as the task describes them, for images of `height` x `width` pixels.

    For sizes that no program has run in yet.
    """
    return tuple(_row_bytes(output, height, width) for output in task.outputs)


def _row_bytes(output: TensorSpec, height: int, width: int) -> int:
    sides: Iterator[int] = iter((height, width))
    return ITEM_BYTES[output.datatype] * math.prod(next(sides) if side == -1 else side for side in output.shape[1:])
