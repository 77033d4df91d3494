"""Trains `builtin:shapes-detector` and `builtin:shapes-segmenter` in minutes on a CPU and writes their weights.

With `--samples` it writes sample images instead: scenes of odd sizes that training never saw.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scripts.shapes_data import HELD_OUT_SEED, LABELS, MAX_SHAPES, TRAIN_SEED, scene

from xlaserve.config import Fit
from xlaserve.images.frame import LETTERBOX_LEVEL, place
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import shapes

SAMPLES: Final = {9: (240, 360), 3: (360, 200), 7: (300, 310)}
"""Height and width by the number of a held-out scene; both models read these correctly, as they do most."""
ROOT: Final = Path(__file__).resolve().parent.parent
SAMPLES_FOLDER: Final = ROOT / "scripts" / "samples" / "shapes"
DATA: Final = ROOT / "server" / "xlaserve" / "model" / "sources" / "data"
BATCH: Final = 32
NEAR: Final = 1.5
"""A cell answers for a shape when its centre is at most this many strides from the middle of the shape's box."""

Array = NDArray[Any]


class Scenes:
    """Scenes of odd sizes, letterboxed as they are served."""

    def __init__(self, count: int, seed: int) -> None:
        sizes = np.random.default_rng(seed)
        self.pixels = np.zeros((count, shapes.SIDE, shapes.SIDE, 3), np.uint8)
        self.classes = np.zeros((count, shapes.SIDE, shapes.SIDE), np.uint8)
        self.boxes = np.full((count, MAX_SHAPES, 5), -1, np.float32)
        """For each shape its label, x_min, y_min, x_max and y_max in pixels of the input; -1 where there is none."""
        for number in range(count):
            height, width = odd_size(sizes)
            drawn = scene(seed, number, height=height, width=width)
            frame = place(height, width, input_height=shapes.SIDE, input_width=shapes.SIDE, fit=Fit.LETTERBOX)
            fitted = (frame.fitted_width, frame.fitted_height)
            inside = np.s_[
                frame.top : frame.top + frame.fitted_height,
                frame.left : frame.left + frame.fitted_width,
            ]
            self.pixels[number] = LETTERBOX_LEVEL
            resized = Image.fromarray(drawn.pixels).resize(fitted, Image.Resampling.BILINEAR)
            self.pixels[number][inside] = np.asarray(resized)
            nearest = Image.fromarray(drawn.classes).resize(fitted, Image.Resampling.NEAREST)
            self.classes[number][inside] = np.asarray(nearest)
            scale = frame.fitted_width / width, frame.fitted_height / height
            for row, shape in enumerate(drawn.shapes):
                corners = np.array(shape[1:]).reshape(2, 2) * scale + (frame.left, frame.top)
                self.boxes[number, row] = (shape.label, *corners.ravel())


def odd_size(rng: np.random.Generator) -> tuple[int, int]:
    """Returns a height and a width of at most about two to one."""
    side, ratio = rng.uniform(110, 260), 2 ** rng.uniform(-0.55, 0.55)
    return round(side * ratio), round(side / ratio)


class Batches(keras.utils.PyDataset):  # type: ignore[misc] # Keras has no types
    """Batches of scenes, newly turned over and mirrored each time, with what `target` makes of their truth."""

    def __init__(self, scenes: Scenes, target: Callable[[Array, Array], Array], seed: int) -> None:
        super().__init__()
        self._scenes = scenes
        self._target = target
        self._rng = np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self._scenes.pixels) // BATCH

    def on_epoch_end(self) -> None:
        """Draws the order of the next epoch."""
        self._order = self._rng.permutation(len(self._scenes.pixels))

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        chosen = self._order[index * BATCH : (index + 1) * BATCH]
        pixels, classes = self._scenes.pixels[chosen], self._scenes.classes[chosen]
        boxes = self._scenes.boxes[chosen].copy()
        there = boxes[..., 0] >= 0
        if self._rng.random() < 0.5:
            pixels, classes = pixels[:, :, ::-1], classes[:, :, ::-1]
            boxes[there, 1::2] = shapes.SIDE - boxes[there, 3::-2]
        if self._rng.random() < 0.5:
            pixels, classes = pixels.swapaxes(1, 2), classes.swapaxes(1, 2)
            boxes[there, 1:] = boxes[there][:, [2, 1, 4, 3]]
        lit = pixels * self._rng.uniform(0.75, 1.2, (len(pixels), 1, 1, 3))
        return np.clip(lit, 0, 255).astype(np.float32), self._target(boxes, classes)


