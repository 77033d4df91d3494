"""Shadows: requests that run in another version or mode as well, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from xlaserve.config.base import Frozen
from xlaserve.config.modes import Mode
from xlaserve.config.version_names import VersionOrLabel


class ShadowSettings(Frozen):
    """A version or mode in which some of a model's requests run as well, for comparison."""

    version: VersionOrLabel | None = None
    """The version to run, by its number or its label; by default the one that answered."""
    mode: Mode | None = None
    """The mode to run in; by default the request's, or the version's default where it does not offer that."""
    share: float = Field(0.01, gt=0, le=1)
    """The share of the requests, drawn at random. Those that come while the device is busy are left out."""

    def check(self, version: str, modes: Sequence[Mode]) -> None:
        """Raises ValueError where `version`, which offers `modes`, can't be compared by these settings."""
        if self.version not in (None, version):
            return  # whose modes are known once it is loaded
        if self.mode is None:
            raise ValueError("shadow: expected another version, or a mode")
        if self.mode not in modes:
            raise ValueError(f"shadow.mode: expected one of modes ({', '.join(modes)}), got {self.mode}")
