"""A model's answers to its examples, images with the outputs that a notebook gave, compared before it is ready."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket, ExampleSettings, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, run_batch
from xlaserve.engine.warmup.auto_buckets import Programs
from xlaserve.engine.warmup.difference import Difference, by_row
from xlaserve.engine.warmup.sample import joined, rows_of
from xlaserve.errors import ModelFailed, RequestError
from xlaserve.images.decoder import Decoded, ImageLimits
from xlaserve.images.frame import Frame, best_input
from xlaserve.models import example_files
from xlaserve.models.catalog import Model
from xlaserve.models.encoded_images import decode_for
from xlaserve.models.example_files import Examples
from xlaserve.models.likeness import OfImage, likeness
from xlaserve.models.task import Classification, Detection, Task

MAX_DIFFERENCE: Final = 0.01
"""The largest difference by default of modes that compute in float32."""
_NUMBERS_SHOWN: Final = 4


@dataclass(frozen=True)
class Compared:
    """A comparison of answers with the expected ones."""

    difference: Difference
    apart: NDArray[np.float64]
    """The difference of each image's answer, `[n]`."""
    worst: int
    """The image whose answer differs most."""


def check(
    model: Model, programs: Programs, limits: ImageLimits, narrow: Mapping[Mode, float]
) -> dict[Mode, Difference]:
    """Returns the difference from the expected answers in each mode that has programs of its own. Blocks.

    Modes in `narrow` may differ by the share given there, unless the settings say how much. Raises ModelFailed where an
    example can't be read, and where a mode is further off than the settings allow.
    """
    settings = model.settings.examples
    assert settings is not None
    if not model.is_of_one_image:
        names = ", ".join(model.names)
        raise ModelFailed(f"examples: expected none, as the model takes other inputs than one image: {names}")
    try:
        examples = example_files.read(settings.folder)
        wanted = example_files.for_task(examples, model.task, model.settings)
        modes = sorted({mode for mode, _ in programs if not mode.traits.choice}, key=[*Mode].index)
        answers, frames = _answers(model, programs, modes, examples, limits)
        found = {mode: compare(model.task, wanted, got, frames) for mode, got in answers.items()}
        for mode, compared in found.items():
            most = settings.max_difference
            if most is None:
                most = narrow.get(mode, MAX_DIFFERENCE)
            if not _is_within(compared.difference, most, settings):
                expected, given = (_row(outputs, compared.worst) for outputs in (wanted, answers[mode]))
                raise ModelFailed(
                    f"mode {mode}: {compared.difference}, expected at most {most:g} and at least"
                    f" {settings.min_agreement:g} (max_difference, min_agreement); of"
                    f" {examples.names[compared.worst]} the expected answer is"
                    f" {_shown(model.task, expected)}, the model's"
                    f" {_shown(model.task, given)}; xlaserve match finds the settings that give"
                    " the expected ones"
                )
    except ModelFailed as error:
        raise ModelFailed(f"examples: {error}") from error
    return {mode: compared.difference for mode, compared in found.items()}


def compare(task: Task, wanted: Outputs, got: Outputs, frames: Collection[Frame]) -> Compared:
    """Compares answers to images at `frames` with the expected ones. Raises ModelFailed where their shapes differ."""
    for spec, theirs, ours in zip(task.outputs, wanted, got, strict=True):
        if theirs.shape != ours.shape:
            raise ModelFailed(f"{spec.name}: expected outputs of shape {list(ours.shape)}, got {list(theirs.shape)}")
    images = len(frames)
    if isinstance(task, Detection):
        pairs = [
            (OfImage(_row(wanted, row), frame), OfImage(_row(got, row), frame)) for row, frame in enumerate(frames)
        ]
        found = [likeness(task, *pair) for pair in pairs]
        apart = np.array([one.difference or 0.0 for one in found])
        agreements: list[float | None] = [one.agreement for one in found]
    else:
        apart = _apart(task, wanted, got)
        agreements = [task.agreement(_row(wanted, row), _row(got, row)) for row in range(images)]
    known = [agreement for agreement in agreements if agreement is not None]
    agreement = float(np.mean(known)) if known else None

    def badness(row: int) -> tuple[float, float]:
        # Another answer is worse than one that is further off.
        agreement = agreements[row]
        return -(1.0 if agreement is None else agreement), float(apart[row])

    difference = Difference(float(apart.max(initial=0.0)), agreement, images)
    return Compared(difference, apart, max(range(images), key=badness))


