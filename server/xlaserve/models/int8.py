"""Makes a model int8 for OpenVINO, on a user's images, and measures the loss of agreement and the gain in speed."""

from __future__ import annotations

import logging
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from xlaserve.config import Bucket, Mode, Precision
from xlaserve.engine.inputs import Images, Inputs, shapes
from xlaserve.engine.program import Outputs
from xlaserve.engine.warmup.compiler import noise
from xlaserve.errors import ConfigError, ModelFailed, RequestError
from xlaserve.images.decoder import Decoded, ImageLimits
from xlaserve.images.frame import Frame
from xlaserve.models import verification
from xlaserve.models.catalog import Model
from xlaserve.models.encoded_images import decode_for
from xlaserve.models.likeness import OfImage, likeness
from xlaserve.models.task import Detection
from xlaserve.programs.openvino.calibration import Size
from xlaserve.programs.openvino.openvino_program import CompiledModel, ConvertedGraph, Shapes
from xlaserve.programs.openvino.quantize import quantize
from xlaserve.programs.tf.openvino_graph import openvino_threads
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.telemetry.findings import Likeness

log = logging.getLogger(__name__)

HELD_OUT_OF: Final = 5
"""One image of so many is held out."""
MIN_IMAGES: Final = 50
"""With fewer images, the ranges and the agreement would be chance."""
MIN_ROUNDS: Final = 5
MAX_ROUNDS: Final = 25
TIMING_BUDGET_S: Final = 5.0


class Speed(NamedTuple):
    """The time of a batch: medians of runs of all precisions in turn."""

    seconds: float
    processor_seconds: float
    """Processor time of all threads together, which other work on the machine changes less."""


@dataclass(frozen=True)
class Int8:
    """A model in int8 for images of one size, and what was measured of it."""

    size: Size
    graph: ConvertedGraph
    digest: str
    """The digest of the graph in float32."""
    held_out: int
    """Number of images it was compared on."""
    agreement: float
    """The mean of `Likeness.agreement` over them."""
    difference: float | None
    """The largest `Likeness.difference` of them."""
    bucket: Bucket
    """The bucket that was timed."""
    speeds: Mapping[Precision, Speed]


class ImageFolder:
    """The images in a folder and in those in it, as the server would decode them for a model.

    One of HELD_OUT_OF is held out. Of more than `most`, as many are taken. Both are chosen by chance, the same ones
    each time. Raises ConfigError where less than MIN_IMAGES can be decoded.
    """

    def __init__(self, folder: Path, most: int, model: Model, limits: ImageLimits) -> None:
        self._model = model
        self._limits = limits
        if most < MIN_IMAGES:
            raise ConfigError(f"--most-images: expected at least {MIN_IMAGES}, got {most}")
        if not os.path.isdir(folder):  # noqa: PTH112 - Path's raises where permissions are lacking
            raise ConfigError(
                f"--images: expected a folder, got {folder}{'' if os.path.lexists(folder) else ', which is none'}"
            )
        files = sorted(_files(folder))
        # Names may go round, by class or by kind of file, and what was chosen evenly would be all of one.
        random.Random(0).shuffle(files)
        self.skipped: dict[Path, str] = {}
        """Files that the server can't decode as images, and the reasons."""
        size = model.buckets[0][1:]
        taken = list(islice((file for file in files if self._decodes(file, size)), most))
        if len(taken) < MIN_IMAGES:
            why = next((f"; {file.name}: {reason}" for file, reason in self.skipped.items()), "")
            raise ConfigError(
                f"--images: expected at least {MIN_IMAGES} images in {folder}, got {len(taken)} and"
                f" {len(self.skipped)} other files{why}"
            )
        self.held_out = taken[::HELD_OUT_OF]
        self.calibrating = [file for number, file in enumerate(taken) if number % HELD_OUT_OF]

    def decode(self, files: Sequence[Path], size: Size) -> Iterator[Decoded]:
        """Yields images as the model takes them, one at a time. Raises RequestError and OSError."""
        for file in files:
            yield self._decoded(file, size)

    def _decodes(self, file: Path, size: Size) -> bool:
        try:
            self._decoded(file, size)
        except RequestError as error:
            self.skipped[file] = str(error)
        except OSError as error:
            self.skipped[file] = str(error.strerror)
        return file not in self.skipped

    def _decoded(self, file: Path, size: Size) -> Decoded:
        where = partial(self._model.place, size)
        with file.open("rb") as opened:  # no more than is refused already: it may be a film
            data = opened.read(self._limits.max_image_bytes + 1)
        return decode_for(self._model, data, where, self._limits)


