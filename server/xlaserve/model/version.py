"""One loading of one model, and what a request needs of it once it is ready."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from xlaserve.config import Bucket, BucketSettings, Fit, Mode, ModelSettings
from xlaserve.engine.batcher import Batcher
from xlaserve.engine.ledger import Entry, Ledger
from xlaserve.errors import InvalidArgument
from xlaserve.model.catalog import Model
from xlaserve.model.task import Detection, Segmentation
from xlaserve.telemetry.model import ModelTelemetry


class State(StrEnum):
    """Where a model is in its life."""

    LOADING = "LOADING"
    COMPILING = "COMPILING"
    READY = "READY"
    DRAINING = "DRAINING"
    UNLOADED = "UNLOADED"
    FAILED = "FAILED"


class Version:
    """One loading of one model."""

    def __init__(self, settings: ModelSettings, telemetry: ModelTelemetry, on_record: Callable[[Entry], None]) -> None:
        self.settings = settings
        self.telemetry = telemetry
        self.ledger = Ledger(on_record)
        self.state = State.LOADING
        self.reason = ""
        """Why it failed."""
        self.model: Model | None = None
        self.batcher: Batcher | None = None
        self.auto: dict[Bucket, Mode] = {}
        """The mode that `auto` runs each bucket in."""

    @property
    def auto_text(self) -> str:
        """`auto` in words: `1x224x224 in graph, 8x224x224 in xla`."""
        return ", ".join(f"{bucket} in {mode}" for bucket, mode in sorted(self.auto.items()))

    @property
    def name(self) -> str:
        """The model's name."""
        return self.settings.name

    @property
    def programs_total(self) -> int:
        """How many programs warm-up compiles; at most so many while it measures candidates."""
        if self.model is None:
            return self.settings.most_programs
        # With `buckets: auto`, more were measured than are kept.
        return max(len(self.settings.compiled_modes) * len(self.model.buckets), len(self.ledger))

    @property
    def progress(self) -> str:
        """Why it failed, or how far its warm-up is."""
        if self.state is State.COMPILING:
            return f"{len(self.ledger)} of {self.programs_total} programs compiled"
        return self.reason


class Served:
    """A version that is ready: what a request needs of it, all there."""

    def __init__(self, version: Version, model: Model, batcher: Batcher) -> None:
        self.settings = version.settings
        self.auto_text = version.auto_text
        self.telemetry = version.telemetry
        self.model = model
        self.batcher = batcher
        self.sizes = frozenset((bucket.height, bucket.width) for bucket in model.buckets)
        """The resolutions that have buckets."""
        settings = version.settings
        first = settings.buckets[0] if settings.buckets else BucketSettings(1)
        own = settings.resolutions[0] if settings.resolutions else settings.input_size
        # Without either, the model has one size only, and so have all its buckets.
        height, width = (first.height, first.width) if first.height else own or (None, None)
        self.image_size = (height or model.buckets[0].height, width or model.buckets[0].width)
        """Height and width that encoded images are fitted to: those of the first configured bucket."""

    @property
    def fit(self) -> Fit:
        """How encoded images come to have the model's size."""
        shows_places = isinstance(self.model.task, (Detection, Segmentation))
        return self.settings.fit or (Fit.LETTERBOX if shows_places else Fit.RESIZE)

    def mode(self, name: str) -> Mode:
        """Returns the mode that a request asks for, the default for an empty name. Raises InvalidArgument."""
        if not name:
            return self.settings.effective_default_mode
        for mode in self.settings.modes:
            if mode == name:
                return mode
        raise InvalidArgument("mode", f"one of {', '.join(self.settings.modes)}", repr(name))
