"""Listings, the models that an engine loads at its start: as they are configured, or as another engine has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from xlaserve.config import ModelSettings
from xlaserve.config.versions import VersionSet
from xlaserve.models.version import State, Version

ORDER = (State.READY, State.COMPILING, State.LOADING, State.FAILED, State.DRAINING, State.UNLOADED)
"""States by precedence: of two loadings of a version, the one whose state comes first is listed."""


class Ended(NamedTuple):
    """A version that is known and not loaded."""

    state: State
    """FAILED or UNLOADED."""
    reason: str = ""


class Listing(NamedTuple):
    """A model's versions, of which those in `ended` are not loaded; plain data, which can be pickled."""

    model: VersionSet
    ended: Mapping[str, Ended] = {}
    """By number."""

    def unloaded(self) -> Listing:
        """Returns the listing with all its versions unloaded."""
        return self._replace(ended=dict.fromkeys(self.model.versions, Ended(State.UNLOADED)))


Listings = Mapping[str, Listing]
"""By name."""


def of_configured(models: Mapping[str, VersionSet]) -> dict[str, Listing]:
    """Returns the listings that load all configured models."""
    return {name: Listing(model) for name, model in models.items()}


def of_versions(versions: Iterable[Version], labels: Mapping[str, str], shares: Mapping[str, float]) -> Listing:
    """Returns the listing with which another engine serves a model's `versions` as they are now."""
    chosen: dict[str, Version] = {}
    for one in versions:
        number = one.settings.version
        chosen[number] = min(chosen.get(number, one), one, key=lambda version: ORDER.index(version.state))
    ended = {
        number: Ended(State.FAILED, one.reason) if one.state is State.FAILED else Ended(State.UNLOADED)
        for number, one in chosen.items()
        if ORDER.index(one.state) >= ORDER.index(State.FAILED)
    }
    settings: dict[str, ModelSettings] = {number: one.settings for number, one in chosen.items()}
    return Listing(VersionSet(settings, labels, shares), ended)
