"""A server of several processes: this one supervises fronts and an engine, and shows the metrics of all."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pickle
import signal
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector

from xlaserve import usage
from xlaserve.app import engine_process, front_process
from xlaserve.app.front import FLUSH_S, RESIDENT_SHARE
from xlaserve.config import Settings
from xlaserve.engine import under_way as under_way_of
from xlaserve.engine.memory import usable_memory_bytes
from xlaserve.errors import ConfigError
from xlaserve.link.host import bound
from xlaserve.model.held_folder import held_folder, remove_left
from xlaserve.processes.metrics import AllMetrics, Restarted
from xlaserve.processes.process import Launcher
from xlaserve.processes.role import NO_USE, Role
from xlaserve.processes.supervisor import Process, Supervisor, Watcher
from xlaserve.protocol import shared_regions
from xlaserve.ready_file import ReadyFile
from xlaserve.runtimes.tf.device import usable_cores
from xlaserve.service_manager import ServiceManager
from xlaserve.telemetry.http import HttpEndpoint, unknown_host
from xlaserve.usage import Usage

ENGINE: Final = "engine"
FRONT: Final = "front {}"
FOLDERS: Final = "xlaserve-engines-"
"""How the names of folders for engines' sockets begin."""
LATER_S: Final = 5.0
"""How much longer a process may take to end than its own limits say, before it is killed."""
AT_ONCE: Final = 128 + signal.SIGTERM
"""The status of a process that ended at a second signal: see `Stopping`."""
MOST_ENGINES: Final = 10**9
"""More than are ever started one after the other."""
MOST_CRASHES: Final = 3
"""A version that may have crashed as many engines is not loaded any more."""
CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a process ends by itself with."""
DRAINING, RUNNING = 1, 0
"""Stages of the end: fronts answer what they have before the engine ends."""

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
            self._engines = _Engines(settings, self._read_settings, _folder(stack), lambda: self._was_ready)
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


class _Engines:
    """What engines are started with: each listens on a socket of its own, and `address` leads to that of the one that
    fills the role. `start` is what one that follows another begins with, as that said; pickled.
    """

    def __init__(
        self, settings: Settings, read_settings: Callable[[], Settings], folder: Path, was_ready: Callable[[], bool]
    ) -> None:
        self.address = folder / ENGINE
        self.start = b""
        self._was_ready = was_ready
        self._settings = settings
        self._read_settings = read_settings
        self._next = count()
        self._number = 0
        self._sockets: dict[int, Path] = {}
        """By process number."""
        self._filling = 0
        """The process number of the one that fills the role, or did last."""
        self._files: dict[int, tuple[int, ...]] = {}
        """By process number, what it notes what it has under way in, and its last words."""
        self._own_files: tuple[int, ...] = ()
        """Of an engine that is about to be started."""
        self._crashes: Counter[bytes] = Counter()
        """How often each version may have crashed an engine, by its key."""
        self.role = Role(
            name=ENGINE,
            target=f"{engine_process.__name__}:{engine_process.run.__name__}",
            payload=lambda: self._orders(self.start, is_beside=False),
            connect=self._listen,
            stage=RUNNING,
            stop_timeout_s=settings.drain_timeout_s + LATER_S,
        )

    def beside(self, start: bytes) -> Role:
        """Returns the role for an engine that is to take the place of the one that serves."""
        return replace(self.role, payload=lambda: self._orders(start, is_beside=True))

    def began(self, process: Process) -> None:
        """The engine that was started last is this process."""
        self._sockets[process.pid] = self._socket
        self._files[process.pid], self._own_files = self._own_files, ()

    def ended(self, process: Process, status: int) -> bool:
        """Notes what an engine had under way when it crashed; returns whether that may have been it."""
        if process.pid != self._filling and process.pid in self._sockets:  # fronts go on to look for that one's
            self._sockets.pop(process.pid).unlink(missing_ok=True)
        under_way, last_words = self._files.pop(process.pid)
        found: frozenset[bytes] = frozenset()
        if -status in CRASHES or (status > 0 and status != NO_USE):
            with open(last_words, errors="replace", closefd=False) as words:
                words.seek(0)
                found = under_way_of.suspects(under_way, words.read())
        os.close(under_way)
        os.close(last_words)
        self._crashes.update(found)
        return bool(found)

    def filled(self, process: Process) -> None:
        """Has `address` lead to this engine's socket."""
        link = self.address.with_suffix(".next")
        link.symlink_to(self._sockets[process.pid])
        link.replace(self.address)  # at once: it always leads to some engine
        self._filling = process.pid
        for pid in self._sockets.keys() - {process.pid}:
            self._sockets.pop(pid).unlink(missing_ok=True)

    @property
    def _socket(self) -> Path:
        return self.address.with_name(f"{ENGINE}-{self._number}")

    def _listen(self) -> Mapping[str, int]:
        """Raises OSError."""
        self._forget_unstarted()
        self._number = next(self._next)
        with ExitStack() as opened:
            listener = opened.enter_context(bound(self._socket))
            files = []
            for create in (under_way_of.create, partial(os.memfd_create, "xlaserve-last-words", os.MFD_CLOEXEC)):
                file = create()
                opened.callback(os.close, file)
                files += [file, os.dup(file)]
                opened.callback(os.close, files[-1])
            opened.pop_all()
        under_way, their_under_way, last_words, their_last_words = files
        self._own_files = under_way, last_words
        return {
            engine_process.FRONTS: listener.detach(),
            engine_process.UNDER_WAY: their_under_way,
            engine_process.LAST_WORDS: their_last_words,
        }

    def _forget_unstarted(self) -> None:
        """Lets go of what was opened for an engine that could not be started."""
        if self._own_files:
            self._socket.unlink(missing_ok=True)
            for file in self._own_files:
                os.close(file)
            self._own_files = ()

    def _orders(self, start: bytes, *, is_beside: bool) -> bytes:
        # A model that fails ends a start, and never what was serving.
        is_fatal = self._settings.exit_on_model_failure and not self._was_ready()
        return pickle.dumps(
            engine_process.Orders(
                self._settings.model_copy(update={"exit_on_model_failure": is_fatal}),
                self._read_settings,
                number=self._number,
                start=start,
                is_beside=is_beside,
                set_aside=frozenset(key for key, crashes in self._crashes.items() if crashes >= MOST_CRASHES),
            )
        )


def _folder(stack: ExitStack) -> Path:
    """Returns a folder for the sockets of engines. Raises ConfigError."""
    try:
        remove_left(FOLDERS)  # of supervisors that were killed
        folder = stack.enter_context(held_folder(FOLDERS))
        bound(folder / f"{ENGINE}-{MOST_ENGINES}").close()
    except OSError as error:
        expected, got = "a folder with room for a socket, with a short name", os.environ.get("TMPDIR") or "/tmp"
        raise ConfigError(f"TMPDIR: expected {expected}, got {got}: {error.strerror or error}") from None
    return folder


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
