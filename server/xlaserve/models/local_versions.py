"""The versions that a process holds itself: begun, pointed to by labels, shown to requests, retired."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from xlaserve.config import ModelSettings, Settings
from xlaserve.config.versions import VersionSet
from xlaserve.engine.under_way import key_of
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.models.change_plan import movable_labels
from xlaserve.models.draining import drain_and_free
from xlaserve.models.listing import Listing, of_versions
from xlaserve.models.version import State, Version, new_version
from xlaserve.models.version_lookup import Directory
from xlaserve.telemetry.metrics import Metrics


@dataclass(eq=False, kw_only=True)
class LocalVersions(Directory):
    """A directory of the versions that this process loads. On the event loop.

    `on_change` is called at every change of state, `on_record` with every program that was compiled (on the compiling
    thread).
    """

    settings: Settings
    metrics: Metrics
    on_change: Callable[[Version], None] = lambda version: None
    on_record: Callable[[Entry], None] = lambda entry: None
    on_listing: Callable[[], None] = lambda: None
    """Called where versions were forgotten, or labels or shares have changed, which are no changes of a state."""
    set_aside: dict[bytes, str] = field(default_factory=dict)
    """Versions that are not loaded, as they have crashed the process, by their keys, and why: only `load` tries them
    again."""

    def __post_init__(self) -> None:
        super().__init__()

    def listing(self) -> dict[str, Listing]:
        """Returns the listings that another engine loads to serve the same models."""
        return {
            name: of_versions(versions, dict(self.labels(name)), dict(self.shares(name)))
            for name, versions in self._versions.items()
        }

    def show_failure(self, settings: ModelSettings, reason: str) -> None:
        """Shows that a version failed elsewhere."""
        self._begin(settings).enter(State.FAILED, reason)

    def _crash_of(self, settings: ModelSettings) -> str:
        """Returns why a version is set aside, empty where it is not."""
        return self.set_aside.get(key_of(settings), "") if self.set_aside else ""

    def _is_set_aside(self, settings: ModelSettings) -> bool:
        return bool(self._crash_of(settings))

    def _serving(self, name: str) -> dict[str, ModelSettings]:
        """Returns the settings of each version of a model that is ready."""
        return {one.settings.version: one.settings for one in self._ready(name)}

    def _left(self, name: str, model: VersionSet) -> list[Version]:
        """Returns the versions of a model that are no longer configured."""
        return [one for one in self._versions[name] if one.settings.version not in model.versions]

    def _others(self, newcomer: Version) -> list[Version]:
        """Returns the other loadings of a version."""
        versions = self._versions[newcomer.name]
        return [one for one in versions if one is not newcomer and one.settings.version == newcomer.settings.version]

    def _begin(self, settings: ModelSettings) -> Version:
        """Returns a new version, announced as loading."""
        # A loading that serves stays until the new one is ready; any other loading of this version is replaced.
        versions = [
            one
            for one in self._versions.get(settings.name, ())
            if one.state is State.READY or one.settings.version != settings.version
        ]
        version = new_version(settings, self.metrics, self._changed, self.on_record)
        self._versions[settings.name] = [*versions, version]
        version.enter(State.LOADING)
        return version

    def _changed(self, version: Version) -> None:
        self._publish(version.name)
        self.on_change(version)

    def _point(self, name: str, model: VersionSet) -> None:
        """Sets labels and shares as they are configured, but moves no label to a version that is not ready."""
        self._labels[name] = movable_labels(model.labels, self._labels.get(name, {}), self._serving(name))
        self._share(name, model.routing)
        self._publish(name)
        self.on_listing()

    def _move_labels(self, name: str, labels: Mapping[str, str]) -> None:
        if name in self._versions:
            self._labels[name] = dict(labels)
            self._publish(name)
            self.on_listing()

    def _forget_failed(self, name: str) -> None:
        """Drops the failed versions of a model that are no longer configured, except those that are set aside."""
        self._versions[name] = [
            version
            for version in self._versions[name]
            if version.state is not State.FAILED or self._is_set_aside(version.settings)
        ]
        if not self._versions[name]:
            self._forget(name)
        self.on_listing()

    async def _retire(self, name: str, ended: Collection[Version]) -> None:
        """Finishes versions and forgets them."""
        if ended:
            await self._finish(ended)
            self._versions[name] = [one for one in self._versions[name] if one not in ended]
            self.on_listing()

    async def _finish(self, versions: Collection[Version]) -> None:
        """Drains versions and frees them."""
        for version in versions:
            for other in self._versions.get(version.name, ()):
                other.forget_shadow(version.settings.version)
        await drain_and_free(versions, self.settings.drain_timeout_s)
