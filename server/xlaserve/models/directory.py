"""Which versions of models there are, and which of them answers a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from xlaserve.admission.caller import CURRENT
from xlaserve.config.versions import STABLE
from xlaserve.errors import ModelFailed, ModelNotFound, ModelNotReady
from xlaserve.models.routing import Routing
from xlaserve.models.version import Served, State, Version

NONE: Final[Mapping[str, Served]] = MappingProxyType({})


class Directory(ABC):
    """Finds versions by name, number, label or share. Those who fill it derive from it. On the event loop."""

    def __init__(self) -> None:
        self._versions: dict[str, list[Version]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        """The version that each label of a model names now."""
        self._shares: dict[str, Mapping[str, float]] = {}
        self._routing: dict[str, Routing] = {}
        """Of the models that have shares."""
        self._served: dict[str, dict[str, Served]] = {}
        """What answers the requests to each model: by version, by label, and by "" for those that name neither."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether start-up has warmed every model that did not fail, one serves, and the server does not stop.

        What is loaded later is ready or not for itself: it takes nothing from those that serve.
        """

    def get(self, name: str, version: str = "") -> Served:
        """Returns what serves a version, which is a number, a label, or empty for the default version.

        Raises ModelNotFound, ModelNotReady or ModelFailed.
        """
        served = self._served.get(name, NONE).get(version)
        if served is not None:
            return served
        found = self.find(name, version)
        if found.state is State.FAILED:
            raise ModelFailed(f"model {found.title} failed: {found.reason}")
        raise ModelNotReady(f"model {found.title} is {found.state.lower()}")

    def routed(self, name: str, request_id: str) -> Served:
        """Returns what answers a request that names no version: chosen by the id where versions share such requests.

        Raises what `get` raises.
        """
        if (routing := self._routing.get(name)) is not None:
            chosen = self._served.get(name, NONE).get(routing.choose(request_id))
            if chosen is not None:
                return chosen
        return self.get(name)

    def find(self, name: str, version: str = "") -> Version:
        """Returns a version, named as for `get`, in any state, preferably the one that serves. Raises ModelNotFound."""
        served = self._served.get(name, NONE).get(version)
        if served is not None:
            return served.version
        versions, labels = self._versions.get(name, ()), self._labels.get(name, {})
        number = labels.get(version, version)
        if found := [one for one in versions if number in ("", one.settings.version)]:
            return max(found, key=lambda one: (one.state is not State.FAILED, int(one.settings.version)))
        if versions:
            there = ", ".join(dict.fromkeys((*(one.settings.version for one in versions), *labels)))
            raise ModelNotFound(f"model {name} has no version {version[:32]!r}; it has {there}")
        raise ModelNotFound(f"no model {name[:128]!r}; there are: {usable(sorted(self._versions))}")

    def index(self) -> list[Version]:
        """Returns every version, in the order of the configuration; a newcomer after the one that serves."""
        return [version for versions in list(self._versions.values()) for version in versions]

    def versions(self, name: str = "") -> list[Version]:
        """Returns each version of a model, or of all, once: of two loadings of one, that which serves."""
        names = [name] if name else [*self._versions]
        each = ((name, one.settings.version) for name in names for one in self._versions.get(name, ()))
        return [self.find(name, number) for name, number in dict.fromkeys(each)]

    def serving(self) -> dict[str, bool]:
        """Returns for each model whether it serves, in some version."""
        return {name: bool(self._served.get(name)) for name in list(self._versions)}

    def labels(self, name: str) -> Mapping[str, str]:
        """Returns the version that each label of a model names now."""
        return self._labels.get(name, {})

    def shares(self, name: str) -> Mapping[str, float]:
        """Returns which percentage of the requests that name no version each label or version of a model answers."""
        return self._shares.get(name, {})

    def _ready(self, name: str) -> list[Version]:
        return [one for one in self._versions.get(name, ()) if one.state is State.READY]

    def _share(self, name: str, shares: Mapping[str, float]) -> None:
        """Has requests that name no version be answered by these shares from now on."""
        self._shares[name] = shares
        if shares:
            self._routing[name] = Routing(shares)
        else:
            self._routing.pop(name, None)

    def _publish(self, name: str) -> None:
        """Has requests find what is ready now."""
        found = {one.settings.version: one.served for one in self._ready(name) if one.served is not None}
        labels = self._labels.get(name, {})
        served = found | {label: found[version] for label, version in labels.items() if version in found}
        if found:
            served[""] = served.get(STABLE) or found[max(found, key=int)]
        self._served[name] = served

    def _forget(self, name: str) -> None:
        """Forgets a model."""
        for of_models in (self._versions, self._labels, self._shares, self._routing, self._served):
            of_models.pop(name, None)


def usable(names: Iterable[str]) -> str:
    """Returns those of the models that the caller may use, for a refusal."""
    return ", ".join(filter(CURRENT.get().may_use, names)) or "none"
