"""The models of a sweep, and figures that others published for them."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from xlaserve_loadtest.targets.embedded import served_name

APPLICATIONS: Final = "keras.applications:"
PUBLISHED_BATCH: Final = 4
"""Images in a batch of the published figures."""

_ACCELERATORS: Final = ("a100", "v100", "t4")


@dataclass(frozen=True)
class Model:
    """A model to sweep over."""

    source: str
    """The model's source, as in the server's configuration."""
    name: str
    family: str
    size: int | None
    """Height and width that the model was designed for, in pixels; None where the catalogue has none."""


@dataclass(frozen=True)
class Published:
    """Figures that the Keras XLA benchmark project published for a model on one accelerator, in batches of 4 images."""

    images_per_s: tuple[float, float] | None
    """Least and greatest images/s under XLA over the revisions of their notebooks; None where only ratios were
    published."""
    ratio_to_eager: float | None
    """Their speed-up under XLA over eager execution."""


@cache
def applications() -> tuple[Model, ...]:
    """Returns all models of keras.applications, families together."""
    return tuple(
        Model(APPLICATIONS + row["name"], row["name"], row["family"], int(row["size"])) for row in _rows("models.csv")
    )


def find(names: Sequence[str]) -> tuple[Model, ...]:
    """Returns the models that `names` name: `all`, one of keras.applications, a family of them, or any source or path.

    Each model occurs once, in the order of `names`. Raises ValueError for an unknown name.
    """
    known = applications()
    by_source: dict[str, Model] = {}
    for name in names:
        bare = name.removeprefix(APPLICATIONS)
        chosen = [model for model in known if name == "all" or bare in {model.name, model.family}]
        is_there = os.path.exists(name)  # noqa: PTH110 - `Path.exists` raises an error for a long name
        if not chosen and not (is_there or ":" in name or "/" in name or Path(name).suffix):
            near = get_close_matches(bare, [text for model in known for text in (model.name, model.family)], n=1)
            meant = f", did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"expected all, a model or a family that --list shows, a source or a path, got {name}{meant}"
            )
        by_source.update((model.source, model) for model in chosen or [_other(name)])
    return tuple(by_source.values())


def published(gpus: Sequence[str]) -> dict[tuple[str, int], Published]:
    """Returns the published figures for the first of `gpus` (the driver's names), by model and resolution.

    Empty where none were published for such a device.
    """
    device = gpus[0].lower() if gpus else ""
    accelerator = next((known for known in _ACCELERATORS if known in device.replace("-", " ").split()), None)
    names = {row["variant"]: row["name"] for row in _rows("published_names.csv")}
    rates: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    ratios: dict[tuple[str, int], float] = {}
    for row in _rows("published_speedups.csv"):
        if row["kind"] == "percent" and row["accelerator"] == accelerator and row["model_variant"] in names:
            ratios[names[row["model_variant"]], int(row["resolution"])] = 1 + float(row["value"]) / 100
    for row in _rows("xla_vs_noxla_pairs.csv"):
        if row["acc"] == accelerator and row["variant"] in names:
            ratios[names[row["variant"]], int(row["res"])] = float(row["ratio"])
    for row in _rows("published_throughput_rows.csv"):
        if row["accelerator"] == accelerator and row["xla"] == "True" and row["model_variant"] in names:
            rates[names[row["model_variant"]], int(row["resolution"])].append(float(row["throughput_img_s"]))
    return {
        key: Published((min(rates[key]), max(rates[key])) if key in rates else None, ratios.get(key))
        for key in sorted({*rates, *ratios})
    }


def _other(source: str) -> Model:
    return Model(source, served_name(source), "other", None)


def _rows(name: str) -> Iterable[dict[str, str]]:
    text = (files("xlaserve_loadtest") / "data" / name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())