def make(model: Model, folder: ImageFolder) -> Iterator[Int8]:
    """Yields `model` in int8 for each of the sizes that it has buckets for; blocks.

    Raises ModelFailed, also where OpenVINO computes something other than the model in float32, and what reading the
    images raises.
    """
    program = model.program
    if not isinstance(program, TensorFlowProgram):
        raise ModelFailed(f"expected a model of TensorFlow's, got {model.settings.source}")
    largest = {bucket[1:]: bucket for bucket in model.buckets}  # buckets are sorted
    verifier = verification.verifier(model, has_tf32=False, warn=log.warning)
    for size, bucket in largest.items():
        compile_exact = partial(program.compile, Mode.OPENVINO, bucket)
        verifier.verify(Mode.OPENVINO, bucket, compile_exact(), compile_exact)  # int8 would agree with what is wrong
        exact = program.converted(bucket)
        graph = quantize(exact, _Batches(model, folder, size), -(-len(folder.calibrating) // (model.batch or 1)))
        found = _compare(model, folder, size, exact, graph)
        agreement = statistics.fmean(one.agreement for one in found)
        difference = max((one.difference for one in found if one.difference is not None), default=None)
        speeds = _time(exact, graph, bucket, model.inputs)
        yield Int8(size, graph, exact.digest, len(found), agreement, difference, bucket, speeds)


class _Batches:
    """The images to calibrate on, in batches that the model takes; may be gone through several times."""

    def __init__(self, model: Model, folder: ImageFolder, size: Size) -> None:
        self._batch = model.batch or 1
        self._folder, self._size = folder, size

    def __iter__(self) -> Iterator[Images]:
        decoded = self._folder.decode(self._folder.calibrating, self._size)
        for images, _ in _batched(decoded, self._batch):
            yield images


def _compare(
    model: Model, folder: ImageFolder, size: Size, exact: ConvertedGraph, graph: ConvertedGraph
) -> list[Likeness]:
    """Returns how alike answers to held-out images are: to all, or to those with objects. Raises ModelFailed."""
    batch = model.batch or 1
    bucket = Bucket(batch, *size)
    shape = shapes(model.inputs, bucket)
    arms = [_compiled(exact, Precision.FLOAT32, shape), _compiled(graph, Precision.INT8, shape)]
    found = []
    for images, frames in _batched(folder.decode(folder.held_out, size), batch):
        answers = [arm(images) for arm in arms]
        for name, outputs in zip((Precision.FLOAT32, Precision.INT8), answers, strict=True):
            if not all(np.isfinite(output).all() for output in outputs):
                raise ModelFailed(f"its answers in {name} are NaN or infinite for some of the images")
        for row, frame in enumerate(frames):
            ours, theirs = (OfImage(_row(outputs, row), frame) for outputs in answers)
            # Images in which neither finds objects would hide a loss of objects in the others.
            if not isinstance(model.task, Detection) or ours.outputs[-1][0] or theirs.outputs[-1][0]:
                found.append(likeness(model.task, ours, theirs))
    if not found:
        raise ModelFailed("it finds no objects in the held-out images, so that nothing can be said of int8")
    return found


def _time(exact: ConvertedGraph, graph: ConvertedGraph, bucket: Bucket, inputs: Inputs) -> dict[Precision, Speed]:
    """Returns the time of a batch in int8, in float32 and, where the processor has it, in bfloat16, timed in turn."""
    shape = shapes(inputs, bucket)
    arms = {
        Precision.FLOAT32: _compiled(exact, Precision.FLOAT32, shape),
        Precision.BFLOAT16: _compiled(exact, Precision.BFLOAT16, shape),
        Precision.INT8: _compiled(graph, Precision.INT8, shape),
    }
    arms = {precision: arm for precision, arm in arms.items() if arm.precision is precision}
    rows = noise(bucket, inputs)
    took: dict[Precision, list[Speed]] = {precision: [] for precision in arms}
    for arm in arms.values():
        arm(*rows)  # the first run is slower
    began = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - began > TIMING_BUDGET_S:
            break
        for precision, arm in arms.items():
            start, processor_start = time.perf_counter(), time.process_time()
            arm(*rows)
            took[precision].append(Speed(time.perf_counter() - start, time.process_time() - processor_start))
    return {precision: Speed(*map(statistics.median, zip(*runs, strict=True))) for precision, runs in took.items()}


def _compiled(graph: ConvertedGraph, precision: Precision, shapes: Shapes) -> CompiledModel:
    return graph.compile(shapes, precision, openvino_threads())


def _batched(decoded: Iterator[Decoded], batch: int) -> Iterator[tuple[Images, list[Frame]]]:
    """Yields images in batches of one size, the last filled with its own, and the frames of those that count."""
    while taken := list(islice(decoded, batch)):
        pixels = [taken[row % len(taken)].pixels for row in range(batch)]
        yield np.stack(pixels), [one.frame for one in taken]


def _row(outputs: Outputs, row: int) -> Outputs:
    return tuple(output[row : row + 1] for output in outputs)


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and in those in it, without hidden ones and without what is no file, as a pipe."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(parent, name)
            if not name.startswith(".") and os.path.isfile(file):  # noqa: PTH113 - Path's raises, as above
                yield file
