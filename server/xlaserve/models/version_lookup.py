"""The directory of models: their versions, and the version that answers a request, by number, label or share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from xlaserve.admission.caller import CURRENT
from xlaserve.config.versions import STABLE
from xlaserve.errors import ModelFailed, ModelNotFound, ModelNotReady
from xlaserve.models.version import Served, State, Version

NONE: Final[Mapping[str, Served]] = MappingProxyType({})
HASH_BITS: Final = 64


class Routing:
    """Divides requests by `shares`, percentages by label or version; "" stands for the default version."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = tuple(shares.items())

    def choose(self, request_id: str) -> str:
        """Returns the label or version that answers: for one id always the same, in every process; without, by chance.

        A share that grows keeps its ids as long as those before it stay as they are.
        """
        left = (_place(request_id) if request_id else random.random()) * 100
        for target, share in self._shares:
            left -= share
            if left < 0:
                return target
        return ""


class Directory(ABC):
    """Finds versions by name, number, label or share. Its subclass adds and removes them. On the event loop."""

    def __init__(self) -> None:
        self._versions: dict[str, list[Version]] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        """The version that each label of a model names now."""
        self._shares: dict[str, Mapping[str, float]] = {}
        self._routing: dict[str, Routing] = {}
        """The routing of each model that has shares."""
        self._served: dict[str, dict[str, Served]] = {}
        """The ready versions of each model: by number, by label, and by "" for requests that name neither."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether start-up has warmed every model that did not fail, one serves, and the server does not stop.

        Models that are loaded later have a state of their own and do not change this.
        """

    def get(self, name: str, version: str = "") -> Served:
        """Returns the ready version of a model, given by number or label, or empty for the default version.

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
        """Returns the version that answers a request that names none: by the request's id where versions share them.

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
        """Sets the shares in which versions answer the requests that name none."""
        self._shares[name] = shares
        if shares:
            self._routing[name] = Routing(shares)
        else:
            self._routing.pop(name, None)

    def _publish(self, name: str) -> None:
        """Makes the versions that are ready now the ones that requests find."""
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
    """Returns the names of the models that the caller may use, for the message of a refusal."""
    return ", ".join(filter(CURRENT.get().may_use, names)) or "none"


def _place(request_id: str) -> float:
    """Returns the hash of an id as a number from 0 to 1."""
    digest = blake2b(request_id.encode(errors="surrogatepass"), digest_size=HASH_BITS // 8).digest()
    return float(int.from_bytes(digest) / 2**HASH_BITS)
