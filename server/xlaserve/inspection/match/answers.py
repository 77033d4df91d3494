"""A model's answers to images with other settings than its own, without compiling it for each."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs, run_batch
from xlaserve.engine.warmup.sample import joined, rows_of
from xlaserve.errors import ModelFailed, RequestError
from xlaserve.images.decoder import Decoded, ImageLimits
from xlaserve.images.frame import Frame
from xlaserve.inspection.match.choices import Changes, Choice, Part
from xlaserve.models import examples as compared_examples
from xlaserve.models.catalog import Model
from xlaserve.models.encoded_images import decode_for
from xlaserve.models.example_files import Examples, for_task
from xlaserve.models.examples import Compared
from xlaserve.models.networks import preprocess
from xlaserve.models.task import Classification
from xlaserve.programs.tf.function import Function
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

LEAST_SPREAD: Final = 1e-4
"""The least difference between expected answers to two images, as a share of the largest number."""
EXACT_SHARE: Final = 0.01
"""The share of that difference that rounding may make."""
EXACT: Final = 1e-4
"""The largest difference, as a share of the largest number, that another machine or mode makes in float32."""
MOST_PIXEL_BYTES: Final = 256 << 20
"""Bytes of decoded images that are kept for further settings."""
_BATCH: Final = 8

Rows = tuple[int, ...]
"""Images, as places among the examples."""


class _Pixels(NamedTuple):
    """Images as a model takes them, before they are scaled."""

    images: NDArray[Any]
    frames: list[Frame]


class Answers:
    """Answers of a model to its examples; each image is read once, and each tensor runs once.

    `model` was built with `preprocess: none`, in float32; `choices` are what there is to try. Raises ModelFailed where
    an image can't be read, or where the expected outputs are not of the model's task.
    """

    def __init__(self, model: Model, choices: tuple[Choice, ...], examples: Examples, limits: ImageLimits) -> None:
        if not isinstance(model.program, TensorFlowProgram) or model.program.bare is None:
            raise ModelFailed(f"expected a model that TensorFlow runs, got {model.settings.source}")
        self.model, self.choices, self.examples = model, choices, examples
        self._limits = limits
        self._size = model.buckets[0][1:]
        self._wanted = for_task(examples, model.task, model.settings)
        if len(examples) == 1:
            raise ModelFailed("expected outputs for several images, as one image tells few settings apart; got one")
        self.spread = _spread(self._wanted, model)
        """The largest difference of two expected answers, as a share of the largest number; 1 without floats."""
        if self.spread < LEAST_SPREAD:
            raise ModelFailed(
                "the expected outputs are the same for all images, so that they tell no settings apart; expected"
                " outputs of a trained model for different images"
            )
        self._files = [compared_examples.read_image(examples, row, limits) for row in range(len(examples))]
        spec = tf.TensorSpec((model.batch, *self._size, model.image.channels), tf.float32)
        bare = tf.function(model.program.bare, autograph=False, jit_compile=False)
        self._network = Function(bare.get_concrete_function(spec))
        self._of_pixels = [choice.field for choice in choices if choice.part in (Part.PLACE, Part.COLOR)]
        self._pixels: OrderedDict[object, _Pixels] = OrderedDict()
        self._outputs: dict[bytes, Outputs] = {}
        self.runs = 0
        """Batches of images that the network ran, each of other numbers."""

    def of(self, changes: Changes, rows: Rows) -> Outputs:
        """Returns the answers with the settings `changes` to some images."""
        return self._of(self._decoded(changes, rows), changes)

    def compare(self, changes: Changes, rows: Rows) -> Compared:
        """Compares the answers with the settings `changes` to some images with the expected ones."""
        pixels = self._decoded(changes, rows)
        wanted = rows_of(self._wanted, np.array(rows))
        return compared_examples.compare(self.model.task, wanted, self._of(pixels, changes), pixels.frames)

    def wanted(self, rows: Rows) -> Outputs:
        """Returns the expected answers to some images."""
        return rows_of(self._wanted, np.array(rows))

    def is_random(self, changes: Changes) -> bool:
        """Returns whether the network answers the same image differently each time."""
        values = _scaled(self._decoded(changes, (0,)), changes)
        once, again = self._run(values), self._run(values)
        return any(not np.allclose(one, other, atol=1e-4) for one, other in zip(once, again, strict=True))

    @property
    def exact(self) -> float:
        """The largest difference of answers that are the expected ones."""
        return min(EXACT, EXACT_SHARE * self.spread)

    def telling(self, changes: Changes) -> Rows:
        """Returns the images in an order in which those come first that tell most about the place of their pixels: the
        ones least like the model's size and shape."""
        height, width = self._size
        frames = self._decoded(changes, tuple(range(len(self._files)))).frames

        def likeness(row: int) -> float:
            frame = frames[row]
            shape = abs(math.log(frame.height * width / (frame.width * height)))
            return -(shape + abs(math.log(frame.height * frame.width / (height * width))))

        return tuple(sorted(range(len(frames)), key=likeness))

    def _of(self, pixels: _Pixels, changes: Changes) -> Outputs:
        values = _scaled(pixels, changes)
        digest = hashlib.sha1(values.tobytes(), usedforsecurity=False).digest()
        if digest not in self._outputs:
            self._outputs[digest] = self._run(values)
        return activated(self.model, self._outputs[digest], changes.get("activation"))

    def _run(self, values: NDArray[np.float32]) -> Outputs:
        self.runs += 1
        batch = self.model.batch or min(len(values), _BATCH)
        got = []
        for start in range(0, len(values), batch):
            taken = values[start : start + batch]
            whole = taken[np.arange(self.model.batch or len(taken)) % len(taken)]
            got.append(tuple(output[: len(taken)] for output in run_batch(self._network, whole)))
        return joined(got)

    def _decoded(self, changes: Changes, rows: Rows) -> _Pixels:
        key = (rows, *(changes.get(field) for field in self._of_pixels))
        if key not in self._pixels:
            settings = self.model.settings.model_copy(update=dict(changes))
            image = replace(self.model.image, color=changes.get("color", self.model.image.color))
            model = replace(self.model, settings=settings, image=image)
            decoded = [self._decode(model, row) for row in rows]
            self._pixels[key] = _Pixels(np.stack([one.pixels for one in decoded]), [one.frame for one in decoded])
            while (
                sum(kept.images.nbytes for kept in self._pixels.values()) > MOST_PIXEL_BYTES and len(self._pixels) > 1
            ):
                self._pixels.popitem(last=False)
        self._pixels.move_to_end(key)
        return self._pixels[key]

    def _decode(self, model: Model, row: int) -> Decoded:
        try:
            return decode_for(model, self._files[row], partial(model.place, self._size), self._limits)
        except RequestError as error:
            raise ModelFailed(f"{self.examples.names[row]}: {error}") from None


