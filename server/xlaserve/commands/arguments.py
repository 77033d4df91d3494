"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from xlaserve.config import BucketSettings
from xlaserve.errors import ConfigError


def bucket(text: str) -> BucketSettings:
    """Parses `8` or `8x224x224`, for argparse."""
    try:
        sides = [int(side) for side in text.split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 3) or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"expected 8 or 8x224x224, got {text}")
    return BucketSettings(*sides)


def positive(text: str) -> float:
    """Parses a finite number greater than 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number greater than 0, got {text}")
    return value


def make_folder(folder: Path) -> None:
    """Makes sure, before minutes of work, that something can be written there. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".xlaserve"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out: expected a folder to write to, got {folder}: {error.strerror}") from None