def detector_target(boxes: Array, classes: Array) -> Array:
    """Returns `[n, 16, 16, 4 + 1]`: the distances that each cell should give, in strides, and its label, or -1."""
    cells = shapes.SIDE // shapes.STRIDE
    y, x = (np.mgrid[:cells, :cells] + 0.5) * shapes.STRIDE
    label, x_min, y_min, x_max, y_max = np.moveaxis(boxes[..., np.newaxis, np.newaxis], 2, 0)
    distances = np.stack([x - x_min, y - y_min, x_max - x, y_max - y], axis=-1) / shapes.STRIDE
    off_middle = np.maximum(np.abs(x - (x_min + x_max) / 2), np.abs(y - (y_min + y_max) / 2)) / shapes.STRIDE
    answers = (distances.min(axis=-1) > 0) & (off_middle < NEAR) & (label >= 0)
    # Where boxes overlap, the cell answers for the one whose middle is nearest.
    best = np.where(answers, off_middle, np.inf).argmin(axis=1)[:, np.newaxis]
    chosen = np.take_along_axis(distances, best[..., np.newaxis], axis=1)[:, 0]
    labels = np.where(answers.any(axis=1), np.take_along_axis(np.broadcast_to(label, answers.shape), best, 1)[:, 0], -1)
    return np.concatenate([chosen, labels[..., np.newaxis]], axis=-1).astype(np.float32)


def detector_loss(target: Any, grid: Any) -> Any:
    """Focal loss (Lin et al. 2017) on the labels, and 1 less the generalized IoU (Rezatofighi et al. 2019) of boxes."""
    ops = keras.ops
    label = ops.cast(target[..., 4], "int32")
    is_shape = ops.cast(label >= 0, "float32")
    wanted = ops.one_hot(label, len(LABELS))
    logits = grid[..., 4:]
    right = ops.sigmoid(ops.where(wanted > 0, logits, -logits))
    cross_entropy = ops.softplus(ops.where(wanted > 0, -logits, logits))
    focal = ops.sum(ops.where(wanted > 0, 0.25, 0.75) * (1 - right) ** 2 * cross_entropy)
    true, given = target[..., :4], grid[..., :4]
    common, hull = ops.minimum(true, given), ops.maximum(true, given)
    intersection, hull_area = _area(ops.maximum(common, 0.0)), _area(ops.maximum(hull, 0.0))
    union = _area(ops.maximum(true, 0.0)) + _area(given) - intersection
    generalized = intersection / (union + 1e-6) - (hull_area - union) / (hull_area + 1e-6)
    return (focal + ops.sum(is_shape * (1 - generalized))) / ops.maximum(ops.sum(is_shape), 1.0)


def _area(distances: Any) -> Any:
    return (distances[..., 0] + distances[..., 2]) * (distances[..., 1] + distances[..., 3])


def segmenter_target(boxes: Array, classes: Array) -> Array:
    """Returns the class maps themselves."""
    return classes.astype(np.int32)


def train(
    model: Any, scenes: Scenes, target: Callable[[Array, Array], Array], loss: Any, weights: str, **how: int
) -> None:
    """Trains `model` and writes its weights."""
    began = time.process_time()
    data = Batches(scenes, target, how["seed"])
    rate = keras.optimizers.schedules.CosineDecay(4e-3, how["epochs"] * len(data), warmup_target=4e-3, warmup_steps=50)
    model.compile(keras.optimizers.AdamW(rate, weight_decay=1e-4, clipnorm=5.0), loss=loss, jit_compile=False)
    model.fit(data, epochs=how["epochs"], verbose=2)
    file = DATA / weights
    np.savez_compressed(file, **{variable.path: variable.numpy() for variable in model.weights})
    spent_s = time.process_time() - began
    print(f"wrote {file.relative_to(ROOT)}: {file.stat().st_size} bytes, after {spent_s:.0f} s of CPU")


def write_samples() -> None:
    """Writes held-out scenes as JPEG files, each named for the shapes in it."""
    SAMPLES_FOLDER.mkdir(parents=True, exist_ok=True)
    for number, (height, width) in SAMPLES.items():
        drawn = scene(HELD_OUT_SEED, number, height=height, width=width)
        name = "_".join(sorted(LABELS[shape.label] for shape in drawn.shapes))
        Image.fromarray(drawn.pixels).save(SAMPLES_FOLDER / f"{name}.jpg", quality=90)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("detector", "segmenter"), help="train one of the two")
    parser.add_argument("--scenes", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=TRAIN_SEED)
    parser.add_argument("--samples", action="store_true", help="write sample images instead")
    arguments = parser.parse_args()
    if arguments.samples:
        write_samples()
        return
    scenes = Scenes(arguments.scenes, arguments.seed)
    how = {"epochs": arguments.epochs, "seed": arguments.seed}
    keras.utils.set_random_seed(arguments.seed)
    if arguments.only != "segmenter":
        train(shapes.build_detector(), scenes, detector_target, detector_loss, shapes.DETECTOR_WEIGHTS, **how)
    if arguments.only != "detector":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        train(shapes.build_segmenter(), scenes, segmenter_target, loss, shapes.SEGMENTER_WEIGHTS, **how)


if __name__ == "__main__":
    main()
