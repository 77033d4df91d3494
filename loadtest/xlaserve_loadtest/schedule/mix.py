"""The mix of a run's requests: shares of models, numbers of images and sizes. Pure and seeded."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from xlaserve_loadtest.record.requests import MAX_MODELS

Size = tuple[int, int]
"""Height and width."""
Value = TypeVar("Value", bound=Hashable)

DISTINCT_REQUESTS: Final = 16
"""Distinct requests of one kind: enough that no cache serves all of them, few enough to stay in memory."""
MIXED_REQUESTS: Final = 40
"""Distinct requests of several kinds together."""
MIN_SHARE: Final = 0.001
"""Least share of a value of a mix."""

_MAX_LENGTH: Final = 1000
_SLACK: Final = 0.02
"""Largest relative error of a share that is accepted for the sake of a short sequence."""
_SHARE: Final = re.compile(r"\s*(\d*\.?\d+)\s*")
_COUNT: Final = re.compile(r"0*[1-9]\d{0,8}")
_SIZE: Final = re.compile(r"0*([1-9]\d{0,8})x0*([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class Mix(Generic[Value]):
    """Values and their shares, whose sum is 1."""

    shares: Mapping[Value, float]

    @classmethod
    def of(cls, shares: Mapping[Value, float]) -> Mix[Value]:
        """Returns a mix of `shares`, which are scaled to a sum of 1. Raises ValueError for a share that is too
        small."""
        total = sum(shares.values())
        if not total or min(shares.values()) < MIN_SHARE * total:
            raise ValueError(f"expected shares of at least {MIN_SHARE:g} of the whole")
        return cls({value: share / total for value, share in shares.items()})

    def __str__(self) -> str:
        if len(self.shares) == 1:
            return _word(next(iter(self.shares)))
        return ",".join(f"{_word(value)}:{share:.4g}" for value, share in self.shares.items())

    def draw(self, number: int, seed: int) -> list[Value]:
        """Returns `number` values in a random order, with counts as near to the shares as whole numbers can be."""
        values = list(self.shares)
        exact = np.array(list(self.shares.values())) * number
        whole = exact.astype(np.int64)
        rests = np.argsort(whole - exact, kind="stable")
        whole[rests[: number - int(whole.sum())]] += 1
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(values)), whole))
        return [values[place] for place in order.tolist()]


class Kind(NamedTuple):
    """The kind of a request: its model, its number and size of images, and its file."""

    model: int = 0
    """Index of the model in `Arm.served`."""
    images: int = 1
    size: Size | None = None
    """Size of the images; None for the model's own."""
    file: str | None = None
    """Path of the image or .npy file to send; None for the run's other images or tensors."""


def draw_kinds(
    models: Mix[int], counts: Mix[int], sizes: Mix[Size | None], number: int | None, seed: int
) -> list[Kind]:
    """Returns the kinds of `number` requests in the order of sending; models, counts and sizes are drawn independently.

    Where `number` is None, it is the least number of requests that is near to all shares.
    """
    if number is None:
        number = _length((models, counts, sizes))
    drawn = (models.draw(number, seed + 2), counts.draw(number, seed), sizes.draw(number, seed + 1))
    return [Kind(model, images, size) for model, images, size in zip(*drawn, strict=True)]


def _length(mixes: Sequence[Mix[Any]]) -> int:
    """Returns the least number of requests for which all shares are exact up to _SLACK; _MAX_LENGTH at most."""
    shares = np.array([share for mix in mixes for share in mix.shares.values()])
    # Several mixes need more requests, so that their values are not correlated by chance.
    least = MIXED_REQUESTS * 10 ** (sum(len(mix.shares) > 1 for mix in mixes) > 1)
    for number in range(least, _MAX_LENGTH):
        exact = shares * number
        if (np.abs(np.round(exact) - exact) <= _SLACK * exact).all():
            return number
    return _MAX_LENGTH


def parse_counts(text: str) -> Mix[int]:
    """Parses images per request: `8` or `1:0.7,8:0.3`. Raises ValueError."""
    expected = "images per request such as 8 or 1:0.7,8:0.3"
    return _parse(text, lambda word: int(word) if _COUNT.fullmatch(word) else None, expected)


def parse_sizes(text: str) -> Mix[Size]:
    """Parses `224x224` or `224x224:0.7,448x448:0.3`: heights and widths. Raises ValueError."""
    return _parse(text, read_size, "HEIGHTxWIDTH such as 224x224 or 224x224:0.7,448x448:0.3")


def parse_models(text: str) -> Mix[str]:
    """Parses `resnet:0.7,mobilenet:0.3`. Raises ValueError."""
    models = _parse(
        text, lambda word: word if word and not word.endswith(":") else None, "models such as resnet:0.7,mobilenet:0.3"
    )
    if len(models.shares) > MAX_MODELS:
        raise ValueError(f"expected up to {MAX_MODELS} models, got {len(models.shares)}")
    return models


def read_size(text: str) -> Size | None:
    """Parses `224x224`, height and width; returns None where `text` is no size."""
    match = _SIZE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def _parse(text: str, read: Callable[[str], Value | None], expected: str) -> Mix[Value]:
    shares: dict[Value, float] = {}
    for part in text.split(","):
        word, colon, share = part.rpartition(":")
        if not colon or not _SHARE.fullmatch(share):
            word, share = part, "1"
        value = read(word.strip())
        if value is None or value in shares:
            raise ValueError(f"expected {expected}, got {text!r}")
        shares[value] = float(share)
    try:
        return Mix.of(shares)
    except ValueError as error:
        raise ValueError(f"{error}, got {text!r}") from None


def _word(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
