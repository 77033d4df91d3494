"""Commands: their type, and settings that several of them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from xlaserve.config import Settings

FAILED: Final = 1

# Settings that commands take as flags, beside those of the environment and the file.
EVERY: Final = tuple(Settings.model_fields)
ADDRESS: Final = ("host", "grpc_port")
"""Where the server listens that a command asks."""
EXECUTION: Final = (
    *("device", "gpu_memory_mib", "performance_hint", "lanes", "threads_per_lane", "tf32"),
    *("log_level", "log_format", "models"),
)
"""Settings of a command that runs models itself."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """A command as it was called."""

    own: argparse.Namespace
    """The command's own options."""
    settings: Settings
    load: Callable[[], Settings]
    """Reads the settings again. Raises ConfigError."""


class Group(Enum):
    """What commands are for; the help lists them so."""

    SERVE = "serve models"
    MODEL = "look at models"
    TUNE = "fit a server to its traffic"
    CONFIGURE = "configure"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `xlaserve`."""

    name: str
    help: str
    run: Callable[[Invocation], int]
    """Returns the exit status. Raises XlaserveError for what a person can mend."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    settings: tuple[str, ...] = EVERY
    """Settings that are flags of the command; a command without any reads no configuration."""
    group: Group = Group.SERVE
    sources: Literal["", "1", "*"] = ""
    """Number of models that its command line names by their sources; see `named_models`."""
