"""The architectures of KerasCV that `data/keras_cv.yaml` lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from xlaserve.config import parse


@dataclass(frozen=True)
class Backbone:
    """One architecture."""

    constructor: str
    """A class of `keras_cv.models`."""
    side: int
    """Pixels of its own input size, which is square."""
    arguments: Mapping[str, Any]
    fixed_size: bool = False
    """Whether it must be built for one input size."""
    multiple: int = 1
    """Height and width have to be multiples of this."""


@dataclass(frozen=True)
class KerasCvHead:
    """The head on a backbone for a task."""

    constructor: str
    """A class of `keras_cv.models`."""
    task: str
    classes: int
    """The default number of classes: that of the data set that its published weights were trained on."""
    side: int
    backbones: tuple[str, ...]
    """The backbones that the catalog lists for it."""
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments in addition to the common ones, by backbone."""


def _backbones(families: list[dict[str, Any]]) -> Iterator[tuple[str, Backbone]]:
    for family in families:
        for name, own in family["named"].items():
            arguments = {**family["common"], **own}
            of_backbone = {key: arguments.pop(key) for key in ("side", "fixed_size", "multiple") if key in arguments}
            yield name, Backbone(family["constructor"], arguments=arguments, **of_backbone)


_TABLE: Final = parse((resources.files("xlaserve.models.sources") / "data" / "keras_cv.yaml").read_text("utf-8"))

BACKBONES: Final[Mapping[str, Backbone]] = dict(_backbones(_TABLE["backbones"]))
"""By the name that follows `keras_cv:`; KerasCV's own constructors have `Backbone` after it."""
HEADS: Final[Mapping[str, KerasCvHead]] = {
    name: KerasCvHead(name, **{**head, "backbones": tuple(head["backbones"])}) for name, head in _TABLE["heads"].items()
}
"""By the name that follows `keras_cv:`, before a dash and the backbone's name."""
CLASSIFIERS: Final = tuple(name for name, backbone in BACKBONES.items() if backbone.constructor != "YOLOV8Backbone")
"""The backbones that the catalog lists as classifiers."""


def names() -> tuple[str, ...]:
    """Returns every name that the catalog lists: backbones as classifiers, then `<Head>-<Backbone>`."""
    return (*CLASSIFIERS, *(f"{head}-{backbone}" for head, known in HEADS.items() for backbone in known.backbones))
