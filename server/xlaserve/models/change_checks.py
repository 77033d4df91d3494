"""Versions and labels that a client names in a change of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from xlaserve.config.version_names import LABEL
from xlaserve.errors import InvalidArgument

NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


def check_versions(there: Collection[str], versions: Collection[str]) -> None:
    """Raises InvalidArgument where the versions `there` are others than `versions`, if given."""
    if versions and {*versions} != {*there}:
        expected = f"the versions that the server's file has ({', '.join(there)})"
        wanted = ", ".join(sorted(versions, key=int)[:16])
        raise InvalidArgument("model_version_policy.specific", expected, wanted)


def check_labels(ready: Collection[str], labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for a malformed label, or one that names a version that is not ready."""
    for label, version in labels.items():
        if not re.fullmatch(LABEL, label):
            raise InvalidArgument("version_labels", "labels such as stable", repr(label[:64]))
        if version not in ready:
            expected = f"a version that is ready ({', '.join(ready)})"
            raise InvalidArgument(f"version_labels.{label}", expected, version)
