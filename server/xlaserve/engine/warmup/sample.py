"""Samples: the rows that programs are verified with, the same every time, and the reference's answers to them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket
from xlaserve.engine.causes import cause
from xlaserve.engine.inputs import RGB_IMAGE, Images, Inputs, InputSpec, Rows, selected
from xlaserve.engine.program import Executable, Outputs, WrongRowsError, run_batch
from xlaserve.errors import ModelFailed

log = logging.getLogger(__name__)

_GRAINS: Final = (2, 4, 8, 16, 32)
"""How many patches the sides of the images are cut into; the other images are noise."""
CONSTANT: Final = {2: (127, 127, 127), 4: (0, 0, 0), 6: (255, 255, 255), 8: (200, 30, 90)}
"""Images of one colour, by their place, as levels of the channels in turn: a model may leave out images that are dark,
saturated, or show nothing. In batches of 2, 3, 4 and 8 there is another image behind one of each kind, whose answer
then takes its place. Their own answers are not compared: some networks answer them with rounding errors, a thousand
times as large as otherwise."""

RowIndices = NDArray[np.intp]
"""Rows of a batch, or places of images in a sample."""


class Sample:
    """`images` images of each resolution of a model, and the answers of its `reference` to them, made when needed.

    `buckets` are the sizes that the reference may be made for. `warn` is called where the reference can't run. Not
    locked.
    """

    def __init__(
        self,
        images: int,
        reference: Executable | None,
        buckets: Iterable[Bucket],
        warn: Callable[[str], object],
        inputs: Inputs = RGB_IMAGE,
    ) -> None:
        self.size = images
        """The number of images."""
        self._inputs = inputs
        self._reference = reference
        self._warn = warn
        batches = {bucket.batch for bucket in buckets}
        # A network that was made for batches of one size only has buckets of no other, and takes no image alone.
        self._reference_batch = batches.pop() if len(batches) == 1 else 1
        self._answered: dict[tuple[int, int], tuple[Rows, Outputs | None]] = {}

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference, which has not turned out to be unable to run."""
        return self._reference is not None

    def at(self, height: int, width: int) -> tuple[Rows, Outputs | None]:
        """Returns the images of a resolution and the reference's answers, None without a reference.

        The reference gives them once for all programs. Raises WrongRowsError where it has rows too few or too many,
        and what `joined` raises.
        """
        size = (height, width)
        if size not in self._answered:
            rows = make_rows(self._inputs, self.size, height, width)
            self._answered[size] = rows, self._answers(rows)
        return self._answered[size]

    def answers(self, rows: Rows) -> Outputs:
        """Returns the reference's answers to `rows` as one batch. Raises the errors of the reference."""
        assert self._reference is not None
        return run_batch(self._reference, *rows)

    def forget(self, height: int, width: int) -> None:
        """Drops the images of a resolution, and the reference's answers."""
        self._answered.pop((height, width), None)

    def _answers(self, rows: Rows) -> Outputs | None:
        if self._reference is None:
            return None
        batch = self._reference_batch
        order = np.arange(math.ceil(self.size / batch) * batch) % self.size
        try:
            answers = joined([self.answers(selected(rows, places)) for places in order.reshape(-1, batch)])
        except (WrongRowsError, ModelFailed):
            raise
        except Exception as error:
            log.debug("no reference", exc_info=error)
            self._warn(
                "its programs are served unverified: TensorFlow can't run the model operation by operation:"
                f" {type(error).__name__}: {cause(error)}"
            )
            self._reference = None
            return None
        return rows_of(answers, np.arange(self.size))


def make_rows(inputs: Inputs, count: int, height: int, width: int) -> Rows:
    """Returns rows of a model's inputs in buckets of this height and width, the same ones every time."""
    return tuple(_rows_of_input(each, seed, count, height, width) for seed, each in enumerate(inputs))


def _rows_of_input(spec: InputSpec, seed: int, count: int, height: int, width: int) -> NDArray[Any]:
    shape = spec.row_shape(height, width)
    if spec.is_image:
        height, width, channels = shape
        return deepened(make_images(count, height, width, channels, seed), spec.dtype)
    return noise_of(np.dtype(spec.dtype), (count, *shape), seed)


def noise_of(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0, *, is_image: bool = False) -> NDArray[Any]:
    """Returns random numbers: levels of images; floats from 0 to 1; other whole numbers are 0 or 1, as they may be
    places in a table."""
    random = np.random.default_rng(seed)
    if is_image:
        return deepened(random.integers(0, 256, shape, dtype=np.uint8), dtype.name)
    if dtype.kind == "f":
        return random.random(shape, np.float32).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)


def deepened(images: NDArray[np.uint8], dtype: str) -> Images:
    """Returns levels as images of `dtype`: of 16 bits from 0 to 65535; as floats from 0 to 255, and every other two of
    them from 0 to 1, as it isn't known which the model was trained on."""
    match dtype:
        case "uint16":
            return images.astype(np.uint16) * np.uint16(257)
        case "float32":
            values = images.astype(np.float32)
            values[np.arange(len(values)) // 2 % 2 == 1] /= 255
            return values
    return images


def make_images(count: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Images:
    """Returns images of noise, of coloured patches, coarse and fine, and of one colour; the same ones every time."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    for index, image in enumerate(images):
        grain = _GRAINS[index % len(_GRAINS)]
        patches = random.integers(0, 256, (grain, grain, channels), dtype=np.uint8)
        if index % 4 != 1:  # every fourth stays noise
            rows, columns = np.arange(height) * grain, np.arange(width) * grain
            image[:] = patches[rows // height][:, columns // width]
    for index, colour in CONSTANT.items():
        images[index : index + 1] = np.resize(colour, channels)
    return images


def compared_rows(images: RowIndices) -> RowIndices:
    """Returns the rows of `images`, places in a sample, whose answers are compared: all but those of one colour."""
    return np.flatnonzero(~np.isin(images, list(CONSTANT)))


def other_batch(rows: RowIndices, images: int) -> RowIndices:
    """Returns the places in a batch, whose `rows` are of `images` different images, that make up another batch: half of
    them, at other places.

    They are every other one, so that the images beside each change as well: a program may divide a batch. Some of them
    are compared.
    """
    batch = len(rows)
    places: RowIndices = 2 * np.arange(batch)[::-1] % (2 * max(1, min(batch, images) // 2))
    return places if len(compared_rows(rows[places])) else places + 1


def joined(batches: list[Outputs]) -> Outputs:
    """Returns the outputs of several batches as those of one.

    Raises ModelFailed where rows of an output differ in shape: answers of one request could not be put together.
    """
    for index, outputs in enumerate(zip(*batches, strict=True)):
        if len(shapes := {output.shape[1:] for output in outputs}) > 1:
            got = " and ".join(map(str, sorted(shapes)))
            raise ModelFailed(f"output {index}: expected rows of one shape for all images, got {got}")
    return tuple(np.concatenate(outputs) for outputs in zip(*batches, strict=True))


def rows_of(outputs: Outputs, rows: RowIndices) -> Outputs:
    """Returns these rows of each output."""
    return tuple(output[rows] for output in outputs)
