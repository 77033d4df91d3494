"""The handover of ports, shared memory regions and clients' changes from a server to the one that takes its place.

The server that serves starts another one (`Successor`) with the command that it was started with, and goes on serving.
Once the other one serves as well, it says so (`Predecessor`) and is told that it is in charge; then the first one
leaves. If either ends before that, the other one goes on.

Another version of this code reads the state that is handed over: plain JSON, to which fields are only added.
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
from xlaserve.processes.engine_replacement import InitialModels
from xlaserve.processes.supervision import service_manager
from xlaserve.telemetry.http import listens_at

HANDED_OVER: Final = "TAKES_OVER_FROM_XLASERVE"
"""The environment variable with the descriptor of the file of the state that is handed over."""
READY, GO = b"r", b"g"
"""The messages on the channel: the successor serves; it is in charge from now on."""
END_S: Final = 30.0
"""Time that a successor which is not needed may take to end."""
CHANGES_S: Final = 30.0
"""Time that an upgrade waits for changes of models that have begun."""
CHANGES_LOOK_S: Final = 0.05
"""Interval between looks whether such changes are under way."""

log = logging.getLogger(__name__)


class ClientOverrides(NamedTuple):
    """Differences that clients have made between the models of a server and its configuration."""

    unloaded: Mapping[str, Sequence[str]] = {}
    """By model, the numbers of the versions that are not to be loaded."""
    labels: Mapping[str, Mapping[str, str]] = {}
    """By model whose labels were moved, and by label, the version that the label names now."""
    serving: Sequence[str] = ()
    """Names of the models that serve."""

    @classmethod
    def of(cls, initial: InitialModels) -> ClientOverrides:
        """Returns the differences between the listings of `initial` and its configuration."""
        unloaded, labels, serving = {}, {}, []
        for name, (model, ended) in initial.listings.items():
            if (configured := initial.configured.get(name)) is None:
                continue
            if numbers := [one for one in configured.versions if one in ended and ended[one].state is State.UNLOADED]:
                unloaded[name] = numbers
            if model.labels != configured.labels:
                labels[name] = dict(model.labels)
            if model.versions.keys() - ended.keys():
                serving.append(name)
        return cls(unloaded, labels, serving)

    def listings(self, models: Mapping[str, VersionSet]) -> dict[str, Listing]:
        """Returns the listings that an engine begins with, by model, where these models are configured."""
        return {name: self._listing(name, model) for name, model in models.items()}

    def _listing(self, name: str, model: VersionSet) -> Listing:
        named = {label: number for label, number in self.labels.get(name, {}).items() if number in model.versions}
        unloaded = [number for number in self.unloaded.get(name, ()) if number in model.versions]
        labelled = VersionSet(model.versions, {**model.labels, **named}, model.routing)
        return Listing(labelled, dict.fromkeys(unloaded, Ended(State.UNLOADED)))


class Predecessor(NamedTuple):
    """The server whose place this one takes, and the state that it hands over."""

    ports: Mapping[str, int]
    """Ports by the names of their settings."""
    metrics: socket.socket | None
    """The socket that listens at the address of the metrics; None if they are off."""
    regions: int
    """The file of the regions of shared memory that clients have registered."""
    changes: ClientOverrides
    channel: socket.socket
    successor_addresses: Sequence[Path] = ()
    """Symbolic links to be pointed to the socket where this server makes changes of models, one for each server before
    this one that may still have clients."""

    @classmethod
    def of(cls, environment: MutableMapping[str, str] = os.environ) -> Predecessor | None:
        """Reads the state that was handed over to this process, once; None if there is none. Raises ConfigError."""
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

    def metrics_listener(self, host: str, port: int | None) -> socket.socket | None:
        """Returns the socket of the metrics if it listens at that address; else closes it and returns None."""
        if self.metrics is not None and not listens_at(self.metrics, host, port):
            self.metrics.close()
            return None
        return self.metrics

    async def leaves(self) -> None:
        """Tells the predecessor that this server serves, and returns once that server leaves or has ended."""
        loop = asyncio.get_running_loop()
        self.channel.setblocking(False)
        with suppress(OSError):  # the predecessor has ended
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
        self._is_ready = self._is_reload_due = False
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
        """Process number of the successor."""
        return self._popen.pid

    async def is_ready(self) -> bool:
        """Returns True once the successor serves, and False once it has ended before that."""
        with suppress(OSError):
            self._is_ready = await asyncio.get_running_loop().sock_recv(self._channel, 1) == READY
        if self._is_ready and self._is_reload_due:
            self.send_signal(signal.SIGHUP)
        return self._is_ready

    def request_reload(self) -> None:
        """Has the successor read the configuration again, once it serves: SIGHUP would end it while it starts."""
        self._is_reload_due = True
        if self._is_ready:
            self.send_signal(signal.SIGHUP)

    def go(self) -> None:
        """Tells the successor that it is in charge from now on."""
        with suppress(OSError):
            self._channel.send(GO)
        self._channel.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the successor, unless it has ended."""
        self._popen.send_signal(number)

    async def end(self) -> str:
        """Ends the successor, and returns how it ended as the end of a sentence."""
        self._channel.close()
        self._popen.terminate()
        try:
            status = await asyncio.to_thread(self._popen.wait, END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return "had to be killed"
        return f"ended with status {status}"


async def changes_are_made(usage: SharedCounts) -> bool:
    """Waits until no client's change of models is under way; returns False if that takes longer than `CHANGES_S`.

    When it returns True, the engines have sent their changed models to the supervisor.
    """
    under_way, loop = usage.amount(Kind.CHANGES), asyncio.get_running_loop()
    give_up_at = loop.time() + CHANGES_S
    are_under_way = True
    while are_under_way and loop.time() < give_up_at:
        are_under_way = under_way.total > 0
        await asyncio.sleep(CHANGES_LOOK_S)
    return not are_under_way


def command(arguments: Sequence[str] = sys.orig_argv, is_executable: Callable[[str], bool] | None = None) -> list[str]:
    """Returns the command that starts this program again, in the version that is installed by now.

    An executable script is started directly, as its first line names the interpreter of that version; `is_executable`
    decides which paths are.
    """
    is_executable = is_executable or (lambda path: os.access(path, os.X_OK) and Path(path).is_file())
    _, *rest = arguments
    return rest if rest and is_executable(rest[0]) else [*arguments]


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=_own(descriptor))


def _own(descriptor: int) -> int:
    """Returns a descriptor that processes which this one starts don't inherit from now on."""
    os.set_inheritable(descriptor, False)
    return descriptor