def _spread(wanted: Outputs, model: Model) -> float:
    floats = [values for values in model.task.comparable(wanted) if values.dtype.kind == "f"]
    shares = [float(np.ptp(values, axis=0).max() / (np.abs(values).max() or 1.0)) for values in floats]
    return max(shares, default=1.0)


def _scaled(pixels: _Pixels, changes: Changes) -> NDArray[np.float32]:
    values: NDArray[np.float32] = preprocess.apply(
        tf.constant(pixels.images), changes.get("preprocess", "none")
    ).numpy()
    return values


def activated(model: Model, outputs: Outputs, activation: Any) -> Outputs:
    """Returns the outputs of a classification as the setting `activation` makes them of those without."""
    task = model.task
    if activation is None or not isinstance(task, Classification) or model.settings.activation is not None:
        return outputs
    scores = outputs[task.at].astype(np.float64)
    if activation == "softmax":
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return ((shares / shares.sum(axis=1, keepdims=True)).astype(np.float32),)
    with np.errstate(over="ignore"):
        if task.threshold is None:
            return ((1 / (1 + np.exp(-scores))).astype(np.float32),)
        second = 1 / (1 + np.exp(-scores[:, 1:]))
    return (np.concatenate((1 - second, second), axis=1).astype(np.float32),)
