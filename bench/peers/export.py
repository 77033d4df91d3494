"""`python -m bench.peers.export FOLDER`: writes MobileNetV2 with random weights, for xlaserve and for OpenVINO.

FOLDER gets `model.keras`, and `saved`: a SavedModel that takes bytes of pixels, and scales them as xlaserve does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras

from bench.peers import KERAS, SAVED, SIDE


def main(folder: Path) -> None:
    """Writes both."""
    keras.utils.set_random_seed(0)
    network = keras.applications.MobileNetV2(weights=None)
    network.save(folder / KERAS)
    pixels = keras.Input((SIDE, SIDE, 3), dtype="uint8", name="pixels")
    scores = network(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(pixels))
    keras.Model(pixels, scores).export(folder / SAVED, verbose=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
