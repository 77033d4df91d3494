"""What the client answers: plain frozen values, free of protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went inside the server, in seconds."""

    decode_s: float
    queue_s: float
    gather_s: float
    execute_s: float
    encode_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Category:
    """One class and what the model gives for it."""

    index: int
    label: str
    """The class's name; its index as text where the model has no labels."""
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """What is in one image."""

    categories: tuple[Category, ...]
    """The likeliest first."""

    @property
    def top(self) -> Category:
        """The likeliest class."""
        return self.categories[0]


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """The answer of `classify`."""

    classifications: tuple[Classification, ...]
    """One for each image, in the order of the request."""
    model: str
    version: str
    mode: str
    """How it was run; empty where the server does not say."""
    timings: Timings | None
    """None where the server does not say."""


@dataclass(frozen=True, slots=True)
class InferResult:
    """The answer of `infer`."""

    outputs: Mapping[str, NDArray[Any]]
    """Output tensors by name, their first dimension the image; read-only. BYTES are arrays of objects."""
    model: str
    version: str
    mode: str
    """How it was run; empty where the server does not say."""
    timings: Timings | None
    """None where the server does not say."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """A classifier's `scores`, float32 `[n, classes]`. Raises KeyError for a model of another task."""
        return self.outputs["scores"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A padded input shape that was compiled ahead of traffic."""

    batch: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Program:
    """One entry of a model's compile ledger."""

    mode: str
    bucket: Bucket
    trace_s: float
    compile_s: float
    run_s: float
    """Median of several runs, alone on the device."""
    run_loaded_s: float
    """The same with every lane of the device running it."""


@dataclass(frozen=True, slots=True)
class Model:
    """A configured model and its state."""

    name: str
    version: str
    state: str
    """loading, compiling, ready, draining, unloaded or failed."""
    reason: str
    """Why it failed."""
    source: str
    weights: str
    """Where the weights came from; "random" means that the answers mean nothing."""
    task: str
    modes: tuple[str, ...]
    default_mode: str
    buckets: tuple[Bucket, ...]
    programs: tuple[Program, ...]
    """What was compiled so far, in the order of compilation."""
    programs_total: int
    compile_s: float
    """Trace and compile seconds of all programs."""
