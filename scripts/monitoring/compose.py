"""The services of deploy/compose.yaml, and how their commands read on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml
from scripts.monitoring.__main__ import DEPLOY

FILE: Final = DEPLOY / "compose.yaml"
SERVICES: Final[Mapping[str, Any]] = yaml.safe_load(FILE.read_text())["services"]


def here(path: str, service: str) -> str:
    """Returns a path of a service's container as it is on this machine, where a folder or file of ours is mounted."""
    for source, target, *_ in (volume.split(":") for volume in SERVICES[service].get("volumes", ())):
        if source.startswith(".") and (path == target or path.startswith(f"{target}/")):
            return str(DEPLOY / source) + path.removeprefix(target)
    return path


def command(service: str) -> list[str]:
    """Returns a service's command, with the paths of this machine."""
    words = SERVICES[service]["command"]
    return [re.sub(r"(^|=)(/.*)$", lambda found: found[1] + here(found[2], service), word) for word in words]
