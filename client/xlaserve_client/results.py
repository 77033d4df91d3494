"""Results of calls: plain frozen values, free of protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a request in each stage inside the server."""

    decode_s: float
    queue_s: float
    gather_s: float
    execute_s: float
    encode_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fields that every answer has."""

    model: str
    version: str
    mode: str
    """The mode in which the model was run; empty where the server does not report it."""
    timings: Timings | None
    """None where the server does not report them."""


@dataclass(frozen=True, slots=True)
class Category:
    """One class and its score."""

    index: int
    label: str
    """The class's name; its index as text where the model has no labels."""
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """The classes of one image."""

    categories: tuple[Category, ...]
    """The likeliest first."""

    @property
    def top(self) -> Category:
        """The likeliest class."""
        return self.categories[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyResult(Answer):
    """The answer of `classify`."""

    classifications: tuple[Classification, ...]
    """One for each image, in the order of the request."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box in pixels of the original image, upright and clipped to it; (0, 0) is its top left corner."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


@dataclass(frozen=True, slots=True)
class Detection:
    """One object."""

    index: int
    """The class's position in the model's output."""
    label: str
    """The class's name; its index as text where the model has no labels."""
    score: float
    box: Box


@dataclass(frozen=True, slots=True)
class Detections:
    """The objects in one image."""

    detections: tuple[Detection, ...]
    """The highest score first."""
    height: int
    """Height of the original image, upright; `width` likewise."""
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectResult(Answer):
    """The answer of `detect`."""

    results: tuple[Detections, ...]
    """One for each image, in the order of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassMap:
    """The class of each pixel of one image."""

    classes: NDArray[np.uint8] | NDArray[np.uint16]
    """The classes' indices, `[height, width]` of the original image, upright; uint16 where one is above 255."""
    labels: tuple[str, ...]
    """The classes' names by their index; empty where the model has no labels."""

    def label(self, index: int) -> str:
        """Returns a class's name; its index as text where it has none."""
        return self.labels[index] if index < len(self.labels) else str(index)

    def counts(self) -> dict[int, int]:
        """Returns the number of pixels of each class in the map, by its index."""
        indices, pixels = np.unique(self.classes, return_counts=True)
        return dict(zip(indices.tolist(), pixels.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult(Answer):
    """The answer of `segment`."""

    maps: tuple[ClassMap, ...]
    """One for each image, in the order of the request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbedResult(Answer):
    """The answer of `embed`."""

    vectors: NDArray[np.float32]
    """`[n, dimensions]`, a row for each image, in the order of the request."""


@dataclass(frozen=True, slots=True)
class Transcription:
    """The sequence of classes in one image."""

    text: str
    """The labels one after the other; the indices with spaces between where the model has no labels."""
    score: float
    """The product of the highest scores of all steps."""
    categories: tuple[Category, ...]
    """The classes in their order, each with its highest score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeResult(Answer):
    """The answer of `transcribe`."""

    transcriptions: tuple[Transcription, ...]
    """One for each image, in the order of the request."""


@dataclass(frozen=True, slots=True)
class Keypoint:
    """One keypoint, in pixels of the original image; it may lie beyond its edges."""

    index: int
    """The keypoint's position in the model's output."""
    label: str
    """Its name; its index as text where the model has no labels."""
    score: float | None
    """None where the model gives none."""
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Keypoints:
    """The keypoints in one image."""

    keypoints: tuple[Keypoint, ...]
    """In the order of the model's output."""
    height: int
    """Height of the original image, upright; `width` likewise."""
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateResult(Answer):
    """The answer of `locate`."""

    results: tuple[Keypoints, ...]
    """One for each image, in the order of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResult(Answer):
    """The answer of `infer`."""

    outputs: Mapping[str, NDArray[Any]]
    """Output tensors by name, their first dimension the image; read-only. BYTES are arrays of objects."""

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
    """Median with every lane of the device running it."""
    from_cache: bool = False
    """Whether it was read from the compile cache instead of being traced and compiled."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An input of a model."""

    name: str
    datatype: str
    """Type by the Open Inference Protocol: UINT8, FP32; BYTES for encoded images."""
    shape: tuple[int, ...]
    """Begins with the batch. -1 is a side of any length."""
    is_image: bool
    """Whether it holds images."""

    def __str__(self) -> str:
        sides = ", ".join(
            "n" if not place else "any" if side < 0 else str(side) for place, side in enumerate(self.shape)
        )
        return f"{self.name} [{sides}] {self.datatype}{' image' if self.is_image else ''}"


@dataclass(frozen=True, slots=True)
class Model:
    """A configured model and its state."""

    name: str
    version: str
    state: str
    """loading, compiling, ready, draining, unloaded or failed."""
    reason: str
    """Why the model failed; empty where it did not."""
    source: str
    weights: str
    """Origin of the weights; with "random", answers are meaningless."""
    task: str
    fit: str
    """How encoded images are fitted to the model's size: resize, letterbox, pad or reject."""
    modes: tuple[str, ...]
    default_mode: str
    buckets: tuple[Bucket, ...]
    programs: tuple[Program, ...]
    """Programs that are compiled so far, in the order of compilation."""
    programs_total: int
    compile_s: float
    """Trace and compile seconds of all programs."""
    precision: str = ""
    """The type that the model computes in: float32, bfloat16 or float16."""
    decode: str = ""
    """How JPEG images are decoded: exact or fast."""
    pixels: str = ""
    """The pixels that the model takes, as in `[n, 224, 224, 3] rgb`."""
    warnings: tuple[str, ...] = ()
    """Warnings about the model's answers and how it is served."""
    inputs: tuple[ModelInput, ...] = ()
    """The inputs by their names; empty while the model is not ready."""

    @property
    def is_of_one_image(self) -> bool:
        """Whether the only input holds images, as far as known: all methods take its images."""
        return not self.inputs or (len(self.inputs) == 1 and self.inputs[0].is_image)
