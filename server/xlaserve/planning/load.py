"""Loads: the times at which requests arrive, and the images of each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.errors import ConfigError

EXPECTED: Final = 'expected seconds, or a JSON object such as {"at_s": 0.25, "images": 4}'


class Load(NamedTuple):
    """Requests in the order in which they arrive."""

    at_s: NDArray[np.float64]
    """Seconds after the start, ascending."""
    images: NDArray[np.int64]
    """Images of each."""

    @property
    def rate(self) -> float:
        """Requests a second, on average."""
        return len(self.at_s) / max(float(self.at_s[-1]), math.ulp(1.0))


def poisson(rate: float, seconds: float, images: int, seed: int) -> Load:
    """Returns requests of `images` images each that come independently of each other, `rate` a second on average."""
    chance = np.random.default_rng(seed)
    gaps_s = chance.exponential(1 / rate, max(1, round(rate * seconds)))
    return Load(np.cumsum(gaps_s), np.full(len(gaps_s), images, np.int64))


def read_trace(path: Path) -> Load:
    """Returns the load of a trace: a line for each request, as `loadtest --save-arrivals` writes it. Raises
    ConfigError.

    Lines are seconds after the start, or JSON objects with `at_s` and perhaps `images`; other fields are ignored.
    """
    at_s: list[float] = []
    images: list[int] = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: expected a text file, got {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            at, count = _request(json.loads(line))
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"--trace: {path}:{number}: {EXPECTED}, got {line[:80]!r}") from None
        at_s.append(at)
        images.append(count)
    if not at_s:
        raise ConfigError(f"--trace: expected requests, got none in {path}")
    order = np.argsort(at_s, kind="stable")
    return Load(np.array(at_s, np.float64)[order], np.array(images, np.int64)[order])


def _request(line: Any) -> tuple[float, int]:
    fields = line if isinstance(line, dict) else {"at_s": line}
    at, images = float(fields["at_s"]), int(fields.get("images") or 1)
    if not 0 <= at < math.inf or images < 1:
        raise ValueError
    return at, images
