"""Trains `builtin:digits` in about a minute on a CPU, prints its held-out accuracy and writes its weights.

With `--samples` it writes sample images instead, for the weights that are already there: for each digit one
held-out scan that they read correctly.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scripts.digits_data import DigitImage, digit_images

from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import digits

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS_FILE = ROOT / "server" / "xlaserve" / "model" / "sources" / "data" / digits.WEIGHTS
SAMPLES_FOLDER = ROOT / "scripts" / "samples" / "digits"
SAMPLE_SIDE = 64
BATCH = 64
FILTERS = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)


class Augmented(keras.utils.PyDataset):  # type: ignore[misc] # Keras has no types
    """Batches of training scans, enlarged and newly distorted each epoch, as clients and handwriting may vary."""

    def __init__(self, images: list[DigitImage], seed: int) -> None:
        super().__init__()
        self._images = images
        self._rng = np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self._images) // BATCH

    def on_epoch_end(self) -> None:
        """Draws the order of the next epoch."""
        self._order = self._rng.permutation(len(self._images))

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        chosen = [self._images[i] for i in self._order[index * BATCH : (index + 1) * BATCH]]
        pixels = [distort(image.png, self._rng) for image in chosen]
        return np.stack(pixels).astype(np.float32), np.array([image.label for image in chosen])


def distort(png: bytes, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Returns a scan as the model's pixels `[32, 32, 3]`, enlarged by a random way and slightly bent."""
    scan = Image.open(io.BytesIO(png)).convert("RGB")
    side = int(rng.choice((8, 16, 28, 32, 64)))
    sent = scan.resize((side, side), FILTERS[rng.integers(len(FILTERS))])
    image = sent.resize((digits.SIDE, digits.SIDE), FILTERS[rng.integers(1, len(FILTERS))])
    angle, shear = rng.uniform(-0.2, 0.2, 2)
    scale_x, scale_y = rng.uniform(0.87, 1.15, 2)
    matrix = np.array([[np.cos(angle), -np.sin(angle) + shear], [np.sin(angle), np.cos(angle)]])
    matrix /= np.array([[scale_x], [scale_y]])
    middle = np.full(2, digits.SIDE / 2)
    shift = middle - matrix @ (middle + rng.uniform(-2.5, 2.5, 2))
    rows = np.column_stack([matrix, shift]).ravel().tolist()
    bent = image.transform(image.size, Image.Transform.AFFINE, rows, Image.Resampling.BILINEAR)
    return np.asarray(np.clip(np.asarray(bent) * rng.uniform(0.8, 1.1), 0, 255), np.uint8)


def as_served(images: list[DigitImage]) -> NDArray[np.float32]:
    """Returns the pixels `[n, 32, 32, 3]` that the server makes of encoded images."""
    shape = (digits.SIDE, digits.SIDE)
    decoded = (Image.open(io.BytesIO(image.png)).convert("RGB") for image in images)
    return np.stack([np.asarray(image.resize(shape, Image.Resampling.BILINEAR), np.float32) for image in decoded])


def train(epochs: int, seed: int) -> None:
    """Trains on the training split, prints the accuracy on the other and writes the weights."""
    keras.utils.set_random_seed(seed)
    data = Augmented(digit_images("train"), seed)
    model = digits.build()
    rate = keras.optimizers.schedules.CosineDecay(2e-3, epochs * len(data))
    optimizer = keras.optimizers.AdamW(rate, weight_decay=1e-4)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=epochs, verbose=2)
    for side in (8, 32, 64):
        print(f"held-out accuracy from {side} x {side} pixels: {accuracy(model, side):.4f}")
    np.savez_compressed(WEIGHTS_FILE, **{variable.path: variable.numpy() for variable in model.weights})
    print(f"wrote {WEIGHTS_FILE.relative_to(ROOT)}: {WEIGHTS_FILE.stat().st_size} bytes")


def accuracy(model: keras.Model, side: int) -> float:
    """Returns the share of held-out scans, sent at `side` x `side` pixels, that `model` reads correctly."""
    images = digit_images("held_out", side=side)
    read = model.predict(as_served(images), verbose=0).argmax(axis=1)
    return float(np.mean(read == [image.label for image in images]))


def write_samples() -> None:
    """Writes `<label>_<index>.png` for one held-out scan of each digit that the committed weights read correctly."""
    images = digit_images("held_out", side=SAMPLE_SIDE)
    read = digits.load().predict(as_served(images), verbose=0).argmax(axis=1)
    samples = {image.label: image for image, digit in zip(images, read, strict=True) if image.label == digit}
    SAMPLES_FOLDER.mkdir(parents=True, exist_ok=True)
    for label, image in sorted(samples.items()):
        (SAMPLES_FOLDER / f"{label}_{image.index}.png").write_bytes(image.png)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", action="store_true", help="write sample images instead")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_samples() if arguments.samples else train(arguments.epochs, arguments.seed)