def _apart(task: Task, wanted: Outputs, got: Outputs) -> NDArray[np.float64]:
    """Returns for each image how far floats are from the expected ones; how far whole numbers agree is told apart."""
    pairs = zip(task.comparable(wanted), task.comparable(got), strict=True)
    floats = [pair for pair in pairs if pair[0].dtype.kind == "f"]
    if not floats:
        return np.zeros(len(wanted[0]))
    return by_row(tuple(theirs for theirs, _ in floats), tuple(ours for _, ours in floats), task.rounding)


def _row(outputs: Outputs, row: int) -> Outputs:
    return tuple(output[row : row + 1] for output in outputs)


def read_image(examples: Examples, row: int, limits: ImageLimits) -> bytes:
    """Returns the encoded image; no more of it than is refused already. Raises ModelFailed."""
    try:
        with examples.path(row).open("rb") as opened:
            return opened.read(limits.max_image_bytes + 1)
    except OSError as error:
        raise ModelFailed(f"{examples.names[row]} can't be read: {error.strerror}") from None


def _answers(
    model: Model, programs: Programs, modes: Collection[Mode], examples: Examples, limits: ImageLimits
) -> tuple[dict[Mode, Outputs], list[Frame]]:
    """Returns the answers of each mode in its smallest buckets, a row for each image, and the images' frames.

    An image is held until the batches that it is in are full and have run.
    """
    smallest: dict[Mode, dict[tuple[int, int], Bucket]] = {mode: {} for mode in modes}
    for mode, bucket in sorted((key for key in programs if key[0] in smallest), reverse=True):
        smallest[mode][bucket.height, bucket.width] = bucket
    sizes = sorted(smallest[next(iter(modes))])
    frames: list[Frame] = []
    waiting: dict[tuple[Mode, Bucket], list[tuple[int, Images]]] = defaultdict(list)
    done: dict[Mode, list[int]] = defaultdict(list)
    got: dict[Mode, list[Outputs]] = defaultdict(list)

    def run(mode: Mode, bucket: Bucket) -> None:
        rows, pixels = zip(*waiting.pop((mode, bucket)), strict=True)
        batch = np.stack([pixels[place % len(pixels)] for place in range(bucket.batch)])
        outputs = run_batch(programs[mode, bucket].executable, batch)
        got[mode].append(tuple(output[: len(rows)] for output in outputs))
        done[mode] += rows

    for row in range(len(examples)):
        image = _decoded(model, examples, row, sizes, limits)
        frames.append(image.frame)
        for mode in modes:
            bucket = smallest[mode][image.frame.input_height, image.frame.input_width]
            waiting[mode, bucket].append((row, image.pixels))
            if len(waiting[mode, bucket]) == bucket.batch:
                run(mode, bucket)
    for mode, bucket in [*waiting]:
        run(mode, bucket)
    return {mode: rows_of(joined(got[mode]), np.argsort(done[mode])) for mode in modes}, frames


def _decoded(model: Model, examples: Examples, row: int, sizes: list[tuple[int, int]], limits: ImageLimits) -> Decoded:
    """Returns an image as the model takes it. Raises ModelFailed."""

    def where(height: int, width: int) -> Frame:
        return model.place(best_input(height, width, sizes), height, width)

    try:
        return decode_for(model, read_image(examples, row, limits), where, limits)
    except RequestError as error:
        raise ModelFailed(f"{examples.names[row]}: {error}") from None


def _is_within(difference: Difference, most: float, settings: ExampleSettings) -> bool:
    agrees = difference.agreement is None or difference.agreement >= settings.min_agreement
    return agrees and difference.largest <= most


def _shown(task: Task, outputs: Outputs) -> str:
    """Returns the answer to one image in words: its likeliest class, its objects, or the first numbers."""
    if isinstance(task, Classification):
        scores = outputs[task.at][0]
        top = int(task.best(scores, 1)[0])
        return f"{task.label(top)} {scores[top]:.4g}"
    if isinstance(task, Detection):
        (objects,) = task.objects(outputs)
        named = [
            f"{task.label(int(index))} {score:.3g}"
            for index, score in zip(objects.classes, objects.scores, strict=True)
        ]
        return ", ".join(named[:_NUMBERS_SHOWN]) or "no object"
    numbers = outputs[0][0].reshape(-1)
    shown: list[Any] = numbers[:_NUMBERS_SHOWN].tolist()
    return f"[{', '.join(f'{number:.4g}' for number in shown)}{', ...' if numbers.size > len(shown) else ''}]"
