"""The tasks of KerasHub that `data/keras_hub.yaml` lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from typing import Any, Final

from xlaserve.config import TaskName, parse
from xlaserve.models.networks.preprocess import Preprocess


@dataclass(frozen=True, kw_only=True)
class HubClass:
    """One class of `keras_hub.models` that computes a task, and an architecture for it."""

    task: TaskName
    classes: int
    """The default number of classes: that of the data set that its published weights were trained on."""
    side: int
    """Pixels of its own input size, which is square."""
    preprocess: Preprocess
    """The preprocessing of pixels, without a preset."""
    arguments: Mapping[str, Any]
    """The constructor's arguments; `data/keras_hub.yaml` says how classes and sizes are written in them."""
    multiple: int = 1
    """Height and width have to be multiples of this."""


_TABLE: Final = parse((resources.files("xlaserve.models.sources") / "data" / "keras_hub.yaml").read_text("utf-8"))

CLASSES: Final[dict[str, HubClass]] = {
    name: HubClass(**{**group["common"], **own}) for group in _TABLE["tasks"] for name, own in group["named"].items()
}
"""By the name that follows `keras_hub:`."""
REFUSED: Final[Mapping[str, str]] = _TABLE["refused"]
"""Classes of images that cannot be served, and why."""


def names() -> tuple[str, ...]:
    """Returns every name that the catalog lists: none where KerasHub is not installed."""
    return tuple(CLASSES) if find_spec("keras_hub") else ()


def arguments(of: HubClass, library: Any, classes: int, size: tuple[int, int]) -> dict[str, Any]:
    """Returns the arguments of a class of `library`, which is `keras_hub.models`, for inputs of `size`."""
    stands_for = {"classes": classes, "image_shape": (*size, 3), "image_size": size}

    def build(value: Any) -> Any:
        if isinstance(value, str):
            return stands_for.get(value, value)
        if isinstance(value, list):
            return [item for each in value for item in repeated(each)]
        if not isinstance(value, Mapping):
            return value
        built = {name: build(each) for name, each in value.items()}
        return getattr(library, built.pop("class"))(**built) if "class" in built else built

    def repeated(item: Any) -> list[Any]:
        if isinstance(item, Mapping) and item.keys() == {"times", "of"}:
            return [build(each) for _ in range(item["times"]) for each in item["of"]]
        return [build(item)]

    built: dict[str, Any] = build(of.arguments)
    return built
