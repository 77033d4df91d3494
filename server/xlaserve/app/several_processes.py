"""A server of several processes: this one supervises fronts and an engine, and shows the metrics of all."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pickle
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector

from xlaserve import usage
from xlaserve.app import front_process
from xlaserve.app.engines import DRAINING, ENGINE, LATER_S, Engines, folder_of_engines
from xlaserve.app.front import FLUSH_S, RESIDENT_SHARE
from xlaserve.config import Settings
from xlaserve.engine.memory import usable_memory_bytes
from xlaserve.errors import ConfigError
from xlaserve.processes.metrics import AllMetrics, Restarted
from xlaserve.processes.process import Launcher
from xlaserve.processes.role import Role
from xlaserve.processes.supervisor import Process, Supervisor, Watcher
from xlaserve.protocol import shared_regions
from xlaserve.ready_file import ReadyFile
from xlaserve.runtimes.tf.device import usable_cores
from xlaserve.service_manager import ServiceManager
from xlaserve.telemetry.http import HttpEndpoint, unknown_host
from xlaserve.usage import Usage

FRONT: Final = "front {}"
AT_ONCE: Final = 128 + signal.SIGTERM
"""The status of a process that ended at a second signal: see `Stopping`."""

log = logging.getLogger(__name__)


class Server(Watcher):
    """A server of `settings.front_processes` fronts. `read_settings`, which can be pickled, reads them again."""

    def __init__(self, settings: Settings, read_settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._service_manager = ServiceManager()
        self._ready_file = ReadyFile(settings.ready_file)
        self._metrics_address: str | None = None
        self._ready: dict[str, Mapping[str, Any]] = {}
        """What each process that is ready said of itself, by the name of its role."""
        self._numbers = {FRONT.format(number): number for number in range(1, settings.front_processes + 1)}
        """Of the fronts, by the names of their roles."""
        self._engine: Process | None = None
        """The one that fills its role."""
        self._starting: set[asyncio.Task[None]] = set()
        self._was_ready = False
        self._at_once = 0
        """The exit status where some process was told again to end, and did not wait for what it had under way."""
        self._is_stopping = False

    async def run(self) -> int:
        """Serves until a signal, and returns the exit status. Raises ConfigError where it can't listen."""
        settings = self._settings
        with ExitStack() as stack:
            stack.callback(self._service_manager.close)
            self._ready_file.remove()
            stack.callback(self._remove_ready_file)
            ports = {name: self._reserve(name, stack) for name in ("grpc_port", "http_port")}
            used = _shared(partial(usage.create, settings.front_processes), stack)
            shared = {front_process.USAGE: used, front_process.REGIONS: _shared(shared_regions.create, stack)}
            self._engines = Engines(settings, self._read_settings, folder_of_engines(stack), lambda: self._was_ready)
            self._usage = Usage(used, settings.front_processes)
            registry = CollectorRegistry()
            registry.register(ProcessCollector(registry=None))
            metrics, restarts = AllMetrics(registry), Restarted(registry)
            endpoint = self._endpoint(metrics)
            if endpoint is not None:
                endpoint.start()
                stack.callback(endpoint.stop)
            self._metrics_address = None if endpoint is None else endpoint.address
            fronts = self._fronts(ports, self._engines.address, shared)
            self._front = fronts[0]
            self._launcher = Launcher(settings.log_level, settings.log_format)
            stack.callback(self._launcher.close)
            self._supervisor = Supervisor([self._engines.role, *fronts], self._launcher, [metrics, restarts, self])
            following = [asyncio.create_task(metrics.follow()), asyncio.create_task(self._service_manager.watch())]
            self._service_manager.tell_status("compiling")
            try:
                return await self._supervisor.run() or self._at_once
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):  # all have ended: nothing is left to be told
                    signal.signal(number, signal.SIG_IGN)
                for task in (*following, *self._starting):
                    task.cancel()

    def began(self, role: Role, process: Process) -> None:
        """Notes where an engine listens."""
        if role.name == ENGINE:
            self._engines.began(process)

    def filled(self, role: Role, process: Process) -> None:
        """Has fronts link to an engine from now on."""
        if role.name == ENGINE:
            self._engine = process
            self._engines.filled(process)

    def keeps(self, role: Role, process: Process, content: bytes) -> None:
        """Notes what an engine that follows one that ends is to begin with."""
        self._engines.start = content

    def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
        """Starts an engine that takes the place of the one that asks, and tells that what has become of it."""
        self._do(self._succeed(process, content))

    async def _succeed(self, process: Process, start: bytes) -> None:
        told: Mapping[str, Any] = {}

        def unfit(about: Mapping[str, Any]) -> str:
            nonlocal told
            told = {key: about[key] for key in ("reason", "failed") if key in about}
            return str(about.get("reason", ""))

        reason = await self._supervisor.succeed(self._engines.beside(start), unfit)
        if not self._is_stopping:  # else all changes end with that
            process.tell({**told, "reason": reason})

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def became_ready(self, role: Role, process: Process) -> None:
        """Tells the world once all are ready, and of what changes then."""
        self._ready[role.name] = self._supervisor.about[role.name]
        if len(self._ready) <= self._settings.front_processes:
            return
        engine = self._ready[ENGINE]
        self._launcher.prepare(self._front)
        if not self._was_ready:
            self._was_ready = True
            log.info("%s", engine["serving"])
            if engine["is_ready"]:
                self._write_ready_file()
        self._service_manager.tell_ready(engine["serving"])

    def reloading(self) -> None:
        """Tells who started the server; that it has happened is told once the engine says so."""
        if self._was_ready:
            self._service_manager.tell_reloading()

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Notes that the role is not filled, and what a front had in use is not."""
        is_filling = role.name != ENGINE or process is self._engine
        if is_filling:
            self._ready.pop(role.name, None)
        if role.name == ENGINE and self._engines.ended(process, status if is_filling else 0):
            self._supervisor.forgive(role.name)
        if status == AT_ONCE:
            self._at_once = status
        if number := self._numbers.get(role.name):
            self._usage.clear(number - 1)

    def stopping(self) -> None:
        """Tells the world that the server ends."""
        self._is_stopping = True
        self._ready.clear()
        self._service_manager.tell_stopping()

    def is_ready(self) -> bool:
        """Whether models serve, and some front does. Called on any thread."""
        ready = self._ready.copy()
        engine = ready.pop(ENGINE, None)
        return bool(ready) and engine is not None and bool(engine["is_ready"])

    def _fronts(self, ports: Mapping[str, int], engine: Path, shared: Mapping[str, int]) -> list[Role]:
        settings = self._settings
        of_front = _of_front(settings, ports)
        stop_timeout_s = settings.shutdown_delay_s + settings.drain_timeout_s + 2 * FLUSH_S + LATER_S
        return [
            Role(
                name=name,
                target=f"{front_process.__name__}:{front_process.run.__name__}",
                payload=pickle.dumps(front_process.Orders(of_front, engine, self._metrics_address, number)),
                descriptors=shared,
                has_spare=True,
                stage=DRAINING,
                stop_timeout_s=stop_timeout_s,
            )
            for name, number in self._numbers.items()
        ]

    def _endpoint(self, metrics: AllMetrics) -> HttpEndpoint | None:
        settings, loop = self._settings, asyncio.get_running_loop()
        if settings.metrics_port is None:
            return None
        registry = CollectorRegistry()
        registry.register(metrics.merged)
        return HttpEndpoint(
            settings.host,
            settings.metrics_port,
            registry,
            is_ready=self.is_ready,
            refresh=lambda: asyncio.run_coroutine_threadsafe(metrics.refresh(), loop),
        )

    def _reserve(self, name: str, stack: ExitStack) -> int:
        """Takes a port of all addresses of the host, where fronts may listen too, and returns it. Raises ConfigError.

        Nobody listens here: a connection meets a front, or is refused where there is none.
        """
        host, port = self._settings.host, getattr(self._settings, name)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (socket.gaierror, UnicodeError) as error:
            raise unknown_host(host, error) from None
        for family, address in dict.fromkeys((family, address[0]) for family, _, _, _, address in found):
            try:
                with _bound(family, address, port, is_shared=False) as alone:  # fails where anybody else has it
                    port = alone.getsockname()[1]
                stack.enter_context(_bound(family, address, port, is_shared=True))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    expected = f"a free port of {host}"
                    raise ConfigError(f"{name}: expected {expected}, got {port}: {error.strerror}") from None
        return int(port)

    def _write_ready_file(self) -> None:
        try:
            self._ready_file.write(self._ready[FRONT.format(1)])
        except ConfigError as error:
            self._supervisor.fail(str(error))

    def _remove_ready_file(self) -> None:
        with suppress(ConfigError):
            self._ready_file.remove()


def _shared(create: Callable[[], int], stack: ExitStack) -> int:
    """Returns a file in memory for all fronts. Raises ConfigError."""
    try:
        file = create()
    except OSError as error:
        raise ConfigError(f"fronts: expected memory and a file for each, got {error.strerror}") from None
    stack.callback(os.close, file)
    return file


def _of_front(settings: Settings, ports: Mapping[str, int]) -> Settings:
    """Returns the settings of one of the fronts: it has its share of the memory that a process may take, beside what
    all hold together, and of the cores."""
    fronts = settings.front_processes
    held_bytes = settings.max_inflight_bytes
    resident_bytes = settings.max_resident_bytes or int(usable_memory_bytes() * RESIDENT_SHARE)
    return settings.model_copy(
        update={
            **ports,
            "metrics_port": None,
            "max_resident_bytes": held_bytes + max(0, resident_bytes - held_bytes) // fronts,
            "decode_threads": max(1, (settings.decode_threads or usable_cores()) // fronts),
        }
    )


def _bound(family: int, address: str | int, port: int, *, is_shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if is_shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((address, port))
    except OSError:
        one.close()
        raise
    return one
