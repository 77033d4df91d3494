"""The models that an engine publishes to its fronts."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.inputs import Inputs
from xlaserve.engine.model_engine import ModelEngine
from xlaserve.errors import ModelNotReady
from xlaserve.processes.link.engine_state import ModelSnapshot, Snapshot
from xlaserve.processes.link.link_records import Published


class Hosted(NamedTuple):
    """A model that fronts may use."""

    snapshot: ModelSnapshot
    engine: ModelEngine
    acquire: Callable[[], object] = lambda: None
    """Called for each front to which the model is published."""
    release: Callable[[], object] = lambda: None
    """Called once for each of those fronts, when it does not use the model any more."""


class HostedModels:
    """The models that an engine publishes, by the ids of their snapshots. All methods run on the event loop."""

    def __init__(self) -> None:
        self._models: Mapping[int, Hosted] = {}
        self._snapshot = Snapshot(0, ())
        self._worked: set[int] = set()
        """Models with jobs that have ended since the last call of `levels`."""
        self._worked_before: set[int] = set()
        """The same, of the call before."""

    @property
    def by_id(self) -> Mapping[int, Hosted]:
        """The models, by the ids of their snapshots."""
        return self._models

    def publish(self, models: Iterable[Hosted], details: object) -> None:
        """Replaces the models and the details of the snapshot."""
        self._models = {model.snapshot.id: model for model in models}
        snapshots = tuple(model.snapshot for model in self._models.values())
        self._snapshot = Snapshot(self._snapshot.epoch + 1, snapshots, details)

    def record(self) -> Published:
        """Returns the record that tells fronts of the models."""
        return Published(self._snapshot.epoch, pickle.dumps(self._snapshot))

    def engine(self, model: int) -> ModelEngine:
        """Returns the engine of a model. Raises ModelNotReady."""
        if model not in self._models:
            raise ModelNotReady("the model was unloaded")
        return self._models[model].engine

    def inputs(self, model: int) -> Inputs:
        """Returns the inputs of a model; none for an unknown model, which runs no rows."""
        return () if (hosted := self._models.get(model)) is None else hosted.snapshot.inputs

    def outstanding_s(self, model: int) -> float | None:
        """Returns the seconds in which all that waits and runs of a model should be answered; None for an unknown
        model."""
        return None if (hosted := self._models.get(model)) is None else hosted.engine.outstanding_s()

    def note_work(self, model: int) -> None:
        """Notes that a job of a model has ended: `levels` is to tell the model's load."""
        self._worked.add(model)

    def levels(self) -> dict[int, Live]:
        """Returns the load of each model that has worked since the last call or the one before.

        The one before counts as well: a load that is told before a model's last job has left the model would stand.
        """
        due = self._worked_before | self._worked
        self._worked_before, self._worked = self._worked, set()
        return {number: self._models[number].engine.live() for number in due if number in self._models}
