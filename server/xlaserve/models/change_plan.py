"""The changes that make a model be served as it is configured."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from xlaserve.config import ModelSettings
from xlaserve.config.versions import VersionSet


def change_of(
    name: str,
    serving: Mapping[str, ModelSettings],
    configured: VersionSet,
    is_set_aside: Callable[[ModelSettings], bool],
    *,
    is_routed: bool,
) -> str:
    """Returns a sentence on the change that makes a model be served as configured; empty where it is already.

    `serving` are the settings of versions that serve, by number; `is_routed` tells whether labels and shares are as
    configured. Versions that are set aside are not loaded.
    """
    due = [settings for number, settings in configured.versions.items() if serving.get(number) != settings]
    if not all(map(is_set_aside, due)):
        return f"{name} loaded"
    if left := sorted(serving.keys() - configured.versions.keys(), key=int):
        return f"{name} version {', '.join(left)} unloaded"
    return "" if is_routed else f"{name} has other labels or shares"


def ends_any(serving: Mapping[str, ModelSettings], configured: VersionSet | None, *, again: bool = False) -> bool:
    """Returns whether a version that serves ends where a model is served as configured, None for not at all.

    With `again`, versions that have the same settings are loaded again as well.
    """
    return any(
        again or configured is None or configured.versions.get(number) != settings
        for number, settings in serving.items()
    )


def movable_labels(configured: Mapping[str, str], now: Mapping[str, str], ready: Container[str]) -> dict[str, str]:
    """Returns the labels as configured, except that a label stays at a version that is ready where its new one is not.

    `now` are the labels that hold; both name the number of a version by label.
    """
    return {
        label: version if version in ready or now.get(label) not in ready else now[label]
        for label, version in configured.items()
    }
