"""A server of a fleet, as a process: started, asked how it is, and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xlaserve.config.authority import authority
from xlaserve.errors import XlaserveError
from xlaserve_fleet import folders
from xlaserve_fleet.policy import BUSY, WAIT

POLL_S: Final = 0.05
ASK_TIMEOUT_S: Final = 3.0
GRACE_S: Final = 10.0
"""How much longer than it may take to drain a server may take to end, before it is killed."""
TAIL_BYTES: Final = 2000
MOST_LOG_BYTES: Final = 16 * 2**20
"""A log of more is moved to a second file: a server keeps two such files at most."""
LOOPBACK: Final = "127.0.0.1"
ALL_ADDRESSES: Final = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine, at none of which others reach it."""
QUEUED: Final = "xlaserve_queued_work_seconds"
LANES: Final = "xlaserve_lanes"
LANE_BUSY: Final = "xlaserve_lane_busy_seconds_total"


class ServerFailed(XlaserveError):
    """The server did not start, has ended, or does not serve."""


class Recovering(ServerFailed):
    """The server does not serve, and has processes to mend that."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a server listens, HOST:PORT each."""

    grpc: str
    http: str
    metrics: str


class ServerProcess:
    """An `xlaserve serve` process with the configuration `values` and `flags` over it, which keeps files in `folder`.

    `folder` is made, and removed at the end; where nobody is left to do so, at the start of a server beside it.
    `stop_s` is how long it takes to stop by its settings. `node_address` is where others reach one that listens on all
    addresses. `recover_s` is how long it may take to serve again by itself. It gets SIGTERM when this process dies.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        flags: Mapping[str, object],
        folder: Path,
        stop_s: float,
        node_address: str = LOOPBACK,
        *,
        recover_s: float = 0.0,
    ) -> None:
        self._recover_s = recover_s
        self._served_at = 0.0
        """When it was last seen to serve."""
        self._values = values
        self._flags = flags
        self._folder = folder
        self._stop_s = stop_s
        self._node_address = node_address
        self._held: int | None = None
        """Keeps the folder; the server has it as well, and may live longer."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._busy_s = 0.0
        self._busy_at = 0.0
        self.found = Found("", "", "")
        """Where it listens, once it was started."""

    @property
    def pid(self) -> int | None:
        """Its process number, once there is one."""
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it was started and is no more."""
        return self._process is not None and self._process.poll() is not None

    async def start(self) -> None:
        """Returns once it is ready. Raises ServerFailed with the end of its log where it ends instead."""
        try:
            await self._start()
        except ServerFailed:
            await self.stop()
            raise

    async def _start(self) -> None:
        ready = self._folder / "ready.json"
        self._process = process = self._spawn(ready)
        while not ready.exists():
            if process.poll() is not None:
                raise ServerFailed(
                    f"the server exited with {process.returncode}; its log ends with\n{_tail(self._log)}"
                )
            await asyncio.sleep(POLL_S)
        addresses = json.loads(ready.read_text())
        self.found = Found(*(reachable(addresses[name], self._node_address) for name in ("grpc", "http", "metrics")))
        if "tls_certificate" not in self._values:
            self._channel = grpc.aio.insecure_channel(self.found.grpc, (("grpc.enable_http_proxy", 0),))
        self._served_at = time.monotonic()
        await self.load()

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _spawn(self, ready: Path) -> subprocess.Popen[bytes]:
        self._held = folders.hold(self._folder)
        config = self._folder / "config.yaml"
        folders.write(config, json.dumps(self._values))  # JSON is YAML as well
        flags = {"config": config, "ready_file": ready, **self._flags}
        command = [sys.executable, "-m", "xlaserve", "serve", *_as_arguments(flags)]
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "xlaserve_fleet.launcher", str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # What the fleet's configuration says counts, not the environment of a node.
                env={name: value for name, value in os.environ.items() if not name.startswith("XLASERVE_")},
                pass_fds=[self._held],
                start_new_session=True,  # a signal to the group of this process is not for the server
            )

    async def check(self) -> None:
        """Raises ServerFailed where it has ended or does not serve: Recovering, where it has some time left to serve
        again. Keeps its log from growing for ever."""
        if self._process is None or self.has_ended:
            raise ServerFailed(f"the server has ended, with {self._process and self._process.returncode}")
        await asyncio.to_thread(rotate, self._log, MOST_LOG_BYTES)
        if await self._serves():
            self._served_at = time.monotonic()
        elif time.monotonic() < self._served_at + self._recover_s:
            raise Recovering("the server is NOT_SERVING")
        else:
            raise ServerFailed("the server is NOT_SERVING")

    async def _serves(self) -> bool:
        """Returns whether it says that it does. Raises ServerFailed where it does not answer."""
        if self._channel is None:  # with TLS, for names that only its clients know
            return await self._ask("/readyz") is not None
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_TIMEOUT_S)
        except grpc.RpcError as error:
            raise ServerFailed(f"the server does not answer: {error}") from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def load(self) -> dict[str, float]:
        """Returns the expected wait in seconds, and the share of the lanes' time in use since the last call.

        Raises ServerFailed.
        """
        now = time.monotonic()
        if (shown := await self._ask("/metrics")) is None:
            raise ServerFailed("the server shows no metrics")
        values = totals(shown, (QUEUED, LANES, LANE_BUSY))
        lanes = max(1.0, values[LANES])
        busy = (values[LANE_BUSY] - self._busy_s) / (lanes * max(now - self._busy_at, POLL_S))
        self._busy_s, self._busy_at = values[LANE_BUSY], now
        return {WAIT: values[QUEUED] / lanes, BUSY: min(max(busy, 0.0), 1.0)}

    async def stop(self) -> None:
        """Drains and ends the process, kills it where that takes too long, and removes its files."""
        if self._process is not None:
            if not self.has_ended:
                self._process.send_signal(signal.SIGTERM)
            give_up_at = time.monotonic() + self._stop_s + GRACE_S
            while not self.has_ended:
                if time.monotonic() > give_up_at:
                    self._process.kill()
                await asyncio.sleep(POLL_S)
        if self._channel is not None:
            await self._channel.close()
        if self._held is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._held)
            self._held = None

    async def _ask(self, path: str) -> str | None:
        """Returns what it answers, None where that is not 200. Raises ServerFailed where it does not."""

        def ask() -> str:
            with urllib.request.urlopen(f"http://{self.found.metrics}{path}", timeout=ASK_TIMEOUT_S) as answer:
                return str(answer.read().decode())

        try:
            return await asyncio.to_thread(ask)
        except urllib.error.HTTPError:
            return None
        except (OSError, urllib.error.URLError) as error:
            raise ServerFailed(f"the server does not answer {path}: {error}") from None


def reachable(address: str, node_address: str) -> str:
    """Returns HOST:PORT where others reach a server that says it listens at `address`, which may be all of its node."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in ALL_ADDRESSES:
        return address
    return authority(node_address, port)


def rotate(log: Path, most_bytes: int) -> None:
    """Moves what is in a log of more than `most_bytes` to a second file beside it, over what is there.

    A process that appends to the log goes on. What it writes during the move may be lost.
    """
    with suppress(OSError):  # a full disk, or a log that was removed: the server is none the worse
        if log.stat().st_size > most_bytes:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def totals(text: str, names: Sequence[str]) -> dict[str, float]:
    """Returns the sum of each metric's series in Prometheus' text; 0 for those that are not there."""
    found = dict.fromkeys(names, 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


def _as_arguments(flags: Mapping[str, object]) -> list[str]:
    return [part for name, value in flags.items() for part in _as_argument(name.replace("_", "-"), value)]


def _as_argument(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", str(value)


def _tail(file: Path) -> str:
    return file.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
