"""A server that takes the place of another one on its ports: what they hand over, and in what order.

The one that serves starts another with the command that started itself (`Successor`), and goes on serving. Once the
other serves as well, it says so (`Predecessor`), is told that it is the server from now on, and the first one leaves.
If either ends before that, the other one goes on.

What is handed over is read by another version of this code: plain JSON, which only grows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.config.versions import VersionSet
from xlaserve.errors import ConfigError
from xlaserve.models.listing import Ended, Listing
from xlaserve.models.version import State
from xlaserve.processes.engine_replacement import Start
from xlaserve.processes.supervision import service_manager

HANDED_OVER: Final = "TAKES_OVER_FROM_XLASERVE"
"""The environment variable that names the descriptor of what is handed over."""
READY, GO = b"r", b"g"
"""What the successor says, and what it is told then."""
END_S: Final = 30.0
"""How long a successor that is not needed may take to end."""
CHANGES_S: Final = 30.0
"""How long an upgrade waits for changes of models that have begun."""
CHANGES_LOOK_S: Final = 0.05
"""How often it looks at them."""

log = logging.getLogger(__name__)


class ClientOverrides(NamedTuple):
    """How the models of a server are other than as they are configured, as its clients want it."""

    unloaded: Mapping[str, Sequence[str]] = {}
    """The numbers of versions that are not to be loaded, by model."""
    labels: Mapping[str, Mapping[str, str]] = {}
    """Of models whose labels were moved, the versions that they name now."""
    serving: Sequence[str] = ()
    """The models that serve."""

    @classmethod
    def of(cls, start: Start) -> ClientOverrides:
        """Returns those of a server that another one would follow with `start`."""
        unloaded, labels, serving = {}, {}, []
        for name, (model, ended) in start.listings.items():
            if (configured := start.configured.get(name)) is None:
                continue
            if numbers := [one for one in configured.versions if one in ended and ended[one].state is State.UNLOADED]:
                unloaded[name] = numbers
            if model.labels != configured.labels:
                labels[name] = dict(model.labels)
            if model.versions.keys() - ended.keys():
                serving.append(name)
        return cls(unloaded, labels, serving)

    def listings(self, models: Mapping[str, VersionSet]) -> dict[str, Listing]:
        """Returns what an engine is to begin with where these models are configured."""
        return {name: self._listing(name, model) for name, model in models.items()}

    def _listing(self, name: str, model: VersionSet) -> Listing:
        named = {label: number for label, number in self.labels.get(name, {}).items() if number in model.versions}
        unloaded = [number for number in self.unloaded.get(name, ()) if number in model.versions]
        labelled = VersionSet(model.versions, {**model.labels, **named}, model.routing)
        return Listing(labelled, dict.fromkeys(unloaded, Ended(State.UNLOADED)))


class Predecessor(NamedTuple):
    """The server whose place this one takes, as it told."""

    ports: Mapping[str, int]
    """By the names of their settings."""
    metrics: socket.socket | None
    """It listens where metrics are shown."""
    regions: int
    """The file of the regions of shared memory that clients have registered."""
    changes: ClientOverrides
    channel: socket.socket
    successor_addresses: Sequence[Path] = ()
    """Where that server and those before it look for the socket of the one that makes changes of models for them."""

    @classmethod
    def of(cls, environment: MutableMapping[str, str] = os.environ) -> Predecessor | None:
        """Returns that of this process, None where there is none; only once. Raises ConfigError."""
        if not (file := environment.pop(HANDED_OVER, "")):
            return None
        try:
            with os.fdopen(int(file), "rb") as content:
                content.seek(0)
                told: dict[str, Any] = json.load(content)
            metrics = told["metrics"]
            return cls(
                ports=told["ports"],
                metrics=None if metrics is None else _socket(metrics),
                regions=_own(told["regions"]),
                changes=ClientOverrides(
                    **{name: told["changes"][name] for name in ClientOverrides._fields if name in told["changes"]}
                ),
                channel=_socket(told["channel"]),
                successor_addresses=[*map(Path, told.get("successor_addresses", ()))],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{HANDED_OVER}: expected what another server hands over, got {error!r}") from None

    async def leaves(self) -> None:
        """Says that this server serves, and returns once it is alone in that."""
        loop = asyncio.get_running_loop()
        self.channel.setblocking(False)
        with suppress(OSError):  # it has ended
            await loop.sock_sendall(self.channel, READY)
            await loop.sock_recv(self.channel, 1)
        self.channel.close()


class Successor:
    """A server that is started to take this one's place, by the command that started this process.

    Raises OSError where it can't be started.
    """

    def __init__(
        self,
        ports: Mapping[str, int],
        metrics: socket.socket | None,
        regions: int,
        changes: ClientOverrides,
        successor_addresses: Sequence[Path] = (),
    ) -> None:
        self._is_ready = self._has_news = False
        with ExitStack() as theirs:
            self._channel, channel = map(theirs.enter_context, socket.socketpair())
            file = os.memfd_create("xlaserve-handed-over")
            theirs.callback(os.close, file)
            told = {
                "ports": dict(ports),
                "metrics": None if metrics is None else metrics.fileno(),
                "regions": regions,
                "changes": changes._asdict(),
                "channel": channel.fileno(),
                "successor_addresses": [*map(str, successor_addresses)],
            }
            os.write(file, json.dumps(told).encode())
            passed = [file, regions, channel.fileno(), *(() if metrics is None else (metrics.fileno(),))]
            self._popen = subprocess.Popen(
                command(),
                pass_fds=passed,
                env={
                    **{name: value for name, value in os.environ.items() if name != service_manager.WATCHDOG_PID},
                    HANDED_OVER: str(file),
                },
            )
            self._channel = self._channel.dup()
        self._channel.setblocking(False)

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._popen.pid

    async def is_ready(self) -> bool:
        """Returns whether it serves, once it does or has ended."""
        with suppress(OSError):
            self._is_ready = await asyncio.get_running_loop().sock_recv(self._channel, 1) == READY
        if self._is_ready and self._has_news:
            self.send_signal(signal.SIGHUP)
        return self._is_ready

    def pass_news(self) -> None:
        """Has it read the configuration again, once it serves: SIGHUP would end it while it starts."""
        self._has_news = True
        if self._is_ready:
            self.send_signal(signal.SIGHUP)

    def go(self) -> None:
        """Tells it that it is the server from now on."""
        with suppress(OSError):
            self._channel.send(GO)
        self._channel.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it `number`, unless it has ended."""
        self._popen.send_signal(number)

    async def end(self) -> str:
        """Has it end, and returns how it did, in words."""
        self._channel.close()
        self._popen.terminate()
        try:
            status = await asyncio.to_thread(self._popen.wait, END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return "had to be killed"
        return f"ended with status {status}"


async def changes_are_made(usage: SharedCounts) -> bool:
    """Waits until no change of models that a client has asked for is under way; returns False where that takes long.

    By then the supervisor has heard of engines what they have changed.
    """
    under_way, loop = usage.amount(Kind.CHANGES), asyncio.get_running_loop()
    give_up_at = loop.time() + CHANGES_S
    are_under_way = True
    while are_under_way and loop.time() < give_up_at:
        are_under_way = under_way.total > 0
        await asyncio.sleep(CHANGES_LOOK_S)
    return not are_under_way


def command(arguments: Sequence[str] = sys.orig_argv, is_executable: Callable[[str], bool] | None = None) -> list[str]:
    """Returns what starts this program again, as it is installed by now.

    A script that is executable names its interpreter itself: that of this process may be that of another version.
    """
    is_executable = is_executable or (lambda path: os.access(path, os.X_OK) and Path(path).is_file())
    _, *rest = arguments
    return rest if rest and is_executable(rest[0]) else [*arguments]


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=_own(descriptor))


def _own(descriptor: int) -> int:
    """Keeps it from what this process starts."""
    os.set_inheritable(descriptor, False)
    return descriptor
