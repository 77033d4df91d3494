"""A server of several processes: a supervisor of fronts and engines, which shows the metrics of all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector

from xlaserve.admission import shared_counts
from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.processes import front_process
from xlaserve.processes.engines import Engines, folder_of_engines, is_engine, point
from xlaserve.processes.event_loop import in_background
from xlaserve.processes.first_call import first_call
from xlaserve.processes.fronts import FRONT, Fronts, keep_spare
from xlaserve.processes.handover import Predecessor, Successor
from xlaserve.processes.link.engine_end.host import bound
from xlaserve.processes.ready_file import ReadyFile
from xlaserve.processes.reserved_ports import reserve_all
from xlaserve.processes.supervision import linux
from xlaserve.processes.supervision.child_handle import Launcher
from xlaserve.processes.supervision.liveness import Liveness
from xlaserve.processes.supervision.merged_metrics import AllMetrics, Restarted
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.service_manager import ServiceManager
from xlaserve.processes.supervision.supervisor import Supervisor
from xlaserve.processes.supervision.watcher import Watcher
from xlaserve.processes.upgrades import LEAVING, Upgrades
from xlaserve.telemetry.http import HttpEndpoint
from xlaserve.wire.shared import shared_regions

AT_ONCE: Final = 128 + signal.SIGTERM
"""Exit status of a process that ended at once, at a third signal; see `Stopping`."""

log = logging.getLogger(__name__)


class Server(Watcher):
    """A server of `settings.front_processes` fronts. `read_settings`, which can be pickled, reads the settings again.

    Takes the place of the server `before`, if there is one. A server that `grows` begins with one front, and adds
    others up to that number when engines turn out to compute more images/s than its fronts bring.
    """

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        before: Predecessor | None = None,
        *,
        grows: bool = False,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._before = before
        self._service_manager = ServiceManager(is_silent=before is not None)
        self._ready_file = ReadyFile(settings.ready_file)
        self._ready: dict[str, Mapping[str, Any]] = {}
        """By the name of a role, what its process reported when it became ready."""
        self._grows = grows
        self._serving_engines: dict[str, Process] = {}
        """By the name of an engine's role, the process that fills it."""
        self._replacing_engine = asyncio.Lock()
        """Held while an engine takes the place of another: there is memory for one more, not for as many again."""
        self._reloading: set[str] = set()
        """Names of the roles of engines that have not applied the configuration yet since the last request for that."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Replacements and upgrades under way."""
        self._was_ready = False
        self._at_once = 0
        """`AT_ONCE` once some process has ended without finishing its requests, at a third signal; else 0."""
        self._is_stopping = False

    async def run(self) -> int:
        """Serves until a signal, and returns the exit status. Raises ConfigError if a port can't be opened."""
        settings = self._settings
        with ExitStack() as stack:
            stack.callback(self._service_manager.close)
            self._ready_file.check()
            stack.callback(self._ready_file.remove)
            if self._before is None:  # an older version holds no lock on its own
                self._ready_file.remove_left()
            self._ports = reserve_all(settings, self._before, stack)
            used = _shared(partial(shared_counts.create, settings.front_processes), stack)
            self._regions = _shared(shared_regions.create, stack) if self._before is None else self._before.regions
            changes = None if self._before is None else self._before.changes
            folder = folder_of_engines(stack)
            self._changes_socket, self._successor_address = folder / "changes", folder / "successor"
            descriptors = {
                front_process.USAGE: used,
                front_process.REGIONS: self._regions,
                front_process.CHANGES: _shared(lambda: bound(self._changes_socket).detach(), stack),
            }
            self._engines = Engines(settings, self._read_settings, folder, lambda: self._was_ready, changes)
            self._usage = SharedCounts(used, settings.front_processes)
            registry = CollectorRegistry()
            registry.register(ProcessCollector(registry=None))
            metrics, liveness = AllMetrics(registry), Liveness()
            endpoint = self._metrics_endpoint = self._endpoint(metrics)
            if endpoint is not None:
                endpoint.start()
                stack.callback(endpoint.stop)
            self._fronts = Fronts(
                settings,
                1 if self._grows else settings.front_processes,
                ports=self._ports,
                engines=self._engines.addresses,
                successor=self._successor_address,
                metrics=None if endpoint is None else endpoint.address,
                descriptors=descriptors,
                waits=lambda: self._before is not None and not self._was_ready,
            )
            fronts = self._fronts.roles
            self._usage.serving = len(fronts)
            self._upgrades = Upgrades(self._usage, self._start_successor, self._leave, self._grow)
            launcher = Launcher(settings.log_level, settings.log_format)
            stack.callback(launcher.close)
            watchers = [metrics, Restarted(registry), liveness, self]
            self._supervisor = Supervisor([*self._engines.roles, *fronts], launcher, watchers)
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._upgrade)
            following = [
                in_background(work, lambda: self._supervisor.fail("it can't watch its processes"))
                for work in (
                    metrics.follow(),
                    liveness.follow(),
                    keep_spare(lambda: self._has_front, lambda: launcher.prepare(fronts[0])),
                    self._service_manager.watch(),
                )
            ]
            self._service_manager.tell_status("compiling")
            try:
                return await self._supervisor.run() or self._at_once
            finally:
                await self._upgrades.end()
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):  # all processes have ended
                    signal.signal(number, signal.SIG_IGN)
                for task in (*following, *self._tasks):
                    task.cancel()

    def began(self, role: Role, process: Process) -> None:
        """Notes the socket of an engine."""
        if is_engine(role.name):
            self._engines.began(process)

    def filled(self, role: Role, process: Process) -> None:
        """Points fronts to an engine that fills its role."""
        if is_engine(role.name):
            self._serving_engines[role.name] = process
            self._engines.filled(role, process)

    def keeps(self, role: Role, process: Process, content: bytes) -> None:
        """Keeps the initial models of an engine that will follow this one."""
        self._engines.keep(content)

    def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
        """Starts an engine that takes the place of the one that asks, and tells that one the outcome."""
        self._begin(self._replace_engine(role, process, content))

    async def _replace_engine(self, role: Role, process: Process, initial_models: bytes) -> None:
        outcome: Mapping[str, Any] = {}

        def unfit(about: Mapping[str, Any]) -> str:
            nonlocal outcome
            outcome = {key: about[key] for key in ("reason", "failed") if key in about}
            return str(about.get("reason", ""))

        try:
            async with self._replacing_engine:
                reason = "another process has taken its place"
                if self._serving_engines.get(role.name) is process:
                    reason = await self._supervisor.succeed(self._engines.beside(role, initial_models), unfit)
        except Exception:  # the engine waits for an outcome, and makes no other change before
            log.exception("%s: another process could not be started", role.name)
            reason = "another process could not be started; the server's log says why"
        if not self._is_stopping:  # else all changes end with the server
            process.tell_outcome({**outcome, "reason": reason})

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = in_background(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def became_ready(self, role: Role, process: Process) -> None:
        """Announces the server once all its fronts and an engine are ready, and later changes of which models serve.

        To take another server's place, all engines have to be ready.
        """
        self._ready[role.name] = self._supervisor.about[role.name]
        self._reloading.discard(role.name)
        self._grow()
        engine = self._engine_ready
        awaited = {*self._fronts.numbers}
        if self._before is not None and not self._was_ready:
            awaited |= {role.name for role in self._engines.roles}
        if engine is None or not awaited <= self._ready.keys():
            return
        if not self._was_ready:
            self._was_ready = True
            log.info("%s", engine["serving"])
            if self._before is not None:
                self._begin(self._take_over(self._before, self._ready[FRONT.format(1)]))
            elif engine["is_ready"]:
                addresses = self._ready[FRONT.format(1)]
                log.info(first_call(self._settings, addresses))
                try:
                    self._ready_file.write(addresses)
                except ConfigError as error:
                    self._supervisor.fail(str(error))
        if not self._reloading:
            self._service_manager.tell_ready(engine["serving"])

    def _grow(self) -> None:
        """Adds the fronts that are missing to bring each engine the images/s that it computes.

        Adds none while another server starts: the fronts of that have to be the last to listen (`Ports.leave`).
        """
        engine = self._engine_ready
        if not self._grows or engine is None or not self._upgrades.is_idle or self._is_stopping:
            return
        images_per_s: float = engine["images_per_s"]
        if added := self._fronts.add(images_per_s, len(self._engines.roles)):
            log.info("fronts: %d more, for up to %.0f images/s of each engine", len(added), images_per_s)
            self._usage.serving = len(self._fronts.numbers)
            self._supervisor.add(added)

    @property
    def _has_front(self) -> bool:
        return not self._fronts.numbers.keys().isdisjoint(self._ready)

    @property
    def _engine_ready(self) -> Mapping[str, Any] | None:
        """The report of an engine that is ready: of one whose models serve, if there is any."""
        engines = [about for name, about in self._ready.copy().items() if is_engine(name)]
        return max(engines, key=lambda about: bool(about["is_ready"]), default=None)

    async def _take_over(self, before: Predecessor, addresses: Mapping[str, Any]) -> None:
        await before.leaves()
        for address in before.successor_addresses:
            with suppress(OSError):  # the server there has ended
                point(address, self._changes_socket)
        log.info("upgrade: this is the server from now on")
        self._service_manager.is_silent = False
        self._service_manager.tell_ready(self._serving)
        try:
            self._ready_file.write(addresses)
        except ConfigError as error:  # no other server is left
            log.warning("upgrade: this server goes on without a ready file: %s", error)

    @property
    def _serving(self) -> str:
        return str((self._engine_ready or {}).get("serving", "starting"))

    def _upgrade(self) -> None:
        if not self._was_ready or self._is_stopping:
            log.warning("upgrade: this server is %s; nothing is done", "ending" if self._is_stopping else "starting")
        elif os.getpid() == 1 or not self._settings.upgrades:
            log.error("upgrade: who has started this server would take it for ended (upgrades: false); nothing is done")
        elif not self._upgrades.is_idle:
            log.warning("upgrade: %s is starting already; nothing more is done", self._upgrades.title)
        else:
            self._upgrades.begin()
            self._begin(self._upgrades.run())

    def _start_successor(self) -> Successor:
        """Starts the server that is to take this one's place. Raises OSError."""
        metrics = None if self._metrics_endpoint is None else self._metrics_endpoint.listener
        addresses = [self._successor_address, *(() if self._before is None else self._before.successor_addresses)]
        return Successor(self._ports, metrics, self._regions, self._engines.changes, addresses)

    def _leave(self, successor: Successor) -> None:
        """Leaves new clients to the server that has taken this one's place, and ends once the others have gone."""
        with ExitStack() as stack:  # so that all steps are taken, whichever raises an error
            stack.callback(self._supervisor.drain)
            if self._metrics_endpoint is not None:
                stack.callback(self._metrics_endpoint.leave)
            stack.callback(successor.go)
            self._service_manager.tell_main(successor.pid)
            linux.set_title(LEAVING, LEAVING)

    def reloading(self) -> None:
        """Tells the service manager, and another server that starts. `became_ready` tells when all engines are done."""
        if self._was_ready:
            self._reloading = {*filter(is_engine, self._ready)}
            self._service_manager.tell_reloading()
        self._upgrades.reload()

    def announced_end(self, role: Role, process: Process) -> None:
        """Notes that an engine ends without a crash."""
        if is_engine(role.name):
            self._engines.announced_end(process)

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Notes that a role is no longer filled, and gives back what a front had counted as in use."""
        is_filling = not is_engine(role.name) or process is self._serving_engines.get(role.name)
        if is_filling:
            self._ready.pop(role.name, None)
            self._reloading.discard(role.name)
        if is_engine(role.name) and self._engines.ended(process, status):
            self._supervisor.forgive(role.name)
        if status == AT_ONCE and self._is_stopping:
            self._at_once = status
        if number := self._fronts.numbers.get(role.name):
            self._usage.clear(number - 1)

    def stopping(self) -> None:
        """Announces the end of the server, and ends an upgrade that is under way."""
        self._is_stopping = True
        self._ready.clear()
        self._service_manager.tell_stopping()
        self._upgrades.stop()

    def is_ready(self) -> bool:
        """Whether models serve and a front is ready. Called on any thread."""
        engine = self._engine_ready
        return engine is not None and bool(engine["is_ready"]) and self._has_front

    def _endpoint(self, metrics: AllMetrics) -> HttpEndpoint | None:
        settings, before, loop = self._settings, self._before, asyncio.get_running_loop()
        registry = CollectorRegistry()
        registry.register(metrics.merged)
        return HttpEndpoint.of(
            settings,
            registry,
            is_ready=self.is_ready,
            refresh=lambda: asyncio.run_coroutine_threadsafe(metrics.refresh(), loop),
            listening=None if before is None else before.metrics_listener(settings.host, settings.metrics_port),
        )


def _shared(create: Callable[[], int], stack: ExitStack) -> int:
    """Returns the descriptor of a file that all fronts inherit, which `stack` closes. Raises ConfigError."""
    try:
        file = create()
    except OSError as error:
        raise ConfigError(f"fronts: expected memory and a file for each, got {error.strerror}") from None
    stack.callback(os.close, file)
    return file
