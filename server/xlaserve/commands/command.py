"""Commands: their type, and settings that several of them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal, NamedTuple

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


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `xlaserve`."""

    run: Callable[[Invocation], int]
    """Returns the exit status. Raises XlaserveError for what a person can mend."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    settings: tuple[str, ...] = EVERY
    """Settings that are flags of the command; a command without any reads no configuration."""
    sources: Literal["", "1", "*"] = ""
    """Number of models that its command line names by their sources; see `named_models`."""


class ListedCommand(NamedTuple):
    """A command as the help lists it. Its module is imported only where it is run, as some import much."""

    name: str
    module: str
    """The module of this package that has it, as `COMMAND`."""
    help: str

    def load(self) -> Command:
        """Imports the command."""
        command: Command = import_module(f"{__package__}.{self.module}").COMMAND
        return command
