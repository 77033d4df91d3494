"""Arguments that several commands take, and the types of their values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from xlaserve.config import BucketSettings
from xlaserve.errors import ConfigError
from xlaserve.programs.cache.records import check_writable

MAX_COUNT: Final = 65_536
DAY_S: Final = 86_400


def bucket(text: str) -> BucketSettings:
    """Parses `8` or `8x224x224`, for argparse."""
    try:
        sides = [int(side) for side in text.split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 3) or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"expected 8 or 8x224x224, got {text}")
    return BucketSettings(*sides)


def count(text: str) -> int:
    """Parses a whole number from 1 on, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {MAX_COUNT}, got {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Parses `1,8`, for argparse, in ascending order."""
    return tuple(sorted({count(word.strip()) for word in text.split(",")}))


def positive(text: str) -> float:
    """Parses a finite number greater than 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number greater than 0, got {text!r}")
    return value


def share(text: str) -> float:
    """Parses a share from 0 to 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text!r}")
    return value


def error(text: str) -> float:
    """Parses a share by which something may be off, from 0 and less than 1, for argparse."""
    if (value := share(text)) == 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 and less than 1, got {text!r}")
    return value


def duration_s(text: str) -> float:
    """Parses seconds, a day of them at most, for argparse."""
    if (value := positive(text)) > DAY_S:
        raise argparse.ArgumentTypeError(f"expected at most {DAY_S} seconds, got {text!r}")
    return value


def make_folder(folder: Path) -> None:
    """Makes sure, before minutes of work, that something can be written there. Raises ConfigError."""
    try:
        check_writable(folder)
    except OSError as error:
        raise ConfigError(f"--out: expected a folder to write to, got {folder}: {error.strerror}") from None
