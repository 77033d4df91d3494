"""What fronts are told of the models: plain data, which can be pickled."""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.warmup.difference import Difference
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.models.catalog import Model
from xlaserve.models.directory import Directory
from xlaserve.models.task import Datatype, TensorSpec
from xlaserve.models.version import Served, State, Version
from xlaserve.processes.link.engine_state import ModelSnapshot
from xlaserve.programs.tf.device import Device
from xlaserve.programs.watch.xla_log import XlaCompilation

ITEM_BYTES: Final[dict[Datatype, int]] = {"FP32": 4, "INT32": 4, "UINT8": 1}


@dataclass(slots=True)
class Elsewhere:
    """A program that another process has."""

    platform: str

    def compile(self, mode: Mode, bucket: Bucket) -> NoReturn:
        """Does nothing here."""
        raise NotImplementedError(f"{mode} {bucket}: models are compiled in the engine's process")


class Facts(NamedTuple):
    """What a version is."""

    settings: ModelSettings
    model: Model | None
    """Its program is `Elsewhere`; None until it is loaded."""
    auto: Mapping[Bucket, Mode]
    differences: Mapping[Mode, Difference]
    decode_difference: Difference | None
    warnings: tuple[str, ...]
    entries: tuple[Entry, ...]
    """Of its ledger."""


class Loading(NamedTuple):
    """One loading of a version, as it is now."""

    number: int
    """Names it among all that the engine ever has, and the one before it and after it."""
    state: State
    reason: str
    takes_requests: bool
    facts: bytes
    """`Facts`, pickled: fronts read them only where they have changed."""


class Catalogue(NamedTuple):
    """All versions, in their order, and how requests find them."""

    is_ready: bool
    loadings: tuple[Loading, ...]
    labels: Mapping[str, Mapping[str, str]]
    """By model, the version that each label names."""
    shares: Mapping[str, Mapping[str, float]]
    """By model, what of the requests that name no version each label or version answers."""


class About(NamedTuple):
    """What fronts are told of the engine with each change."""

    catalogue: Catalogue
    device: Device
    unexpected: tuple[XlaCompilation, ...]
    is_watched: bool | None


class Publisher:
    """Says what there is in `directory`, numbering loadings from `first` on. On the event loop."""

    def __init__(self, directory: Directory, first: int = 1) -> None:
        self._directory = directory
        self._next = count(first)
        self._numbers: WeakKeyDictionary[Version, int] = WeakKeyDictionary()
        self._facts: WeakKeyDictionary[Version, tuple[object, bytes]] = WeakKeyDictionary()

    def number(self, version: Version) -> int:
        """Returns what names this loading of a version."""
        if version not in self._numbers:
            self._numbers[version] = next(self._next)
        return self._numbers[version]

    def numbered(self) -> dict[int, Version]:
        """Returns all loadings by what names them."""
        return {self.number(version): version for version in self._directory.index()}

    def signs(self) -> object:
        """Returns what differs once the catalogue does; cheap."""
        versions = self._directory.index()
        shapes = [version.served.batcher.shapes() for version in versions if version.served is not None]
        return self._directory.is_ready, [(*_signs(version), version.state) for version in versions], shapes

    def catalogue(self) -> Catalogue:
        """Returns what there is now."""
        versions = self._directory.index()
        names = {version.name for version in versions}
        return Catalogue(
            self._directory.is_ready,
            tuple(map(self._loading, versions)),
            {name: dict(self._directory.labels(name)) for name in names},
            {name: dict(self._directory.shares(name)) for name in names},
        )

    def serving(self) -> Collection[tuple[ModelSnapshot, Served]]:
        """Returns those that take requests."""
        return [
            (snapshot(version.served, self.number(version)), version.served)
            for version in self._directory.index()
            if version.served is not None
        ]

    def _loading(self, version: Version) -> Loading:
        signs = _signs(version)
        before, facts = self._facts.get(version, (None, b""))
        if before != signs:
            facts = pickle.dumps(_facts(version))
            self._facts[version] = signs, facts
        return Loading(self.number(version), version.state, version.reason, version.served is not None, facts)


def _signs(version: Version) -> tuple[object, ...]:
    model = version.model
    return (
        id(version),
        tuple(version.ledger),
        len(version.warnings),
        len(version.auto),
        len(version.differences),
        version.decode_difference,
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
        tuple(version.warnings),
        tuple(version.ledger),
    )


def snapshot(served: Served, number: int) -> ModelSnapshot:
    """Returns what a link needs to know of a version that serves; `number` names this loading of it."""
    batcher, model = served.batcher, served.model
    admission, largest = batcher.admission, batcher.shapes()
    resolutions = sorted({(height, width) for _, height, width in largest})
    return ModelSnapshot(
        id=number,
        title=served.settings.title,
        is_open=not admission.is_closed,
        max_images=admission.max_images,
        max_bytes=admission.max_bytes,
        output_bytes={size: tuple(row_bytes(output, *size) for output in model.task.outputs) for size in resolutions},
        largest=largest,
        unmatched=None if batcher.opener is None else batcher.opener.unmatched,
    )


def row_bytes(output: TensorSpec, height: int, width: int) -> int:
    """Returns the bytes of an output for one image of this size."""
    sides: Iterator[int] = iter((height, width))
    return ITEM_BYTES[output.datatype] * math.prod(next(sides) if side == -1 else side for side in output.shape[1:])
